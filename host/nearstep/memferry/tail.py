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

from collections.abc import Sequence

import numpy as np

from nearstep.memferry.cost import DECISIONS, Costs, Decision, Ints, Mode

F, R, H, A, S, D, BYTES, KEPT = range(8)
"""Columns of states: the last two are bytes of GPU memory, and of gradients in it."""


def start(costs: Costs) -> Ints:
    """The state before the first layer; int64 of shape (1, 8)."""
    state = np.zeros((1, 8), np.int64)
    state[0, A] = state[0, D] = costs.update.sum()
    return state


def extend(costs: Costs, states: Ints, place: int, column: int) -> Ints:
    """Extend states by one layer.

    Parameters
    ----------
    states : int64 of shape (n, 8), of the layers before.
    column : `Decision.index`.
    """
    decision = DECISIONS[column]
    load, send = costs.load[place], costs.send[place]
    new = states.copy()
    new[:, F] += costs.before_forward[place]
    if decision.mode is Mode.GFGB:
        new[:, R] += load
        np.maximum(new[:, F], new[:, R], out=new[:, F])
    new[:, F] += costs.forward[place, column]
    after = states[:, A] + costs.before_backward[place]
    updated = costs.update[: place + 1].sum()
    sent = np.maximum(states[:, S], updated)
    if costs.trained[place] and not decision.write:
        sent = sent + send
        after = np.maximum(after, sent)
    new[:, S] = sent
    new[:, A] = after + costs.backward[place, column]
    np.maximum(states[:, D], new[:, A], out=new[:, D])
    if decision.mode is Mode.DFGB:
        new[:, D] += load
        new[:, H] = new[:, F]
    kept = costs.gradient_bytes[place, column]
    new[:, KEPT] += kept
    new[:, BYTES] += kept + costs.parameter_bytes[place, column]
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
