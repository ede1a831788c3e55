"""The model of a link by itself, for its tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nearstep_sim.models.link.faults import KINDS, CFault, CStatistics, LinkFault, LinkOptions
from nearstep_sim.verilate.abi import load, structure
from nearstep_sim.verilate.build import compile_library

SOURCE = Path(__file__).with_name("probe.cpp")


@dataclass(frozen=True)
class Sample:
    """A phit; `cycle` is the one from which it is offered, or in which it arrived."""

    data: int
    head: bool
    last: bool
    cycle: int = 0


@dataclass(frozen=True)
class ProbeRun:
    """Phits that arrived; cycle in which each phit was taken, -1 for never; the link's counters."""

    arrived: list[Sample]
    taken: list[int]
    frames: int
    delivered_phits: int
    swallowed: int
    faults: dict[str, int]


_Sample = structure("models/link/probe.cpp", "Sample")


@cache
def _library() -> ctypes.CDLL:
    return load(compile_library("link_probe", [SOURCE]), SOURCE)


def run_link(
    phits: Sequence[Sample],
    options: LinkOptions,
    faults: Sequence[LinkFault] = (),
    *,
    cycles: int,
) -> ProbeRun:
    """Offer the phits one after the other to a link, for so many cycles."""
    count = len(phits)
    given = (_Sample * max(count, 1))()
    for each, phit in zip(given, phits, strict=False):
        each.data[0], each.data[1] = phit.data & (1 << 64) - 1, phit.data >> 64
        each.head, each.last, each.cycle = phit.head, phit.last, phit.cycle
    capacity = 4 * count + 16
    out = (_Sample * capacity)()
    taken = (ctypes.c_int64 * max(count, 1))(*[-1] * max(count, 1))
    armed = (CFault * max(len(faults), 1))(*(fault.mirror() for fault in faults))
    statistics = CStatistics()
    arrived = _library().probe_run(
        ctypes.byref(options.mirror()), armed, len(faults), given, count, taken,
        out, capacity, cycles, ctypes.byref(statistics),
    )  # fmt: skip
    return ProbeRun(
        [
            Sample(s.data[0] | s.data[1] << 64, bool(s.head), bool(s.last), s.cycle)
            for s in out[:arrived]
        ],
        list(taken)[:count],
        statistics.frames,
        statistics.delivered_phits,
        statistics.swallowed,
        dict(zip(KINDS, statistics.faults, strict=True)),
    )
