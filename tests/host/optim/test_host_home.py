"""Updates of the user's tensors in place: memory that is shared, random use, and what is refused.

Steps, checkpoints and layouts on the processor are rows of `test_beside_torch.py`,
`test_checkpoints.py` and `test_conformance.py`.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nearstep
from nearstep.device import open_processor
from nearstep.errors import ArgumentError, OptionError, UrlError
from nearstep.torch.errors import (
    GradientError,
    ParameterError,
    StateError,
    UnsupportedOptionError,
)
from nearstep.torch.homes.host import HostHome
from nearstep.torch.layout import Layout
from nearstep.torch.table import labels_of
from nearstep.updater.arguments import rule_arguments
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.rule.columns import Columns
from nearstep_spec.rule.optimizer import Number, Optimizer
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.rules import OPTIMIZERS, optimizer_named

from ..optimizers import LION, MIXED
from .beside import KINDS, Beside, clone, made, step_alone, tensors
from .conftest import bits, late_adagrad, like_torch
from .host_optimizer import HostOptimizer
from .test_beside_torch import LAYOUTS, OPTIONS, swap


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
def test_dense_layouts_are_not_copied(layout, copied) -> None:
    given = [*tensors(), LAYOUTS[layout](tensors([(4, 8, 2, 16)])[0])]
    optimizer = HostOptimizer(given, OPTIMIZERS["adamw"])
    for step in range(2):
        for p in given:
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


DENSE = ("transposed", "channels_last", "offset")


def test_a_gradient_of_two_parameters_is_divided_once() -> None:
    """Where torch's fused step divides it again for the second one."""
    first, second, gradient = torch.ones(16), torch.ones(16), torch.full((16,), 8.0)
    first.grad = second.grad = gradient
    optimizer = HostOptimizer([first, second], OPTIMIZERS["sgd"], lr=0.25)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()
    assert torch.equal(gradient, torch.full((16,), 2.0))
    assert torch.equal(torch.stack([first, second]), torch.full((2, 16), 0.5))


@like_torch
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 3.7])
def test_scales_are_divided_out_as_by_torch(scale, kind) -> None:
    beside = Beside(kind, "host:", maximize=True)
    for found in (0.0, 1.0, 0.0):
        beside.give()
        for side in beside:
            side.optimizer.grad_scale = torch.tensor(scale)
            side.optimizer.found_inf = torch.tensor(found)
        step_alone(beside)
        # torch's SGD takes memory that nobody wrote for the momentum of a step that is skipped
        beside.check(state=kind != "momentum" or found == 0.0)


@like_torch
def test_parameters_that_share_memory_are_updated_one_after_the_other() -> None:
    """Gradients that are parameters, and views that overlap, by whole lines."""
    beside = Beside("AdamW", "host:", tensors([(1 << 18,)]))
    bases = [side.parameters[0].detach() for side in beside]
    for side, base in zip(beside, bases, strict=True):
        parts = [base[: 1 << 17], base[1 << 12 : 1 << 18], base[64:128], base[1 << 16 : 1 << 17]]
        side.parameters = [each.detach().requires_grad_() for each in parts]
    beside.mine.optimizer = made("AdamW", beside.mine.parameters, "host:")
    beside.torchs.optimizer = made("AdamW", beside.torchs.parameters)
    for _ in range(3):
        beside.give()
        for side in beside:
            side.parameters[2].grad = side.parameters[3][:64].detach()
            side.parameters[3].grad = side.parameters[3].detach()
        step_alone(beside)
    assert torch.equal(bits(bases[0]), bits(bases[1]))
    beside.check()


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor(3.0).double()])
def test_any_count_of_steps_becomes_one_as_torch_has_it(count) -> None:
    beside = Beside("AdamW", "host:", tensors([(64,)]))
    beside.step()
    for side, each in zip(beside, (count, torch.tensor(3.0)), strict=True):
        side.state[side.parameters[0]]["step"] = each
    beside.step()
    kept = beside.mine.state[beside.mine.parameters[0]]["step"]
    assert (kept.dtype, kept.item()) == (torch.float32, 4.0)
    beside.check()


@like_torch
@late_adagrad
@pytest.mark.parametrize(
    "seed", [*range(6), 13, *(pytest.param(n, marks=pytest.mark.deep) for n in range(14, 300))]
)
def test_random_use_equals_torch(seed) -> None:
    """Options that change, gradients that are missing, scales, writes of the user, checkpoints.

    In 13 Adagrad has state of parameters that require no gradient.
    """
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    kind, options = list(OPTIONS.values())[rng.integers(len(OPTIONS))]
    contents, layouts = [], []
    for _ in range(rng.integers(1, 9)):
        shape = [int(each) for each in rng.integers(1, 7, 3)] + [int(rng.choice([0, 16, 48]))]
        contents.append(torch.randn(shape, generator=generator))
        layouts.append(LAYOUTS[rng.choice(DENSE)] if rng.integers(2) else torch.clone)
    beside = Beside(kind, "host:", contents)
    split = int(rng.integers(1, len(contents) + 1))
    for side in beside:  # torch takes gradients in the order of parameters
        side.parameters = [of(each.clone()) for of, each in zip(layouts, contents, strict=True)]
        parts = side.parameters[:split], side.parameters[split:]
        groups: list[dict[str, Any]] = [{"params": part} for part in parts if part]
        groups[-1]["lr"] = 0.02
        where = "host:" if side is beside.mine else None
        side.optimizer = made(kind, groups, where, **options)
    for _ in range(6):
        scale = float(rng.choice([1.0, 1024.0, 3.7]))
        found = float(rng.integers(5) == 0)
        missing = rng.integers(4, size=len(contents)) == 0
        if "momentum" in options:  # torch makes buffers for all parameters at once
            found, missing = 0.0, np.zeros(len(contents), bool)
        for a, b, none in zip(*(side.parameters for side in beside), missing, strict=True):
            gradient = torch.randn(a.shape, generator=generator) * 10 ** float(rng.uniform(-8, 2))
            for p in (a, b):
                p.grad = None if none else torch.empty_strided(p.shape, p.stride()).copy_(gradient)
        changed = {"lr": rng.uniform(1e-4, 0.1), "weight_decay": rng.choice([0, 0.1])}
        what, which = rng.integers(4), int(rng.integers(len(contents)))
        for side in beside:
            side.optimizer.param_groups[-1].update({k: float(v) for k, v in changed.items()})
            if what == 0:
                p = side.parameters[which].mul_(0.5)
                for moment in list(side.state.get(p, {}).values())[1:]:
                    moment.mul_(0.25)
            if scale != 1.0:
                side.optimizer.grad_scale = torch.tensor(scale)
                side.optimizer.found_inf = torch.tensor(found)
            side.optimizer.step()
            vars(side.optimizer).pop("grad_scale", None)
            vars(side.optimizer).pop("found_inf", None)
        if what == 1:
            swap(beside)
    if any(p.numel() for p in contents):
        beside.check()


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
    "nested": (
        lambda p, s: s.update(exp_avg=torch.nested.nested_tensor([*s["exp_avg"]])),
        StateError,
        "dense tensor with data as 'exp_avg', not nested",
    ),
    "nested step": (
        lambda p, s: s.update(step=torch.nested.nested_tensor([torch.ones(1)])),
        StateError,
        "whole number",
    ),
    "step": (lambda p, s: s.update(step=torch.tensor(0.5)), StateError, "whole number"),
    "no step": (lambda p, s: s.pop("step"), StateError, "'step'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_before_anything_changes(wrong) -> None:
    change, error, message = WRONG[wrong]
    beside = Beside("AdamW", "host:", tensors([(0,), (32, 48), (64,), (16, 3, 5)]))
    beside.step()
    parameters, optimizer = beside.mine.parameters, beside.mine.optimizer
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


def _doubled(p: Tensor, optimizer: Any) -> None:
    p.data = p.data.double()
    p.grad = torch.ones_like(p)


def _load(p: Tensor, optimizer: Any) -> None:
    saved = optimizer.state_dict()
    _doubled(p, optimizer)
    optimizer.load_state_dict(saved)


def _renew(p: Tensor, optimizer: Any) -> None:
    _doubled(p, optimizer)
    optimizer.state[p].clear()


def _append(p: Tensor, optimizer: Any) -> None:
    new = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    new.grad = torch.ones_like(new)
    optimizer.param_groups[0]["params"][1:] = [new]


@pytest.mark.parametrize("kind", ["AdamW", "momentum"])
@pytest.mark.parametrize("change", [_doubled, _load, _renew, _append])
def test_a_parameter_that_becomes_fp64_is_refused_by_name(change, kind) -> None:
    beside = Beside(kind, "host:")
    beside.step()
    optimizer, (first, second, _) = beside.mine.optimizer, beside.mine.parameters
    before = first.detach().clone()

    def use() -> None:
        change(second, optimizer)
        optimizer.step()

    with pytest.raises(ParameterError, match=r"parameter 1 of group 0 .*not torch.float64"):
        use()
    assert torch.equal(first, before)


def test_state_and_processors_are_plain_data() -> None:
    """Whatever the default dtype is, and after a copy."""
    given = tensors()
    optimizer = HostOptimizer(given, OPTIMIZERS["adagrad"], initial_accumulator_value=0.5)
    torch.set_default_dtype(torch.float64)
    try:
        adam = HostOptimizer(given, OPTIMIZERS["adam"])
        for p in given:
            p.grad = torch.ones_like(p)
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adagrad", {"state_dtype": torch.uint8, "initial_accumulator_value": 0.1}),
        ("AdamW", {"state_dtype": torch.uint8, "amsgrad": True}),
        ("AdamW", {"state_dtype": torch.bfloat16, "rounding": "stochastic"}),
        ("Muon", {}),
    ],
    ids=str,
)
def test_defaults_of_torch_are_not_those_of_the_state(name, options) -> None:
    def train(dtype: torch.dtype, device: str | None) -> list[Tensor]:
        p, given = (each.requires_grad_() for each in tensors([(16, 24), (16, 24)]))
        try:
            torch.set_default_dtype(dtype)
            torch.set_default_device(device)
            optimizer = getattr(nearstep.optim, name)([p], lr=0.1, **options)
            for _ in range(2):
                p.grad = given.detach()
                optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        return [p.detach(), *optimizer.state[p].values()]

    found, expected = train(torch.bfloat16, "meta"), train(torch.float32, None)
    assert len(found) >= 2
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def test_formats_and_places_that_cannot_be_are_refused() -> None:
    p = torch.zeros(16, dtype=torch.float64)
    p.grad = torch.zeros(16, dtype=torch.float64)
    with pytest.raises(ParameterError, match="float64"):
        HostOptimizer([p], OPTIMIZERS["adamw"]).step()
    p = torch.zeros(16, device="meta", requires_grad=True)
    p.grad = torch.zeros(16, device="meta")
    with pytest.raises(ParameterError, match="meta"):
        HostOptimizer([p], OPTIMIZERS["adamw"]).step()
    p = torch.zeros(1).expand(16)
    p.grad = torch.zeros(16)
    with pytest.raises(ParameterError, match="share no memory"):
        HostOptimizer([p], OPTIMIZERS["adamw"]).step()
    p = torch.zeros(16)
    for kind, given, message in (
        ("adamw", {"rounding": "stochastic"}, "no parameter and no state is in bf16"),
        ("sgd", {"rounding": "stochastic", "state_dtype": torch.bfloat16}, "counts no steps"),
        (MIXED, {"state_dtype": torch.float16}, "keeps m in bf16"),
    ):
        with pytest.raises(UnsupportedOptionError, match=message):
            nearstep.optim.from_rule(kind, [p], **given)


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
            HostHome(Layout.of(definition), open_processor()).check(
                definition.form({"a": 0.5}), Columns()
            )


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
        ("golden:axdimm", UrlError, "no name of a processor; valid: host:"),
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
    addresses = [arrays[name].ctypes.data for name in arguments.form.rule.arrays_in]
    blocks = np.array([[1003, 0, *addresses]], np.uint64)
    with pytest.raises(ArgumentError, match="gradient_scale must be finite"):
        processor.blocks(arguments, Columns(), blocks, gradient_scale=math.inf)
    processor.blocks(arguments, Columns(), blocks, gradient_scale=-0.3)()
    whole = 1000 if arguments.form.remainder else 1003  # of vectors
    for name in "pmv":
        got, wanted = arrays[name].view(np.uint32), expected[name].view(np.uint32)
        assert (got[:whole] == wanted[:whole]).all()


def test_a_device_of_the_processor_scales_gradients_by_any_factor(tmp_path) -> None:
    parameter = torch.nn.Parameter(torch.ones(16))
    optimizer = nearstep.optim.SGD([parameter], lr=0.5, drives=[tmp_path], memory="1MiB")
    parameter.grad = torch.ones(16)
    optimizer.step()
    arrays = {name: optimizer.device.alloc(64, np.float32) for name in "pg"}
    for scale, expected in ((0.0, 1.0), (-0.0, 1.0), (1.0, 0.5), (-0.5, 1.25)):
        for each in arrays.values():
            each.write(np.ones(64, np.float32))
        optimizer.device.update("sgd", arrays, lr=0.5, gradient_scale=scale)
        assert (arrays["p"].read() == expected).all()


FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"weight_decay": 0.1}),
    "amsgrad": ("AdamW", {"amsgrad": True, "betas": (0.3, 0.9), "maximize": True}),
    "Adam": ("Adam", {"weight_decay": 0.1}),
    "SGD": ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    "dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": ("Adagrad", {"weight_decay": 0.1, "lr_decay": 0.1}),
}


@like_torch
@pytest.mark.parametrize(
    ("kind", "dtype", "offset", "scale"),
    [
        *((kind, torch.float32, 0, 1.0) for kind in FUSED),
        *((kind, dtype, 0, 1.0) for kind in ("AdamW", "amsgrad", "Adam")
          for dtype in (torch.bfloat16, torch.float16)),
        ("AdamW", torch.float32, 3, 3.7),
        ("AdamW", torch.bfloat16, 3, 3.7),
        pytest.param("AdamW", torch.float16, 3, 0.3, marks=pytest.mark.deep),
    ],
)  # fmt: skip
def test_every_size_has_torchs_bits(kind, dtype, offset, scale) -> None:
    """The elements behind the last whole vector, too, and those of views."""
    seed = 3
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    # Of divided gradients few elements show how the last ones were computed.
    sizes = [*range(1, 201), 1000, 4097, *([15] * 12000 if scale == 0.3 else ())]
    first = [torch.randn(size + offset, generator=generator).to(dtype) for size in sizes]
    ours, theirs = ([each.clone()[offset:] for each in first] for _ in range(2))
    name, options = FUSED[kind]
    mine = getattr(nearstep.optim, name)(ours, **options)
    other = getattr(torch.optim, name)(theirs, fused=True, **options)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            exponent = torch.rand(a.shape, generator=generator) * 6 - 5
            a.grad = (torch.randn(a.shape, generator=generator) * 10**exponent).to(dtype)
            b.grad = a.grad.clone()
        for each in (mine, other):
            if scale != 1.0:
                each.grad_scale, each.found_inf = torch.tensor(scale), torch.tensor(0.0)
            each.step()
    compared = 0
    for a, b in zip(ours, theirs, strict=True):
        moments = [(mine.state[a][k], v) for k, v in other.state[b].items() if v is not None]
        for x, y in ((a, b), (a.grad, b.grad), *(m for m in moments if m[1].dim())):
            assert x.dtype == y.dtype
            assert torch.equal(bits(x), bits(y)), f"{tuple(a.shape)}"
            compared += x.numel()
    assert compared >= 2 * sum(sizes)


FORMATS: dict[str, tuple[torch.dtype, dict[str, Any], str]] = {
    "8 bits": (torch.float32, {"state_dtype": torch.uint8}, "state_format=dynamic8"),
    "8 bits of bf16": (
        torch.bfloat16,
        {"state_dtype": torch.uint8},
        "state_format=dynamic8&parameter_format=bf16",
    ),
    "bf16 state": (torch.float32, {"state_dtype": torch.bfloat16}, "state_format=bf16"),
    "stochastic": (
        torch.bfloat16,
        {"rounding": "stochastic", "rounding_seed": 5},
        "state_format=bf16&parameter_format=bf16&stochastic_rounding=yes",
    ),
}
"""Dtype of parameters, options of both, options of a device."""


@pytest.mark.parametrize("name", FORMATS)
def test_formats_have_the_bits_of_a_device(name) -> None:
    """Also of another layout, where groups and random bits go by the logical order, and after a
    checkpoint, which either loads from the other."""
    dtype, options, url = FORMATS[name]
    url = f"golden:axdimm?memory_bytes=4MiB&block_bytes=1024&gradient_formats=fp32,bf16&{url}"
    shapes = [(5,), (), (3, 7, 5, 4), (1025,), (0,), (33, 17)]
    generator = torch.Generator().manual_seed(4)
    first = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    sides = []
    for device in ("host:", url):
        given = clone(first)
        if device == "host:":
            given[2] = first[2].contiguous(memory_format=torch.channels_last).requires_grad_()
        optimizer = nearstep.optim.AdamW(given, weight_decay=0.1, device=device, **options)
        sides.append((given, optimizer))
    compared = 0
    for number in range(4):
        for ps in zip(*(given for given, _ in sides), strict=True):
            gradient = torch.randn(ps[0].shape, generator=generator).to(dtype)
            for p in ps:
                p.grad = gradient.clone()
        for _, optimizer in sides:
            optimizer.step()
        for a, b in zip(*(given for given, _ in sides), strict=True):
            mine, other = (o.state[p] for (_, o), p in zip(sides, (a, b), strict=True))
            assert set(mine) == set(other)
            for key, x, y in [("p", a, b), *((key, mine[key], other[key]) for key in other)]:
                assert (x.dtype, x.shape) == (y.dtype, y.shape), key
                assert torch.equal(x.detach(), y.detach()), f"{key} of {tuple(a.shape)}"
                compared += x.numel()
        if number == 1:
            saved = [optimizer.state_dict() for _, optimizer in sides]
            for (_, optimizer), state in zip(sides, reversed(saved), strict=True):
                optimizer.load_state_dict(state)
    assert compared > 4 * 3 * sum(map(math.prod, shapes))


def test_a_rule_of_a_file_is_that_of_the_file() -> None:
    definition = optimizer_named(LION)
    assert Path(definition.rule.location.file).name == "lion.py"
    p = torch.linspace(-1, 1, 37)
    expected = p * (1 - 0.1 * 0.5) - 0.1 * torch.sign(torch.ones(37))
    p.grad = torch.ones(37)
    HostOptimizer([p], definition, lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(p, expected)


EIGHT_BITS: dict[str, tuple[str, Any, str]] = {
    "floats": ("exp_avg", lambda old: old.float(), "tensor of torch.uint8"),
    "no scales": ("exp_avg_scale", None, "have 'exp_avg_scale'"),
    "too few scales": ("exp_avg_sq_scale", lambda old: old[:1], "of shape"),
    "expanded scales": ("exp_avg_scale", lambda old: old[:1].expand(2), "exp_avg_scale"),
    "shared": ("exp_avg_sq", lambda old: old[:1].expand(300), "exp_avg_sq"),
    "meta": ("exp_avg", lambda old: old.to("meta"), "with data"),
}


@pytest.mark.parametrize("wrong", EIGHT_BITS)
def test_state_in_8_bits_that_cannot_be_is_refused(wrong) -> None:
    key, change, message = EIGHT_BITS[wrong]
    p = torch.linspace(-1, 1, 300)
    p.grad = torch.ones(300)
    optimizer = nearstep.optim.AdamW([p], state_dtype=torch.uint8)
    optimizer.step()
    state, before = optimizer.state[p], p.clone()
    if change is None:
        del state[key]
    else:
        state[key] = change(state[key])
    with pytest.raises(StateError, match=message):
        optimizer.step()
    assert torch.equal(bits(p), bits(before))
    assert state["step"] == 1


def test_labels_of_parameters_are_made_once(monkeypatch) -> None:
    """For each parameter they would take a time that grows with the square of their number."""
    made_of: list[int] = []

    def labels(groups: Any) -> dict[Tensor, str]:
        made_of.append(len(groups[0]["params"]))
        return labels_of(groups)

    monkeypatch.setattr("nearstep.torch.host_table.labels_of", labels)
    parameters = [torch.ones(3) for _ in range(50)]
    optimizer = nearstep.optim.AdamW(parameters)
    for each in parameters:
        each.grad = torch.ones(3)
    optimizer.step()
    assert made_of == [50]
