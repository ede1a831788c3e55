"""Selection of gradients written to the host: GO-MemFerry's dynamic programme.

`D[i][j] = max(D[i-1][j], D[i-1][j - s_i] + T_GBP(i) - T_CBP(i))`: the most time that is saved by
keeping gradients of layers up to i in j bytes of GPU memory. The unit of the second axis is the
greatest common divisor of the sizes, or, where that needs more than `UNITS` columns, the limit over
`UNITS`, with sizes rounded up, so that the limit holds.

Ref: MemFerry paper, section IV-D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nearstep.memferry.cost import Costs, Decision

UNITS = 4096
"""Columns of the table at most."""


def write_back(costs: Costs, decisions: Sequence[Decision], limit: int) -> list[Decision]:
    """Keep gradients in GPU memory where that saves most, and write the others to the host.

    Parameters
    ----------
    decisions : whose modes are kept.
    limit : bytes of gradients in GPU memory. Layers that cannot write theirs are kept in any case.
    """
    found = list(decisions)
    free: list[tuple[int, int, int]] = []  # layer, bytes, gain
    for i, decision in enumerate(decisions):
        written = Decision(decision.mode, True)
        if not costs.allowed[i, written.index]:
            limit -= int(costs.gradient_bytes[i, decision.index])
            continue
        kept = Decision(decision.mode)
        gain = int(costs.backward[i, written.index] - costs.backward[i, kept.index])
        found[i] = written
        free.append((i, int(costs.gradient_bytes[i, kept.index]), gain))
    for i in _keep(free, max(limit, 0)):
        found[i] = Decision(found[i].mode)
    return found


def _keep(free: Sequence[tuple[int, int, int]], limit: int) -> list[int]:
    """Select layers whose gradients are kept in GPU memory."""
    if sum(size for _, size, _ in free) <= limit:
        return [i for i, _, gain in free if gain >= 0]
    unit = math.gcd(*(size for _, size, _ in free)) if free else 1
    unit = max(unit, -(-limit // UNITS), 1)
    columns = limit // unit
    table = np.zeros(columns + 1, np.int64)
    taken = []
    for _, size, gain in free:
        units = -(-size // unit)
        better = np.zeros(columns + 1, bool)
        if units <= columns and gain > 0:
            candidate = table[: columns + 1 - units] + gain
            better[units:] = candidate > table[units:]
            table = table.copy()
            table[units:][better[units:]] = candidate[better[units:]]
        taken.append((better, units))
    kept, at = [], columns
    for (i, _, _), (better, units) in zip(reversed(free), reversed(taken), strict=True):
        if better[at]:
            kept.append(i)
            at -= units
    return kept
