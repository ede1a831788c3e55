"""The scales of groups of elements."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.hdl import Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_spec.blockwise import GROUP, SMALLEST_SCALE
from nearstep_spec.fp import FP32

LEVELS_A_STAGE = 2
"""Levels of the comparison tree in a pipeline stage."""


class GroupScale(wiring.Component):
    """Finds the largest magnitude of each group of 256 elements, at least 1e-12.

    *Timing*: a part a cycle; the scale `latency` cycles after the last part of its group.

    *Numerics*: exact; the default NaN for a group with a NaN.

    Parameters
    ----------
    ways : elements of a part, a power of two.

    Members
    -------
    i_valid, i_numbers : a part.
    i_last : the part is the last of the run, and ends its group.
    o_valid, o_scale : the scale of a group.
    """

    def __init__(self, *, ways: int) -> None:
        self.ways = ways
        self.latency = -(-exact_log2(ways) // LEVELS_A_STAGE) + 1
        super().__init__(
            {
                "i_valid": In(1),
                "i_numbers": In(FP32.width * ways),
                "i_last": In(1),
                "o_valid": Out(1),
                "o_scale": Out(FP32.width),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        part = Signal(range(GROUP // self.ways))
        ends = Signal()
        m.d.comb += ends.eq((part == GROUP // self.ways - 1) | self.i_last)
        with m.If(self.i_valid):
            m.d.sync += part.eq(Mux(ends, 0, part + 1))

        # A NaN has a larger pattern than an infinity, so it is the largest.
        magnitudes = [
            self.i_numbers.word_select(way, FP32.width)[: FP32.width - 1]
            for way in range(self.ways)
        ]
        valid, last = self.i_valid, ends
        for level in range(exact_log2(self.ways)):
            pairs = zip(magnitudes[::2], magnitudes[1::2], strict=True)
            magnitudes = [self._larger(m, *pair, f"l{level}") for pair in pairs]
            if level % LEVELS_A_STAGE == LEVELS_A_STAGE - 1 or len(magnitudes) == 1:
                magnitudes = [self._register(m, each) for each in magnitudes]
                was_valid, was_last = Signal(), Signal()
                m.d.sync += [was_valid.eq(valid), was_last.eq(last)]
                valid, last = was_valid, was_last
        (largest,) = magnitudes
        before = Signal(FP32.width - 1, init=SMALLEST_SCALE)
        now = self._larger(m, before, largest, "now")
        m.d.sync += self.o_valid.eq(valid & last)
        with m.If(valid):
            m.d.sync += [
                before.eq(Mux(last, SMALLEST_SCALE, now)),
                self.o_scale.eq(Mux(now > FP32.infinity, FP32.quiet_nan, now)),
            ]
        return m

    def _larger(self, m: Module, a: Value, b: Value, name: str) -> Signal:
        larger = Signal(FP32.width - 1, name=f"larger_{name}")
        m.d.comb += larger.eq(Mux(a > b, a, b))
        return larger

    def _register(self, m: Module, value: Value) -> Signal:
        kept = Signal(len(value), name="kept")
        m.d.sync += kept.eq(value)
        return kept
