"""nextpnr's report of a design: clocks, cells, the critical path."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from nearstep_sim.bitstream.errors import BitstreamError
from nearstep_sim.bitstream.sources import block_of, source_of

__all__ = [
    "LUT",
    "RESOURCES",
    "Clock",
    "Path",
    "Report",
    "Stretch",
    "Use",
    "read_report",
    "utilisation",
    "without_kept",
]

LUT = "TRELLIS_COMB"
RESOURCES = {
    LUT: "LUT4 (carries included)",
    "TRELLIS_FF": "FF",
    "MULT18X18D": "multipliers 18 x 18",
    "DP16KD": "block RAM, 18 Kib",
    "TRELLIS_RAMW": "slices as memory",
    "EHXPLLL": "PLL",
    "TRELLIS_IO": "pins",
}
"""Types of cells in a summary, with readable names."""

_UTILISATION = re.compile(r"^Info:\s+(\w+):\s*(\d+)/\s*(\d+)\s+\d+%$")


@dataclass(frozen=True)
class Clock:
    """A clock: reached and required rate in MHz."""

    name: str
    achieved: float
    needed: float

    @property
    def met(self) -> bool:
        return self.achieved >= self.needed

    @property
    def margin(self) -> float:
        """Reached rate divided by the required one."""
        return self.achieved / self.needed


@dataclass(frozen=True)
class Use:
    """Cells of a type: in use, and of the chip."""

    used: int
    available: int


@dataclass(frozen=True)
class Stretch:
    """Part of a path within one source line or one block.

    Attributes
    ----------
    source : file and line; empty if not in the netlist.
    block : instances, with a point between.
    net : last net.
    cells : on the path.
    logic_ns, routing_ns : delays of the part.
    """

    source: str
    block: str
    net: str
    cells: int
    logic_ns: float
    routing_ns: float


@dataclass(frozen=True)
class Path:
    """The longest path of a clock.

    Attributes
    ----------
    start, end : cells.
    places : column and row of each cell.
    """

    start: str
    end: str
    logic_ns: float
    routing_ns: float
    stretches: tuple[Stretch, ...]
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Report:
    """A report of nextpnr.

    Attributes
    ----------
    clocks : ordered by margin, the slowest first.
    cells : by type.
    path : critical path of the first clock, if a path has both ends in its domain.
    """

    clocks: tuple[Clock, ...]
    cells: Mapping[str, Use]
    path: Path | None

    @property
    def margin(self) -> float:
        """Least margin of a clock."""
        return self.clocks[0].margin

    @property
    def failed(self) -> dict[str, tuple[float, float]]:
        """MHz reached and needed of each clock that is too slow."""
        return {each.name: (each.achieved, each.needed) for each in self.clocks if not each.met}


def clock_name(net: str) -> str:
    """Return the name of a clock without nextpnr's prefix of global nets."""
    return net.removeprefix("$glbnet$")


def read_report(raw: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> Report:
    """The report in the JSON that nextpnr writes.

    Parameters
    ----------
    sources : attributes `src` of cells, by name.

    Raises
    ------
    BitstreamError : the report has no clock, so no timing.
    """
    clocks = [
        Clock(clock_name(net), each["achieved"], each["constraint"])
        for net, each in raw["fmax"].items()
    ]
    if not clocks:
        raise BitstreamError("nextpnr reports no clock, expected at least one")
    clocks.sort(key=lambda each: (each.margin, each.name))
    edges = [
        path
        for path in raw["critical_paths"]
        if _clock_of(path["from"]) == _clock_of(path["to"]) == clocks[0].name
    ]
    longest = max(edges, key=_length, default=None)
    cells = {
        cell: Use(each["used"], each["available"]) for cell, each in raw["utilization"].items()
    }
    return Report(tuple(clocks), cells, _path(longest, sources or {}) if longest else None)


def _clock_of(edge: str) -> str:
    """Return the clock of an edge, such as `posedge $glbnet$clk`."""
    return clock_name(edge.rpartition(" ")[2])


def _length(path: Mapping[str, Any]) -> float:
    return float(sum(step["delay"] for step in path["path"]))


def _path(path: Mapping[str, Any], sources: Mapping[str, str]) -> Path:
    steps = path["path"]
    stretches = tuple(_stretches(steps, sources))
    ends = [step[end] for step in steps for end in ("from", "to")]
    return Path(
        start=steps[0]["from"]["cell"],
        end=steps[-1]["to"]["cell"],
        logic_ns=round(sum(each.logic_ns for each in stretches), 3),
        routing_ns=round(sum(each.routing_ns for each in stretches), 3),
        stretches=stretches,
        places=tuple((x, y) for x, y in dict.fromkeys(tuple(end["loc"]) for end in ends)),
    )


def _stretches(steps: list[Mapping[str, Any]], sources: Mapping[str, str]) -> Iterator[Stretch]:
    """Group consecutive steps of one source and block.

    A step without source is added to the previous group of the same block: lookup tables have no
    source, since they merge the logic of several lines.
    """
    named = []
    before = ("", "")
    for step in steps:
        cell = step["from"]["cell"]
        net = step.get("net", "")
        block = ".".join(block_of(net or cell))
        source = source_of([*step.get("sources", []), sources.get(cell, "")])
        if not source and block == before[1]:
            source = before[0]
        before = (source, block)
        named.append((before, step))
    for (source, block), group in groupby(named, key=lambda each: each[0]):
        members = [step for _, step in group]
        nets = [step["net"] for step in members if "net" in step]
        yield Stretch(
            source=source,
            block=block,
            net=clock_name(nets[-1]) if nets else "",
            cells=len({step["from"]["cell"] for step in members}),
            logic_ns=_sum(step for step in members if step["type"] != "routing"),
            routing_ns=_sum(step for step in members if step["type"] == "routing"),
        )


def _sum(steps: Iterator[Mapping[str, Any]]) -> float:
    return round(sum(step["delay"] for step in steps), 3)


def without_kept(cells: Mapping[str, Use], kept: int) -> dict[str, Use]:
    """Subtract `kept` lookup tables, which a design keeps free, from those used and available."""
    return {
        cell: Use(use.used - kept, use.available - kept) if cell == LUT else use
        for cell, use in cells.items()
    }


def utilisation(line: str) -> tuple[str, Use] | None:
    """Parse a line of nextpnr's `Device utilisation`, printed before placing."""
    match = _UTILISATION.match(line)
    return (match[1], Use(int(match[2]), int(match[3]))) if match else None
