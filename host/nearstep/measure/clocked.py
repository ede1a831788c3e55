"""Time of a call."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

RUNS = 5
"""Runs of a median, after a warm-up."""

BUDGET_S = 1.0
"""Seconds after which no run starts; a longer warm-up counts as a run."""


def seconds(work: Callable[[], object], *, runs: int = RUNS) -> float:
    """Median time of a call, in seconds.

    Parameters
    ----------
    work : a call that returns after all of its work is done.
    runs : most runs, above 0.
    """
    spent = once(work)
    if spent > BUDGET_S:
        return spent
    times: list[float] = []
    while len(times) < runs and sum(times) < BUDGET_S:
        times.append(once(work))
    return median(times)


def once(work: Callable[[], object]) -> float:
    """Time of one call, in seconds, above 0."""
    start = perf_counter()
    work()
    return max(perf_counter() - start, 1e-9)
