"""Offloaded training with moments in 8 bits has the bits of plain training, which are compared
with numpy's in `tests/host/optim/test_blockwise.py`."""

from __future__ import annotations

import pytest

from .models import KINDS
from .test_init import module_bytes, train_away
from .training import OPTIMIZERS, Plan, assert_equal, train, train_in_least

EIGHT = "golden:axdimm?rules=adam,sgd,sgd_momentum,adagrad&state_format=dynamic8&memory_bytes=8MiB"
DIMM = f"{EIGHT}&channels=2&block_bytes=2048"


def eight_bit(result) -> int:
    return sum(
        value.numel()
        for state in result.optimizer["state"].values()
        for value in state.values()
        if str(value.dtype) == "torch.uint8"
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("device", [EIGHT, DIMM])
def test_gradients_that_the_device_keeps(device: str, optimizer: str) -> None:
    plan = Plan(kind="functional", optimizer=optimizer, passes=3, keeps=True, device=device)
    plain = train(plan)
    assert_equal(train(plan, budget=4096), plain)
    assert eight_bit(plain) > 0 or optimizer == "sgd"


def test_updates_in_backward_are_those_of_the_step() -> None:
    plan = Plan(kind="stack", evaluates=True, schedules=True, device=DIMM)
    plain = train(plan)
    assert_equal(train_in_least(plan, updates="in-backward"), plain)
    assert eight_bit(plain) > 0


@pytest.mark.parametrize("kind", ["stack", "functional"])
def test_a_model_that_is_made_on_the_device(kind: str) -> None:
    plan = Plan(kind=kind, device=DIMM, steps=3)
    plain = train(plan)
    budget = 2 * module_bytes(KINDS[kind]()) + 4096
    found, _ = train_away(plan, KINDS[kind], budget)
    assert_equal(found, plain)
    assert eight_bit(plain) > 0
