"""State of the optimizers: a mapping with torch's keys, fetched when read."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import nearstep
from nearstep.torch.errors import ParameterError
from nearstep.torch.state import ParameterState

from .beside import Beside
from .conftest import like_torch

pytestmark = like_torch


@pytest.fixture
def trained(device) -> Beside:
    """After three steps."""
    beside = Beside("AdamW", device)
    beside.step(3)
    return beside


def test_state_is_never_empty_after_a_step_and_fetches_moments_when_read(trained):
    ours, optimizer = trained.mine.parameters, trained.mine.optimizer
    assert set(optimizer.state) == set(ours)
    before = optimizer.traffic.moments_up
    state = optimizer.state[ours[0]]
    assert isinstance(state, dict)
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    assert len(state) == 3
    assert state["step"] == 3
    assert optimizer.traffic.moments_up == before
    first = state["exp_avg"]
    assert optimizer.traffic.moments_up == before + 4 * ours[0].numel()
    assert state["exp_avg"] is first
    assert optimizer.traffic.moments_up == before + 4 * ours[0].numel()


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
    state, expected = (side.state[side.parameters[1]] for side in trained)
    result = read(state)
    assert type(result) is dict
    assert list(result) == list(expected)
    for key, value in expected.items():
        assert torch.equal(result[key], value), key


def test_a_state_made_of_another_is_a_dict_that_a_step_takes_over(trained):
    for side in trained:
        for p in side.parameters:
            state = side.state[p]
            side.state[p] = type(state)({key: value.clone() for key, value in state.items()})
            side.state[p] |= {"step": torch.tensor(5.0)}
    optimizer, first = trained.mine.optimizer, trained.mine.parameters[0]
    made = optimizer.state[first]
    assert type(made) is ParameterState
    assert made.store is None
    assert ParameterState.fromkeys("ab", 1) == {"a": 1, "b": 1}
    exported = optimizer.state_dict()["state"][0]
    assert type(exported) is dict
    assert list(exported) == ["step", "exp_avg", "exp_avg_sq"]
    assert type(copy.deepcopy(made)) is type(pickle.loads(pickle.dumps(made))) is dict
    trained.step(2)
    assert optimizer.state[first].store is not None
    assert optimizer.state[first]["step"] == 7
    trained.check()


def test_a_state_is_a_pytree_as_torchs_is(trained):
    mine, other = (side.state[side.parameters[1]] for side in trained)
    leaves, spec = pytree.tree_flatten(mine)
    assert len(leaves) == len(other) == 3
    assert all(torch.equal(a, b) for a, b in zip(leaves, other.values(), strict=True))
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is ParameterState
    assert all(again[key] is leaf for key, leaf in zip(mine, leaves, strict=True))
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(mine)[0]]
    assert paths == [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(other)[0]]
    for side in trained:
        for p in side.parameters:
            side.state[p] = pytree.tree_map(lambda value: value * 2, side.state[p])
    trained.step()
    trained.check()


def test_a_copy_of_state_has_values_of_its_own(trained):
    state = trained.mine.state[trained.mine.parameters[0]]
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


def test_reading_state_between_steps_changes_nothing(trained):
    optimizer, first = trained.mine.optimizer, trained.mine.parameters[0]
    for _ in range(3):
        optimizer.state_dict()
        dict(optimizer.state[first])
        down = optimizer.traffic.moments_down
        trained.step()
        assert optimizer.traffic.moments_down == down
        trained.check()


def test_keys_of_the_user_are_kept(trained):
    optimizer, first = trained.mine.optimizer, trained.mine.parameters[0]
    assert isinstance(optimizer.state[first], ParameterState)
    optimizer.state[first]["note"] = "mine"
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[first]["note"] == "mine"
    assert optimizer.state[first].pop("nothing", 5) == 5


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
