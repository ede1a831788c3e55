"""A parameter that is in its group more than once: torch warns, and updates it as often."""

from __future__ import annotations

import pytest
import torch

import nearstep

from .conftest import like_torch

KINDS = {
    "Adam": {},
    "AdamW": {},
    "SGD": {},
    "SGD with momentum": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    "Adagrad": {"lr_decay": 0.1},
}


def pair(kind, ours, theirs, device):
    name, options = kind.split()[0], {"lr": 1e-2, **KINDS[kind]}
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = getattr(nearstep.optim, name)(ours, device=device, **options)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        return optimizer, getattr(torch.optim, name)(theirs, fused=True, **options)


@like_torch
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("kind", KINDS)
def test_duplicates_have_the_bits_of_torch(
    kind, many_rules, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = (make_parameters([(32,), (64,), (16,)]) for _ in range(2))
    groups = [[p, q, p, r, p, q] for p, q, r in (ours, theirs)]
    optimizer, reference = pair(kind, *groups, many_rules)
    for turn in range(4):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
        assert_equal_bits(ours, theirs, optimizer, reference)
        if turn == 1:
            saved = reference.state_dict()
            mine = optimizer.state_dict()
            assert list(mine["state"]) == list(saved["state"])
            assert mine["param_groups"][0]["params"] == saved["param_groups"][0]["params"]
            optimizer.load_state_dict(saved)
    assert optimizer.traffic.elements == 4 * (32 + 64 + 16)
    # p, q and r are neighbours, but have three, two runs and one.
    assert optimizer.traffic.launches == 4 * 6


def test_one_parameter_in_two_groups_is_refused_as_by_torch(device):
    p = torch.ones(16, requires_grad=True)
    for make in (
        lambda groups: nearstep.optim.AdamW(groups, device=device),
        lambda groups: torch.optim.AdamW(groups, fused=True),
    ):
        with pytest.raises(ValueError, match="appear in more than one parameter group"):
            make([{"params": [p]}, {"params": [p]}])
