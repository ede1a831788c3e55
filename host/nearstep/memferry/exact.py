"""The best decisions under the cost model, and the proof that none are better.

A dynamic programme over layers, with the states of `nearstep.memferry.tail`. A state is dropped if
another state dominates it, in which no number is larger, or if no iteration from the state can be
shorter than the best known one (`nearstep.memferry.bound`), which the same search with few states
finds. If there are too many states, those with the least bounds are kept, and the least bound of
the others bounds the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nearstep.memferry import tail
from nearstep.memferry.bound import Bound, Limits, bounds, longest
from nearstep.memferry.cost import DECISIONS, Costs, Decision, Ints
from nearstep.memferry.slack import KEYS, ahead

ROUNDS = 64
"""Paths of a bound."""

BEAMS = (16, 128)
"""States that the search for good decisions keeps after each layer."""

MOST_STATES = 2_000
"""States that the search keeps after a layer."""

FEW = 200
EVERY = 4
CLOSE_ROUNDS = 32
MOST_BOUNDS = 15
"""Number of states beyond which, after every fourth layer, bounds near some of them are added; the
last bounds are kept.
"""


@dataclass(frozen=True)
class Optimum:
    """Result of the search.

    Attributes
    ----------
    decisions : the best ones known.
    total : picoseconds of an iteration with these.
    least : lower bound of any iteration in picoseconds: `total` if the optimum is proven.
    states : number of states examined.
    """

    decisions: tuple[Decision, ...]
    total: int
    least: int
    states: int

    @property
    def proven(self) -> bool:
        return self.least == self.total


def optimum(
    costs: Costs,
    limits: Limits,
    known: Sequence[Decision],
    *,
    rounds: int = ROUNDS,
    most_states: int = MOST_STATES,
) -> Optimum:
    """Search for the best decisions within limits; `known` decisions must be within them."""
    first = np.array([[each.index for each in known]])
    (bound,), answers = bounds(costs, limits, first, rounds)
    search = _Search(costs, limits, bound, known)
    search.offer(answers[:, 0])
    for most in (*(beam for beam in BEAMS if beam < most_states), most_states):
        if search.least < search.total:
            search.run(most)
    return Optimum(search.best, search.total, search.least, search.states)


class _Search:
    """The best decisions so far, and the search for better ones."""

    def __init__(
        self, costs: Costs, limits: Limits, bound: Bound, known: Sequence[Decision]
    ) -> None:
        self.costs, self.limits, self.bounds = costs, limits, [bound]
        self.best = tuple(known)
        self.total = costs.times(known).total
        self.least = max(-(-int(bound.of(tail.start(costs), 0)[0]) // bound.paths), 0)
        self.states = 0
        least = [
            np.where(costs.allowed, sizes, np.iinfo(np.int64).max).min(1)
            for sizes in (costs.parameter_bytes + costs.gradient_bytes, costs.gradient_bytes)
        ]
        self._after = [np.concatenate([np.cumsum(each[::-1])[::-1], [0]]) for each in least]
        """Least bytes of the layers from one on."""

    def offer(self, columns: Ints) -> None:
        """Adopt the best of some plans within the limits if it is an improvement; columns have
        shape (n, L).
        """
        rows = np.arange(len(self.costs))
        kept = self.costs.gradient_bytes[rows, columns].sum(1)
        used = self.costs.parameter_bytes[rows, columns].sum(1) + kept
        columns = columns[(used <= self.limits.budget) & (kept <= self.limits.kept)]
        _, least = longest(self.costs, columns)
        for i in np.argsort(least, kind="stable").tolist():
            if least[i] >= self.total:
                break
            decisions = tuple(DECISIONS[column] for column in columns[i].tolist())
            total = self.costs.times(decisions).total
            if total < self.total:
                self.best, self.total = decisions, total

    def _clipped(self) -> Ints:
        """Values up to which the keys of states can be raised, by layers decided, without an
        iteration that ends later than `least`."""
        bound = self.bounds[0]
        first = int(bound.of(tail.start(self.costs), 0)[0])
        gap = max(bound.paths * (self.total - 1) - first, 0)
        return self.least - ahead(self.costs, bound.excess, bound.paths, gap)

    def run(self, most: int) -> None:
        """Search all layers with at most so many states after each; update `best` and `least`."""
        states, cut = tail.start(self.costs), self.total
        clip = self._clipped()
        self.bounds = self.bounds[:1]
        steps: list[tuple[Ints, Ints]] = []  # of each state, that before and the decision
        for place in range(len(self.costs)):
            parts = [
                (column, tail.extend(self.costs, states, place, column))
                for column in np.flatnonzero(self.costs.allowed[place]).tolist()
            ]
            new = np.concatenate([each for _, each in parts])
            parents = np.tile(np.arange(len(states)), len(parts))
            columns = np.repeat([column for column, _ in parts], len(states))
            self.states += len(new)
            kept, least = self._promising(new, place + 1)
            alone, seen = _undominated(self._keys(new[kept], clip[place + 1]), most)
            if seen < len(kept):
                cut = min(cut, int(least[seen]))
            kept = kept[alone]
            states = new[kept]
            steps.append((parents[kept], columns[kept]))
            if len(states) > FEW and place % EVERY == 0 and place + 1 < len(self.costs):
                self._look_closer(len(states), steps)
                again, _ = self._promising(states, place + 1)
                states = states[again]
                steps[-1] = (steps[-1][0][again], steps[-1][1][again])
        if len(states):
            self._take(states, steps)
        self.least = max(self.least, min(cut, self.total))

    def _promising(self, states: Ints, decided: int) -> tuple[Ints, Ints]:
        """Select states that could improve on the best, the most promising first, with the lower
        bounds of their iterations.
        """
        fits = np.ones(len(states), bool)
        for column, limit, after in zip(
            (tail.BYTES, tail.KEPT), self.limits, self._after, strict=True
        ):
            fits &= states[:, column] + after[decided] <= limit
        chosen = np.flatnonzero(fits)
        least = np.zeros(len(chosen), np.int64)
        for bound in self.bounds:
            found = -(-bound.of(states[chosen], decided) // bound.paths)
            least = np.maximum(least, found)
            better = least < self.total
            chosen, least = chosen[better], least[better]
        order = np.argsort(least, kind="stable")
        return chosen[order], least[order]

    def _keys(self, states: Ints, clip: Ints) -> Ints:
        """Sums of two numbers that paths pass, and bytes: a state none of whose keys is above those
        of another is not worse; (n, k)."""
        found = [
            np.maximum(states[:, before] + states[:, after], least)
            for (before, after), least in zip(KEYS, clip, strict=True)
        ]
        columns = zip((tail.BYTES, tail.KEPT), self.limits, strict=True)
        found += [states[:, column] for column, limit in columns if limit < _UNLIMITED]
        return np.stack(found, 1)

    def _look_closer(self, count: int, steps: Sequence[tuple[Ints, Ints]]) -> None:
        """Add bounds that are good near some of the states."""
        near = [
            [*_columns(steps, state), *(each.index for each in self.best[len(steps) :])]
            for state in (0, count // 3, 2 * count // 3, count - 1)
        ]
        found, answers = bounds(self.costs, self.limits, np.array(near), CLOSE_ROUNDS, len(steps))
        self.bounds = [self.bounds[0], *[*self.bounds[1:], *found][-MOST_BOUNDS:]]
        self.offer(answers[-8:].reshape(-1, len(self.costs)))

    def _take(self, states: Ints, steps: Sequence[tuple[Ints, Ints]]) -> None:
        totals = tail.totals(states)
        at = int(totals.argmin())
        if totals[at] >= self.total:
            return
        self.total = int(totals[at])
        self.best = tuple(DECISIONS[column] for column in _columns(steps, at))


def _columns(steps: Sequence[tuple[Ints, Ints]], state: int) -> list[int]:
    """`Decision.index` of each layer that leads to a state."""
    found = []
    for parents, columns in reversed(steps):
        found.append(int(columns[state]))
        state = int(parents[state])
    return found[::-1]


_UNLIMITED = 1 << 62
NO_LIMITS = Limits(_UNLIMITED, _UNLIMITED)

_BLOCK, _CHUNK = 256, 512
"""Rows that are compared at a time: the result fits a cache."""


def _undominated(keys: Ints, most: int) -> tuple[Ints, int]:
    """Find rows that no row before is below or equal to in all columns.

    Parameters
    ----------
    most : rows to find.

    Returns
    -------
    Ints : their numbers, ascending.
    int : rows that were examined before `most` were found.
    """
    ranks = _ranks(keys)
    kept, count = np.empty((len(ranks), most), ranks.dtype), 0
    found: list[Ints] = []
    seen = 0
    while seen < len(keys) and count < most:
        alone = np.arange(seen, min(seen + _BLOCK, len(keys)))
        for start in range(0, count, _CHUNK):
            below = _below(kept[:, start : min(start + _CHUNK, count)], ranks[:, alone])
            alone = alone[~below.any(0)]
        below = _below(ranks[:, alone], ranks[:, alone])
        alone = alone[~np.triu(below, 1).any(0)][: most - count]
        kept[:, count : count + len(alone)] = ranks[:, alone]
        count += len(alone)
        found.append(alone)
        seen = min(seen + _BLOCK, len(keys)) if count < most else int(alone[-1]) + 1
    return np.concatenate([*found, np.empty(0, np.int64)]), seen


def _ranks(keys: Ints) -> npt.NDArray[np.uint32]:
    """Ranks in the order of each column, in few bits, since they are compared often: (k, n)."""
    found = [np.unique(column, return_inverse=True)[1] for column in keys.T]
    narrow: type = np.uint16 if len(keys) <= 1 << 16 else np.uint32
    return np.stack(found).astype(narrow)


def _below(some: npt.NDArray[np.uint32], others: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Whether some columns are not above others in any row; (some, others)."""
    less: npt.NDArray[np.bool_] = some[0][:, None] <= others[0]
    for one, other in zip(some[1:], others[1:], strict=True):
        less &= one[:, None] <= other
    return less
