"""Conversion of results to elements of 16 bits."""

from collections.abc import Sequence

from amaranth import Cat, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.hdl import Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.fp import convert
from nearstep_hw.fp.pipeline import Pipeline, Staged
from nearstep_spec.fp import BF16, FP16, FP32
from nearstep_spec.rounding import RANDOM_BITS
from nearstep_spec.updater.registers import CopyOutFormat

COPY_FORMAT_WIDTH = max(form.value for form in CopyOutFormat).bit_length()

_TARGETS = {"fp16": FP16, "bf16": BF16}


class Narrow(wiring.Component):
    """Converts two beats of binary32 to one beat of 16-bit numbers.

    The first beat fills the low half. An odd last beat of a run is output alone, with an undefined
    high half.

    *Timing*: a beat in every cycle; a beat out `latency + 1` cycles after the second of its
    two. The pipeline stalls while a beat waits at the output.

    *Numerics*: rounded once, to nearest even; a NaN becomes the default NaN of the format. Or
    stochastically, to bfloat16: see `nearstep_spec.rounding`.

    Parameters
    ----------
    lanes : binary32 elements of a beat.
    formats : formats of the elements in memory: `fp16`, `bf16` or both.
    beats_width : bits of `i_beats`.
    stochastic : bfloat16, the only format, can be rounded stochastically.

    Members
    -------
    i : beats of binary32.
    o : beats as in memory.
    i_beats : beats of the run; held until the last beat is output.
    i_format : a `CopyOutFormat`, one of `formats`; held as `i_beats`.
    i_stochastic, i_random : elements are rounded stochastically, with 16 random bits each;
        `i_stochastic` is held as `i_beats`. If `stochastic`.
    i_clear : clears all state.
    """

    latency = convert.DEPTH

    def __init__(
        self,
        *,
        lanes: int,
        formats: Sequence[str],
        beats_width: int,
        stochastic: bool = False,
    ) -> None:
        self.lanes = lanes
        self.formats = tuple(formats)
        self.stochastic = stochastic
        random = stream.Signature(RANDOM_BITS * lanes)
        super().__init__(
            {
                "i": In(stream.Signature(FP32.width * lanes)),
                "o": Out(stream.Signature(FP32.width * lanes)),
                "i_beats": In(beats_width),
                "i_format": In(COPY_FORMAT_WIDTH),
                **({"i_stochastic": In(1), "i_random": In(random)} if stochastic else {}),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        advance, narrowed = Signal(), Signal()
        upper, ends = Signal(), Signal()
        number = Signal.like(self.i_beats)  # beats narrowed
        low = Signal(FP16.width * self.lanes)
        pipe = Pipeline(m, en=advance)
        given, takes = self.i.valid, advance
        if self.stochastic:
            has_bits = ~self.i_stochastic | self.i_random.valid
            given, takes = given & has_bits, advance & has_bits
            m.d.comb += self.i_random.ready.eq(advance & self.i.valid & self.i_stochastic)
        half = Cat(
            self._narrowed(pipe, self.i.payload.word_select(lane, FP32.width), lane)
            for lane in range(self.lanes)
        )
        m.d.comb += [
            advance.eq(self.o.ready | ~self.o.valid),
            self.i.ready.eq(takes),
            narrowed.eq(pipe.valid(given, self.latency)),
            ends.eq(number == self.i_beats - 1),
        ]
        with m.If(advance):
            m.d.sync += self.o.valid.eq(narrowed & (upper | ends))
            with m.If(narrowed):
                m.d.sync += [
                    number.eq(number + 1),
                    upper.eq(~upper),
                    low.eq(half),
                    self.o.payload.eq(Mux(upper, Cat(low, half), half)),
                ]
        return ResetInserter(self.i_clear)(m)

    def _narrowed(self, pipe: Pipeline, word: Value, lane: int) -> Value:
        at = self.latency
        number = pipe.wrap(word, 0, f"word{lane}")
        values = {
            name: pipe.at(
                convert.convert(pipe, FP32, _TARGETS[name], number, depth=at, flags=False).z, at
            )
            for name in self.formats
        }
        (_, value), *others = values.items()
        for name, other in others:
            value = Mux(self.i_format == CopyOutFormat[name.upper()], other, value)
        if self.stochastic:
            return Mux(self.i_stochastic, self._rounded(pipe, number, lane), value)
        return value

    def _rounded(self, pipe: Pipeline, number: Staged, lane: int) -> Value:
        """Return a number rounded stochastically to bfloat16."""
        random = self.i_random.payload.word_select(lane, RANDOM_BITS)
        fraction = number.value[: FP32.mantissa]
        special = number.value[FP32.mantissa : FP32.width - 1].all() & fraction.any()
        total = pipe.wrap((number.value + random)[RANDOM_BITS : FP32.width], 0, f"rounded{lane}")
        nan = pipe.wrap(special, 0, f"nan{lane}")
        at = self.latency
        return Mux(pipe.at(nan, at), BF16.quiet_nan, pipe.at(total, at))
