"""The paper's planner: Algorithm 1, then DFGB layers, then gradients, and a budget in addition.

*DFGB* (section IV-B, which gives no algorithm): of the layers that are computed by direct host
access those are loaded for backward that shorten it most, the largest gain first, as long as all of
their loads fit between the end of loading and the first gradient that is sent.

*Budget* (not in the paper, which limits gradients alone): while a plan takes too many bytes, first
gradients are written to the host, then DFGB layers are kept in host memory, then GFGB layers are
computed there, in order of least time for a byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nearstep.memferry.bound import Limits
from nearstep.memferry.cost import Costs, Decision, Mode
from nearstep.memferry.forward import Reading, hosted
from nearstep.memferry.gradients import write_back


def greedy(costs: Costs, limits: Limits, reading: Reading) -> list[Decision] | None:
    """The paper's decisions, or None if they exceed the limits."""
    forward = hosted(costs, reading)
    modes = load_late(costs, [Mode.DHA if each else Mode.GFGB for each in forward])
    modes = _within(costs, modes, limits)
    decisions = _gradients(costs, modes, limits)
    parameters, kept = costs.taken(decisions)
    return decisions if parameters + kept <= limits.budget and kept <= limits.kept else None


def load_late(costs: Costs, modes: Sequence[Mode]) -> list[Mode]:
    """Turn DHA layers into DFGB ones where the window has room for their loads."""
    found = list(modes)
    times = costs.times([Decision(mode) for mode in modes])
    loaded = max(times.load, default=0)
    sending = np.flatnonzero(costs.trained)
    window = times.backward[sending[-1]] if len(sending) else times.total
    dha, gpu = Decision(Mode.DHA).index, Decision(Mode.DFGB).index
    gain = costs.backward[:, dha] - costs.backward[:, gpu]
    begin, used = max(loaded, 0), 0
    for i in np.argsort(-gain, kind="stable").tolist():
        if found[i] is not Mode.DHA or not costs.allowed[i, gpu] or gain[i] <= 0:
            continue
        start, load = max(begin, times.forward[i]), int(costs.load[i])
        if start + used + load <= window:
            begin, used = start, used + load
            found[i] = Mode.DFGB
    return found


def _gradients(costs: Costs, modes: Sequence[Mode], limits: Limits) -> list[Decision]:
    decisions = [Decision(mode) for mode in modes]
    parameters, _ = costs.taken(decisions)
    return write_back(costs, decisions, min(limits.kept, limits.budget - parameters))


def _within(costs: Costs, modes: Sequence[Mode], limits: Limits) -> list[Mode]:
    """Modes whose parameters leave room for the gradients that must be kept."""
    found = list(modes)
    written = costs.allowed[:, [Decision(mode, True).index for mode in Mode]].any(1)
    room = limits.budget - int(costs.gradient_bytes[~written, 0].sum())
    over = costs.taken([Decision(mode) for mode in found])[0] - room
    dha = Decision(Mode.DHA).index
    for mode in (Mode.DFGB, Mode.GFGB):
        here = [i for i in range(len(found)) if found[i] is mode and costs.allowed[i, dha]]
        column = Decision(mode).index
        loss = costs.forward[:, dha] + costs.backward[:, dha]
        loss = loss - costs.forward[:, column] - costs.backward[:, column]
        size = np.maximum(costs.parameter_bytes[:, column], 1)
        for i in sorted(here, key=lambda i: (loss[i] / size[i], i)):
            if over <= 0:
                break
            found[i] = Mode.DHA
            over -= int(costs.parameter_bytes[i, column])
    return found
