"""Plans for a profile: the paper's greedy ones, the exact one, and the best of all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nearstep.errors import ArgumentError
from nearstep.memferry.bound import Limits
from nearstep.memferry.cost import DECISIONS, Costs, Decision
from nearstep.memferry.errors import PlanBudgetError
from nearstep.memferry.exact import MOST_STATES, NO_LIMITS, Optimum, optimum
from nearstep.memferry.forward import READINGS, Reading
from nearstep.memferry.greedy import greedy
from nearstep.memferry.plan import Plan, allowance, check
from nearstep.memferry.profile import Profile
from nearstep.scalars import is_whole

Planner = Literal["best", "greedy", "exact"]
QUICK_STATES = 1000
MOST_EXACT = 500
"""Layers up to which the exact planner is tried by default."""


@dataclass(frozen=True)
class Planned:
    """A plan, and its comparison with others.

    Attributes
    ----------
    total : picoseconds of an iteration.
    least : lower bound of any plan in picoseconds; None if nothing was proven.
    readings : picoseconds of the greedy planner by reading; None where it found no plan.
    """

    plan: Plan
    costs: Costs
    total: int
    least: int | None
    readings: Mapping[Reading, int | None]

    @property
    def decisions(self) -> Sequence[Decision]:
        return [*self.plan.layers.values()]

    @property
    def gap(self) -> float | None:
        """Largest share of the time that another plan could save."""
        return None if self.least is None else (self.total - self.least) / max(self.total, 1)


def make(
    profile: Profile,
    *,
    budget: int | None = None,
    reserve: float = 1.0,
    planner: Planner = "best",
    readings: Sequence[Reading] = READINGS,
    decisions: Literal["all", "keep"] = "all",
    most_states: int | None = None,
) -> Planned:
    """Plan a model.

    Parameters
    ----------
    budget : bytes of GPU memory for parameters and gradients; None of no limit.
    reserve : share of the gradients' bytes that GPU memory may keep.
    planner : `greedy`: by the first reading; `exact` or `best`: the best of the exact plan and of
        the greedy ones by all readings; `best` plans at most `MOST_EXACT` layers exactly.
    readings : of Algorithm 1, at least one.
    decisions : `all`, or `keep`: no gradient is written to the host by choice (MemFerry without
        GO).
    most_states : of the exact planner; fewer take less time, and prove less. None: the default, or,
        for `best`, `QUICK_STATES`.

    Raises
    ------
    ArgumentError : an argument is out of range.
    PlanBudgetError : no plan fits.
    """
    if budget is not None and (not is_whole(budget) or budget < 0):
        raise ArgumentError(f"budget must be bytes from 0, or None, not {budget!r}")
    if not 0 <= reserve <= 1:
        raise ArgumentError(f"reserve must be a share from 0 to 1, not {reserve!r}")
    if planner not in ("best", "greedy", "exact") or decisions not in ("all", "keep"):
        raise ArgumentError(f"there is no planner {planner!r} with decisions {decisions!r}")
    costs = Costs(profile)
    if decisions == "keep":
        for column, decision in enumerate(DECISIONS):
            if decision.write:
                costs.allowed[:, column] = False
    kept = NO_LIMITS.kept if reserve == 1 else allowance(reserve, costs)
    limits = Limits(NO_LIMITS.budget if budget is None else budget, kept)
    least = _least(costs, limits)
    tried = readings[:1] if planner == "greedy" else readings
    found = {reading: greedy(costs, limits, reading) for reading in tried}
    totals = {r: None if d is None else costs.times(d).total for r, d in found.items()}
    known = [each for each in found.values() if each is not None]
    chosen: Sequence[Decision] = min(known or [least], key=lambda d: costs.times(d).total)
    bound: int | None = None
    if planner == "exact" or (planner == "best" and len(costs) <= MOST_EXACT):
        if most_states is None:
            most_states = MOST_STATES if planner == "exact" else QUICK_STATES
        best: Optimum = optimum(costs, limits, chosen, most_states=most_states)
        chosen, bound = best.decisions, best.least
    names = [layer.name for layer in profile.layers]
    plan = Plan(
        fingerprint=profile.fingerprint,
        budget_bytes=budget,
        reserve=reserve,
        layers=dict(zip(names, chosen, strict=True)),
    )
    check(plan, costs)
    return Planned(plan, costs, costs.times(chosen).total, bound, totals)


def _least(costs: Costs, limits: Limits) -> list[Decision]:
    """Decisions that take few bytes within the reserve: the fewest, then layer by layer others that
    keep less of the gradients, first where these take the fewest bytes more for it.

    Raises
    ------
    ArgumentError : all decisions exceed the reserve.
    PlanBudgetError : these exceed the budget.
    """
    gradients, never, rows = costs.gradient_bytes, np.int64(1 << 62), range(len(costs))
    sizes = np.where(costs.allowed, costs.parameter_bytes + gradients, never)
    names = [layer.name for layer in costs.profile.layers]
    fewest = np.cumsum(np.where(costs.allowed, gradients, never).min(1))
    if fewest[-1] > limits.kept:
        place, whole = int((fewest > limits.kept).argmax()), int(fewest[-1])
        share = whole / max(costs.profile.gradient_bytes, 1)
        while allowance(share, costs) < whole:
            share = math.nextafter(share, math.inf)
        raise ArgumentError(
            f"layer {names[place]}: reserve must be at least {share}: gradients that cannot be "
            f"written to the host take {whole} bytes, the reserve leaves {limits.kept}"
        )
    columns = sizes.argmin(1)
    while (gradients[rows, columns]).sum() > limits.kept:
        saved = gradients[rows, columns][:, None] - gradients
        more = (sizes - sizes[rows, columns][:, None]) / np.where(saved > 0, saved, 1)
        place, column = divmod(int(np.where(saved > 0, more, np.inf).argmin()), sizes.shape[1])
        columns[place] = column
    used = np.cumsum(sizes[rows, columns])
    if used[-1] > limits.budget:
        place = int((used > limits.budget).argmax())
        raise PlanBudgetError(limits.budget, int(used[-1]), names[place], int(used[place]))
    return [DECISIONS[column] for column in columns.tolist()]
