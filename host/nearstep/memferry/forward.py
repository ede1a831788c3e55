"""Algorithm 1: which layers are computed by direct host access in the forward pass.

Three lines of the printed text are ambiguous; each has named readings:

- `Criterion`: line 3 adds `max(T_trans(l), 0)`, which is T_trans(l), since a load is not negative.
  `whole-load` is that; `exposed-load` adds `max(T_trans(l) - T_res, 0)`, the part of the load that
  computation before it does not hide.
- `Gain`: line 21 has `T_trans(i) + T_FP^H(i) - T_FP(i)`: the load is saved, and computation is
  longer. Section IV-B prints `T_all + T_FP^H(i) - T_FP^H(i) + T_trans(i)`, where two terms cancel
  and a point in time is added to durations. `line-21` is the first; `transfer-only` the second
  without T_all.
- `Base`: line 22 starts from T_all of before the backtracking even if an earlier layer was changed
  to DHA, and ignores its longer forward (`as-printed`); `accumulated` adds it.

Four more have one sensible reading: line 30 sets T_all to `base`, which includes T_all, instead of
adding it; `i` runs over layers before l that are GFGB, since line 13 makes l GFGB in any case; a
tag of -1 stands for the first layer; layers that cannot be computed by direct host access remain
GFGB.

Ref: MemFerry paper, Algorithm 1 and section IV-B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nearstep.memferry.cost import DHA, GFGB, Costs

Criterion = Literal["whole-load", "exposed-load"]
Gain = Literal["line-21", "transfer-only"]
Base = Literal["as-printed", "accumulated"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A reading of Algorithm 1."""

    criterion: Criterion = "whole-load"
    gain: Gain = "line-21"
    base: Base = "as-printed"

    def __str__(self) -> str:
        return f"{self.criterion}, {self.gain}, {self.base}"


READINGS = tuple(
    Reading(criterion=criterion, gain=gain, base=base)
    for criterion in ("whole-load", "exposed-load")
    for gain in ("line-21", "transfer-only")
    for base in ("as-printed", "accumulated")
)


def hosted(costs: Costs, reading: Reading) -> list[bool]:
    """Whether each layer is computed by direct host access in forward."""
    run = _Run(costs, reading)
    for layer in range(len(costs)):
        run.decide(layer)
    return run.in_place.tolist()


class _Run:
    """State of the algorithm, with the paper's T_all, T_res and tag."""

    def __init__(self, costs: Costs, reading: Reading) -> None:
        self.reading = reading
        count = len(costs)
        self.load = costs.load
        self.on_gpu, self.by_dha = costs.forward[:, GFGB.index], costs.forward[:, DHA.index]
        self.extra = np.where(costs.allowed[:, DHA.index], self.by_dha - self.on_gpu, _NEVER)
        self.gap = costs.before_forward.tolist()
        self.can = costs.allowed[:, [GFGB.index, DHA.index]].tolist()
        self.open = np.full(count, _NEVER, np.int64)  # `extra` of GFGB layers that may be changed
        self.in_place = np.zeros(count, bool)
        self.all = self.reserve = 0
        self.tag = -1

    def decide(self, layer: int) -> None:
        self._advance(self.gap[layer], self.gap[layer])
        load, on_gpu, by_dha = (int(each[layer]) for each in (self.load, self.on_gpu, self.by_dha))
        exposed = load if self.reading.criterion == "whole-load" else max(load - self.reserve, 0)
        can_load, can_host = self.can[layer]
        if can_host and (not can_load or by_dha <= on_gpu + exposed):
            self.in_place[layer] = True
            self._advance(by_dha, by_dha)
            return
        if load < self.reserve:
            if self.tag == -1:
                self.tag = layer
            self._advance(on_gpu, on_gpu - load)
        else:
            self._backtrack(layer, load, on_gpu)
        self.open[layer] = self.extra[layer]

    def _advance(self, everything: int, reserve: int) -> None:
        """The paper's `update`."""
        self.all += everything
        self.reserve += reserve

    def _backtrack(self, layer: int, load: int, on_gpu: int) -> None:
        start, before, reserve = max(self.tag, 0), self.all, self.reserve
        base = before + load + on_gpu - reserve
        while reserve < load:
            turned = self._next(start, layer, base - before - on_gpu, load - reserve)
            if turned < 0:
                break
            extra = int(self.extra[turned])
            gain = self._gain(turned)
            base = max(load - reserve - gain, 0) + before + extra + on_gpu
            reserve += gain
            if self.reading.base == "accumulated":
                before += extra
            self.in_place[turned] = True
            self.open[turned] = _NEVER
            start = self.tag = turned + 1
        self.all, self.reserve = base, max(reserve - load, 0) + on_gpu

    def _gain(self, layer: int) -> int:
        extra = int(self.extra[layer]) if self.reading.gain == "line-21" else 0
        return int(self.load[layer]) + extra

    def _next(self, start: int, stop: int, most: int, missing: int) -> int:
        """Return the first GFGB layer worth changing, or -1."""
        extra = self.open[start:stop]
        found = np.flatnonzero(extra < most)  # few, mostly none
        if not len(found):
            return -1
        gain = self.load[start:stop][found]
        if self.reading.gain == "line-21":
            gain = gain + extra[found]
        better = np.maximum(missing - gain, 0) + extra[found] < most
        return start + int(found[better.argmax()]) if better.any() else -1


_NEVER = np.int64(1 << 60)
