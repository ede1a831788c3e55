"""AXI isolation: an initiator can be reset while its bursts are in flight."""

from amaranth import Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import Axi4Signature
from nearstep_hw.stream.fifo import StreamFifo


class AxiIsolate(wiring.Component):
    """Isolates an initiator from its port on request, and completes the initiator's transactions.

    Connected, all channels are forwarded. Isolated, the initiator is blocked; bursts with an
    accepted address are completed, with masked beats in place of missing W, and all responses are
    dropped. With `o_isolated` and `o_idle` high the initiator may have been reset at any time: no
    earlier beat is in flight or expected by the subordinate.

    The initiator must be reset while isolated, and its reset must end before it is connected again.

    Beats of W are taken only after the address of their burst, which AXI4 allows.

    *Timing*: AR, AW and W pass a register, R and B are combinational; a transfer a cycle on each
    channel. RREADY and BREADY of the port are those of the initiator, or high. `o_isolated` follows
    `i_isolate` by a cycle, and falls only while `o_idle` is high.

    Parameters
    ----------
    address_width, data_width, id_width : bits.
    bursts : most read bursts, and most write bursts, in flight; a power of two.
    write_bursts : most writes whose address, but not all data, was accepted; a power of two.

    Members
    -------
    s_axi : the initiator.
    m_axi : the port.
    i_isolate : isolate the initiator. Held until `o_isolated`.
    o_isolated : the initiator is isolated.
    o_idle : no burst is in flight.
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
        """Forward AR or AW, and return whether a burst is accepted."""
        taken = source.valid & source.ready
        m.d.comb += source.ready.eq(may & (~port.valid | port.ready))
        with m.If(taken):
            m.d.sync += [port.valid.eq(1), port.payload.eq(source.payload)]
        with m.Elif(port.ready):
            m.d.sync += port.valid.eq(0)
        return taken

    def _data(self, m: Module) -> None:
        """Forward beats of W, or generate masked ones."""
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
