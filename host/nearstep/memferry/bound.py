"""Lower bounds on an iteration whose first layers are decided.

An iteration takes at least as long as any path through its operations. A path is a sum of numbers
of layers, each by what is decided for that layer; so the mean over some paths is, too, and its
least value is found layer by layer. The more evenly the paths are those that are longest under good
decisions, the nearer the bound is to the optimum: they are found by letting decisions answer the
mean of the paths so far, and adding the path that is the longest under the answer (fictitious
play). A limit on bytes is priced: bytes times a multiplier are added, and the limit times it taken
off.

All is integers: sums over paths, not means, so that the bound is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nearstep.memferry import tail
from nearstep.memferry.cost import DECISIONS, Costs, Decision, Ints, Mode

BEFORE, AFTER = (tail.F, tail.R), (tail.A, tail.S, tail.D, None)
"""Numbers of a state that a path can come from and go to; None stands for the updates so far."""


class Limits(NamedTuple):
    """Most bytes of GPU memory, and of gradients in it."""

    budget: int
    kept: int


class Path(NamedTuple):
    """A path: where it changes lanes, by layer.

    Attributes
    ----------
    forward : from the last load to the first computation after it; -1 if there is no load in it, L
        if it has loads alone.
    sent : backward to the first copy to the host; -1 if there is none in it.
    updated : copies to the host to the first update after them; -1 if there is none in it.
    late : from the last load of a DFGB layer to its backward; L if there is none in it.
    """

    forward: int
    sent: int
    updated: int
    late: int


@dataclass(frozen=True)
class Bound:
    """What a set of paths says.

    Attributes
    ----------
    paths : how many.
    weights : by layers decided, from 0 to L, how often a path goes from `BEFORE` to `AFTER`; int64
        of shape (L + 1, 2, 4).
    updates : picoseconds of the layers decided; (L + 1,).
    rest : least that the layers not decided add to all paths; (L + 1,).
    excess : what each decision adds above the least of its layer; (L, 6).
    prices : of a byte, and of a byte of gradients, times the number of paths.
    limits
    """

    paths: int
    weights: Ints
    updates: Ints
    rest: Ints
    excess: Ints
    prices: tuple[float, float]
    limits: Limits

    def of(self, states: Ints, decided: int) -> Ints:
        """Least picoseconds of what begins with these states, times `paths`; int64 of shape
        (n,)."""
        found = np.full(len(states), self.rest[decided])
        for i, before in enumerate(BEFORE):
            for j, after in enumerate(AFTER):
                if weight := self.weights[decided, i, j]:
                    to = self.updates[decided] if after is None else states[:, after]
                    found += weight * (states[:, before] + to)
        columns = (tail.BYTES, tail.KEPT)
        for price, limit, column in zip(self.prices, self.limits, columns, strict=True):
            if price:
                found += np.floor(price * (states[:, column] - limit)).astype(np.int64)
        return found - self.paths - len(self.rest)  # more than floating point is off by


def longest(costs: Costs, decisions: Sequence[Decision]) -> Path:
    """The path that decides when an iteration ends; of DFGB layers that wait for their own forward
    the longest of the others."""
    count = len(costs)
    rows, columns = range(count), [each.index for each in decisions]
    forward, backward = costs.forward[rows, columns], costs.backward[rows, columns]
    early = _loads(costs, decisions, forward.tolist())
    f, r, a, s, updated = early[1], early[2], int(costs.update.sum()), 0, 0
    d = a
    load, send, update = costs.load.tolist(), costs.send.tolist(), costs.update.tolist()
    sends, updates, lates = [], [], []
    gaps, trained = costs.before_backward.tolist(), costs.trained.tolist()
    for i, taken in enumerate(backward.tolist()):
        a += gaps[i]
        updated += update[i]
        if trained[i] and not decisions[i].write:
            if updated >= s:
                updates.append(i)
            s = max(s, updated) + send[i]
            if s >= a:
                sends.append(i)
                a = s
        a += taken
        if decisions[i].mode is Mode.DFGB:
            if a >= d:
                lates.append(i)
            d = max(a, d) + load[i]
        d = max(a, d)
    late = count
    if r + d > f + a and lates:
        late = max(lates)
    sent = max((i for i in sends if i <= late), default=-1)
    return Path(
        forward=early[0] if late == count else count,
        sent=sent,
        updated=max((i for i in updates if i <= sent), default=-1),
        late=late,
    )


def _loads(
    costs: Costs, decisions: Sequence[Decision], forward: Sequence[int]
) -> tuple[int, int, int]:
    """The last layer that waits for its load, or -1; the end of forward, and of the loads."""
    last, now, loaded = -1, 0, 0
    load = costs.load.tolist()
    for i, gap in enumerate(costs.before_forward.tolist()):
        now += gap
        if decisions[i].mode is Mode.GFGB:
            loaded += load[i]
            if loaded >= now:
                last, now = i, loaded
        now += forward[i]
    return last, now, loaded


def coefficients(costs: Costs, path: Path) -> Ints:
    """What each layer adds to a path, by decision; int64 of shape (L, 6)."""
    count = len(costs)
    i = np.arange(count)[:, None]
    early = np.array([each.mode is Mode.GFGB for each in DECISIONS])[None]
    late = np.array([each.mode is Mode.DFGB for each in DECISIONS])[None]
    sends = costs.trained[:, None] & np.array([not each.write for each in DECISIONS])[None]
    found = np.where(early & (i <= path.forward), costs.load[:, None], 0)
    found = found + np.where(i >= path.forward, costs.forward, 0)
    found = found + np.where(i > path.forward, costs.before_forward[:, None], 0)
    found += np.where(sends & (path.updated <= i) & (i <= path.sent), costs.send[:, None], 0)
    found += np.where(i <= path.updated, costs.update[:, None], 0)
    found += np.where((i >= path.sent) & (i <= path.late), costs.backward, 0)
    found += np.where((i > path.sent) & (i <= path.late), costs.before_backward[:, None], 0)
    if path.late < count:
        found += np.where(late & (i >= path.late), costs.load[:, None], 0)
    return found


def lanes(costs: Costs, path: Path) -> Ints:
    """Whence and where a path goes after each number of decided layers; (L + 1, 2, 4)."""
    count = len(costs)
    found = np.zeros((count + 1, 2, len(AFTER)), np.int64)
    last = np.arange(-1, count)
    before = (last < path.forward).astype(int)
    after = np.where(last < path.updated, 3, (last < path.sent).astype(int))
    if path.late < count:
        after = np.where(last >= path.late, 2, after)
    found[last + 1, before, after] = 1
    return found


def bounds(
    costs: Costs,
    limits: Limits,
    best: Sequence[Decision],
    rounds: int,
    first: Sequence[Decision] = (),
) -> tuple[Bound, list[Sequence[Decision]]]:
    """A bound, and the decisions that answered its paths: good ones, if they are within the limits.

    Parameters
    ----------
    costs
    limits
    best : good decisions, whose longest path comes first.
    rounds : paths.
    first : decisions that all answers begin with: the bound is good near these.
    """
    count = len(costs)
    usable = np.where(costs.allowed, 0, _NEVER)
    given = usable.copy()
    for place, decision in enumerate(first):
        given[place] = _NEVER
        given[place, decision.index] = 0
    total = np.zeros((count, len(DECISIONS)), np.int64)
    weights = np.zeros((count + 1, 2, len(AFTER)), np.int64)
    sizes = np.stack([costs.parameter_bytes + costs.gradient_bytes, costs.gradient_bytes])
    most = np.maximum(sizes.max(2).sum(1), 1).astype(float)
    steps = costs.times(best).total / most
    prices = np.zeros(2)
    answers: list[Sequence[Decision]] = [best]
    for number in range(1, rounds + 1):
        path = longest(costs, answers[-1])
        total += coefficients(costs, path)
        weights += lanes(costs, path)
        columns = (_priced(total, number * prices, sizes) + given).argmin(1)
        answers.append([DECISIONS[column] for column in columns.tolist()])
        used = sizes[:, range(count), columns].sum(1)
        prices = np.maximum(prices + steps * (used - np.array(limits)) / most / number**0.5, 0)
    priced = _priced(total, rounds * prices, sizes) + usable
    least = priced.min(1)
    rest = np.concatenate([np.cumsum(least[::-1])[::-1], [0]])
    each = (float(rounds * prices[0]), float(rounds * prices[1]))
    updates = np.concatenate([[0], np.cumsum(costs.update)])
    excess = priced - least[:, None]
    return Bound(rounds, weights, updates, rest, excess, each, limits), answers


_NEVER = 1 << 60
"""Added to a decision that is not allowed."""


def _priced(total: Ints, prices: npt.NDArray[np.float64], sizes: Ints) -> Ints:
    """With the price of bytes; not above it."""
    priced: Ints = total + np.floor(np.tensordot(prices, sizes, 1)).astype(np.int64)
    return priced
