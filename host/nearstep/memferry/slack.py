"""Slack of the numbers of a state: the largest values without effect.

The longest path that begins at a number of a state, over all remaining decisions, bounds the values
of the number without effect on an iteration of a given length. Decisions that cannot improve on the
best known iteration are excluded by a price: the sum that a decision adds to a bound, above the
least, must not exceed the distance of the bound from the best.
"""

from __future__ import annotations

import numpy as np

from nearstep.memferry import tail
from nearstep.memferry.cost import DECISIONS, Costs, Ints, Mode

BEFORE, AFTER = (tail.F, tail.R, tail.H), (tail.A, tail.S, tail.D)
KEYS = (
    (tail.F, tail.A),
    (tail.F, tail.S),
    (tail.F, tail.D),
    (tail.R, tail.A),
    (tail.R, tail.S),
    (tail.R, tail.D),
    (tail.H, tail.D),
)
"""Pairs of numbers that paths pass."""

_NEVER = -(1 << 60)
_MOST = (1 << 63) - 1
_SHARES = (0, 1, 2, 4, 8, 16)
"""Prices that are tried: paths of the bound for a picosecond of the path."""


def ahead(costs: Costs, excess: Ints, paths: int, gap: int) -> Ints:
    """Longest paths from each of `KEYS` to the end.

    Parameters
    ----------
    excess : sum that a decision adds to a bound above the least of its layer, times `paths`; (L,
        6).
    gap : distance of the bound from the time to beat, times `paths`.

    Returns
    -------
    Ints : picoseconds by layers decided; int64 of shape (L + 1, 7).
    """
    count = len(costs)
    shares = np.array(_SHARES, np.int64)
    excess = np.minimum(excess, _MOST // _SHARES[-1])
    offset = -(-shares * gap // paths)
    reach = np.full((len(shares), 3, 3), _NEVER, np.int64)
    for x, y in ((tail.F, tail.A), (tail.R, tail.D), (tail.H, tail.D)):
        reach[:, BEFORE.index(x), AFTER.index(y)] = 0
    rows = [BEFORE.index(x) for x, _ in KEYS]
    columns = [AFTER.index(y) for _, y in KEYS]
    found = np.zeros((count + 1, len(KEYS)), np.int64)
    for place in reversed(range(count)):
        price = -(excess[place][None] * shares[:, None] // paths)
        price = np.where(costs.allowed[place], price, _NEVER)
        reach = _before(costs, place, price, reach)
        found[place] = (reach + offset[:, None, None]).min(0)[rows, columns]
    return found


def _before(costs: Costs, place: int, price: Ints, reach: Ints) -> Ints:
    """The longest paths from before a layer, of those from after it."""
    forward, backward = _forward(costs, place), _backward(costs, place)
    best = np.full(reach.shape, 2 * _NEVER, np.int64)
    for (x, x2), there in forward.items():
        for (y, y2), back in backward.items():
            step = (price + there + back).max(1) + reach[:, x2, y2]
            np.maximum(best[:, x, y], step, out=best[:, x, y])
    return np.maximum(best, _NEVER)


_EARLY, _LATE = (np.array([d.mode is mode for d in DECISIONS]) for mode in (Mode.GFGB, Mode.DFGB))
_KEEPS = np.array([not d.write for d in DECISIONS])


def _forward(costs: Costs, place: int) -> dict[tuple[int, int], Ints]:
    """Steps among `BEFORE` through a layer, by decision."""
    computed = costs.before_forward[place] + costs.forward[place]
    load = costs.load[place]
    return {
        (0, 0): computed,
        (0, 2): np.where(_LATE, computed, _NEVER),
        (1, 0): np.where(_EARLY, load + costs.forward[place], _NEVER),
        (1, 1): np.where(_EARLY, load, 0),
        (2, 2): np.zeros(len(DECISIONS), np.int64),
    }


def _backward(costs: Costs, place: int) -> dict[tuple[int, int], Ints]:
    """Steps among `AFTER` through a layer, by decision."""
    backward = costs.backward[place]
    late = np.where(_LATE, costs.load[place], 0)
    sends = _KEEPS & costs.trained[place]
    sent = np.where(sends, costs.send[place], 0)
    through = np.where(sends, costs.send[place] + backward, _NEVER)
    return {
        (0, 0): costs.before_backward[place] + backward,
        (0, 2): costs.before_backward[place] + backward + late,
        (1, 0): through,
        (1, 1): sent,
        (1, 2): through + late,
        (2, 2): late,
    }
