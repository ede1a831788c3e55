"""Checkpoints of the optimizers: shared with torch, and refused where no step can follow them."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch

import nearstep
from nearstep.errors import ArgumentError
from nearstep.torch.errors import (
    MissingOptionError,
    StateError,
)

from .conftest import clone, like_torch


def through_a_file(state_dict):
    """As it is after torch.save and torch.load with weights_only, the default."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


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
