"""Executes memory requests: a byte stream on one side, bursts on the other."""

from amaranth import Cat, Const, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_hw.serial.burst_access import BURST_BEATS, INDEX_BITS, BurstAccess
from nearstep_hw.serial.request import PAGE_BITS, AccessSignature
from nearstep_hw.serial.timeout import Timeout
from nearstep_hw.serial.uart import BYTE_BITS
from nearstep_spec.serial.protocol import MOST_DATA, Op, Status


class MemoryAccess(wiring.Component):
    """Reads and writes of memory, of any bytes within a page.

    A request is split into bursts at multiples of `BURST_BEATS` beats. The first burst that fails
    ends the request with the address of the burst's first byte. A burst that takes longer than
    `timeout_cycles` ends the request with BUS_TIMEOUT, but still runs to completion, and no other
    burst begins before: the next request waits up to `timeout_cycles` for the port, then fails with
    BUS_TIMEOUT too.

    *Timing*: a cycle a byte, plus for each burst its beats and the latency of memory.

    Parameters
    ----------
    address_width, data_width : bits of the port.
    timeout_cycles : see above.

    Members
    -------
    access : the request.
    m_axi : memory.
    i_reset : the device behind the port is in reset: outstanding responses are cancelled.

    Raises
    ------
    ValueError : `data_width` is not 32 to 1024, a power of two.
    """

    def __init__(self, *, address_width: int, data_width: int, timeout_cycles: int) -> None:
        self.timeout = Timeout(timeout_cycles)
        self.address_width = address_width
        self.data_width = data_width
        self.burst = BurstAccess(address_width=address_width, data_width=data_width)
        if data_width < 32:
            raise ValueError(f"Data width must be 32 to 1024 bits, not {data_width!r}")
        widths = {"address_width": address_width, "data_width": data_width}
        super().__init__(
            {
                "access": In(AccessSignature()),
                "m_axi": Out(Axi4Signature(**widths, id_width=1)),
                "i_reset": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.timeout = timeout = self.timeout
        m.submodules.burst = burst = self.burst
        connect_channels(m, burst.m_axi, self.m_axi)
        access, header = self.access, self.access.header
        lane_bits = ceil_log2(self.data_width // BYTE_BITS)
        is_write, unmapped = Signal(), Signal()
        address = Signal(PAGE_BITS)  # of the next byte
        failed = Signal(PAGE_BITS)  # of the first byte of the burst
        rest = Signal(range(MOST_DATA + 1))  # bytes
        last = Signal(INDEX_BITS)  # index of the last beat of the burst
        put, give, ends = Signal(), Signal(), Signal()
        final = Signal(range(BURST_BEATS * self.data_width // BYTE_BITS + MOST_DATA))

        byte = self._buffer(m, address, put, first=address == failed)
        m.d.comb += [
            final.eq(address[: lane_bits + INDEX_BITS] + rest - 1),
            ends.eq((rest == 1) | address[: lane_bits + INDEX_BITS].all()),
            access.failed.eq(failed),
            burst.i_reset.eq(self.i_reset),
            burst.i_write.eq(is_write),
            burst.i_address[lane_bits:].eq(Cat(failed, header.address[PAGE_BITS:])[lane_bits:]),
            burst.i_last.eq(last),
        ]
        m.d.sync += [
            is_write.eq(header.op == Op.WRITE),
            unmapped.eq(header.address[self.address_width :] != 0),
            access.read_data.valid.eq(give),
            access.read_data.payload.eq(byte),
        ]
        with m.If(put | give):
            m.d.sync += [address.eq(address + 1), rest.eq(rest - 1)]
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [
                    address.eq(header.address),
                    failed.eq(header.address),
                    rest.eq(header.length),
                    access.status.eq(Status.OK),
                ]
                with m.If(access.valid):
                    m.next = "MAP"
            with m.State("MAP"):
                m.next = "FREE"
                with m.If(unmapped):
                    m.d.sync += access.status.eq(Status.DECERR)
                    m.next = "END"
            with m.State("FREE"):
                m.d.comb += timeout.i_run.eq(1)
                with m.If(~burst.o_busy):
                    m.next = "MEASURE"
                with m.Elif(timeout.o_expired):
                    m.d.sync += access.status.eq(Status.BUS_TIMEOUT)
                    m.next = "END"
            with m.State("MEASURE"):
                beyond = final[lane_bits + INDEX_BITS :].any()
                m.d.sync += [
                    failed.eq(address),
                    last.eq(Mux(beyond, BURST_BEATS - 1, final[lane_bits:][:INDEX_BITS])),
                ]
                with m.If(rest == 0):
                    m.next = "END"
                with m.Elif(is_write):
                    m.next = "GATHER"
                with m.Else():
                    m.next = "START"
            with m.State("GATHER"):
                m.d.comb += [access.write_data.ready.eq(1), put.eq(access.write_data.valid)]
                with m.If(put & ends):
                    m.next = "START"
            with m.State("START"):
                m.d.comb += burst.i_start.eq(1)
                m.next = "WAIT"
            with m.State("WAIT"):
                m.d.comb += timeout.i_run.eq(1)
                with m.If(~burst.o_busy):
                    m.next = "CHECK"
                with m.Elif(timeout.o_expired):
                    m.d.sync += access.status.eq(Status.BUS_TIMEOUT)
                    m.next = "END"
            with m.State("CHECK"):
                with m.If(burst.o_response != 0):
                    m.d.sync += access.status.eq(burst.o_response)
                    m.next = "END"
                with m.Elif(is_write):
                    m.next = "MEASURE"
                with m.Else():
                    m.next = "GIVE"
            with m.State("GIVE"):
                m.d.comb += give.eq(1)
                with m.If(ends):
                    m.next = "MEASURE"
            with m.State("END"):
                m.d.comb += access.done.eq(1)
                m.next = "IDLE"
        return m

    def _buffer(self, m: Module, address: Signal, put: Signal, *, first: Value) -> Value:
        """Buffer the beats of a burst and their strobes; return the byte at `address`."""
        burst, beat_bytes = self.burst, self.data_width // BYTE_BITS
        lane_bits = ceil_log2(beat_bytes)
        lane, index = address[:lane_bits], address[lane_bits:][:INDEX_BITS]
        beats = Memory(shape=self.data_width, depth=BURST_BEATS, init=[])
        strobes = Memory(shape=beat_bytes, depth=BURST_BEATS, init=[])
        m.submodules.beats, m.submodules.strobes = beats, strobes
        write_beat = beats.write_port(granularity=BYTE_BITS)
        write_strobe = strobes.write_port()
        read_beat, read_strobe = (each.read_port(domain="comb") for each in (beats, strobes))
        before, strobe = Signal(beat_bytes), Signal(beat_bytes)
        here = Const(1, beat_bytes) << lane

        m.d.comb += [
            strobe.eq(Mux(first | (lane == 0), 0, before) | here),
            write_strobe.addr.eq(index),
            write_strobe.data.eq(strobe),
            write_strobe.en.eq(put),
            write_beat.addr.eq(Mux(burst.o_put, burst.o_index, index)),
            write_beat.data.eq(
                Mux(burst.o_put, burst.o_data, self.access.write_data.payload.replicate(beat_bytes))
            ),
            write_beat.en.eq(Mux(burst.o_put, ~0, Mux(put, here, 0))),
            read_beat.addr.eq(Mux(burst.o_busy, burst.o_index, index)),
            read_strobe.addr.eq(burst.o_index),
            burst.i_data.eq(read_beat.data),
            burst.i_strobe.eq(read_strobe.data),
        ]
        with m.If(put):
            m.d.sync += before.eq(strobe)
        return read_beat.data.word_select(lane, BYTE_BITS)
