"""Lower bounds on an iteration whose first layers are decided.

An iteration takes at least as long as any path through its operations. The length of a path is a
sum of one number for each layer, by its decision; so is the mean of some paths, whose least value
is found layer by layer. A bound is close to the optimum if its paths are the longest ones under
good decisions: each round computes the best decisions for the mean of the paths so far, and adds
the longest path under them (fictitious play), later ones with more weight; the best bound of all
rounds counts. A limit on bytes is priced: bytes times a multiplier are added, and the limit times
the multiplier is subtracted.

All numbers are integers: sums over paths, not means, so that the bound is exact. Several bounds are
computed at a time by operations on arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nearstep.memferry import tail
from nearstep.memferry.cost import DECISIONS, EARLY, KEEPS, LATE, Costs, Ints

NUMBERS = (tail.F, tail.R, tail.A, tail.S, tail.D)
"""Numbers of a state at which paths begin (the first two) and end (the rest)."""


class Limits(NamedTuple):
    """Most bytes of GPU memory, and of gradients in it."""

    budget: int
    kept: int


@dataclass(frozen=True)
class Bound:
    """A lower bound from a set of paths.

    Attributes
    ----------
    paths : number, with weights.
    weights : by layers decided, from 0 to L, how often a path passes each of `NUMBERS`; int64 of
        shape (L + 1, 5).
    rest : least sum that the undecided layers add to all paths, including finished updates; (L +
        1,).
    excess : sum that each decision adds above the least of its layer; (L, 6).
    prices : of a byte, and of a byte of gradients, times the number of paths.
    """

    paths: int
    weights: Ints
    rest: Ints
    excess: Ints
    prices: tuple[float, float]
    limits: Limits

    def of(self, states: Ints, decided: int) -> Ints:
        """Least picoseconds of iterations that begin with these states, times `paths`; int64 of
        shape (n,)."""
        # more than the floating-point error
        found = np.full(len(states), self.rest[decided] - self.paths - len(self.rest))
        for number, weight in zip(NUMBERS, self.weights[decided].tolist(), strict=True):
            if weight:
                found += weight * states[:, number]
        columns = (tail.BYTES, tail.KEPT)
        for price, limit, column in zip(self.prices, self.limits, columns, strict=True):
            if price:
                found += np.floor(price * (states[:, column] - limit)).astype(np.int64)
        return found


def longest(costs: Costs, columns: Ints) -> tuple[Ints, Ints]:
    """The longest paths of iterations; for DFGB layers that wait for their own forward, the longest
    of the others.

    Parameters
    ----------
    columns : `Decision.index` of each layer of n plans; int64 of shape (n, L).

    Returns
    -------
    Ints : by layer, where each path changes lanes; int64 of shape (n, 4): from the last load to the
        first computation after it (-1 without a load, L with loads alone); in backward to the first
        copy to the host, and from there to the first update after it (-1: none); from the last load
        of a DFGB layer to its backward (L: none).
    Ints : picoseconds of each; (n,).
    """
    rows, each = np.arange(len(costs)), np.arange(len(columns))
    forward, backward = costs.forward[rows, columns], costs.backward[rows, columns]
    early, late, kept = EARLY[columns], LATE[columns], KEEPS[columns] & costs.trained
    loaded = np.cumsum(costs.load * early, 1)
    before = np.cumsum(forward + costs.before_forward, 1)
    ahead = np.where(early, loaded + forward - before, -_NEVER)  # loads, then forward alone
    load = ahead.argmax(1)
    waited = ahead[each, load]
    load = np.where(waited >= 0, load, -1)
    updated, sends = costs.updated, costs.send * kept
    sent = np.cumsum(sends, 1)
    updates = np.where(kept, updated - sent + sends, -_NEVER)
    sent += np.maximum.accumulate(updates, 1)
    behind = np.cumsum(backward + costs.before_backward, 1)
    copies = np.where(kept, sent + backward - behind, -_NEVER)
    after = behind + np.maximum(np.maximum.accumulate(copies, 1), updated[-1])
    again = costs.load * late
    again = np.cumsum(again[:, ::-1], 1)[:, ::-1]
    lates = np.where(late, after + again, -_NEVER)
    last = lates.argmax(1)
    length = before[:, -1] + np.maximum(waited, 0) + after[:, -1]
    later = loaded[:, -1] + lates[each, last]
    there = later > length
    last = np.where(there, last, len(costs))
    copies = np.where(rows <= last[:, None], copies, -_NEVER)
    copy = copies.argmax(1)
    copy = np.where(copies[each, copy] >= updated[-1], copy, -1)
    updates = np.where(rows <= copy[:, None], updates, -_NEVER)
    update = np.where(copy < 0, -1, updates.argmax(1))
    lanes = [np.where(there, len(costs), load), copy, update, last]
    return np.stack(lanes, 1), np.maximum(length, later)


def coefficients(costs: Costs, paths: Ints) -> Ints:
    """Time that each layer adds to paths, by decision; int64 of shape (n, L, 6).

    A path without copies to the host has all updates in addition.
    """
    i = np.arange(len(costs))
    load, sent, updated, last = (paths[:, [column]] for column in range(4))
    found = (i >= load)[..., None] * costs.forward
    found += ((i >= sent) & (i <= last))[..., None] * costs.backward
    found[..., EARLY] += ((i <= load) * costs.load)[..., None]
    found[..., KEEPS] += (((updated <= i) & (i <= sent) & costs.trained) * costs.send)[..., None]
    found[..., LATE] += (((last < len(costs)) & (i >= last)) * costs.load)[..., None]
    found += (
        (i > load) * costs.before_forward
        + (i <= updated) * costs.update
        + ((i > sent) & (i <= last)) * costs.before_backward
    )[..., None]
    return found


def lanes(costs: Costs, paths: Ints, weights: Ints) -> tuple[Ints, Ints]:
    """How often paths pass each of `NUMBERS` after each number of decided layers, and how often
    updates; (L + 1, 5) and (L + 1,)."""
    last = np.arange(-1, len(costs))
    load, sent, updated, late = (paths[:, [column]] for column in range(4))
    computes = last < load  # from loads
    loads_late = (late < len(costs)) & (last >= late)
    updates = ~loads_late & (last < updated)
    sends = ~loads_late & ~updates & (last < sent)
    lane = [~computes, computes, ~loads_late & ~updates & ~sends, sends, loads_late]
    return np.stack([weights @ each for each in lane], 1), weights @ updates


def bounds(
    costs: Costs, limits: Limits, best: Ints, rounds: int, decided: int = 0
) -> tuple[list[Bound], Ints]:
    """Compute bounds, and the best decisions for their paths: good ones, if within the limits.

    Parameters
    ----------
    best : columns of n good plans, whose longest paths begin the sets; int64 of shape (n, L).
    rounds : number of paths.
    decided : layers whose decisions are fixed as in `best`: each bound is good near these.

    Returns
    -------
    list : of n bounds.
    Ints : columns of plans; int64 of shape (rounds, n, L).
    """
    count, rows = len(best), np.arange(len(costs))
    usable = np.broadcast_to(costs.allowed, (count, *costs.allowed.shape)).copy()
    usable[:, :decided] = np.arange(len(DECISIONS)) == best[:, :decided, None]
    sizes = np.stack([costs.parameter_bytes + costs.gradient_bytes, costs.gradient_bytes])
    most = np.maximum(sizes.max(2).sum(1), 1).astype(float)
    steps = costs.times([DECISIONS[column] for column in best[0].tolist()]).total / most
    total = np.zeros((count, *costs.allowed.shape), np.int64)
    prices, limited = np.zeros((count, 2)), np.array(limits, float)
    chosen = [(-np.inf, total[0], 0, prices[0], 0) for _ in range(count)]
    answers, paths = [best], []
    weights = 1 + np.arange(rounds) // SAME
    updates = np.zeros(count, np.int64)  # of paths without copies to the host
    for number, weight in enumerate(weights.tolist(), 1):
        paths.append(longest(costs, answers[-1])[0])
        total += weight * coefficients(costs, paths[-1])
        updates += weight * np.where(paths[-1][:, 1] < 0, costs.update.sum(), 0)
        together = int(weights[:number].sum())
        priced = np.where(usable, _priced(total, together * prices, sizes), _NEVER)
        columns = priced.argmin(2)
        answers.append(columns)
        least = np.take_along_axis(priced, columns[..., None], 2).sum((1, 2))
        least = (least + updates) / together
        least -= np.where(prices > 0, prices * limited, 0).sum(1)
        for i in np.flatnonzero(least > [each[0] for each in chosen]).tolist():
            chosen[i] = (float(least[i]), total[i].copy(), number, prices[i], together)
        used = np.stack([each[rows, columns].sum(1) for each in sizes], 1)
        prices = np.maximum(prices + steps * (used - limited) / most / math.sqrt(number), 0)
    found = []
    history = np.stack(paths)
    for i, (_, summed, number, price, together) in enumerate(chosen):
        through = lanes(costs, history[:number, i], weights[:number])
        found.append(_bound(costs, limits, summed, together, price, through, sizes))
    return found, np.stack(answers[1:])


def _bound(
    costs: Costs,
    limits: Limits,
    total: Ints,
    paths: int,
    price: npt.NDArray[np.float64],
    through: tuple[Ints, Ints],
    sizes: Ints,
) -> Bound:
    each = paths * price
    priced = np.where(costs.allowed, _priced(total[None], each[None], sizes)[0], _NEVER)
    least = priced.min(1)
    rest = np.concatenate([np.cumsum(least[::-1])[::-1], [0]])
    rest += through[1] * np.concatenate([[0], costs.updated])
    prices = (float(each[0]), float(each[1]))
    return Bound(paths, through[0], rest, priced - least[:, None], prices, limits)


SAME = 4
"""Rounds after which the weight of a path grows."""

_NEVER = 1 << 62
"""More than any sum over paths."""


def _priced(total: Ints, prices: npt.NDArray[np.float64], sizes: Ints) -> Ints:
    """Add the price of bytes to sums, rounded down."""
    if not prices.any():
        return total
    bytes_ = prices[:, 0, None, None] * sizes[0] + prices[:, 1, None, None] * sizes[1]
    priced: Ints = total + np.floor(bytes_).astype(np.int64)
    return priced
