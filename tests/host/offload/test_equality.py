"""Offloaded training has the bits of plain training, within its budget."""

from __future__ import annotations

import random

import pytest

from .models import KINDS
from .training import (
    GOLDEN,
    HOST,
    OPTIMIZERS,
    SEED,
    Plan,
    assert_equal,
    budget_of,
    computes,
    train,
    train_in_least,
)

DIMM = "golden:axdimm?channels=2&block_bytes=512&memory_bytes=2MiB&rules=adam"
SIMULATED = "sim:axdimm?memory=ideal"
CHANNELS = "sim:axdimm?memory=ddr4-1600&block_bytes=512&functional_units=4&channels=2&fu=native"

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


on_each = pytest.mark.parametrize("device", [GOLDEN, HOST], ids=["golden", "host"])


@on_each
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_trains_with_the_smallest_budget_and_with_much(
    kind: str, device: str
) -> None:
    plan = Plan(kind=kind, evaluates=True, schedules=True, device=device)
    plain = train(plan)
    least = train_in_least(plan)
    for found in (least, train(plan, budget="1000%", policy="on-demand")):
        assert_equal(found, plain)
        assert found.report is not None
        assert found.report.peak <= found.report.budget
        assert found.report.peak > 0
        assert found.report.fetches > 0


@on_each
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_accumulates_gradients_at_their_owner(optimizer: str, device: str) -> None:
    plan = Plan(kind="functional", optimizer=optimizer, passes=3, keeps=True, device=device)
    found = train(plan, budget=4096)
    assert_equal(found, train(plan))
    assert found.report is not None
    assert found.report.gradients == plan.steps * plan.passes * 5
    assert found.report.gradients_up > 0


@on_each
@pytest.mark.parametrize("kind", ["stack", "tied", "functional", "checkpoint"])
def test_updates_in_backward_are_those_of_the_step(kind: str, device: str) -> None:
    plan = Plan(kind=kind, evaluates=True, schedules=True, device=device)
    found = train_in_least(plan, updates="in-backward")
    assert_equal(found, train(plan))
    assert found.report is not None
    assert found.report.peak <= found.report.budget
    assert found.report.steps == plan.steps < found.report.updates


def test_channels_of_a_dimm() -> None:
    plan = Plan(kind="stack", device=DIMM)
    assert_equal(train_in_least(plan), train(plan))


def random_plans(count: int, seed: int) -> list[tuple[Plan, float, str]]:
    """Plans, each with a budget in multiples of the smallest and a policy."""
    chance = random.Random(seed)
    return [
        (
            Plan(
                kind=chance.choice([kind for kind in KINDS if computes(kind)]),
                optimizer=chance.choice(list(OPTIMIZERS)),
                steps=chance.randint(1, 4),
                passes=chance.randint(1, 3),
                evaluates=chance.random() < 0.5,
                keeps=chance.random() < 0.3,
                schedules=chance.random() < 0.5,
                seed=chance.randrange(1 << 20),
            ),
            chance.choice((1.01, 1.3, 2.0, 5.0)),
            chance.choice(("prefetch", "on-demand")),
        )
        for _ in range(count)
    ]


def check_random_plans(count: int, seed: int) -> None:
    print(f"seed {seed}")
    checked = 0
    for plan, share, policy in random_plans(count, seed):
        plain = train(plan)
        least = train_in_least(plan, policy=policy)
        more = train(plan, budget=int(budget_of(least) * share), policy=policy)
        for found in (least, more):
            assert_equal(found, plain)
            assert found.report is not None
            assert found.report.peak <= found.report.budget, plan
            checked += 1
    assert checked == 2 * count


def test_random_trainings() -> None:
    check_random_plans(4, SEED)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(20))
def test_many_random_trainings(seed: int) -> None:
    check_random_plans(25, seed)


@pytest.mark.deep
@pytest.mark.parametrize("device", [SIMULATED, CHANNELS], ids=["sim", "sim-dimm"])
@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
def test_on_the_rtl(device: str, updates: str) -> None:
    plan = Plan(kind="stack", device=device)
    assert_equal(train_in_least(plan, updates=updates), train(plan))
