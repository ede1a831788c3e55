"""The best decisions under the cost model, and the proof that none are better.

A dynamic programme over layers: states as `nearstep.memferry.tail` has them, of which those go that
another one dominates - none of its numbers is above - and those from which no iteration can be
shorter than the best one known (`nearstep.memferry.bound`). The best one known comes from the same
search with a bound on the number of states, which proves nothing, in a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nearstep.memferry import tail
from nearstep.memferry.bound import Bound, Limits, bounds
from nearstep.memferry.cost import DECISIONS, Costs, Decision, Ints
from nearstep.memferry.slack import KEYS, ahead

ROUNDS = 192
"""Paths of a bound."""

BEAMS = (16, 128, 1024)
"""States that the search for good decisions keeps after each layer."""

MOST_STATES = 6_000
"""States after a layer with which the search goes on; with more nothing is proven."""


FEW = 200
EVERY = 2
CLOSE_ROUNDS = 64
MOST_BOUNDS = 15
"""More than so many states are looked at closer, after every second layer: with bounds that are
good near some of them, of which the last ones stay."""


@dataclass(frozen=True)
class Optimum:
    """What the search found.

    Attributes
    ----------
    decisions : the best ones known.
    total : picoseconds of their iteration.
    least : picoseconds that no iteration is shorter than: `total`, where that is proven.
    states : that were looked at.
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
    """Search for the best decisions within limits.

    Parameters
    ----------
    costs
    limits
    known : decisions within the limits.
    rounds
    most_states
    """
    bound, answers = bounds(costs, limits, known, rounds)
    search = _Search(costs, limits, [bound], known)
    for answer in answers:
        search.offer(answer)
    root = -(-int(bound.of(tail.start(costs), 0)[0]) // bound.paths)
    for beam in BEAMS:
        if search.total > root:
            search.clip(root)
            proven = search.run(beam, cut=True)
        if search.total <= root or proven:
            return Optimum(search.best, search.total, search.total, search.states)
    search.clip(root)
    done = search.run(most_states, cut=False)
    least = search.total if done else max(root, 0)
    return Optimum(search.best, search.total, least, search.states)


class _Search:
    """The best decisions so far, and the search for better ones."""

    def __init__(
        self,
        costs: Costs,
        limits: Limits,
        found: list[Bound],
        known: Sequence[Decision],
    ) -> None:
        self.costs, self.limits, self.bounds = costs, limits, found
        self.best = tuple(known)
        self.total = costs.times(known).total
        self.states = 0
        self._clip: Ints | None = None
        least = [
            np.where(costs.allowed, sizes, np.iinfo(np.int64).max).min(1)
            for sizes in (costs.parameter_bytes + costs.gradient_bytes, costs.gradient_bytes)
        ]
        self._after = [np.concatenate([np.cumsum(each[::-1])[::-1], [0]]) for each in least]
        """Least bytes of the layers from one on."""

    def offer(self, decisions: Sequence[Decision]) -> None:
        """Take decisions if they are better and within the limits."""
        rows, columns = range(len(self.costs)), [each.index for each in decisions]
        kept = int(self.costs.gradient_bytes[rows, columns].sum())
        if self.costs.bytes_of(decisions) > self.limits.budget or kept > self.limits.kept:
            return
        total = self.costs.times(decisions).total
        if total < self.total:
            self.best, self.total = tuple(decisions), total

    def clip(self, least: int) -> None:
        """Take numbers of states as equal that end no iteration later than `least`."""
        bound = self.bounds[0]
        first = int(bound.of(tail.start(self.costs), 0)[0])
        gap = max(bound.paths * (self.total - 1) - first, 0)
        self._clip = least - ahead(self.costs, bound.excess, bound.paths, gap)

    def run(self, most: int, *, cut: bool) -> bool:
        """Go through all layers; False if there were too many states.

        Parameters
        ----------
        most : states after a layer.
        cut : of more, those with the least bounds go on; else the search ends.
        """
        states, whole = tail.start(self.costs), True
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
            kept = self._promising(new, place + 1)
            if cut and len(kept) > 4 * most:
                kept, whole = kept[: 4 * most], False
            kept = kept[_undominated(self._keys(new[kept], place + 1))]
            if len(kept) > most:
                if not cut:
                    return False
                kept, whole = kept[:most], False
            states = new[kept]
            steps.append((parents[kept], columns[kept]))
            if len(states) > FEW and place % EVERY == 0 and place + 1 < len(self.costs):
                self._look_closer(len(states), steps)
                again = self._promising(states, place + 1)
                states = states[again]
                steps[-1] = (steps[-1][0][again], steps[-1][1][again])
        if len(states):
            self._take(states, steps)
        return whole

    def _promising(self, states: Ints, decided: int) -> Ints:
        """Numbers of those that could be better than the best, the most promising first."""
        fits = np.ones(len(states), bool)
        for column, limit, after in zip(
            (tail.BYTES, tail.KEPT), self.limits, self._after, strict=True
        ):
            fits &= states[:, column] + after[decided] <= limit
        least = np.zeros(len(states), np.int64)
        for bound in self.bounds:
            found = bound.of(states, decided)
            fits &= found <= bound.paths * (self.total - 1)
            np.maximum(least, found // bound.paths, out=least)
        chosen = np.flatnonzero(fits)
        return chosen[np.argsort(least[chosen], kind="stable")]

    def _keys(self, states: Ints, decided: int) -> Ints:
        """Sums of two numbers that paths go through, and bytes: a state none of whose keys is above
        those of another leads to nothing worse; (n, k)."""
        found = [states[:, before] + states[:, after] for before, after in KEYS]
        if self._clip is not None:
            pairs = zip(found, self._clip[decided], strict=True)
            found = [np.maximum(each, clip) for each, clip in pairs]
        columns = zip((tail.BYTES, tail.KEPT), self.limits, strict=True)
        found += [states[:, column] for column, limit in columns if limit < _UNLIMITED]
        return np.stack(found, 1)

    def _look_closer(self, count: int, steps: Sequence[tuple[Ints, Ints]]) -> None:
        """Add bounds that are good near some of the states."""
        for state in (0, count // 3, 2 * count // 3, count - 1):
            first = _decisions(steps, state)
            known = [*first, *self.best[len(first) :]]
            found, answers = bounds(self.costs, self.limits, known, CLOSE_ROUNDS, first)
            self.bounds = [self.bounds[0], *self.bounds[1:][-MOST_BOUNDS:], found]
            for answer in answers[-8:]:
                self.offer(answer)

    def _take(self, states: Ints, steps: Sequence[tuple[Ints, Ints]]) -> None:
        totals = tail.totals(states)
        at = int(totals.argmin())
        if totals[at] >= self.total:
            return
        self.total = int(totals[at])
        self.best = tuple(_decisions(steps, at))


def _decisions(steps: Sequence[tuple[Ints, Ints]], state: int) -> list[Decision]:
    """That lead to a state."""
    found = []
    for parents, columns in reversed(steps):
        found.append(DECISIONS[columns[state]])
        state = int(parents[state])
    return found[::-1]


_UNLIMITED = 1 << 62
NO_LIMITS = Limits(_UNLIMITED, _UNLIMITED)

_BLOCK = 256


def _undominated(keys: Ints) -> Ints:
    """Rows that no other is below or equal to in all columns, of equal ones the first;
    ascending."""
    keys, first = np.unique(keys, axis=0, return_index=True)
    order = np.lexsort((first, keys.sum(1)))  # what dominates another row comes before it
    keys, first = np.ascontiguousarray(keys[order]), first[order]
    kept = np.zeros(len(keys), bool)
    for start in range(0, len(keys), _BLOCK):
        block = keys[start : start + _BLOCK]
        alone = ~_below(keys[:start][kept[:start]], block).any(0)
        alone &= ~np.triu(_below(block, block), 1).any(0)
        kept[start : start + _BLOCK] = alone
    return np.sort(first[kept])


def _below(some: Ints, others: Ints) -> npt.NDArray[np.bool_]:
    """Whether some rows are not above others in any column; (len(some), len(others))."""
    less = some[:, None, 0] <= others[None, :, 0]
    for column in range(1, some.shape[1]):
        less &= some[:, None, column] <= others[None, :, column]
    return less
