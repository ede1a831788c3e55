"""A budget is never exceeded without an error, whatever a program does; and bits are equal."""

from __future__ import annotations

from collections import Counter

import pytest

from .programs import ACTS, check_program

SEED = 81043

pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad", "ignore:Using backward.* with create_graph=True"
)


def check(seeds: range) -> Counter[str]:
    print(f"seeds {seeds}")
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += check_program(seed)
    return counts


def test_random_programs() -> None:
    counts = check(range(SEED, SEED + 14))
    assert counts["acts"] == 14 * 8
    assert counts["compared"] >= 14 * 4, counts
    assert len(ACTS) >= 15


@pytest.mark.deep
@pytest.mark.parametrize("part", range(8))
def test_many_random_programs(part: int) -> None:
    counts = check(range(part * 100, part * 100 + 100))
    assert counts["compared"] >= 400, counts
    assert counts["BudgetError"] >= 1
    assert counts["EarlyUpdateError"] >= 1
