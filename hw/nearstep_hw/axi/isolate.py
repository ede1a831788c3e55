"""AXI isolation: an initiator that can be reset while its bursts are under way."""

from amaranth import Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import Axi4Signature
from nearstep_hw.stream.fifo import StreamFifo


class AxiIsolate(wiring.Component):
    """Stands between an initiator and its port, and on request ends for it what it began.

    Joined, it passes everything on. Isolated, it takes nothing of the initiator and shows it
    nothing; bursts whose address was taken are carried out to the end, with beats of W that write
    nothing in place of those that were still to come, and all answers are dropped. Once `o_idle`
    is high too, the initiator can have been reset at any moment: no beat of the time before is
    under way, and the subordinate waits for none.

    The initiator must be reset while it is isolated, and come out of the reset before it is joined
    again: what it was doing is gone.

    Beats of W are taken only behind the address of their burst, as a subordinate may do.

    *Timing*: AR, AW and W are a register behind the initiator, R and B pass combinationally; a
    transfer a cycle on each channel. RREADY and BREADY of the port are those of the initiator, or
    high. `o_isolated` follows `i_isolate` by a cycle; it falls only when `o_idle` is high.

    Parameters
    ----------
    address_width, data_width, id_width : bits.
    bursts : of reads, and of writes, that can be under way; a power of two.
    write_bursts : writes whose address was taken and whose data was not; a power of two.

    Members
    -------
    s_axi : the initiator.
    m_axi : the port.
    i_isolate : cut the initiator off. Held until `o_isolated`.
    o_isolated : the initiator is cut off.
    o_idle : nothing is under way.
    """

    def __init__(
        self,
        *,
        address_width: int,
        data_width: int,
        id_width: int,
        bursts: int = 256,
        write_bursts: int = 16,
    ) -> None:
        if bursts < 1 or bursts & (bursts - 1):
            raise ValueError(f"Bursts must be a power of two, not {bursts!r}")
        self.bursts = bursts
        self.lengths = StreamFifo(8, depth=write_bursts)
        port = Axi4Signature(address_width=address_width, data_width=data_width, id_width=id_width)
        super().__init__(
            {
                "s_axi": In(port),
                "m_axi": Out(port),
                "i_isolate": In(1),
                "o_isolated": Out(1),
                "o_idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.lengths = self.lengths
        s, o = self.s_axi, self.m_axi
        cut, lengths = self.o_isolated, self.lengths
        reading, writing = Signal(range(self.bursts + 1)), Signal(range(self.bursts + 1))
        asked = self._address(m, s.ar, o.ar, ~cut & ~reading[-1])
        written = self._address(m, s.aw, o.aw, ~cut & ~writing[-1] & lengths.i.ready)

        m.d.comb += [
            lengths.i.valid.eq(written),
            lengths.i.payload.eq(s.aw.payload.len),
            s.r.valid.eq(o.r.valid & ~cut),
            s.r.payload.eq(o.r.payload),
            o.r.ready.eq(s.r.ready | cut),
            s.b.valid.eq(o.b.valid & ~cut),
            s.b.payload.eq(o.b.payload),
            o.b.ready.eq(s.b.ready | cut),
            self.o_idle.eq((reading == 0) & (writing == 0)),
        ]
        m.d.sync += [
            reading.eq(reading + asked - (o.r.valid & o.r.ready & o.r.payload.last)),
            writing.eq(writing + written - (o.b.valid & o.b.ready)),
        ]
        self._data(m)
        with m.If(self.i_isolate):
            m.d.sync += cut.eq(1)
        with m.Elif(self.o_idle):
            m.d.sync += cut.eq(0)
        return m

    @staticmethod
    def _address(m: Module, source: object, port: object, may: Value) -> Value:
        """Pass AR or AW on; the value tells that a burst is taken."""
        taken = source.valid & source.ready
        m.d.comb += source.ready.eq(may & (~port.valid | port.ready))
        with m.If(taken):
            m.d.sync += [port.valid.eq(1), port.payload.eq(source.payload)]
        with m.Elif(port.ready):
            m.d.sync += port.valid.eq(0)
        return taken

    def _data(self, m: Module) -> None:
        """Pass beats of W on, or make such that write nothing."""
        source, port, length = self.s_axi.w, self.m_axi.w, self.lengths.o
        beat = Signal(8)  # of the burst
        free, put, last = Signal(), Signal(), Signal()
        m.d.comb += [
            free.eq(length.valid & (~port.valid | port.ready)),
            source.ready.eq(free & ~self.o_isolated),
            put.eq(free & (source.valid | self.o_isolated)),
            last.eq(beat == length.payload),
            length.ready.eq(put & last),
        ]
        with m.If(put):
            m.d.sync += [
                port.valid.eq(1),
                port.payload.data.eq(source.payload.data),
                port.payload.strb.eq(Mux(self.o_isolated, 0, source.payload.strb)),
                port.payload.last.eq(last),
                beat.eq(Mux(last, 0, beat + 1)),
            ]
        with m.Elif(port.ready):
            m.d.sync += port.valid.eq(0)
