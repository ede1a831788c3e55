"""Steps against torch's fused ones, bit for bit: programs over kinds of optimizers and homes."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from .beside import (
    KINDS,
    SHAPES,
    Act,
    Beside,
    Side,
    alike,
    alone,
    clone,
    each,
    give,
    made,
    options,
    same,
    step_alone,
    steps,
    tensors,
)
from .conftest import HOMES, bits, late_adagrad, like_torch, on_devices

pytestmark = like_torch

ADAM = ("Adam", "AdamW", "amsgrad")
COUNTING = (*ADAM, "Adagrad")
"""Kinds with a state from the first step on, and a number of steps."""


on_all = pytest.mark.parametrize("home", list(HOMES), indirect=True)


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{kind}-{name}": (kind, given)
    for kinds, rows in (
        (
            ("Adam", "AdamW"),
            {
                "no_decay": {"weight_decay": 0.0},
                "decay": {"lr": 3e-3, "weight_decay": 0.1},
                "betas_of_llms": {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
                "second_form_of_lerp": {"betas": (0.3, 0.99)},
                "beta1_at_the_border": {"betas": (0.5, 0.9)},
                "betas_zero": {"betas": (0.0, 0.0)},
                "eps_zero": {"eps": 0.0},
                "eps_large": {"lr": 0.5, "eps": 1e-2},
                "lr_zero": {"lr": 0.0, "weight_decay": 0.1},
                "maximize": {"weight_decay": 0.1, "maximize": True},
                "amsgrad": {"amsgrad": True},
                "amsgrad_and_all": {
                    "amsgrad": True,
                    "betas": (0.3, 0.9),
                    "weight_decay": 0.1,
                    "maximize": True,
                },
                "amsgrad_eps_zero": {"amsgrad": True, "eps": 0.0, "betas": (0.9, 0.5)},
            },
        ),
        (
            ("SGD",),
            {
                "decay": {"weight_decay": 0.1},
                "momentum": {"momentum": 0.9, "weight_decay": 0.0},
                "momentum_and_decay": {"momentum": 0.9},
                "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
                "dampening_one": {"momentum": 0.5, "dampening": 1.0, "weight_decay": 0.0},
                "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
                "nesterov_and_decay": {"momentum": 0.7, "nesterov": True, "weight_decay": 0.3},
                "nesterov_and_maximize": {"momentum": 0.5, "nesterov": True, "maximize": True},
                "momentum_above_one": {"momentum": 1.5, "weight_decay": 0.0},
                "lr_zero": {"lr": 0.0, "momentum": 0.9, "weight_decay": 0.1},
                "maximize": {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
                "maximize_without_momentum": {"weight_decay": 0.1, "maximize": True},
            },
        ),
        (
            ("Adagrad",),
            {
                "decay": {"weight_decay": 0.1, "lr_decay": 0.0},
                "decay_of_the_rate": {"lr": 0.5, "initial_accumulator_value": 0.0},
                "initial_value": {"lr_decay": 0.0, "initial_accumulator_value": 0.1},
                "all": {"lr": 0.3, "lr_decay": 1e-3, "weight_decay": 0.01, "eps": 1e-3},
                "eps_zero": {"eps": 0.0, "initial_accumulator_value": 1e-20},
                "lr_zero": {"lr": 0.0, "weight_decay": 0.1},
                "maximize": {"weight_decay": 0.1, "maximize": True, "eps": 1e-6},
            },
        ),
    )
    for kind, (name, given) in product(kinds, rows.items())
}
LARGE = (*SHAPES, (0,), (2, 0), (4096, 33))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *OPTIONS.values(),
        *((KINDS[kind][0], dict.fromkeys(KINDS[kind][1])) for kind in ("Adam", "SGD", "Adagrad")),
        ("AdamW", {"lr": None}),
    ],
    ids=[*OPTIONS, "Adam-default", "SGD-default", "Adagrad-default", "AdamW-default"],
)
def test_ten_steps(name: str, more: dict[str, Any], home: Any) -> None:
    """An option of None is one that is not given."""
    defaults = getattr(torch.optim, name)([torch.ones(1)]).defaults
    given = {key: defaults[key] if value is None else value for key, value in more.items()}
    beside = Beside(name, home, tensors(LARGE if home == "host:" else SHAPES), **given)
    beside.step(10)
    beside.check()
    optimizer = beside.mine.optimizer
    if home != "host:":
        assert optimizer.traffic.launches == 10 * optimizer.device.channel_count
    for a, b in zip(beside.mine.parameters, beside.torchs.parameters, strict=True):
        for key, value in beside.torchs.state.get(b, {}).items():
            assert beside.mine.state[a][key].stride() == value.stride()
    if more.get("amsgrad"):
        state = beside.mine.state[beside.mine.parameters[0]]
        assert int((state["max_exp_avg_sq"] > state["exp_avg_sq"]).sum()) > 100


def scheduled(schedule: Any) -> tuple[Act, ...]:
    """Six steps of a scheduler, which is made first."""
    return (
        each(lambda side: vars(side).update(scheduler=schedule(side.optimizer))),
        *[steps(1), each(lambda side: side.scheduler.step())] * 6,
    )


def closure(side: Side) -> Any:
    """A step with a closure, which runs once, with gradients; its loss and the number of runs."""
    calls = []

    def evaluate() -> Tensor:
        assert torch.is_grad_enabled()
        calls.append(1)
        side.optimizer.zero_grad()
        loss = torch.stack([p.square().sum() for p in side.parameters]).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        return side.optimizer.step(evaluate), len(calls)


def clip(side: Side) -> None:
    torch.nn.utils.clip_grad_norm_(side.parameters, 1.0)


def add_group(side: Side) -> None:
    side.parameters += clone(tensors([(8, 16), (48,)]))
    side.optimizer.add_param_group({"params": side.parameters[3:], "lr": 0.5, "weight_decay": 0.5})


def swap(beside: Beside) -> None:
    """Load the state of each into the other."""
    saved = [pickle.loads(pickle.dumps(side.optimizer.state_dict())) for side in beside]
    for side, own, other in zip(beside, saved, reversed(saved), strict=True):
        side.optimizer.load_state_dict({**own, "state": other["state"]})


PROGRAMS: dict[str, tuple[Act, ...]] = {
    "some have no gradient": (
        *(steps(), steps(1, (1,)), same, steps()),
        *(steps(1, (0, 2)), same, steps(1, (1, 2)), steps()),
    ),
    "nothing has a gradient": (steps(1, (0, 1, 2)), same),
    "zero_grad to none": (
        steps(),
        *[each(lambda s: s.optimizer.zero_grad(set_to_none=True)), step_alone] * 2,
    ),
    "zero_grad to zero": (
        steps(),
        *[each(lambda s: s.optimizer.zero_grad(set_to_none=False)), step_alone] * 2,
    ),
    "closures": (alike(closure), alike(closure), alike(closure)),
    "a closure that returns a number": (give, alike(lambda s: s.optimizer.step(lambda: 2.5))),
    "no closure": (give, alike(lambda s: s.optimizer.step())),
    "a group is added": (steps(), each(add_group), same, steps(3)),
    "a learning rate in a tensor": tuple(
        act
        for scale in (1.0, 0.5, 0.25)
        for act in (options(lr=torch.tensor(1e-2 * scale)), steps())
    ),
    "cosine": scheduled(partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)),
    "linear": scheduled(partial(torch.optim.lr_scheduler.LinearLR, total_iters=4)),
    "one cycle, which changes beta1 or the momentum": scheduled(
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=8)
    ),
    "gradients are clipped": (*[give, each(clip), step_alone] * 3,),
    "maximize and weight decay change": (
        *(steps(2), options(maximize=True), steps(2)),
        *(options(weight_decay=0.3), steps(2)),
    ),
    "each loads the state of the other": (
        steps(),
        *[alike(lambda s: s.optimizer.state_dict()["state"].keys()), swap, steps()] * 2,
    ),
    "amsgrad is switched off and on": (
        *(steps(2), same, options(amsgrad=False, maximize=True)),
        *(steps(2), same, options(amsgrad=True, maximize=False), steps(2)),
    ),
    "momentum is switched on and off": tuple(
        act for each in (0.0, 0.9, 0.0, 0.5) for act in (options(momentum=each), steps(2))
    ),
}
ONLY = {
    "one cycle, which changes beta1 or the momentum": (*ADAM, "momentum"),
    "amsgrad is switched off and on": ("amsgrad",),
    "momentum is switched on and off": ("SGD",),
}
"""Kinds of programs that are not for all."""

LATE = ("a group is added", "each loads the state of the other")


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        pytest.param(
            kind,
            program,
            id=f"{kind}-{program}",
            marks=late_adagrad if kind == "Adagrad" and program in LATE else (),
        )
        for program in PROGRAMS
        for kind in ONLY.get(program, KINDS)
    ],
)
def test_a_program(kind: str, program: str, home: Any) -> None:
    beside = Beside(kind, home)
    for act in PROGRAMS[program]:
        act(beside)
    beside.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_learning_rate_in_a_tensor_that_is_filled(kind: str, home: Any) -> None:
    rates = torch.tensor(1e-2), torch.tensor(1e-2)
    beside = Beside(kind, home, own={"lr": rates[0]}, lr=rates[1])
    for _ in range(3):
        beside.step()
        for rate in rates:
            rate.mul_(0.5)
    beside.check()


GROUPS: dict[str, tuple[str, dict[str, Any], Sequence[dict[str, Any]]]] = {
    "AdamW": ("AdamW", {}, ({}, {"weight_decay": 0.0}, {"betas": (0.8, 0.9), "eps": 1e-6})),
    "amsgrad": (
        "AdamW",
        {},
        ({"amsgrad": True}, {"maximize": True}, {"amsgrad": True, "maximize": True, "lr": 0.1}),
    ),
    "SGD": (
        "SGD",
        {"weight_decay": 0.0},
        (
            {"momentum": 0.9},
            {"weight_decay": 0.1},
            {"momentum": 0.5, "nesterov": True, "lr": 0.3},
        ),
    ),
    "Adagrad": (
        "Adagrad",
        {"weight_decay": 0.1},
        ({"lr": 0.2}, {"lr_decay": 0.5, "eps": 1e-5}, {"maximize": True}),
    ),
}


@on_all
@pytest.mark.parametrize("name", GROUPS)
def test_groups_have_their_own_options_and_the_arrays_that_they_need(name: str, home: Any) -> None:
    kind, common, groups = GROUPS[name]
    beside = Beside(
        kind,
        home,
        grouped=lambda ps: [{"params": [p], **own} for p, own in zip(ps, groups, strict=True)],
        **common,
    )
    beside.step(5)
    beside.check()
    if name == "amsgrad" and home != "host:":
        optimizer = beside.mine.optimizer
        arrays = [
            set(optimizer.table.parameters[p].extent.segment.arenas[0])
            for p in beside.mine.parameters
        ]
        assert ["v_max" in each for each in arrays] == [True, False, True]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("kind", [each for each in KINDS if each != "amsgrad"])
def test_a_parameter_that_is_more_than_once_in_its_group(kind: str, home: Any) -> None:
    """torch warns, and updates it as often."""
    contents = tensors([(32,), (64,), (16,)])
    more = {"dampening": 0.5} if kind == "momentum" else {}
    with pytest.warns(UserWarning, match="duplicate parameters"):
        beside = Beside(
            kind, home, contents, grouped=lambda ps: [ps[i] for i in (0, 1, 0, 2, 0, 1)], **more
        )
    for turn in range(4):
        beside.step()
        beside.check()
        if turn == 1:
            mine, saved = (side.optimizer.state_dict() for side in beside)
            assert list(mine["state"]) == list(saved["state"])
            assert mine["param_groups"][0]["params"] == saved["param_groups"][0]["params"]
            beside.mine.optimizer.load_state_dict(saved)
    if home != "host:":
        traffic = beside.mine.optimizer.traffic
        assert traffic.elements == 4 * (32 + 64 + 16)
        # The three are neighbours, but have three, two runs and one.
        assert traffic.launches == 4 * 6


@pytest.mark.parametrize("size", [1, 2, 7, 15, 17, 31, 100, 1023, 4097])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("AdamW", {}),
        ("SGD", {}),
        ("momentum", {"dampening": 0.3}),
        ("momentum", {"nesterov": True}),
        ("Adagrad", {}),
    ],
    ids=["AdamW", "SGD", "dampening", "nesterov", "Adagrad"],
)
@on_devices
def test_sizes_that_are_not_multiples_of_16_differ_only_in_torchs_scalar_tail(
    kind: str, more: dict[str, Any], size: int, home: Any
) -> None:
    beside = Beside(kind, home, tensors([(size,)]), **more)
    beside.step(6)
    (a,), (b,) = (side.parameters for side in beside)
    pairs = [("p", a.detach(), b.detach())]
    pairs += [
        (key, beside.mine.state[a][key], value)
        for key, value in beside.torchs.state[b].items()
        if key != "step"
    ]
    assert len(pairs) == {"AdamW": 3, "SGD": 1}.get(kind, 2)
    for key, mine, other in pairs:
        differ = (bits(mine) != bits(other)).nonzero().flatten().tolist()
        print(f"{key}: {len(differ)} of {size % 16} values of the tail differ from torch's")
        assert not [index for index in differ if index < size - size % 16]
        torch.testing.assert_close(
            mine, other, rtol=1e-6 if kind == "AdamW" else 1e-5, atol=0 if kind == "AdamW" else 1e-6
        )


def test_scalar_parameters_and_empty_ones(home: Any) -> None:
    beside = Beside("AdamW", home, tensors([(), (0,), (16,), (0, 4)]))
    beside.step(3)
    for a, b in zip(beside.mine.parameters, beside.torchs.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)
        assert beside.mine.state[a]["step"] == beside.torchs.state[b]["step"] == 3
        assert beside.mine.state[a]["exp_avg"].shape == a.shape
    empty = Beside("AdamW", home, tensors([(0,)]))
    empty.step()
    assert empty.mine.state[empty.mine.parameters[0]]["step"] == 1
    assert home == "host:" or empty.mine.optimizer.traffic.launches == 0


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda t: torch.cat([t.new_zeros(3), t.reshape(-1)])[3:].view(t.shape),
    "negated": lambda t: torch._neg_view(-t),
    "imaginary": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
}


@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_parameter", LAYOUTS)
def test_any_layout_of_parameters_gradients_and_state(
    of_parameter: str, of_gradient: str, home: Any
) -> None:
    beside = Beside("amsgrad", home, tensors([(4, 8, 2, 16)]), maximize=True)
    (theirs,) = beside.torchs.parameters
    p = LAYOUTS[of_parameter](theirs.detach()).requires_grad_()
    assert torch.equal(p, theirs)
    assert p.is_neg() == (of_parameter in ("negated", "imaginary"))
    beside.mine = Side([p], made("amsgrad", [p], home, maximize=True))
    places = [p.data_ptr()]
    for step in range(3):
        beside.give()
        p.grad = LAYOUTS[of_gradient](theirs.grad)
        step_alone(beside)
        if step == 0:  # from now on state has another layout
            state = beside.mine.state[p]
            assert home != "host:" or state["exp_avg"].stride() == torch.zeros_like(p).stride()
            state["exp_avg"] = LAYOUTS[of_gradient](state["exp_avg"])
            places.append(state["exp_avg"].data_ptr())
    if home == "host:":
        assert places == [p.data_ptr(), beside.mine.state[p]["exp_avg"].data_ptr()]
    assert beside.check() == 4 * p.numel()


def test_an_expanded_gradient(home: Any) -> None:
    """With a scale, where every home takes one."""
    beside = Beside("AdamW", home, tensors([(16, 16)]))
    beside.mine.parameters[0].grad = torch.full((), 0.25).expand(16, 16)
    beside.torchs.parameters[0].grad = torch.full((16, 16), 0.25)
    for side in beside if home == "host:" else ():
        side.optimizer.grad_scale = torch.tensor(3.7)
    step_alone(beside)
    beside.check()


SPECIAL = {3: math.nan, 17: math.inf, 40: -math.inf, 50: 3e38, 51: -0.0}


@pytest.mark.parametrize("special_steps", [(0, 1, 2), (1,)], ids=["always", "once"])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf_follow_ieee_754_and_torchs_maximum(
    kind: str, special_steps: Sequence[int], home: Any
) -> None:
    beside = Beside(kind, home, tensors([(64,)]))
    (a,), (b,) = (side.parameters for side in beside)
    for step in range(3):
        gradient = torch.linspace(-1, 1, 64)
        for at, value in SPECIAL.items() if step in special_steps else ():
            gradient[at] = value
        a.grad, b.grad = gradient.clone(), gradient.clone()
        step_alone(beside)
    compared = 0
    for mine, other in (
        (a.detach(), b.detach()),
        *((beside.mine.state[a][k], v) for k, v in beside.torchs.state[b].items() if k != "step"),
    ):
        assert torch.equal(mine.isnan(), other.isnan())
        assert torch.equal(bits(mine[~mine.isnan()]), bits(other[~other.isnan()]))
        assert 0 < int(mine.isnan().sum()) < 64
        compared += int((~mine.isnan()).sum())
    assert compared >= 58 * (1 + len(beside.torchs.state[b]) - (kind in COUNTING))


@pytest.mark.parametrize("nesterov", [False, True])
@on_devices
def test_parameters_without_a_gradient_start_their_momentum_later(
    nesterov: bool, home: Any
) -> None:
    """In one group here, as in torch's steps that are not fused; in torch's fused in groups."""
    beside = Beside("momentum", home, grouped=alone, nesterov=nesterov)
    ours = beside.mine.parameters
    optimizer = beside.mine.optimizer = made("momentum", ours, home, nesterov=nesterov)
    launches = []
    for skipped in [(1,), (), (0, 2), (1, 2), ()]:
        before = optimizer.traffic.launches
        beside.step(1, skipped)
        launches.append(optimizer.traffic.launches - before)
        beside.check()
    assert launches[1] >= 3  # the second parameter starts between its neighbours
    assert launches[4] == home.channel_count


def test_torchs_fused_step_cannot_start_some_buffers_of_a_group(home: Any) -> None:
    """What the docstring says of torch."""
    beside = Beside("momentum", home, weight_decay=0.0)
    for side in beside:
        side.parameters[0].grad = torch.ones_like(side.parameters[0])
        side.optimizer.step()
        side.parameters[1].grad = torch.ones_like(side.parameters[1])
    with pytest.raises(TypeError):
        beside.torchs.optimizer.step()
    beside.mine.optimizer.step()
    second = beside.mine.parameters[1]
    assert torch.equal(beside.mine.state[second]["momentum_buffer"], torch.ones_like(second))


@on_devices
def test_momentum_takes_memory_when_it_is_switched_on(home: Any) -> None:
    beside = Beside("SGD", home)
    array = 4 * sum(p.numel() for p in beside.mine.parameters)
    taken = []
    for momentum in (0.0, 0.9, 0.0, 0.5):
        free = home.free_bytes
        options(momentum=momentum)(beside)
        beside.step(2)
        beside.check()
        taken.append(free - home.free_bytes)
    assert array <= taken.pop(1) < array + (1 << 15)
    assert taken == [0, 0, 0]


@on_devices
def test_only_arrays_that_a_group_needs_are_allocated(home: Any) -> None:
    array = 4 << 16
    for kind, arrays in {"SGD": 2, "momentum": 3, "Adagrad": 3, "AdamW": 4, "amsgrad": 5}.items():
        free = home.free_bytes
        optimizer = made(kind, clone(tensors([(1 << 16,)])), home)
        assert arrays * array <= free - home.free_bytes < (arrays + 1) * array, kind
        del optimizer
        assert home.free_bytes == free


@pytest.mark.parametrize("kind", KINDS)
@on_devices
def test_frozen_parameters_take_no_memory_until_they_are_thawed(kind: str, home: Any) -> None:
    beside = Beside(kind, home)
    frozen = beside.mine.parameters[0]
    for side in beside:
        side.parameters[0].requires_grad_(False)
    del beside.mine.optimizer
    free = home.free_bytes
    beside.mine.optimizer = made(kind, beside.mine.parameters, home)
    beside.torchs.optimizer = made(kind, beside.torchs.parameters)
    arrays = {"SGD": 2, "momentum": 3, "Adagrad": 3, "amsgrad": 5}.get(kind, 4)
    trained = sum(p.numel() for p in beside.mine.parameters[1:])
    array = 4 * arrays
    assert array * trained <= free - home.free_bytes < array * (trained + frozen.numel())
    assert frozen not in beside.mine.state
    if kind not in ("momentum", "Adagrad"):  # where torch has state of all from the first step on
        beside.step(1, (0,))
        assert frozen not in beside.mine.state
    free = home.free_bytes
    for side in beside:
        side.parameters[0].requires_grad_()
    beside.step(2)
    assert 0 <= free - home.free_bytes - array * frozen.numel() < 4 * frozen.numel()
    if kind != "Adagrad":
        beside.check()
        return
    for a, b in zip(beside.mine.parameters, beside.torchs.parameters, strict=True):
        assert torch.equal(bits(a), bits(b))
        assert torch.equal(beside.mine.state[a]["sum"], beside.torchs.state[b]["sum"])


@pytest.mark.parametrize("kind", KINDS)
@on_devices
def test_only_gradients_go_down_and_parameters_come_up(kind: str, home: Any) -> None:
    beside = Beside(kind, home)
    nbytes = 4 * sum(p.numel() for p in beside.mine.parameters)
    optimizer, moved = beside.mine.optimizer, {"write_memory": 0, "read_memory": 0}
    beside.step()
    assert optimizer.traffic.masters_down == nbytes
    for name in moved:

        def counted(address: int, data: Any, *, name: str = name, act: Any = None) -> None:
            moved[name] += data.nbytes
            act(address, data)

        setattr(home.backend, name, partial(counted, act=getattr(home.backend, name)))
    beside.step(3)
    traffic = optimizer.traffic
    assert (traffic.steps, traffic.elements) == (4, 4 * nbytes // 4)
    assert (traffic.gradients_down, traffic.parameters_up) == (4 * nbytes, 4 * nbytes)
    assert (traffic.masters_down, traffic.moments_down) == (nbytes, 0)
    assert (traffic.masters_up, traffic.moments_up) == (0, 0)
    assert moved == {"write_memory": 3 * nbytes, "read_memory": 3 * nbytes}
    beside.check()


@on_devices
def test_one_run_for_neighbours_of_equal_group_and_step(home: Any) -> None:
    beside = Beside(
        "AdamW",
        home,
        tensors([(20,), (3,), (16,), (5, 5)]),
        grouped=lambda ps: [{"params": ps[:3]}, {"params": ps[3:], "lr": 0.1}],
    )
    launches = [0]
    for skipped in ((0, 1, 2, 3), (), (1,), ()):  # then the numbers of steps are 3, 2, 3 and 3
        beside.step(1, skipped)
        launches.append(beside.mine.optimizer.traffic.launches)
    assert [after - before for before, after in pairwise(launches)] == [0, 2, 3, 4]


@on_devices
def test_two_optimizers_on_one_device(home: Any) -> None:
    two = [Beside("AdamW", home), Beside("Adam", home, lr=1e-3)]
    for _ in range(3):
        for beside in two:
            beside.step()
    for beside in two:
        beside.check()


@pytest.mark.deep
@pytest.mark.parametrize("fu", ["rtl", "native"])
@pytest.mark.parametrize("family", ["axdimm?block_bytes=512", "smartssd?chunk_bytes=512"])
def test_simulated_devices(family: str, fu: str) -> None:
    url = f"sim:{family}&lanes=4&rules=adam,adam_amsgrad&memory=halfduplex&stall=0.2&fu={fu}"
    groups = {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}
    beside = Beside(
        "AdamW",
        url,
        grouped=lambda ps: [{"params": ps[:2], **groups[0]}, {"params": ps[2:], **groups[1]}],
    )
    beside.step(3)
    beside.check()
    assert beside.mine.optimizer.traffic.cycles > 0
