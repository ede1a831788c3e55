"""SIMD unit z = a x + b y."""

from collections.abc import Callable

from amaranth import Elaboratable, Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.smartssd.updater import GeneralUpdater
from nearstep_spec.fp import FP32
from nearstep_spec.rule.axpby import AXPBY
from nearstep_spec.rule.rule import Rule

__all__ = ["AxpbyUnit"]


class AxpbyUnit(wiring.Component):
    """Computes z = a * x + b * y in the FP32 lanes of a beat: a `GeneralUpdater` with one rule.

    *Timing*: one beat a cycle; a result is at the output `latency` cycles after its beat was taken,
    if the output does not wait. While a result waits at the output the pipeline stalls: `i.ready`
    depends combinationally on `o.ready`.

    *Numerics*: binary32, to nearest even: b * y is rounded, and a * x is added with one rounding.
    Lanes are independent. Equal, bit for bit, to `nearstep_sim.golden.rule.evaluate(AXPBY, {"x": x,
    "y": y}, {"a": a, "b": b})["z"]`.

    Parameters
    ----------
    lanes : FP32 elements in a beat.
    unit : see `GeneralUpdater`.

    Members
    -------
    i : In(stream), payload `x` and `y`, lane k in bits 32 k to 32 k + 31 of each.
    a, b : In(32), the coefficients; stable from the first beat taken to the last result.
    o : Out(stream), payload of the lanes of z.

    Attributes
    ----------
    latency : cycles.

    Ref: Smart-Infinity, V-A: SIMD AXPBY units.
    """

    def __init__(
        self, *, lanes: int = 16, unit: Callable[[Rule], wiring.Component] = FunctionalUnit
    ) -> None:
        self._updater = GeneralUpdater([AXPBY], lanes=lanes, unit=unit)
        self.lanes = lanes
        self.latency = self._updater.latency
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
        m.submodules.updater = updater = self._updater
        m.d.comb += [
            updater.i.payload.eq(self.i.payload),
            updater.i.valid.eq(self.i.valid),
            self.i.ready.eq(updater.i.ready),
            updater.s_a.eq(self.a),
            updater.s_b.eq(self.b),
            updater.rule.eq(0),
            self.o.payload.eq(updater.o.payload.z),
            self.o.valid.eq(updater.o.valid),
            updater.o.ready.eq(self.o.ready),
        ]
        return m
