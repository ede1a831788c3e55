"""Queue of jobs of a sync core."""

from amaranth import Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from nearstep_hw.coarse.wire import JobLayout
from nearstep_hw.stream.fifo import StreamFifo


class JobQueue(wiring.Component):
    """FIFO of jobs. A job pushed while the queue is full is dropped, which sets `o_overflow`.

    Parameters
    ----------
    address_width : bits of a byte address.
    depth : capacity in jobs, a power of two.
    exact : cores have exact sums.

    Members
    -------
    i_push : appends `i_job`.
    i_job : the job.
    o : the jobs.
    o_waiting : jobs in the queue.
    o_overflow : a job was dropped since `i_clear`.
    i_clear : clears all state.
    """

    def __init__(self, *, address_width: int, depth: int, exact: bool = False) -> None:
        self.depth = depth
        self.layout = JobLayout(address_width=address_width, exact=exact)
        super().__init__(
            {
                "i_push": In(1),
                "i_job": In(self.layout),
                "o": Out(stream.Signature(self.layout)),
                "o_waiting": Out(bits_for(depth)),
                "o_overflow": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.fifo = fifo = StreamFifo(self.layout, depth=self.depth)
        taken = Signal()
        accept = Signal()
        wiring.connect(m, fifo.o, wiring.flipped(self.o))
        m.d.comb += [
            fifo.i_clear.eq(self.i_clear),
            accept.eq(self.i_push & (self.o_waiting != self.depth)),
            fifo.i.valid.eq(accept),
            fifo.i.payload.eq(self.i_job),
            taken.eq(self.o.valid & self.o.ready),
        ]
        m.d.sync += self.o_waiting.eq(self.o_waiting + accept - taken)
        with m.If(self.i_push & ~accept):
            m.d.sync += self.o_overflow.eq(1)
        return ResetInserter(self.i_clear)(m)
