"""State of the optimizers: torch's keys, fetched when read, checkpoints shared with torch."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import nearstep
from nearstep.errors import ArgumentError
from nearstep.torch.errors import (
    MissingOptionError,
    ParameterError,
    StateError,
)
from nearstep.torch.state import ParameterState

from .conftest import like_torch


@pytest.fixture
def trained(device, make_parameters, give_gradients):
    """Parameters and an optimizer after three steps, and torch's after the same."""
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    return ours, theirs, optimizer, reference


def clone(parameters):
    return [p.detach().clone().requires_grad_() for p in parameters]


def through_a_file(state_dict):
    """As it is after torch.save and torch.load with weights_only, the default."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def test_state_is_never_empty_after_a_step_and_fetches_moments_when_read(trained):
    ours, _, optimizer, _ = trained
    assert set(optimizer.state) == set(ours)
    before = optimizer.traffic.moments_up
    state = optimizer.state[ours[0]]
    assert isinstance(state, dict)
    assert len(state) == 3
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    assert state["step"] == 3
    assert optimizer.traffic.moments_up == before
    first = state["exp_avg"]
    assert optimizer.traffic.moments_up == before + 4 * ours[0].numel()
    assert state["exp_avg"] is first
    assert optimizer.traffic.moments_up == before + 4 * ours[0].numel()


@like_torch
@pytest.mark.parametrize(
    "read",
    [
        dict,
        lambda state: {**state},
        lambda state: dict(state.items()),
        lambda state: dict(zip(state.keys(), state.values(), strict=True)),
        lambda state: {key: state.get(key) for key in state},
        lambda state: state.copy(),
        copy.copy,
        copy.deepcopy,
        lambda state: pickle.loads(pickle.dumps(state)),
        lambda state: {} | state,
        lambda state: state | {},
        lambda state: dict(reversed([state.popitem() for _ in range(len(state))])),
        lambda state: {key: state.setdefault(key) for key in state},
        lambda state: {key: state.pop(key) for key in list(state)},
    ],
)
def test_every_way_to_read_a_state_fetches_it(read, trained):
    ours, theirs, optimizer, reference = trained
    result = read(optimizer.state[ours[1]])
    assert type(result) is dict
    expected = reference.state[theirs[1]]
    assert list(result) == list(expected)
    for key, value in expected.items():
        assert torch.equal(result[key], value), key


@like_torch
def test_a_state_made_of_another_is_a_dict_that_a_step_takes_over(
    trained, give_gradients, assert_equal_bits
):
    ours, theirs, optimizer, reference = trained
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        for p in parameters:
            state = chosen.state[p]
            chosen.state[p] = type(state)({key: value.clone() for key, value in state.items()})
            chosen.state[p] |= {"step": torch.tensor(5.0)}
    made = optimizer.state[ours[0]]
    assert type(made) is ParameterState
    assert made.store is None
    assert ParameterState.fromkeys("ab", 1) == {"a": 1, "b": 1}
    exported = optimizer.state_dict()["state"][0]
    assert type(exported) is dict
    assert list(exported) == ["step", "exp_avg", "exp_avg_sq"]
    assert type(copy.deepcopy(made)) is type(pickle.loads(pickle.dumps(made))) is dict
    for _ in range(2):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert optimizer.state[ours[0]].store is not None
    assert optimizer.state[ours[0]]["step"] == 7
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
def test_a_state_is_a_pytree_as_torchs_is(trained, give_gradients, assert_equal_bits):
    ours, theirs, optimizer, reference = trained
    mine, other = optimizer.state[ours[1]], reference.state[theirs[1]]
    leaves, spec = pytree.tree_flatten(mine)
    assert len(leaves) == len(other) == 3
    assert all(torch.equal(a, b) for a, b in zip(leaves, other.values(), strict=True))
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is ParameterState
    assert all(again[key] is leaf for key, leaf in zip(mine, leaves, strict=True))
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(mine)[0]]
    assert paths == [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(other)[0]]
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        for p in parameters:
            chosen.state[p] = pytree.tree_map(lambda value: value * 2, chosen.state[p])
    give_gradients(ours, theirs)
    optimizer.step()
    reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_a_copy_of_state_has_values_of_its_own(trained):
    ours, _, optimizer, _ = trained
    state = optimizer.state[ours[0]]
    state["note"] = ["mine"]
    for made in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        made["note"].append("other")
        made["exp_avg"].zero_()
        made["step"].zero_()
    assert state["note"] == ["mine"]
    assert state["step"] == 3
    assert state["exp_avg"].any()
    for _ in range(4):
        state.popitem()
    with pytest.raises(KeyError):
        state.popitem()


@like_torch
def test_reading_state_between_steps_changes_nothing(trained, give_gradients, assert_equal_bits):
    ours, theirs, optimizer, reference = trained
    for _ in range(3):
        optimizer.state_dict()
        dict(optimizer.state[ours[0]])
        down = optimizer.traffic.moments_down
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
        assert optimizer.traffic.moments_down == down
        assert optimizer.state[ours[0]]["step"] == reference.state[theirs[0]]["step"]
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
def test_a_state_dict_is_a_snapshot_in_torchs_form(trained, give_gradients):
    ours, _, optimizer, reference = trained
    saved, expected = optimizer.state_dict(), reference.state_dict()
    assert saved.keys() == expected.keys()
    assert saved["state"].keys() == expected["state"].keys()
    assert saved["param_groups"][0].keys() == expected["param_groups"][0].keys()
    for index, state in expected["state"].items():
        assert type(saved["state"][index]) is dict
        for key, value in state.items():
            assert torch.equal(saved["state"][index][key], value)
            assert saved["state"][index][key].dtype == value.dtype
    kept = copy.deepcopy(saved)
    give_gradients(ours)
    optimizer.step()
    for index, state in kept["state"].items():
        for key, value in state.items():
            assert torch.equal(saved["state"][index][key], value)


@like_torch
@pytest.mark.parametrize(
    "direction", ["to itself", "from torch", "to torch", "to torch that was not fused"]
)
def test_checkpoints_are_interchangeable_with_torchs(
    direction, trained, device, give_gradients, assert_equal_bits
):
    ours, theirs, optimizer, reference = trained
    source = reference if direction == "from torch" else optimizer
    resumed = clone(ours)
    if direction.startswith("to torch"):
        fused = True if direction == "to torch" else None
        second = torch.optim.AdamW(resumed, lr=0.5, fused=fused)
    else:
        second = nearstep.optim.AdamW(resumed, lr=0.5, device=device)
    second.load_state_dict(through_a_file(source.state_dict()))
    assert second.param_groups[0]["lr"] == 1e-2
    for _ in range(8):
        give_gradients(ours, resumed, theirs)
        for each in (optimizer, second, reference):
            each.step()
        assert_equal_bits(resumed, ours, second, optimizer)
        assert_equal_bits(resumed, theirs, second, reference)


@pytest.mark.parametrize("fused", [None, False, True])
def test_every_group_of_a_checkpoint_is_fused(fused, device, make_parameters, give_gradients):
    parameters = make_parameters()
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}]
    optimizer = nearstep.optim.AdamW(groups, fused=fused, device=device)
    give_gradients(parameters)
    optimizer.step()
    assert [group["fused"] for group in optimizer.state_dict()["param_groups"]] == [True, True]
    assert [group["fused"] for group in optimizer.param_groups] == [fused, fused]


def test_steps_that_are_not_fused_have_other_bits(trained, give_gradients):
    """Without this the test of interchange would not notice a lost `fused`."""
    ours, theirs, optimizer, reference = trained
    resumed = clone(ours)
    second = torch.optim.AdamW(resumed)
    saved = through_a_file(optimizer.state_dict())
    saved["param_groups"][0]["fused"] = None
    second.load_state_dict(saved)
    for _ in range(8):
        give_gradients(resumed, theirs)
        second.step()
        reference.step()
    assert any(not torch.equal(a, b) for a, b in zip(resumed, theirs, strict=True))


def test_loading_does_not_alias_the_checkpoint(trained, device, give_gradients):
    ours, _, optimizer, _ = trained
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    resumed = clone(ours)
    second = nearstep.optim.AdamW(resumed, device=device)
    second.load_state_dict(saved)
    give_gradients(resumed)
    second.step()
    assert saved["state"][0]["step"] == 3
    for key, value in kept["state"][0].items():
        assert torch.equal(saved["state"][0][key], value)


@like_torch
def test_loading_clears_the_state_of_parameters_that_the_checkpoint_has_not(
    trained, give_gradients, assert_equal_bits
):
    ours, theirs, optimizer, reference = trained
    for chosen in (optimizer, reference):
        saved = chosen.state_dict()
        del saved["state"][1]
        chosen.load_state_dict(saved)
    for _ in range(2):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert optimizer.state[ours[1]]["step"] == 2
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_choices_of_implementation_in_a_checkpoint_are_not_taken_over(trained, device):
    ours, *_, reference = trained
    saved = reference.state_dict()
    saved["param_groups"][0] |= {"foreach": True, "capturable": True, "differentiable": False}
    second = nearstep.optim.AdamW(clone(ours), device=device)
    second.load_state_dict(saved)
    assert not second.param_groups[0]["foreach"]
    assert not second.param_groups[0]["capturable"]


def test_a_checkpoint_of_another_rule_is_refused_and_nothing_is_loaded(trained):
    ours, _, optimizer, _ = trained
    saved = optimizer.state_dict()
    saved["param_groups"][0]["amsgrad"] = True
    saved["param_groups"][0]["lr"] = 0.7
    with pytest.raises(ArgumentError, match="rules=adam,adam_amsgrad"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.state[ours[0]]["step"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("exp_avg"), "have .'exp_avg'."),
        (lambda state: state.update(exp_avg=torch.zeros(3)), "of shape"),
        (lambda state: state.update(exp_avg=torch.zeros(32, 48, dtype=torch.int32)), "floating"),
        (lambda state: state.update(step=torch.tensor(-1.0)), "whole number"),
        (lambda state: state.update(step=1.5), "whole number"),
        (lambda state: state.update(max_exp_avg_sq=torch.zeros(48, 32)), "max_exp_avg_sq"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_is_loaded(change, message, trained):
    ours, _, optimizer, _ = trained
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.7
    change(saved["state"][0])
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.state[ours[0]]["step"] == 3


def test_a_checkpoint_with_other_groups_is_refused_as_in_torch(trained, device, make_parameters):
    saved = trained[2].state_dict()
    other = nearstep.optim.AdamW(make_parameters([(4,)]), device=device)
    with pytest.raises(ValueError, match="size of optimizer's group"):
        other.load_state_dict(saved)


def test_load_state_dict_hooks_see_torchs_form(trained):
    _, _, optimizer, _ = trained
    seen = []
    optimizer.register_load_state_dict_pre_hook(
        lambda _, saved: seen.append(type(saved["state"][0]["exp_avg"]))
    )
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("post"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": 1})
    saved = optimizer.state_dict()
    assert saved.pop("extra") == 1
    optimizer.load_state_dict(saved)
    assert seen == [torch.Tensor, "post"]


@like_torch
def test_pickle_opens_a_device_of_the_same_name(trained, give_gradients, assert_equal_bits):
    ours, theirs, optimizer, reference = trained
    copied, restored = pickle.loads(pickle.dumps((ours, optimizer)))
    assert restored.param_groups[0]["params"][0] is copied[0]
    assert restored.device is not optimizer.device
    assert restored.device.url == optimizer.device.url
    for _ in range(2):
        give_gradients(copied, theirs)
        restored.step()
        reference.step()
    assert_equal_bits(copied, theirs, restored, reference)
    assert optimizer.state[ours[0]]["step"] == 3


@like_torch
def test_deepcopy_has_memory_of_its_own_on_the_same_device(
    trained, give_gradients, assert_equal_bits
):
    ours, theirs, optimizer, reference = trained
    free = optimizer.device.free_bytes
    copied, twin = copy.deepcopy((ours, optimizer))
    assert twin.device is optimizer.device
    assert optimizer.device.free_bytes < free
    kept, moments = clone(ours), optimizer.state_dict()
    for _ in range(2):
        give_gradients(copied, theirs)
        twin.step()
        reference.step()
    assert_equal_bits(copied, theirs, twin, reference)
    assert_equal_bits(ours, kept)
    for index, p in enumerate(ours):
        for key, value in moments["state"][index].items():
            assert torch.equal(optimizer.state[p][key], value)
    del twin
    gc.collect()
    assert optimizer.device.free_bytes == free


def test_a_copy_outlives_the_optimizer_that_opened_the_device(make_parameters, give_gradients):
    optimizer = nearstep.optim.AdamW(make_parameters(), device="golden:axdimm?memory_bytes=1MiB")
    twin = copy.deepcopy(optimizer)
    del optimizer
    gc.collect()
    give_gradients(twin.param_groups[0]["params"])
    twin.step()
    assert twin.traffic.steps == 1


@like_torch
def test_a_moment_changed_in_place_goes_down_with_the_next_step(
    trained, give_gradients, assert_equal_bits
):
    ours, theirs, optimizer, reference = trained
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        chosen.state[parameters[0]]["exp_avg"].mul_(0.5)
        chosen.state[parameters[1]]["exp_avg_sq"].data.zero_()
        chosen.state[parameters[2]]["exp_avg"].numpy()[0, 0] = 3.0
    give_gradients(ours, theirs)
    optimizer.step()
    reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
def test_moments_and_step_may_be_assigned(trained, give_gradients, assert_equal_bits):
    ours, theirs, optimizer, reference = trained
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        chosen.state[parameters[0]]["exp_avg"] = torch.full((32, 48), 0.25)
        chosen.state[parameters[1]]["step"] = torch.tensor(7.0)
        chosen.state[parameters[2]]["step"].fill_(1.0)
    for _ in range(2):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
@pytest.mark.parametrize("how", ["clear all", "clear one", "replace", "delete"])
def test_state_that_is_thrown_away_starts_again_from_zero(
    how, trained, give_gradients, assert_equal_bits
):
    ours, theirs, optimizer, reference = trained
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        if how == "clear all":
            chosen.state.clear()
        elif how == "clear one":
            chosen.state[parameters[0]].clear()
        elif how == "replace":
            chosen.state[parameters[0]] = {}
        else:
            del chosen.state[parameters[0]]
    give_gradients(ours, theirs)
    optimizer.step()
    reference.step()
    assert optimizer.state[ours[0]]["step"] == 1
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
def test_state_of_another_optimizer_may_be_assigned(
    trained, device, give_gradients, assert_equal_bits
):
    ours, theirs, optimizer, reference = trained
    resumed = clone(ours)
    second = nearstep.optim.AdamW(resumed, lr=1e-2, device=device)
    for p, q in zip(resumed, ours, strict=True):
        second.state[p] = optimizer.state[q]
    give_gradients(resumed, theirs)
    second.step()
    reference.step()
    assert_equal_bits(resumed, theirs, second, reference)
    assert optimizer.state[ours[0]]["step"] == 3


def test_a_bad_assignment_is_refused_by_name(trained):
    ours, _, optimizer, _ = trained
    with pytest.raises(StateError, match=r"parameter 0 of group 0 .*'exp_avg' of shape"):
        optimizer.state[ours[0]]["exp_avg"] = torch.zeros(3)


def test_a_deleted_moment_is_missed_by_the_step(trained, give_gradients):
    ours, _, optimizer, _ = trained
    del optimizer.state[ours[0]]["exp_avg"]
    give_gradients(ours)
    with pytest.raises(StateError, match="exp_avg"):
        optimizer.step()


def test_keys_of_the_user_are_kept(trained, device):
    ours, _, optimizer, _ = trained
    assert isinstance(optimizer.state[ours[0]], ParameterState)
    optimizer.state[ours[0]]["note"] = "mine"
    second = nearstep.optim.AdamW(clone(ours), device=device)
    second.load_state_dict(optimizer.state_dict())
    assert second.state[second.param_groups[0]["params"][0]]["note"] == "mine"


def _with_step(step):
    def change(state):
        state["state"][0]["step"] = step

    return change


def _without(*path):
    def change(state):
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


def _with_text(state):
    state["state"][0] = "x"


BAD_CHECKPOINTS = {
    "infinite step": (_with_step(math.inf), StateError, "below 2"),
    "step of a text": (_with_step("x"), StateError, "'step', not x"),
    "step that no run can have": (_with_step(2.0**63), StateError, "below 2"),
    "step that fp32 rounds up to it": (_with_step(2.0**63 - 1024), StateError, "below 2"),
    "group without lr": (_without("param_groups", 0, "lr"), MissingOptionError, "have lr"),
    "group without betas": (_without("param_groups", 0, "betas"), MissingOptionError, "have betas"),
    "text as state": (_with_text, StateError, "parameter 0 must be a mapping, not a str"),
    "no groups": (_without("param_groups"), StateError, "have .'param_groups'."),
}


@pytest.mark.parametrize("bad", BAD_CHECKPOINTS)
def test_a_checkpoint_that_no_step_can_follow_is_refused_and_changes_nothing(bad, trained):
    _, _, optimizer, _ = trained
    change, error, text = BAD_CHECKPOINTS[bad]
    before, spoilt = optimizer.state_dict(), optimizer.state_dict()
    change(spoilt)
    with pytest.raises(error, match=text):
        optimizer.load_state_dict(spoilt)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, values in before["state"].items():
        assert all(torch.equal(after["state"][key][name], each) for name, each in values.items())
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_of_another_size_has_no_state(dtype, device):
    q = torch.ones(32, dtype=dtype, requires_grad=True)
    optimizer = nearstep.optim.AdamW([q], device=device)
    q.grad = torch.ones(32, dtype=dtype)
    optimizer.step()
    good, q.data = q.data, torch.ones(16, dtype=dtype)
    with pytest.raises(ParameterError, match="of 32 elements, not 16"):
        optimizer.state_dict()
    q.data = good
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (32,)
