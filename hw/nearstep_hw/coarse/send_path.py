"""Path from the ALUs to the next device."""

from amaranth import Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.coarse.entry import SentLayout, path_beats
from nearstep_hw.coarse.phits import SendPhits
from nearstep_hw.coarse.wire import DescriptionLayout, EntryPhit
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_spec.coarse.config import CoarseConfig

_STRAY_ENTRIES = 4  # entries of one beat in registers around the FIFO


class SendPath(wiring.Component):
    """Sends the description of a job, then the phits of its beats.

    *Timing*: a phit a cycle; the first one three cycles after its beat.

    Members
    -------
    i : beats of the ALUs.
    i_describe : the description is offered, until `o_described`; only while `o_idle`.
    i_description : description of the job.
    i_halves : elements have 16 bits on the wire; else 32.
    o : phits.
    o_described : the description is accepted.
    o_idle : all entries have been output.
    i_clear : clears all state.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        super().__init__(
            {
                "i": In(stream.Signature(SentLayout(32 * config.alus, exact=bool(config.exact)))),
                "i_describe": In(1),
                "i_description": In(DescriptionLayout(exact=bool(config.exact))),
                "i_halves": In(1),
                "o": Out(stream.Signature(EntryPhit)),
                "o_described": Out(1),
                "o_idle": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        exact = bool(self.config.exact)
        # In an exact sum four devices send two entries more before a list is added than during it.
        depth = path_beats(self.config) * (4 if exact else 1)
        m.submodules.fifo = fifo = StreamFifo(self.i.payload.shape(), depth=depth)
        m.submodules.phits = phits = SendPhits(self.config.alus, exact=exact)
        entries = Signal(range(depth + _STRAY_ENTRIES))
        begun = self.i.valid & self.i.ready & self.i.payload.last
        ended = phits.o.valid & phits.o.ready & phits.o.payload.last

        wiring.connect(m, wiring.flipped(self.i), fifo.i)
        wiring.connect(m, fifo.o, phits.i)
        m.d.comb += [
            phits.i_halves.eq(self.i_halves),
            phits.o.ready.eq(self.o.ready & ~self.i_describe),
            self.o.valid.eq(phits.o.valid | self.i_describe),
            self.o.payload.eq(phits.o.payload),
            self.o_described.eq(self.i_describe & self.o.ready),
            self.o_idle.eq(entries == 0),
        ]
        with m.If(self.i_describe):
            m.d.comb += [
                self.o.payload.data.eq(self.i_description),
                self.o.payload.last.eq(1),
            ]
        m.d.sync += entries.eq(entries + begun - ended)
        return ResetInserter(self.i_clear)(m)
