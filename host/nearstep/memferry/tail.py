"""The cost model from the first layer to the last, in one pass.

Forward begins with layer 0, backward ends with it. So the state of decisions for layers 0 to l is
the times at which resources are free after their forward, and the times from their backward to the
end:

- `F`, `R`: the GPU and the copies from the host are free; `H`: forward of the last DFGB layer
  ended.
- `a`, `s`, `d`: time to the end of the iteration from the earliest backward of layer l on the GPU,
  from the time at which copies to the host are free, from the earliest copy of DFGB layers <= l.

With all layers decided, the iteration takes `max(F + a, max(R, H) + d)`. The next numbers are
monotone in the previous ones, so that one state can dominate another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from nearstep.memferry.cost import EARLY, KEEPS, LATE, Costs, Decision, Ints

F, R, H, A, S, D, BYTES, KEPT = range(8)
"""Columns of states: the last two are bytes of GPU memory, and of gradients in it."""

NEVER = -(1 << 60)
"""Less than any sum over steps."""


def start(costs: Costs) -> Ints:
    """The state before the first layer; int64 of shape (1, 8)."""
    state = np.zeros((1, 8), np.int64)
    state[0, A] = state[0, D] = costs.update.sum()
    return state


@lru_cache(maxsize=4)
def steps(costs: Costs) -> Mapping[tuple[int, int], Ints]:
    """Steps from a number before a layer to a number after it, in picoseconds by layer and
    decision, `NEVER` without such a step; int64 of shape (L, 6).

    A number after a layer is the largest of those before, each with its step. `S` is at least the
    end of the updates so far.
    """

    load, send, between, behind = (
        each[:, None]
        for each in (costs.load, costs.send, costs.before_forward, costs.before_backward)
    )
    forward, backward = between + costs.forward, behind + costs.backward
    sends = costs.trained[:, None] & KEEPS
    late, through = load * LATE, np.where(sends, send + costs.backward, NEVER)
    return {
        (F, F): forward,
        (F, H): np.where(LATE, forward, NEVER),
        (R, F): np.where(EARLY, load + costs.forward, NEVER),
        (R, R): load * EARLY,
        (H, H): np.zeros_like(forward),
        (A, A): backward,
        (A, D): backward + late,
        (S, A): through,
        (S, S): send * sends,
        (S, D): through + late,
        (D, D): late,
    }


def extend(costs: Costs, states: Ints, place: int, column: int) -> Ints:
    """Extend states by one layer.

    Parameters
    ----------
    states : int64 of shape (n, 8), of the layers before.
    column : `Decision.index`.
    """
    before, new = states.copy(), np.full_like(states, NEVER)
    np.maximum(before[:, S], costs.updated[place], out=before[:, S])
    for (first, last), step in steps(costs).items():
        np.maximum(new[:, last], before[:, first] + step[place, column], out=new[:, last])
    kept = costs.gradient_bytes[place, column]
    new[:, KEPT] = states[:, KEPT] + kept
    new[:, BYTES] = states[:, BYTES] + kept + costs.parameter_bytes[place, column]
    return new


def totals(states: Ints) -> Ints:
    """Picoseconds of iterations, from states after the last layer; int64 of shape (n,)."""
    late = np.maximum(states[:, R], states[:, H]) + states[:, D]
    found: Ints = np.maximum(states[:, F] + states[:, A], late)
    return found


def state_of(costs: Costs, decisions: Sequence[Decision]) -> Ints:
    """The state after all layers; (1, 8)."""
    states = start(costs)
    for place, decision in enumerate(decisions):
        states = extend(costs, states, place, decision.index)
    return states
