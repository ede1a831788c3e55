"""SIMD unit z = a x + b y."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.fp.format import FP32
from nearstep_hw.rule.axpby import AXPBY
from nearstep_hw.rule.rtl import FunctionalUnit

__all__ = ["AxpbyUnit"]


class AxpbyUnit(wiring.Component):
    """z = a * x + b * y over the FP32 lanes of a beat.

    *Timing.* One beat a cycle; a result is at the output `latency` cycles after its beat was taken,
    if the output does not wait. While a result waits at the output nothing moves: `i.ready` depends
    combinationally on `o.ready`.

    *Numerics.* binary32, to nearest even: b * y is rounded, then a * x plus that, once. Lanes do
    not touch each other. Equal, bit for bit, to
    `nearstep_sim.golden.rule.evaluate(AXPBY, {"x": x, "y": y}, {"a": a, "b": b})["z"]`.

    Parameters
    ----------
    lanes : FP32 elements in a beat.

    Members
    -------
    i : In(stream), payload `x` and `y`, lane k in bits 32 k to 32 k + 31 of each.
    a, b : In(32), the coefficients; stable from the first beat taken to the last result.
    o : Out(stream), payload of the lanes of z.

    Attributes
    ----------
    latency : int

    Ref: Smart-Infinity, V-A: SIMD AXPBY units.
    """

    def __init__(self, *, lanes: int = 16) -> None:
        if not isinstance(lanes, int) or lanes < 1:
            raise ValueError(f"Lanes must be a positive integer, not {lanes!r}")
        self.lanes = lanes
        self._unit = FunctionalUnit(AXPBY)
        self.latency = self._unit.latency
        words = data.ArrayLayout(FP32.width, lanes)
        super().__init__(
            {
                "i": In(stream.Signature(data.StructLayout({"x": words, "y": words}))),
                "a": In(FP32.width),
                "b": In(FP32.width),
                "o": Out(stream.Signature(words)),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        advance = Signal()
        m.d.comb += [advance.eq(self.o.ready | ~self.o.valid), self.i.ready.eq(advance)]
        for lane in range(self.lanes):
            unit = self._unit if lane == 0 else FunctionalUnit(AXPBY)
            m.submodules[f"lane{lane}"] = unit
            m.d.comb += [
                unit.i_en.eq(advance),
                unit.i_valid.eq(self.i.valid),
                unit.i_x.eq(self.i.payload.x[lane]),
                unit.i_y.eq(self.i.payload.y[lane]),
                unit.s_a.eq(self.a),
                unit.s_b.eq(self.b),
                self.o.payload[lane].eq(unit.o_z),
            ]
            if lane == 0:
                m.d.comb += self.o.valid.eq(unit.o_valid)
        return m
