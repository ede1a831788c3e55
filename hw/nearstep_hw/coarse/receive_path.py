"""Path from the previous device to the ALUs."""

from amaranth import Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.coarse.entry import path_beats
from nearstep_hw.coarse.phits import ReceiveBeats
from nearstep_hw.coarse.wire import DescriptionLayout, EntryPhit
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_spec.coarse.config import CoarseConfig


class ReceivePath(wiring.Component):
    """Compares the first phit of a job with its description, and converts the others to beats.

    The previous device may be a job ahead: the next description is not taken before `i_restart`. A
    description is the only entry of one phit.

    *Timing*: a phit a cycle; a beat is output three cycles after its last phit.

    Members
    -------
    i : phits.
    i_compare : the first phit may be taken and compared.
    i_description : description of the job.
    i_halves : elements have 16 bits on the wire; else 32.
    i_restart : the job has ended.
    i_stop : accepts nothing.
    o : beats of the ALUs.
    o_mismatch : the previous device has another job.
    i_clear : clears all state.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        super().__init__(
            {
                "i": In(stream.Signature(EntryPhit)),
                "i_compare": In(1),
                "i_description": In(DescriptionLayout(exact=bool(config.exact))),
                "i_halves": In(1),
                "i_restart": In(1),
                "i_stop": In(1),
                "o": Out(stream.Signature(32 * config.alus)),
                "o_mismatch": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.beats = beats = ReceiveBeats(self.config.alus)
        m.submodules.fifo = fifo = StreamFifo(32 * self.config.alus, depth=path_beats(self.config))
        same = Signal()
        described = Signal()
        compares = Signal()
        inside = Signal()  # inside an entry
        takes = Signal()

        wiring.connect(m, beats.o, fifo.i)
        wiring.connect(m, fifo.o, wiring.flipped(self.o))
        m.d.comb += [
            same.eq(self.i.payload.data == self.i_description.as_value()),
            compares.eq(self.i_compare & ~described & ~self.i_stop),
            self.o_mismatch.eq(self.i.valid & compares & ~same),
            beats.i_halves.eq(self.i_halves),
            takes.eq(described & ~self.i_stop & (inside | ~self.i.payload.last)),
            beats.i.valid.eq(self.i.valid & takes),
            beats.i.payload.eq(self.i.payload),
            self.i.ready.eq(compares | (beats.i.ready & takes)),
        ]
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += inside.eq(~self.i.payload.last)
        with m.If(self.i.valid & compares & same):
            m.d.sync += described.eq(1)
        with m.If(self.i_restart):
            m.d.sync += described.eq(0)
        return ResetInserter(self.i_clear)(m)
