"""Ordering of non-posted requests behind earlier posted requests."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.stream.fifo import StreamFifo


class PostedOrder(wiring.Component):
    """Releases a non-posted request when every earlier write is done.

    For each non-posted request the number of writes taken before it is queued; the request is
    cleared when as many writes are done. Later writes never delay a request, and a request never
    delays writes.

    *Timing*: a request is cleared three cycles after `i_request` at the earliest.

    Parameters
    ----------
    writes : most outstanding writes, a power of two.
    requests : most waiting requests, a power of two.

    Members
    -------
    i_taken : a write was taken; only with `o_room`.
    i_done : the oldest write is done.
    i_request : a non-posted request was queued, after all writes taken before this cycle.
    i_go : the oldest waiting request is executed; only with `o_cleared`.
    o_room : another write may be taken.
    o_done : all writes are done.
    o_cleared : the oldest waiting request may be executed.

    Ref: PCIe Base Specification, table 2-40 (ordering rules): reads do not pass posted requests;
    posted requests must pass reads where waiting could cause a deadlock.
    """

    def __init__(self, *, writes: int, requests: int) -> None:
        self.writes = writes
        self.requests = requests
        super().__init__(
            {
                "i_taken": In(1),
                "i_done": In(1),
                "i_request": In(1),
                "i_go": In(1),
                "o_room": Out(1),
                "o_done": Out(1),
                "o_cleared": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        # A note is read at most `requests` cycles after its writes are done, and at most one write
        # a cycle is done meanwhile: the difference of the counters is unambiguous in `width` bits.
        width = ceil_log2(4 * max(self.writes, self.requests))
        m.submodules.notes = notes = StreamFifo(width, depth=self.requests)
        taken = Signal(width)
        done = Signal(width)
        outstanding = Signal(width)
        behind = Signal(width)
        clear = Signal()
        cleared = Signal(range(2 * self.requests + 1))
        m.d.comb += [
            outstanding.eq(taken - done),
            self.o_room.eq(outstanding != self.writes),
            self.o_done.eq(outstanding == 0),
            notes.i.payload.eq(taken),
            notes.i.valid.eq(self.i_request),
            behind.eq(done - notes.o.payload),
            clear.eq(notes.o.valid & ~behind[-1]),
            notes.o.ready.eq(clear),
            self.o_cleared.eq(cleared != 0),
        ]
        m.d.sync += [
            taken.eq(taken + self.i_taken),
            done.eq(done + self.i_done),
            cleared.eq(cleared + clear - self.i_go),
        ]
        return m
