"""State of the optimizers: torch's keys, fetched when read, checkpoints shared with torch."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import nearstep
from nearstep.torch.errors import (
    ParameterError,
    StateError,
)
from nearstep.torch.state import ParameterState

from .conftest import clone, like_torch


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
