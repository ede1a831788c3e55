"""Slack of the numbers of a state: the largest values without effect.

The longest path that begins at a number of a state, over all remaining decisions, bounds the values
of the number without effect on an iteration of a given length. Decisions that cannot improve on the
best known iteration are excluded by a price: the sum that a decision adds to a bound, above the
least, must not exceed the distance of the bound from the best.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from nearstep.memferry import tail
from nearstep.memferry.cost import Costs, Ints

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
    reach = np.full((len(shares), 3, 3), tail.NEVER, np.int64)
    for x, y in ((tail.F, tail.A), (tail.R, tail.D), (tail.H, tail.D)):
        reach[:, BEFORE.index(x), AFTER.index(y)] = 0
    rows = [BEFORE.index(x) for x, _ in KEYS]
    columns = [AFTER.index(y) for _, y in KEYS]
    found = np.zeros((count + 1, len(KEYS)), np.int64)
    for place in reversed(range(count)):
        price = -(excess[place][None] * shares[:, None] // paths)
        price = np.where(costs.allowed[place], price, tail.NEVER)
        reach = _before(costs, place, price, reach)
        found[place] = (reach + offset[:, None, None]).min(0)[rows, columns]
    return found


def _before(costs: Costs, place: int, price: Ints, reach: Ints) -> Ints:
    """The longest paths from before a layer, given those from after the layer."""
    best = np.full(reach.shape, 2 * tail.NEVER, np.int64)
    found = tail.steps(costs).items()
    there = [(first, last, step[place]) for (first, last), step in found if first in BEFORE]
    back = [(first, last, step[place]) for (first, last), step in found if first in AFTER]
    for (x, x2, one), (y, y2, other) in product(there, back):
        x, x2, y, y2 = BEFORE.index(x), BEFORE.index(x2), AFTER.index(y), AFTER.index(y2)
        step = (price + one + other).max(1) + reach[:, x2, y2]
        np.maximum(best[:, x, y], step, out=best[:, x, y])
    return np.maximum(best, tail.NEVER)
