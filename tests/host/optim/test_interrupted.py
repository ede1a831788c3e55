"""A step that fails half way is never called done, and a checkpoint heals it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import nearstep
from nearstep.errors import BusResponseError
from nearstep.torch.errors import InterruptedStepError


def failing(adam, calls):
    """``device.adam`` of which the run number ``calls`` fails after it has been done."""
    remaining = [calls]

    def run(*buffers, **options):
        started = adam(*buffers, **options)
        remaining[0] -= 1
        if remaining[0] == 0:
            started.wait()
            raise BusResponseError(
                cause="READ_RESPONSE", stream="P", address=64, committed=0, count=started.count
            )
        return started

    return run


@pytest.fixture
def interrupted(device, make_parameters, give_gradients, monkeypatch):
    """An optimizer whose fourth step failed in the second of two runs, and a good checkpoint."""
    ours, theirs = make_parameters(), make_parameters()
    groups = [{"params": ours[:1]}, {"params": ours[1:]}]
    optimizer = nearstep.optim.AdamW(groups, lr=1e-2, device=device)
    reference = torch.optim.AdamW(
        [{"params": theirs[:1]}, {"params": theirs[1:]}], lr=1e-2, fused=True
    )
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    checkpoint = [p.detach().clone() for p in ours], optimizer.state_dict()
    give_gradients(ours)
    with monkeypatch.context() as patch:
        patch.setattr(device, "adam", failing(device.adam, 2))
        with pytest.raises(BusResponseError):
            optimizer.step()
    return ours, theirs, optimizer, reference, checkpoint


def test_the_host_keeps_the_old_parameters_and_counts_no_step(interrupted):
    ours, _, optimizer, _, (parameters, _) = interrupted
    for p, saved in zip(ours, parameters, strict=True):
        assert torch.equal(p, saved)
    assert optimizer.traffic.steps == 3
    assert optimizer.state[ours[0]]["step"] == 3


@pytest.mark.parametrize(
    "use",
    [
        lambda optimizer: optimizer.step(),
        lambda optimizer: optimizer.state_dict(),
        pickle.dumps,
        copy.deepcopy,
    ],
    ids=["step", "state_dict", "pickle", "deepcopy"],
)
def test_it_refuses_further_use(use, interrupted):
    with pytest.raises(InterruptedStepError, match="BusResponseError"):
        use(interrupted[2])


def test_a_checkpoint_heals_it(interrupted, give_gradients, assert_equal_bits):
    ours, theirs, optimizer, reference, (parameters, state) = interrupted
    with torch.no_grad():
        for p, saved in zip(ours, parameters, strict=True):
            p.copy_(saved)
    optimizer.load_state_dict(state)
    for _ in range(2):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_other_optimizers_of_the_device_go_on(
    interrupted, device, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, device=device)
    reference = torch.optim.AdamW(theirs, fused=True)
    give_gradients(ours, theirs)
    optimizer.step()
    reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)
