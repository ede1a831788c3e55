"""State of optimizers beside torch's: saved, loaded, copied, changed, thrown away and half done."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import nearstep
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.errors import (
    ArgumentError,
    BusResponseError,
    OutOfDeviceMemoryError,
    WaitTimeoutError,
)
from nearstep.torch.errors import InterruptedStepError, MissingOptionError, StateError
from nearstep.torch.parameter import DeviceParameter

from .beside import (
    KINDS,
    Beside,
    Side,
    alone,
    bare,
    clone,
    made,
    step_alone,
    tensors,
    through_a_file,
)
from .conftest import bits, late_adagrad, like_torch, on_devices

pytestmark = like_torch

KEYS = {
    "SGD": [],
    "momentum": ["momentum_buffer"],
    "Adagrad": ["step", "sum"],
    "amsgrad": ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "Adam": ["step", "exp_avg", "exp_avg_sq"],
    "AdamW": ["step", "exp_avg", "exp_avg_sq"],
}
PLAIN = [kind for kind in KINDS if kind != "SGD"]
"""Kinds that have a state."""


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) and one.dtype == other.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_is_a_snapshot_in_torchs_form(kind: str, home: Any) -> None:
    beside = Beside(kind, home)
    for steps in (0, 2):
        beside.step(steps)
        saved, expected = (side.optimizer.state_dict() for side in beside)
        assert saved.keys() == expected.keys()
        assert saved["param_groups"] == expected["param_groups"]
        assert saved["state"].keys() == expected["state"].keys()
        if steps:
            assert len(saved["state"]) == (3 if KEYS[kind] else 0)
        for index, state in expected["state"].items():
            assert type(saved["state"][index]) is dict
            assert list(saved["state"][index]) == list(state) == KEYS[kind]
            assert all(equal(saved["state"][index][key], value) for key, value in state.items())
    assert [id(p) for p in beside.mine.state] == [
        id(p) for p in beside.mine.parameters if KEYS[kind]
    ]
    if home == "host:":  # whose state is the user's, as torch's is
        return
    kept = copy.deepcopy(saved)
    beside.step()
    for index, state in kept["state"].items():
        assert all(torch.equal(saved["state"][index][key], value) for key, value in state.items())


DIRECTIONS = ["to itself", "from torch", "to torch", "to torch that was not fused"]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_interchangeable_with_torchs(
    kind: str, steps: int, direction: str, home: Any
) -> None:
    beside = Beside(kind, home)
    beside.step(steps)
    resumed = clone(beside.mine.parameters)
    where = {"fused": None} if direction.endswith("not fused") else {}
    device = None if direction.startswith("to torch") else home
    second = bare(kind, resumed, device, **where, lr=0.5)
    source = beside.torchs if direction == "from torch" else beside.mine
    second.load_state_dict(through_a_file(source.optimizer.state_dict()))
    assert second.param_groups[0]["lr"] == KINDS[kind][1]["lr"]
    for _ in range(8 if kind == "AdamW" else 4):
        beside.give()
        for p, q in zip(resumed, beside.torchs.parameters, strict=True):
            p.grad = q.grad.clone()
        step_alone(beside)
        second.step()
        beside.check()
    beside.mine = Side(resumed, second)
    beside.check()


def test_steps_that_are_not_fused_have_other_bits(home: Any) -> None:
    """Without this the test of interchange would not notice a lost `fused`."""
    beside = Beside("AdamW", home, weight_decay=0.1)
    beside.step(3)
    second = torch.optim.AdamW(clone(beside.mine.parameters))
    saved = through_a_file(beside.mine.optimizer.state_dict())
    saved["param_groups"][0]["fused"] = None
    second.load_state_dict(saved)
    resumed = second.param_groups[0]["params"]
    beside.mine = Side(resumed, second)
    beside.step(8)
    assert any(not torch.equal(a, b) for a, b in zip(*(s.parameters for s in beside), strict=True))


@pytest.mark.parametrize("fused", [None, False, True])
def test_every_group_of_a_checkpoint_is_fused(fused: bool | None, home: Any) -> None:
    parameters = clone(tensors())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}]
    optimizer = made("AdamW", groups, home, fused=fused)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [group["fused"] for group in optimizer.state_dict()["param_groups"]] == [True, True]
    assert [group["fused"] for group in optimizer.param_groups] == [fused, fused]


@pytest.mark.parametrize("kind", KINDS)
def test_loading_does_not_alias_the_checkpoint(kind: str, home: Any) -> None:
    beside = Beside(kind, home)
    beside.step(3)
    saved = beside.mine.optimizer.state_dict()
    kept = copy.deepcopy(saved)
    beside.mine.optimizer.load_state_dict(saved)
    beside.step()
    beside.check()
    for index, state in kept["state"].items():
        assert all(torch.equal(saved["state"][index][key], value) for key, value in state.items())


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=late_adagrad) if kind == "Adagrad" else kind for kind in PLAIN],
)
def test_loading_clears_the_state_of_parameters_that_the_checkpoint_has_not(
    kind: str, home: Any
) -> None:
    beside = Beside(kind, home, grouped=alone)
    beside.step(3)
    for side in beside:
        saved = side.optimizer.state_dict()
        del saved["state"][1]
        side.optimizer.load_state_dict(saved)
    beside.step(2)
    beside.check()
    assert beside.mine.state[beside.mine.parameters[1]].get("step", 2) == 2


def test_choices_of_implementation_in_a_checkpoint_are_not_taken_over(home: Any) -> None:
    beside = Beside("AdamW", home)
    beside.step()
    saved = beside.torchs.optimizer.state_dict()
    saved["param_groups"][0] |= {"foreach": True, "capturable": True, "differentiable": False}
    beside.mine.optimizer.load_state_dict(saved)
    assert not beside.mine.group["foreach"]
    assert not beside.mine.group["capturable"]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_go_on_alone(kind: str, steps: int, home: Any) -> None:
    """A deep copy has memory of its own on the same device; pickle opens one of the same name."""
    beside = Beside(kind, home)
    beside.step(steps)
    ours, optimizer = beside.mine.parameters, beside.mine.optimizer
    on_device = home != "host:"
    free = home.free_bytes if on_device else 0
    copies = [pickle.loads(pickle.dumps((ours, optimizer))), copy.deepcopy((ours, optimizer))]
    for parameters, twin in copies:
        assert all(a is b for a, b in zip(parameters, twin.param_groups[0]["params"], strict=True))
    kept, before = clone(ours), optimizer.state_dict()
    for parameters, twin in copies:
        for p in parameters:
            p.grad = torch.ones_like(p)
        copy.deepcopy((parameters, twin))[1].step()  # leaves the others as they are
    if on_device:
        assert home.free_bytes < free
        assert (copies[0][1].device is home, copies[1][1].device is home) == (False, True)
        assert copies[0][1].device.url == home.url
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(p, q) for p, q in zip(ours, kept, strict=True))
    for index, state in before["state"].items():
        assert all(torch.equal(after[index][key], value) for key, value in state.items())
    for _ in range(2):
        beside.give()
        for parameters, twin in copies:
            for p, q in zip(parameters, ours, strict=True):
                p.grad = q.grad.clone()
            twin.step()
        step_alone(beside)
    beside.check()
    for parameters, twin in copies:
        beside.mine = Side(parameters, twin)
        beside.check()
    if on_device:
        del copies, parameters, twin, beside
        gc.collect()
        assert home.free_bytes == free


def test_a_copy_outlives_the_optimizer_that_opened_the_device() -> None:
    beside = Beside("AdamW", "golden:axdimm?memory_bytes=1MiB")
    beside.mine = Side(*copy.deepcopy((beside.mine.parameters, beside.mine.optimizer)))
    gc.collect()
    beside.step()
    beside.check()
    assert beside.mine.optimizer.traffic.steps == 1


def _set(side: Side, p: Tensor, value: Any) -> None:
    side.state[p] = value


WAYS: dict[str, Callable[[Side, Tensor], object]] = {
    "load nothing": lambda s, p: s.optimizer.load_state_dict(
        {**s.optimizer.state_dict(), "state": {}}
    ),
    "clear all": lambda s, p: s.state.clear(),
    "clear one": lambda s, p: s.state[p].clear(),
    "replace": lambda s, p: _set(s, p, {}),
    "delete": lambda s, p: s.state.pop(p),
    "pop": lambda s, p: s.state[p].pop("momentum_buffer"),
    "None": lambda s, p: s.state[p].update(momentum_buffer=None),
    "load None": lambda s, p: s.optimizer.load_state_dict(
        {**s.optimizer.state_dict(), "state": {i: {"momentum_buffer": None} for i in range(3)}}
    ),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=late_adagrad if kind == "Adagrad" else ())
        for kind, way in product(PLAIN, WAYS)
        if kind == "momentum" or way not in ("pop", "None", "load None")
    ],
)
def test_state_that_is_thrown_away_starts_again(kind: str, way: str, home: Any) -> None:
    """Old checkpoints of torch have None."""
    beside = Beside(kind, home, grouped=alone)
    beside.step(3)
    for side in beside:
        WAYS[way](side, side.parameters[1])
    beside.step(2)
    assert beside.mine.state[beside.mine.parameters[1]].get("step", 2) == 2
    beside.check()


@pytest.mark.parametrize("kind", PLAIN)
def test_state_may_be_changed_and_assigned(kind: str, home: Any) -> None:
    beside = Beside(kind, home)
    beside.step(3)
    *_, key = KEYS[kind]
    for side in beside:
        one, two, three = (side.state[p] for p in side.parameters)
        one[key].mul_(0.5)
        two[key].data.zero_()
        three[KEYS[kind][kind != "momentum"]].numpy()[0, 0] = 3.0
    beside.step()
    beside.check()
    for side in beside:
        one, two, three = (side.state[p] for p in side.parameters)
        one[key] = torch.full((32, 48), 0.25)
        if kind != "momentum":
            two["step"] = torch.tensor(7.0)
            three["step"].fill_(1.0)
    beside.step(2)
    beside.check()
    state = beside.mine.state[beside.mine.parameters[0]]
    if home != "host:":
        with pytest.raises(StateError, match=rf"parameter 0 of group 0 .*'{key}' of shape"):
            state[key] = torch.zeros(3)
    if kind != "momentum":
        del state[key]
        beside.give()
        with pytest.raises(StateError, match=key):
            beside.mine.optimizer.step()


@pytest.mark.parametrize("kind", ["SGD", "momentum"])
def test_a_buffer_may_be_given_before_there_is_one(kind: str, home: Any) -> None:
    beside = Beside(kind, home)
    beside.step(2)
    for side in beside:
        for p in side.parameters:
            side.state[p]["momentum_buffer"] = torch.full_like(p, 0.25).detach()
    beside.step(2)
    beside.check()
    for side in beside:
        side.group["momentum"] = 0.9
    beside.step(2)
    beside.check()


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
def test_state_that_inference_mode_made_is_used_outside(kind: str, home: Any) -> None:
    beside = Beside(kind, home)
    mine, key = beside.mine, KEYS[kind][-1]
    with torch.inference_mode():
        mine.optimizer = made(kind, mine.parameters, home)
    beside.give()
    with torch.inference_mode():
        mine.optimizer.step()
    beside.torchs.optimizer.step()
    beside.step()
    saved = mine.optimizer.state_dict()
    with torch.inference_mode():
        mine.optimizer.load_state_dict(saved)
    beside.step()
    state = mine.state[mine.parameters[0]]
    with torch.inference_mode():
        assert not state[key].is_inference()  # read, and kept until the next step
        state["step"] = state["step"].clone()
    for side in beside:
        side.state[side.parameters[0]][key].mul_(0.5)
    beside.step(2)
    beside.check()
    with torch.inference_mode():
        state[key] = state[key].clone()
    beside.step(2)
    beside.check()


def test_amsgrad_is_switched_on_later_by_giving_the_state(home: Any) -> None:
    beside = Beside("AdamW", home)
    beside.step(2)
    for side in beside:
        side.group["amsgrad"] = True
    before, mine = clone(beside.mine.parameters), beside.mine.optimizer
    down = mine.traffic.gradients_down
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        beside.torchs.optimizer.step()
    with pytest.raises(StateError, match="have 'max_exp_avg_sq'"):
        mine.step()
    assert all(torch.equal(p, q) for p, q in zip(beside.mine.parameters, before, strict=True))
    assert mine.traffic.gradients_down == down
    for side in beside:
        for p in side.parameters:
            side.state[p]["max_exp_avg_sq"] = torch.full_like(p, 0.25).detach()
    beside.step(2)
    beside.check()


@pytest.mark.parametrize("kind", KINDS)
@on_devices
def test_a_first_step_that_fails_half_way_is_healed_by_a_checkpoint(kind: str, home: Any) -> None:
    beside = Beside(kind, home)
    optimizer, before = beside.mine.optimizer, clone(beside.mine.parameters)
    saved = optimizer.state_dict()
    assert isinstance(home.backend, EmulatedBackend)
    home.backend.inject(Injection(kind="slverr", write=True, base=0, limit=1 << 26))
    beside.give()
    with pytest.raises(BusResponseError):
        optimizer.step()
    home.backend.heal()
    with pytest.raises(InterruptedStepError):
        optimizer.step()
    assert all(
        torch.equal(bits(p), bits(q)) for p, q in zip(beside.mine.parameters, before, strict=True)
    )
    optimizer.load_state_dict(saved)
    beside.step(2)
    beside.check()


def reloaded(side: Side, kind: str, home: Any) -> Side:
    parameters = clone(side.parameters)
    optimizer = made(kind, parameters, home)
    saved = side.optimizer.state_dict()
    optimizer.load_state_dict(saved)
    twin = made(kind, clone(parameters), fused=None)
    twin.load_state_dict(saved)  # torch ignores the masters
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    twin.step()
    return Side(parameters, optimizer)


def before_the_model(side: Side, kind: str, home: Any) -> Side:
    parameters = [torch.zeros_like(p).requires_grad_() for p in side.parameters]
    optimizer = made(kind, parameters, home)
    optimizer.load_state_dict(side.optimizer.state_dict())
    with torch.no_grad():
        for p, q in zip(parameters, side.parameters, strict=True):
            p.copy_(q)
    return Side(parameters, optimizer)


RESUMED: dict[str, Callable[[Side, str, Any], Side]] = {
    "as it is": lambda side, *_: side,
    "loaded": reloaded,
    "loaded before the model": before_the_model,
    "deepcopy": lambda side, *_: Side(*copy.deepcopy((side.parameters, side.optimizer))),
}


@pytest.mark.parametrize("resumed", RESUMED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@on_devices
def test_16_bit_parameters_have_fp32_masters_and_state(
    kind: str, dtype: torch.dtype, resumed: str, home: Any
) -> None:
    """A checkpoint keeps the bits that the parameters have not."""
    beside = Beside(kind, home, dtype=dtype)
    beside.step(3)
    beside.mine = RESUMED[resumed](beside.mine, kind, home)
    for _ in range(2):
        saved = beside.mine.optimizer.state_dict()["state"]
        for index, master in enumerate(beside.torchs.parameters):
            assert torch.equal(saved[index]["master_param"], master)
        beside.step(3)
        beside.check()


STATE, GROUP = ("state", 0), ("param_groups", 0)
BAD: dict[str, tuple[tuple[Any, ...], Any, type[Exception], str]] = {
    "no moment": ((*STATE, "exp_avg"), ..., StateError, "have .'exp_avg'."),
    "shape": ((*STATE, "exp_avg"), torch.zeros(3), StateError, "of shape"),
    "integers": ((*STATE, "exp_avg"), torch.zeros(32, 48).int(), StateError, "floating"),
    "negative step": ((*STATE, "step"), torch.tensor(-1.0), StateError, "whole number"),
    "half a step": ((*STATE, "step"), 1.5, StateError, "whole number"),
    "shape of another": ((*STATE, "max_exp_avg_sq"), torch.zeros(8), StateError, "max_exp_avg_sq"),
    "infinite step": ((*STATE, "step"), math.inf, StateError, "below 2"),
    "step of a text": ((*STATE, "step"), "x", StateError, "'step', not x"),
    "step that no run can have": ((*STATE, "step"), 2.0**63, StateError, "below 2"),
    "step that fp32 rounds up to it": ((*STATE, "step"), 2.0**63 - 1024, StateError, "below 2"),
    "group without lr": ((*GROUP, "lr"), ..., MissingOptionError, "have lr"),
    "group without betas": ((*GROUP, "betas"), ..., MissingOptionError, "have betas"),
    "text as state": (STATE, "x", StateError, "parameter 0 must be a mapping, not a str"),
    "no groups": (("param_groups",), ..., StateError, "have .'param_groups'."),
    "a rule that is not there": ((*GROUP, "amsgrad"), True, ArgumentError, "adam,adam_amsgrad"),
}
"""An entry of a checkpoint, the value that it gets (`...`: none), and what is said."""


@pytest.mark.parametrize("bad", BAD)
def test_a_checkpoint_that_no_step_can_follow_is_refused_and_changes_nothing(
    bad: str, device: Any
) -> None:
    path, value, error, text = BAD[bad]
    beside = Beside("AdamW", device)
    beside.step(3)
    optimizer = beside.mine.optimizer
    before, spoilt = optimizer.state_dict(), optimizer.state_dict()
    spoilt["param_groups"][0]["lr"] = 0.7
    inner: Any = spoilt
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if value is ...:
        del inner[path[-1]]
    with pytest.raises(error, match=text):
        optimizer.load_state_dict(spoilt)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, values in before["state"].items():
        assert all(torch.equal(after["state"][key][name], each) for name, each in values.items())
    beside.step()
    beside.check()


def test_a_checkpoint_that_does_not_fit_on_the_device_changes_nothing() -> None:
    small, large = (torch.nn.Parameter(torch.ones(n)) for n in (512, 8192))
    theirs = torch.optim.AdamW([small, large], lr=0.5)
    small.grad, large.grad = torch.ones(512), torch.ones(8192)
    theirs.step()
    large.requires_grad_(False)
    large.grad = None
    optimizer = nearstep.optim.AdamW(
        [small, large], device="golden:axdimm?memory_bytes=64KiB", lr=0.25
    )
    optimizer.step()
    before = optimizer.state_dict()
    with pytest.raises(OutOfDeviceMemoryError):
        optimizer.load_state_dict(theirs.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys() == {0}
    for key, value in before["state"][0].items():
        assert torch.equal(after["state"][0][key], value), key
    optimizer.step()
    assert optimizer.state[small]["step"] == 2


def test_steps_are_refused_after_a_checkpoint_that_was_sent_half_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = Beside("AdamW", "golden:axdimm?memory_bytes=1MiB")
    beside.step()
    optimizer = beside.mine.optimizer
    saved, states = optimizer.state_dict(), dict(optimizer.state)
    send = DeviceParameter.send

    def fails(resident: DeviceParameter, key: str, value: Any) -> None:
        if key == "exp_avg_sq":
            raise WaitTimeoutError("the link", 1)
        send(resident, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceParameter, "send", fails)
        with pytest.raises(WaitTimeoutError):
            optimizer.load_state_dict(saved)
    assert all(optimizer.state[p] is state for p, state in states.items())
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(InterruptedStepError, match="WaitTimeoutError"):
            use()
    optimizer.load_state_dict(saved)
    beside.step()
    beside.check()


def test_a_checkpoint_with_other_groups_is_refused_as_in_torch(home: Any) -> None:
    saved = Beside("AdamW", home).mine.optimizer.state_dict()
    with pytest.raises(ValueError, match="size of optimizer's group"):
        made("AdamW", clone(tensors([(4,)])), home).load_state_dict(saved)


def test_load_state_dict_hooks_see_torchs_form(device: Any) -> None:
    beside = Beside("AdamW", device)
    beside.step()
    optimizer, seen = beside.mine.optimizer, []
    optimizer.register_load_state_dict_pre_hook(
        lambda _, saved: seen.append(type(saved["state"][0]["exp_avg"]))
    )
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("post"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": 1})
    saved = optimizer.state_dict()
    assert saved.pop("extra") == 1
    optimizer.load_state_dict(saved)
    assert seen == [Tensor, "post"]


def test_state_of_another_optimizer_may_be_assigned_with_keys_of_the_user(home: Any) -> None:
    beside = Beside("AdamW", home)
    beside.step(3)
    resumed, old = clone(beside.mine.parameters), beside.mine
    old.state[old.parameters[0]]["note"] = "mine"
    second = nearstep.optim.AdamW(resumed, lr=1e-2, device=home)
    for p, q in zip(resumed, old.parameters, strict=True):
        second.state[p] = old.state[q]
    beside.mine = Side(resumed, second)
    beside.step()
    assert second.state[resumed[0]].pop("note") == "mine"
    assert home == "host:" or old.state[old.parameters[0]]["step"] == 3
    beside.check()
