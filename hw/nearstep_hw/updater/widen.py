"""Conversion of 16-bit elements to binary32."""

from collections.abc import Sequence

from amaranth import Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.hdl import Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.fp import convert
from nearstep_hw.fp.pipeline import Pipeline
from nearstep_spec.fp import BF16, FP16, FP32
from nearstep_spec.updater.registers import GradientFormat

FORMAT_WIDTH = max(form.value for form in GradientFormat).bit_length()
HALF_WIDTH = FP16.width

_SOURCES = {"fp16": FP16, "bf16": BF16}


class Widen(wiring.Component):
    """Converts each beat of 16-bit numbers to two beats of binary32; binary32 is unchanged.

    The numbers in the low half of a beat are output first. A second half beyond the end of the run
    waits at the output until `i_clear`.

    *Timing*: a beat out every cycle, `latency` cycles after its input. The pipeline stalls while a
    beat waits at the output.

    *Numerics*: exact, also for subnormal numbers; a NaN of 16 bits becomes the default NaN of
    binary32.

    Parameters
    ----------
    lanes : binary32 elements of a beat.
    formats : formats of the elements in memory: of `fp32`, `fp16` and `bf16`.

    Members
    -------
    i : beats as in memory.
    o : beats of binary32.
    i_format : a `GradientFormat`, one of `formats`; held until the last beat is output.
    i_clear : clears all state.
    """

    latency = convert.DEPTH

    def __init__(self, *, lanes: int, formats: Sequence[str]) -> None:
        self.lanes = lanes
        self.formats = tuple(formats)
        super().__init__(
            {
                "i": In(stream.Signature(FP32.width * lanes)),
                "o": Out(stream.Signature(FP32.width * lanes)),
                "i_format": In(FORMAT_WIDTH),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        advance = Signal()
        narrow = Signal()
        upper = Signal()  # the upper half of the beat is next
        half = Signal(HALF_WIDTH * self.lanes)
        pipe = Pipeline(m, en=advance)

        m.d.comb += [
            advance.eq(self.o.ready | ~self.o.valid),
            narrow.eq(self.i_format != GradientFormat.FP32),
            half.eq(self.i.payload.word_select(upper, len(half))),
            self.i.ready.eq(advance & (~narrow | upper)),
            self.o.valid.eq(pipe.valid(self.i.valid, self.latency)),
        ]
        with m.If(advance & self.i.valid & narrow):
            m.d.sync += upper.eq(~upper)
        for lane in range(self.lanes):
            word = self.i.payload.word_select(lane, FP32.width)
            number = half.word_select(lane, HALF_WIDTH)
            result = self.o.payload.word_select(lane, FP32.width)
            m.d.comb += result.eq(self._widened(pipe, word, number, lane))
        return ResetInserter(self.i_clear)(m)

    def _widened(self, pipe: Pipeline, word: Value, number: Value, lane: int) -> Value:
        at = self.latency
        half = pipe.wrap(number, 0, f"half{lane}")
        values: list[tuple[GradientFormat, Value]] = []
        if "fp32" in self.formats:
            word_at = pipe.at(pipe.wrap(word, 0, f"word{lane}"), at)
            values.append((GradientFormat.FP32, word_at))
        for name, source in _SOURCES.items():
            if name in self.formats:
                z = convert.convert(pipe, source, FP32, half, depth=at, flags=False).z
                values.append((GradientFormat[name.upper()], pipe.at(z, at)))
        (_, value), *others = values
        for form, other in others:
            value = Mux(self.i_format == form, other, value)
        return value
