"""The ALUs of a sync core."""

from amaranth import Elaboratable, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.coarse import half
from nearstep_hw.coarse.entry import SentLayout
from nearstep_hw.coarse.sums import SumLayout
from nearstep_hw.coarse.wire import Operation, Wire
from nearstep_hw.fp import add, mul
from nearstep_hw.fp.pipeline import Pipeline, Staged
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.fp import BF16, FP16, FP32

_HALVES = {"fp16": FP16, "bf16": BF16}


class ControlLayout(data.StructLayout):
    """Control of a beat: its sources, whether the values of all devices are combined, its
    destinations, whether it ends an entry, and whether it ends the job.

    With exact sums, also whether it is of addends, whether they are the last ones, whether their
    sums are written, and whether received elements are apart from the own ones.
    """

    def __init__(self, *, exact: bool) -> None:
        names = ("receive", "local", "final", "send", "write", "last", "end")
        super().__init__(
            dict.fromkeys((*names, *(("sum", "closes", "stored", "apart") if exact else ())), 1)
        )


class ReduceLayout(data.StructLayout):
    """An input beat of the ALUs.

    Parameters
    ----------
    alus : elements of a beat.
    exact : the core has exact sums.

    Members
    -------
    received : as on the wire; elements of 16 bits in the lower half.
    local : binary32.
    control : operations.
    """

    def __init__(self, alus: int, *, exact: bool = False) -> None:
        control = ControlLayout(exact=exact)
        super().__init__({"received": 32 * alus, "local": 32 * alus, "control": control})


class Reduce(wiring.Component):
    """Widens, adds or compares, scales and narrows `alus` elements a cycle.

    Received elements that are apart, of 16 bits, are written, or else sent in the lower half before
    the own ones.

    *Timing*: a beat a cycle, `latency` cycles. The pipeline stalls while a destination of the last
    stage's beat is not ready.

    *Numerics*: received + local in binary32; times `i_scale` in the final step of an average;
    rounded to the wire format. Elements that are not combined pass unchanged in binary32. The
    maximum of a NaN is the default NaN, of zeros of both signs +0. The elements written to memory
    are those sent on the wire, widened.

    Members
    -------
    i : beats.
    i_operation, i_wire, i_scale : of the job; held while the pipeline is not empty.
    i_stop : deasserts `i.ready`.
    send : beats for the wire; elements of 16 bits in the lower half.
    write : beats for memory.
    sums : with exact sums alone: addends, in the wire format.
    i_hold : with exact sums alone: outputs no beat that is not of addends.
    o_end : the beat that ends the job has been output.
    o_wait_send, o_wait_write : the pipeline stalls on this output.
    i_clear : clears all state.
    """

    _WIDE = half.DEPTH
    _ADDED = _WIDE + add.DEPTH
    _SCALED = _ADDED + mul.DEPTH
    _NARROW = _SCALED + half.DEPTH
    latency = _NARROW + half.DEPTH

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        self.formats = {name: _HALVES[name] for name in config.wire_formats if name in _HALVES}
        self.control_layout = ControlLayout(exact=bool(config.exact))
        width = 32 * config.alus
        super().__init__(
            {
                "i": In(stream.Signature(ReduceLayout(config.alus, exact=bool(config.exact)))),
                "i_operation": In(Operation),
                "i_wire": In(Wire),
                "i_scale": In(32),
                "i_stop": In(1),
                "send": Out(stream.Signature(SentLayout(width, exact=bool(config.exact)))),
                "write": Out(stream.Signature(width)),
                "o_end": Out(1),
                "o_wait_send": Out(1),
                "o_wait_write": Out(1),
                "i_clear": In(1),
                **(
                    {"sums": Out(stream.Signature(SumLayout(width))), "i_hold": In(1)}
                    if config.exact
                    else {}
                ),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        advance = Signal()
        pipe = Pipeline(m, en=advance)
        beat = self.i.payload
        valid = pipe.valid(self.i.valid & self.i.ready, self.latency)
        control = pipe.source(beat.control, 0, "control")
        done = Signal(self.control_layout)
        halves = Signal()
        sent, written = Signal(), Signal()  # by one output, not yet by both
        free = ~self.o_wait_send & ~self.o_wait_write
        offered = valid
        pair = Signal()  # the beat is sent with elements that are apart
        if self.config.exact:
            held = valid & ~done.sum & self.i_hold
            offered = valid & ~held
            free &= ~held & (~self.sums.valid | self.sums.ready)

        m.d.comb += [
            done.eq(pipe.at(control, self.latency)),
            halves.eq(self.i_wire != Wire.FP32),
            advance.eq(free),
            self.i.ready.eq(advance & ~self.i_stop),
            self.send.valid.eq(offered & done.send & ~sent),
            self.send.payload.last.eq(done.last),
            self.write.valid.eq(offered & done.write & ~written),
            self.o_wait_send.eq(self.send.valid & ~self.send.ready),
            self.o_wait_write.eq(self.write.valid & ~self.write.ready),
            self.o_end.eq(valid & done.end & advance),
        ]
        m.d.sync += [
            sent.eq(~advance & (sent | (self.send.valid & self.send.ready))),
            written.eq(~advance & (written | (self.write.valid & self.write.ready))),
        ]
        if self.config.exact:
            m.d.comb += [
                pair.eq(done.apart & ~done.write),
                self.send.payload.both.eq(pair),
                self.sums.valid.eq(valid & done.sum),
                self.sums.payload.data.eq(self.send.payload.data),
                self.sums.payload.closes.eq(done.closes),
                self.sums.payload.write.eq(done.stored),
                self.sums.payload.last.eq(done.last),
            ]
        both, adds = Signal(), Signal()
        early = self._flags(m, pipe, control, self._WIDE)
        late = self._flags(m, pipe, control, self._ADDED)
        final = self._flags(m, pipe, control, self._SCALED).final
        maximum = self.i_operation == Operation.MAX
        scales = Signal()
        m.d.comb += [
            both.eq(early.receive & early.local),
            adds.eq(late.receive & late.local & ~maximum),
            scales.eq(final & (self.i_operation == Operation.AVERAGE)),
        ]
        aside = None
        if self.config.exact:
            aside = self._flags(m, pipe, control, self._NARROW).apart, pair
        for lane in range(self.config.alus):
            a, b = self._operands(pipe, beat, lane)
            kept = Mux(both, self._maximum(pipe, a.value, b.value, lane), b.value)
            kept = Mux(early.receive & ~early.local, a.value, kept)
            kept = pipe.wrap(kept, self._WIDE, f"kept{lane}")
            added = add.add(pipe, FP32, a, b, flags=False).z
            total = Mux(adds, pipe.at(added, self._ADDED), pipe.at(kept, self._ADDED))
            total = pipe.wrap(total, self._ADDED, f"total{lane}")
            scaled = mul.mul(pipe, FP32, total, pipe.constant(self.i_scale), flags=False).z
            result = Mux(scales, pipe.at(scaled, self._SCALED), pipe.at(total, self._SCALED))
            result = pipe.wrap(result, self._SCALED, f"result{lane}")
            short = pipe.source(beat.received.word_select(lane, 16), 0, f"apart{lane}")
            self._give(m, pipe, result, halves, lane, short, aside)
        return ResetInserter(self.i_clear)(m)

    def _flags(self, m: Module, pipe: Pipeline, control: Staged, stage: int) -> data.View:
        flags = Signal(self.control_layout, name=f"flags_{stage}")
        m.d.comb += flags.eq(pipe.at(control, stage))
        return flags

    def _operands(self, pipe: Pipeline, beat: data.View, lane: int) -> tuple[Staged, Staged]:
        """Return the received and the local value in binary32, at stage `_WIDE`."""
        at = self._WIDE
        word = pipe.wrap(beat.received.word_select(lane, 32), 0, f"word{lane}")
        short = pipe.wrap(beat.received.word_select(lane, 16), 0, f"short{lane}")
        local = pipe.wrap(beat.local.word_select(lane, 32), 0, f"local{lane}")
        received = pipe.at(word, at)
        for name, fmt in self.formats.items():
            wide = half.widen(pipe, fmt, short)
            received = Mux(self.i_wire == Wire[name.upper()], pipe.at(wide, at), received)
        return pipe.wrap(received, at, f"a{lane}"), pipe.wrap(pipe.at(local, at), at, f"b{lane}")

    def _maximum(self, pipe: Pipeline, a: Value, b: Value, lane: int) -> Value:
        """Return the greater of two values of binary32."""
        magnitudes = [x[:31] for x in (a, b)]
        nan = pipe.wrap(
            (magnitudes[0] > FP32.infinity) | (magnitudes[1] > FP32.infinity),
            self._WIDE,
            f"nan{lane}",
        ).value
        above = pipe.wrap(magnitudes[0] > magnitudes[1], self._WIDE, f"above{lane}").value
        takes_a = Mux(a[31] ^ b[31], b[31], above ^ a[31])
        return Mux(nan, FP32.quiet_nan, Mux(takes_a, a, b))

    def _give(
        self,
        m: Module,
        pipe: Pipeline,
        result: Staged,
        halves: Value,
        lane: int,
        received: Staged,
        aside: tuple[Value, Value] | None,
    ) -> None:
        """Drive a lane of both outputs; with exact sums `aside` has bits at stages `_NARROW` and
        `latency`: `received` is apart; and sent.
        """
        at = self.latency
        whole = pipe.at(result, at)
        send, write = self.send.payload.data, self.write.payload
        m.d.comb += write.word_select(lane, 32).eq(whole)
        with m.If(~halves):
            m.d.comb += send.word_select(lane, 32).eq(whole)
        for name, fmt in self.formats.items():
            short = written = half.narrow(pipe, fmt, result)
            if aside is not None:
                choice = Mux(aside[0], *(pipe.at(each, self._NARROW) for each in (received, short)))
                written = pipe.wrap(choice, self._NARROW, f"written_{name}{lane}")
            wide = half.widen(pipe, fmt, written)
            with m.If(self.i_wire == Wire[name.upper()]):
                m.d.comb += [
                    send.word_select(lane, 16).eq(pipe.at(short, at)),
                    write.word_select(lane, 32).eq(pipe.at(wide, at)),
                ]
                if aside is not None:
                    m.d.comb += send.word_select(self.config.alus + lane, 16).eq(pipe.at(short, at))
                    with m.If(aside[1]):
                        m.d.comb += send.word_select(lane, 16).eq(pipe.at(received, at))
