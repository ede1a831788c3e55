"""Arbiter of read and write bursts, in batches of one direction."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.dram.request import PAGE_BEATS, BurstLayout
from nearstep_spec.dram.geometry import DramGeometry


class BatchArbiter(wiring.Component):
    """Keeps one direction as long as possible, because a turnaround of the data bus costs beats.

    The direction changes, if the other one is waiting, when no burst is left and few beats are in
    flight to the DRAM, or when a batch is full. Neither direction waits for more than one batch of
    the other.

    *Timing*: combinational from `i_read` and `i_write` to `o`; a change takes a cycle.

    Parameters
    ----------
    geometry : of the channel.
    id_width : bits of an AXI ID.
    batch_beats : size from which a batch accepts no further burst if the other direction waits.

    Members
    -------
    i_read, i_write : bursts, oldest first; `write` of the payload is ignored.
    i_few : few beats are in flight.
    o : bursts in the order of issue.

    Raises
    ------
    ValueError : `batch_beats` is not positive.
    """

    def __init__(self, geometry: DramGeometry, *, id_width: int, batch_beats: int) -> None:
        if batch_beats < 1:
            raise ValueError(f"Batch must have at least 1 beat, not {batch_beats!r}")
        self.batch_beats = batch_beats
        burst = stream.Signature(BurstLayout(geometry, id_width=id_width))
        super().__init__(
            {"i_read": In(burst), "i_write": In(burst), "i_few": In(1), "o": Out(burst)}
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        writing = Signal()
        beats = Signal(range(self.batch_beats + PAGE_BEATS))  # of this batch, while not `full`
        mine = Signal()
        other = Signal()
        full = Signal()

        m.d.comb += [
            mine.eq(Mux(writing, self.i_write.valid, self.i_read.valid)),
            other.eq(Mux(writing, self.i_read.valid, self.i_write.valid)),
            full.eq(beats >= self.batch_beats),
            self.o.valid.eq(mine & ~(full & other)),
            self.o.payload.eq(Mux(writing, self.i_write.payload, self.i_read.payload)),
            self.o.payload.write.eq(writing),
            self.i_read.ready.eq(self.o.ready & self.o.valid & ~writing),
            self.i_write.ready.eq(self.o.ready & self.o.valid & writing),
        ]
        with m.If(other & (full | (~mine & self.i_few))):
            m.d.sync += [writing.eq(~writing), beats.eq(0)]
        with m.Elif(self.o.valid & self.o.ready & ~full):
            m.d.sync += beats.eq(beats + self.o.payload.last + 1)
        return m
