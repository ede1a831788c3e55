"""A design with a known hole, and a run of it.

`python tiny.py 1,2,3 4,5` drives `x` of two instances, a value a cycle. The state DEAD wants a 7.
"""

import ctypes
import sys
from pathlib import Path

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib.wiring import Component, In, Out

from nearstep_hw.verilog import to_verilog
from nearstep_sim.verilate.build import Model, verilate_library, verilog_of

HARNESS = Path(__file__).with_name("tiny.cpp")


class Inner(Component):
    """Runs from IDLE to RUN, and back or to DEAD."""

    x: In(4)
    scale: In(2)
    y: Out(4)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        with m.FSM():
            with m.State("IDLE"), m.If(self.x.any()):
                m.d.sync += self.y.eq(self.x + self.scale)
                m.next = "RUN"
            with m.State("RUN"), m.If(self.x == 7):
                m.next = "DEAD"
            with m.State("DEAD"):
                m.d.sync += self.y.eq(0)
        return m


class Tiny(Component):
    """An instance with a constant input; other names, and a bit that is tied off."""

    x: In(4)
    y: Out(4)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.inner = inner = Inner()
        padded = Signal(6)
        m.d.comb += padded.eq(inner.y)
        m.d.comb += [inner.x.eq(Mux(self.x == 9, 0, self.x)), inner.scale.eq(2)]
        m.d.comb += self.y.eq(padded)
        return m


def verilog() -> Path:
    return verilog_of(
        "tiny of coverage", lambda: to_verilog(Tiny(), "Tiny"), sources=[Path(__file__)]
    )


if __name__ == "__main__":
    model = Model(top="Tiny", verilog=verilog(), prefix="VTiny")
    library = ctypes.CDLL(str(verilate_library("tiny_coverage", [model], [HARNESS])))
    for given in sys.argv[1:]:
        values = [int(each) for each in given.split(",")]
        library.run((ctypes.c_int * len(values))(*values), len(values))
