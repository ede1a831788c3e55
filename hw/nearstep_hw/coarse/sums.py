"""Exact sums at the owner of a part: an accumulator for each lane of the ALUs."""

from amaranth import Cat, Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from nearstep_hw.coarse import half
from nearstep_hw.coarse.exact import ExactAccumulator
from nearstep_hw.coarse.wire import Wire
from nearstep_hw.fp.pipeline import Pipeline
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.stream.gearbox import PieceLayout
from nearstep_spec.coarse.config import MAX_ADDENDS, CoarseConfig
from nearstep_spec.fp import BF16, FP16, FP32

_FORMATS = {"fp32": FP32, "fp16": FP16, "bf16": BF16}
_FATE_DEPTH = 8
PACE, DIGITS = 3, 2  # a sum of three devices takes as many cycles as it has addends
_IN_FLIGHT = _FATE_DEPTH + 1 + half.DEPTH  # beats of sums: a FIFO with its output, and a pipeline


class SumLayout(data.StructLayout):
    """A beat of addends.

    Parameters
    ----------
    width : bits of a beat.

    Members
    -------
    data : in the wire format; elements of 16 bits in the lower half.
    closes : the last addends of their sums; qualifies the others.
    write, last : the sums are written; they end an entry.
    """

    def __init__(self, width: int) -> None:
        super().__init__({"data": width, "closes": 1, "write": 1, "last": 1})


class OwnerSums(wiring.Component):
    """Adds the addends of `alus` elements exactly, and outputs sums, or quotients, rounded once.

    *Timing*: as of `ExactAccumulator`; then `half.DEPTH` cycles. Stalls while a destination of a
    beat of sums is not ready.

    Members
    -------
    i : addends, one after another for each element.
    i_wire, i_divisor : of the job; held.
    send : sums for the wire; elements of 16 bits in the lower half.
    write : sums for memory.
    o_busy : sums have not been output; from the cycle after their last addends.
    i_clear : clears all state.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        width = 32 * config.alus
        super().__init__(
            {
                "i": In(stream.Signature(SumLayout(width))),
                "i_wire": In(Wire),
                "i_divisor": In(bits_for(MAX_ADDENDS)),
                "send": Out(stream.Signature(PieceLayout(width))),
                "write": Out(stream.Signature(width)),
                "o_busy": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        layout = data.StructLayout({"write": 1, "last": 1})
        m.submodules.fates = fates = StreamFifo(layout, depth=_FATE_DEPTH)
        beat = self.i.payload
        advance, takes, gives = Signal(), Signal(), Signal()
        pipe = Pipeline(m, en=advance)
        ready, offers = [], []
        send, write = self.send.payload.data, self.write.payload
        for name in self.config.exact:
            fmt = _FORMATS[name]
            chosen = Signal(name=f"is_{name}")
            m.d.comb += chosen.eq(self.i_wire == Wire[name.upper()])
            lanes = [
                ExactAccumulator(fmt, pace=PACE, digits=DIGITS) for _ in range(self.config.alus)
            ]
            for lane, unit in enumerate(lanes):
                m.submodules[f"{name}_{lane}"] = unit
                m.d.comb += [
                    unit.i.valid.eq(takes & chosen),
                    unit.i.payload.value.eq(beat.data.word_select(lane, fmt.width)),
                    unit.i.payload.last.eq(beat.closes),
                    unit.i_divisor.eq(self.i_divisor),
                    unit.o.ready.eq(gives & chosen),
                ]
                short = pipe.source(unit.o.payload, 0, f"sum_{name}_{lane}")
                wide = short if fmt is FP32 else half.widen(pipe, fmt, short)
                with m.If(chosen):
                    m.d.comb += [
                        send.word_select(lane, fmt.width).eq(pipe.at(short, half.DEPTH)),
                        write.word_select(lane, 32).eq(pipe.at(wide, half.DEPTH)),
                    ]
            ready.append(chosen & Cat(unit.i.ready for unit in lanes).all())
            offers.append(chosen & Cat(unit.o.valid for unit in lanes).all())

        fate = pipe.at(pipe.source(fates.o.payload, 0, "fate"), half.DEPTH)
        valid = pipe.valid(gives, half.DEPTH)
        sent, written = Signal(), Signal()  # by one output, not yet by both
        wait_send, wait_write = (each.valid & ~each.ready for each in (self.send, self.write))
        done = Signal(layout)
        left = Signal(range(_IN_FLIGHT + 1))
        m.d.comb += [
            self.i.ready.eq(Cat(ready).any() & fates.i.ready),
            takes.eq(self.i.valid & self.i.ready),
            fates.i.valid.eq(takes & beat.closes),
            fates.i.payload.write.eq(beat.write),
            fates.i.payload.last.eq(beat.last),
            gives.eq(advance & Cat(offers).any() & fates.o.valid),
            fates.o.ready.eq(gives),
            done.eq(fate),
            self.send.valid.eq(valid & ~sent),
            self.send.payload.last.eq(done.last),
            self.write.valid.eq(valid & done.write & ~written),
            advance.eq(~wait_send & ~wait_write),
            self.o_busy.eq(left != 0),
        ]
        m.d.sync += [
            left.eq(left + fates.i.valid - (valid & advance)),
            sent.eq(~advance & (sent | (self.send.valid & self.send.ready))),
            written.eq(~advance & (written | (self.write.valid & self.write.ready))),
        ]
        return ResetInserter(self.i_clear)(m)
