"""Updates of the user's tensors in place, against torch's fused steps and golden models."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nearstep.device import open_processor
from nearstep.errors import ArgumentError, OptionError, UrlError
from nearstep.torch.errors import GradientError, ParameterError, StateError
from nearstep.torch.homes.host import HostHome
from nearstep.torch.layout import Layout
from nearstep.updater.arguments import rule_arguments
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.rule.optimizer import Number, Optimizer
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.rules import OPTIMIZERS, optimizer_named

from ..optimizers import GROUPS, LION, MIXED, hyper_of
from .conftest import bits, clone, late_adagrad, like_torch
from .host_optimizer import HostOptimizer

SHAPES = ((32, 48), (64,), (0,), (16, 3, 5), (2, 0), (4096, 33))
TORCH = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("adam", {}),
    ("adam", {"lr": 3e-3, "weight_decay": 0.1}),
    ("adam", {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    ("adam", {"lr": 1e-2, "maximize": True}),
    ("adamw", {}),
    ("adamw", {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    ("adamw", {"lr": 1e-2, "betas": (0.3, 0.99), "amsgrad": True, "maximize": True}),
    ("adamw", {"lr": 0.5, "eps": 1e-2, "weight_decay": 0.0}),
    ("sgd", {"lr": 1e-2}),
    ("sgd", {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    ("sgd", {"lr": 1e-2, "momentum": 0.9}),
    ("sgd", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("sgd", {"lr": 1e-2, "momentum": 0.5, "nesterov": True, "maximize": True}),
    ("adagrad", {"lr": 1e-2}),
    ("adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("adagrad", {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6, "maximize": True}),
]


def steps_alike(
    name: str, ours: list[Tensor], theirs: list[Tensor], **options: Any
) -> tuple[HostOptimizer, torch.optim.Optimizer]:
    return HostOptimizer(ours, OPTIMIZERS[name], **options), TORCH[name](
        theirs, fused=True, **options
    )


@like_torch
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_steps_equal_torch_fused(
    name, options, make_parameters, give_gradients, assert_equal_bits
) -> None:
    ours, theirs = make_parameters(SHAPES), make_parameters(SHAPES)
    optimizer, reference = steps_alike(name, ours, theirs, **options)
    for step in range(5):
        give_gradients(ours, theirs)
        if step == 2:  # a parameter without a gradient keeps its state
            ours[0].grad = theirs[0].grad = None
        optimizer.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(bits(a.grad), bits(b.grad))
    assert_equal_bits(ours, theirs, optimizer, reference)
    for a, b in zip(ours, theirs, strict=True):
        for key, value in reference.state.get(b, {}).items():
            mine = optimizer.state[a][key]
            assert (mine.dtype, mine.stride()) == (value.dtype, value.stride()), key


CASES = [
    (name, form.rule.name)
    for _, named in (GROUPS["all"],)
    for name in named
    for form in optimizer_named(name).by_rule.values()
]


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_every_rule_equals_the_numpy_model_at_any_size(name, rule) -> None:
    seed = 41
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    definition = optimizer_named(name)
    form = definition.by_rule[rule]
    hyper = hyper_of(definition, form, rng)
    sizes = [int(each) for each in rng.integers(1, 70, 6)] + [1 << 12]
    parameters = [torch.from_numpy(rng.standard_normal(n, np.float32)) for n in sizes]
    arrays = [{"p": p.numpy().copy()} for p in parameters]
    keys = {key: array for key, array in definition.state.items() if array in form.rule.states}
    for each in arrays:
        for array in keys.values():
            initial = definition.initial.get(array)
            first = 0.0 if initial is None else hyper[initial]
            each[array] = np.full_like(each["p"], first)
    optimizer = HostOptimizer(parameters, definition, **hyper)
    compared = 0
    for step in (1, 2, 3):
        first = step == 1 and form.starts
        arguments = rule_arguments(definition, "default", step=step, first=first, **hyper)
        assert arguments.rule == rule
        for p, each in zip(parameters, arrays, strict=True):
            p.grad = torch.from_numpy(rng.standard_normal(p.numel(), np.float32))
            given = {**each, "g": p.grad.numpy()}
            with np.errstate(all="ignore"):
                each.update(evaluate(arguments.form.rule, given, arguments.scalars))
        optimizer.step()
        for p, each in zip(parameters, arrays, strict=True):
            for key, array in {"": "p", **keys}.items():
                found = optimizer.state[p][key] if key else p
                assert (found.numpy().view(np.uint32) == each[array].view(np.uint32)).all()
                compared += p.numel()
    assert compared >= 3 * sum(sizes)
    print(f"{compared} values compared, bit for bit")


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda t: torch.cat([t.new_zeros(3), t.reshape(-1)])[3:].view(t.shape),
    "negated": lambda t: torch._neg_view(-t),
    "imaginary": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
}


@like_torch
@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_parameter", LAYOUTS)
def test_any_layout_of_parameters_gradients_and_state(
    of_parameter, of_gradient, make_parameters, give_gradients, assert_equal_bits
) -> None:
    shape = [(4, 8, 2, 16)]
    theirs = make_parameters(shape)
    ours = [LAYOUTS[of_parameter](theirs[0].detach()).requires_grad_()]
    assert torch.equal(ours[0], theirs[0])
    assert ours[0].is_neg() == (of_parameter in ("negated", "imaginary"))
    places = [ours[0].data_ptr()]
    options = {"lr": 1e-2, "amsgrad": True, "maximize": True}
    optimizer, reference = steps_alike("adamw", ours, theirs, **options)
    for step in range(3):
        give_gradients(theirs)
        ours[0].grad = LAYOUTS[of_gradient](theirs[0].grad)
        optimizer.step()
        reference.step()
        assert torch.equal(ours[0].grad, theirs[0].grad)
        if step == 0:  # from now on state has another layout
            state = optimizer.state[ours[0]]
            assert state["exp_avg"].stride() == torch.zeros_like(ours[0]).stride()
            state["exp_avg"] = LAYOUTS[of_gradient](state["exp_avg"])
            places.append(state["exp_avg"].data_ptr())
    assert places == [ours[0].data_ptr(), optimizer.state[ours[0]]["exp_avg"].data_ptr()]
    assert_equal_bits(ours, theirs, optimizer, reference)


class _Copies(TorchDispatchMode):
    """Counts operations that copy a tensor or make one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in ("clone", "copy_", "_to_copy", "empty_like", "resolve_neg", "_unsafe_view"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("layout", "copied"), [("channels_last", 0), ("transposed", 0), ("strided", 3)]
)
def test_dense_layouts_are_not_copied(layout, copied, make_parameters) -> None:
    parameters = [*make_parameters(), LAYOUTS[layout](make_parameters([(4, 8, 2, 16)])[0].detach())]
    optimizer = HostOptimizer(parameters, OPTIMIZERS["adamw"])
    for step in range(2):
        for p in parameters:
            p.grad = torch.empty_strided(p.shape, p.stride()).fill_(0.5)
        with _Copies() as copies:
            optimizer.step()
        assert step == 0 or len(copies.found) == copied, copies.found


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_gradient_that_is_memory_of_its_parameter_is_read_first(offset) -> None:
    made = []
    for shares in (True, False):
        flat = torch.linspace(-1, 1, 1000)
        p, g = (flat[1:], flat[:-1]) if offset < 0 else (flat[:-1], flat[1:])
        p.grad = g if shares else g.clone()
        HostOptimizer([p], OPTIMIZERS["sgd"], lr=0.5).step()
        made.append(p)
    assert torch.equal(bits(made[0]), bits(made[1]))


@like_torch
def test_an_expanded_gradient_with_a_scale(make_parameters, assert_equal_bits) -> None:
    ours, theirs = make_parameters([(16, 16)]), make_parameters([(16, 16)])
    optimizer, reference = steps_alike("adamw", ours, theirs)
    ours[0].grad = torch.full((), 0.25).expand(16, 16)
    theirs[0].grad = torch.full((16, 16), 0.25)
    optimizer.grad_scale = reference.grad_scale = torch.tensor(3.7)
    optimizer.step()
    reference.step()
    assert torch.equal(bits(ours[0].grad), bits(theirs[0].grad))
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 3.7])
def test_scales_are_divided_out_as_by_torch(
    name, scale, make_parameters, give_gradients, assert_equal_bits
) -> None:
    ours, theirs = make_parameters(), make_parameters()
    optimizer, reference = steps_alike(name, ours, theirs, lr=1e-2, maximize=True)
    for found in (0.0, 1.0, 0.0):
        give_gradients(ours, theirs)
        for each in (optimizer, reference):
            each.grad_scale, each.found_inf = torch.tensor(scale), torch.tensor(found)
            each.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(bits(a.grad), bits(b.grad))
    if name == "sgd":  # it counts no steps
        assert not any(optimizer.state.values())
    assert_equal_bits(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        for key, value in reference.state.get(b, {}).items():
            assert torch.equal(optimizer.state[a][key], value), key


@like_torch
@late_adagrad
@pytest.mark.parametrize("name", TORCH)
def test_training_with_a_grad_scaler_equals_torch(name) -> None:
    def train(kind: Any) -> tuple[list[Tensor], float]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)
        )
        optimizer = kind(list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2, growth_factor=3)
        for step in range(6):
            optimizer.zero_grad()
            inputs = torch.randn(8, 16)
            if step == 3:
                inputs[0, 0] = math.inf
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return list(model.parameters()), scaler.get_scale()

    ours, scale = train(lambda p: HostOptimizer(p, OPTIMIZERS[name], lr=1e-2))
    theirs, expected = train(lambda p: TORCH[name](p, lr=1e-2, fused=True))
    assert scale == expected == 1000.0 * 3 * 0.5 * 3
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(bits(a), bits(b))


@like_torch
def test_groups_closures_and_groups_that_are_added(
    make_parameters, give_gradients, assert_equal_bits
) -> None:
    ours, theirs = make_parameters(), make_parameters()
    made = []
    for kind, p in ((HostOptimizer, ours), (torch.optim.AdamW, theirs)):
        groups = [{"params": p[:1], "lr": 1e-2}, {"params": p[1:2], "amsgrad": True}]
        more = (OPTIMIZERS["adamw"],) if kind is HostOptimizer else ()
        made.append(kind(groups, *more, weight_decay=0.2, **({} if more else {"fused": True})))
    for step in range(4):
        if step == 2:
            for each, p in zip(made, (ours, theirs), strict=True):
                each.add_param_group({"params": p[2:], "betas": (0.8, 0.9), "maximize": True})
        for each in made:
            for group in each.param_groups:
                group["lr"] *= 0.7
        give_gradients(ours, theirs)
        assert [each.step(lambda: 2.5) for each in made] == [2.5, 2.5]
    assert_equal_bits(ours, theirs, *made)


@like_torch
@late_adagrad
@pytest.mark.parametrize("name", TORCH)
def test_checkpoints_are_torchs_in_both_directions(
    name, make_parameters, give_gradients, assert_equal_bits
) -> None:
    options = {"momentum": 0.9} if name == "sgd" else {}
    ours, theirs = make_parameters(), make_parameters()
    optimizer, reference = steps_alike(name, ours, theirs, lr=1e-2, **options)

    def both() -> None:
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()

    both()
    for _ in range(2):
        mine, other = (pickle.loads(pickle.dumps(e.state_dict())) for e in (optimizer, reference))
        assert mine["state"].keys() == other["state"].keys()
        reference.load_state_dict({**other, "state": mine["state"]})
        optimizer.load_state_dict({**mine, "state": other["state"]})
        both()
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
def test_parameters_that_share_memory_are_updated_one_after_the_other(
    give_gradients, assert_equal_bits
) -> None:
    """Twice in a group, gradients that are parameters, and views that overlap, by whole lines."""
    generator = torch.Generator().manual_seed(4)
    flat = torch.randn(1 << 18, generator=generator)

    def views(base: Tensor) -> list[Tensor]:
        parts = [base[: 1 << 17], base[1 << 12 : 1 << 18], base[64:128], base[1 << 16 : 1 << 17]]
        return [each.detach().requires_grad_() for each in parts]

    bases = flat.clone(), flat.clone()
    ours, theirs = map(views, bases)
    optimizer, reference = steps_alike("adamw", ours, theirs, lr=1e-2)
    for _ in range(3):
        give_gradients(ours, theirs)
        for each in (ours, theirs):
            each[2].grad = each[3][:64].detach()
            each[3].grad = each[3].detach()
        optimizer.step()
        reference.step()
    assert torch.equal(bits(bases[0]), bits(bases[1]))
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize(
    ("name", "options"),
    [("adamw", {}), ("adagrad", {}), ("sgd", {"momentum": 0.9, "dampening": 0.5})],
    ids=["adamw", "adagrad", "sgd"],
)
def test_a_parameter_that_is_twice_in_its_group(
    name, options, make_parameters, give_gradients, assert_equal_bits
) -> None:
    ours, theirs = make_parameters(), make_parameters()
    twice = [*ours, ours[1]], [*theirs, theirs[1]]
    optimizer, reference = steps_alike(name, *twice, lr=1e-2, **options)
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert optimizer.state[ours[1]].get("step", 6) == 6
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_a_momentum_that_is_none_begins_anew(give_gradients, make_parameters) -> None:
    p, q = make_parameters([(64,)]), make_parameters([(64,)])
    optimizer = HostOptimizer(p, OPTIMIZERS["sgd"], lr=0.1, momentum=0.9)
    give_gradients(p, q)
    optimizer.step()
    optimizer.state[p[0]]["momentum_buffer"] = None
    optimizer.step()
    assert torch.equal(bits(optimizer.state[p[0]]["momentum_buffer"]), bits(q[0].grad))


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3), torch.tensor(3.0, dtype=torch.float64)])
def test_any_count_of_steps_becomes_one_as_torch_has_it(
    step, make_parameters, give_gradients
) -> None:
    ours, theirs = make_parameters([(64,)]), make_parameters([(64,)])
    optimizers = [HostOptimizer(each, OPTIMIZERS["adamw"]) for each in (ours, theirs)]
    give_gradients(ours, theirs)
    for optimizer, p, count in zip(
        optimizers, (*ours, *theirs), (step, torch.tensor(3.0)), strict=True
    ):
        optimizer.step()
        optimizer.state[p]["step"] = count
        optimizer.step()
        kept = optimizer.state[p]["step"]
        assert (kept.dtype, kept.item()) == (torch.float32, 4.0)
    assert torch.equal(bits(ours[0]), bits(theirs[0]))


DENSE = ("transposed", "channels_last", "offset")


@like_torch
@late_adagrad
@pytest.mark.parametrize(
    "seed", [*range(6), 13, *(pytest.param(n, marks=pytest.mark.deep) for n in range(14, 300))]
)
def test_random_use_equals_torch(seed, assert_equal_bits) -> None:
    """Options that change, gradients that are missing, scales, writes of the user, checkpoints.

    In 13 Adagrad has state of parameters that require no gradient.
    """
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    name, options = OPTIONS[rng.integers(len(OPTIONS))]
    lists: tuple[list[Tensor], list[Tensor]] = [], []
    for _ in range(rng.integers(1, 9)):
        shape = [int(each) for each in rng.integers(1, 7, 3)] + [int(rng.choice([0, 16, 48]))]
        first = torch.randn(shape, generator=generator)
        for each in lists:
            of = LAYOUTS[rng.choice(DENSE)] if rng.integers(2) else torch.clone
            each.append(of(first.clone()))
        if lists[0][-1].stride() != lists[1][-1].stride():  # torch takes gradients in that order
            lists[1][-1] = torch.empty_strided(shape, lists[0][-1].stride()).copy_(first)
    first_group = int(rng.integers(1, len(lists[0]) + 1))
    made = []
    for kind, p in zip((HostOptimizer, TORCH[name]), lists, strict=True):
        groups = [{"params": part} for part in (p[:first_group], p[first_group:]) if part]
        groups[-1]["lr"] = 0.02
        more = {"definition": OPTIMIZERS[name]} if kind is HostOptimizer else {"fused": True}
        made.append(kind(groups, **more, **options))
    for _ in range(6):
        scale = float(rng.choice([1.0, 1024.0, 3.7]))
        found = float(rng.integers(5) == 0)
        missing = rng.integers(4, size=len(lists[0])) == 0
        if "momentum" in options:  # torch makes buffers for all parameters at once
            found, missing = 0.0, np.zeros(len(lists[0]), bool)
        for a, b, none in zip(*lists, missing, strict=True):
            gradient = torch.randn(a.shape, generator=generator) * 10 ** float(rng.uniform(-8, 2))
            for p in (a, b):
                p.grad = None if none else torch.empty_strided(p.shape, p.stride()).copy_(gradient)
        for key, value in (("lr", rng.uniform(1e-4, 0.1)), ("weight_decay", rng.choice([0, 0.1]))):
            for each in made:
                each.param_groups[-1][key] = float(value)
        what, which = rng.integers(4), int(rng.integers(len(lists[0])))
        for each, p in zip(made, lists, strict=True):
            if what == 0:
                p[which].mul_(0.5)
                for moment in list(each.state.get(p[which], {}).values())[1:]:
                    moment.mul_(0.25)
            if scale != 1.0:
                each.grad_scale, each.found_inf = torch.tensor(scale), torch.tensor(found)
            each.step()
            vars(each).pop("grad_scale", None)
            vars(each).pop("found_inf", None)
        if what == 1:
            states = [pickle.loads(pickle.dumps(each.state_dict())) for each in made]
            for each, mine, other in zip(made, states, states[::-1], strict=True):
                each.load_state_dict({**mine, "state": other["state"]})
        for a, b in zip(*lists, strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(bits(a.grad), bits(b.grad))
    if any(p.numel() for p in lists[0]):
        assert_equal_bits(*lists, *made)


@like_torch
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_local_part_of_a_dtensor_is_updated_in_place(tmp_path, scale, make_parameters) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh, compared = init_device_mesh("cpu", (1,)), 0
        spread = [Shard(0)], [Replicate()], [Shard(1)]
        made = []
        for _ in range(2):
            shapes = [(32, 16), (16, 16), (64, 32)]
            pairs = zip(make_parameters(shapes), spread, strict=True)
            made.append(
                [distribute_tensor(p.detach(), mesh, how).requires_grad_() for p, how in pairs]
            )
        ours, theirs = made
        places = [p.to_local().data_ptr() for p in ours]
        optimizer, reference = steps_alike("adamw", ours, theirs, lr=1e-2)
        for each in (ours, theirs, ours, theirs):
            for p in each:
                p.grad = distribute_tensor(torch.full(p.shape, 0.3), mesh, p.placements)
            before = [p._version for p in each]
            chosen = optimizer if each is ours else reference
            chosen.grad_scale = torch.tensor(scale)
            chosen.step()
            changed = [p._version > v for p, v in zip(each, before, strict=True)]
            assert all(changed) or each is theirs
        ours[2].grad = distribute_tensor(torch.full((64, 32), 0.3), mesh, [Replicate()])
        theirs[2].grad = distribute_tensor(torch.full((64, 32), 0.3), mesh, [Shard(1)])
        optimizer.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            mine, other = optimizer.state[a], reference.state[b]
            values = [
                (a, b),
                (a.grad, b.grad),
                *((mine[key], other[key]) for key in list(other)[1:]),
            ]
            for x, y in values:
                assert x.placements == y.placements or x is ours[2].grad
                assert torch.equal(bits(x.to_local()), bits(y.to_local()))
                compared += x.numel()
        assert [p.to_local().data_ptr() for p in ours] == places
        assert compared == 4 * sum(p.numel() for p in ours)
        print(f"{compared} values compared, bit for bit")
    finally:
        dist.destroy_process_group()


def test_a_gradient_of_two_parameters_is_divided_once() -> None:
    """Where torch's fused step divides it again for the second one."""
    first, second, gradient = torch.ones(16), torch.ones(16), torch.full((16,), 8.0)
    first.grad = second.grad = gradient
    optimizer = HostOptimizer([first, second], OPTIMIZERS["sgd"], lr=0.25)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()
    assert torch.equal(gradient, torch.full((16,), 2.0))
    assert torch.equal(torch.stack([first, second]), torch.full((2, 16), 0.5))


@pytest.mark.parametrize("threads", [2, 5])
def test_bits_do_not_depend_on_the_number_of_threads(threads, monkeypatch) -> None:
    monkeypatch.setenv("NEARSTEP_THREADS", "5")
    seed = 8
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    sizes = [300_001, *torch.randint(1, 5000, (40,), generator=generator).tolist(), 131_072]
    first = [torch.randn(size, generator=generator) for size in sizes]
    found = []
    for count in (1, threads):
        parameters = clone(first)
        optimizer = HostOptimizer(parameters, OPTIMIZERS["adamw"], url=f"host:?threads={count}")
        for step in range(2):
            for index, p in enumerate(parameters):
                p.grad = first[index] * (step + 1)
            optimizer.step()
        found.append([p.detach() for p in parameters])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*found, strict=True))
    assert sum(each.numel() for each in found[0]) > 500_000


def test_autograd_notices_that_a_parameter_has_changed(make_parameters) -> None:
    weight, strided = make_parameters([(16, 16)])[0], make_parameters([(16, 32)])[0]
    strided = strided.detach()[:, ::2].requires_grad_()
    for p in (weight, strided):
        optimizer = HostOptimizer([p], OPTIMIZERS["adam"])
        loss = (p * p).sum()
        p.grad = torch.ones_like(p)
        before = p._version
        optimizer.step()
        assert p._version > before
        versions = [optimizer.state[p][key]._version for key in ("exp_avg", "exp_avg_sq")]
        assert min(versions) > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def _sparse(p: Tensor) -> None:
    p.grad = torch.ones_like(p).to_sparse()


def _shared_state(p: Tensor, state: dict[str, Any]) -> None:
    state["exp_avg"] = p.detach()


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "sparse": (lambda p, s: _sparse(p), GradientError, "dense"),
    "no state": (lambda p, s: s.pop("exp_avg"), StateError, "have 'exp_avg'"),
    "None": (lambda p, s: s.update(exp_avg=None), StateError, "floating-point tensor as 'exp_avg'"),
    "shape": (lambda p, s: s.update(exp_avg=torch.zeros(3)), StateError, "of shape"),
    "half": (lambda p, s: s.update(exp_avg=s["exp_avg"].half()), StateError, "torch.float32"),
    "meta": (lambda p, s: s.update(exp_avg=s["exp_avg"].to("meta")), StateError, "with data"),
    "expanded": (
        lambda p, s: s.update(exp_avg=torch.zeros(1).expand(p.shape)),
        StateError,
        "have 'exp_avg' of torch.float32",
    ),
    "shared": (_shared_state, StateError, "share no memory"),
    "no memory": (
        lambda p, s: s["exp_avg"].untyped_storage().resize_(0),
        StateError,
        "with memory",
    ),
    "step": (lambda p, s: s.update(step=torch.tensor(0.5)), StateError, "whole number"),
    "no step": (lambda p, s: s.pop("step"), StateError, "'step'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_before_anything_changes(
    wrong, make_parameters, give_gradients
) -> None:
    change, error, message = WRONG[wrong]
    parameters = make_parameters([(0,), (32, 48), (64,), (16, 3, 5)])
    optimizer = HostOptimizer(parameters, OPTIMIZERS["adamw"])
    give_gradients(parameters)
    optimizer.step()
    last = parameters[-1]
    change(last, optimizer.state[last])
    optimizer.grad_scale = torch.tensor(2.0)
    watched = [t for p in parameters[:-1] for t in (p, p.grad, *optimizer.state[p].values())]
    before = [each.detach().clone() for each in [*watched, last]]
    with pytest.raises(error, match=message):
        optimizer.step()
    after = [*watched, last]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, after, strict=True))
    assert len(after) == 3 * 5 + 1


def test_state_and_processors_are_plain_data(make_parameters, give_gradients) -> None:
    """Whatever the default dtype is, and after a copy."""
    parameters = make_parameters()
    optimizer = HostOptimizer(parameters, OPTIMIZERS["adagrad"], initial_accumulator_value=0.5)
    torch.set_default_dtype(torch.float64)
    try:
        adam = HostOptimizer(parameters, OPTIMIZERS["adam"])
        give_gradients(parameters)
        adam.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for each in (optimizer, adam):
        for state in each.state.values():
            assert {type(value) for value in state.values()} == {Tensor}
            assert {value.dtype for value in state.values()} == {torch.float32}
            assert not any(value.requires_grad for value in state.values())
    home = pickle.loads(pickle.dumps(adam.table._home))
    assert vars(home.processor) == vars(adam.table._home.processor)
    assert home.layout == adam.table._home.layout


def test_formats_and_places_that_are_not_there_yet_are_refused() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        p = torch.zeros(16, dtype=dtype)
        p.grad = torch.zeros(16, dtype=dtype)
        with pytest.raises(ParameterError, match=str(dtype)):
            HostOptimizer([p], OPTIMIZERS["adamw"]).step()
    p = torch.zeros(16, device="meta", requires_grad=True)
    p.grad = torch.zeros(16, device="meta")
    with pytest.raises(ParameterError, match="meta"):
        HostOptimizer([p], OPTIMIZERS["adamw"]).step()
    p = torch.zeros(1).expand(16)
    p.grad = torch.zeros(16)
    with pytest.raises(ParameterError, match="share no memory"):
        HostOptimizer([p], OPTIMIZERS["adamw"]).step()
    definition = optimizer_named(MIXED)
    p = torch.zeros(16)
    p.grad = torch.zeros(16)
    with pytest.raises(ArgumentError, match="keeps m in bf16, v in bf16: open a device"):
        HostOptimizer([p], definition).step()
    assert not p.any()


def test_rules_without_a_gradient_or_with_other_arrays_are_refused() -> None:
    def no_gradient(p, *, a):
        return {"p": a * p}

    def another(p, g, h, *, a):
        return {"p": p + a * (g + h)}

    for rule, message in (
        (Rule("shrink", no_gradient, states=("p",), scalars=("a",)), "must have an array 'g'"),
        (
            Rule("both", another, states=("p",), inputs=("g", "h"), scalars=("a",)),
            "arrays of both must be of p, g, not h",
        ),
    ):
        definition = Optimizer(rule=rule, scalars=lambda a: {"a": a}, hyper={"a": Number(0.5)})
        with pytest.raises(ArgumentError, match=message):
            HostHome(Layout.of(definition), open_processor()).check(definition.form({"a": 0.5}))


def test_options_that_no_register_holds_are_refused_before_another_group_is_updated() -> None:
    good, wrong = torch.ones(16), torch.ones(16)
    good.grad, wrong.grad = torch.ones(16), torch.ones(16)
    groups = [{"params": [good]}, {"params": [wrong], "lr": 1e39}]
    optimizer = HostOptimizer(groups, OPTIMIZERS["sgd"], lr=0.5)
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(ArgumentError, match="overflow binary32"):
        optimizer.step()
    assert all(torch.equal(each, torch.ones(16)) for each in (good, wrong, good.grad, wrong.grad))


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("golden:axdimm", UrlError, "no processor; valid: host:"),
        ("host:x", UrlError, r"or host:\?option=value"),
        ("host:?threads=0", OptionError, "threads must lie in"),
        ("host:?lanes=4", OptionError, "no such option; valid: threads, order"),
        (5, UrlError, "must be text"),
    ],
)
def test_names_of_processors(url, error, message) -> None:
    with pytest.raises(error, match=message):
        open_processor(url)


@pytest.mark.parametrize("order", ["default", "paper"])
def test_arrays_of_numpy_and_both_orders(order) -> None:
    rng = np.random.default_rng(7)
    processor = open_processor(f"host:?order={order}")
    arrays = {name: rng.random(1003, np.float32) for name in "pgmv"}
    arguments = rule_arguments(OPTIMIZERS["adam"], processor.order, step=3, weight_decay=0.1)
    given = {**arrays, "g": arrays["g"] * np.float32(-0.3)}
    expected = evaluate(arguments.form.rule, given, arguments.scalars)
    with pytest.raises(ArgumentError, match="gradient_scale must be finite"):
        processor.run(arguments, arrays, math.inf)
    with pytest.raises(ArgumentError, match="overlap in memory"):
        processor.run(arguments, {**arrays, "m": arrays["v"]})
    processor.run(arguments, arrays, -0.3)
    for name in "pmv":
        assert (arrays[name].view(np.uint32) == expected[name].view(np.uint32)).all()


def test_a_rule_of_a_file_is_that_of_the_file() -> None:
    definition = optimizer_named(LION)
    assert Path(definition.rule.location.file).name == "lion.py"
    p = torch.linspace(-1, 1, 37)
    expected = p * (1 - 0.1 * 0.5) - 0.1 * torch.sign(torch.ones(37))
    p.grad = torch.ones(37)
    HostOptimizer([p], definition, lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(p, expected)
