"""Splitter of requests into completions and bursts that read their payloads."""

from amaranth import Array, Elaboratable, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.axi.credits import BeatCredits
from nearstep_hw.axi.signature import AddressLayout, BurstType
from nearstep_hw.pcie.completion_job import (
    MAX_PAYLOAD_DWORDS,
    CompletionJob,
    Source,
    WaitingRequest,
)
from nearstep_hw.pcie.descriptor import MAX_PAYLOAD_BYTES, MAX_REQUEST_DWORDS, RequestType
from nearstep_hw.pcie.stream import DWORD_BITS, DWORD_BYTES

PAYLOAD_SIZES = 4  # codes of cfg_max_payload: 128 bytes, 256, 512, 1024
IO_BYTES = 4  # the count in every completion of an IO request
SMALLEST_PAYLOAD_DWORDS = 128 // DWORD_BYTES


class ReadSplitter(wiring.Component):
    """Splits each request into completions, and each memory read into one burst a completion.

    A read is split at every multiple of the largest payload, which is at least 128 bytes: the read
    completion boundary of an endpoint (64 bytes is for root complexes only).

    A burst is issued only when the landing buffer has space for all of its beats.

    *Timing*: two cycles; a completion a cycle.

    Parameters
    ----------
    address_width : bits of a byte address of the memory.
    data_width : bits of a beat.
    landing_beats : capacity of the landing buffer.

    Members
    -------
    i : cleared requests, in the order of their completions.
    i_max_payload : code of the largest payload, as `cfg_max_payload` of the hard block.
    i_credit : a beat has left the landing buffer.
    ar : AR channel; one ID.
    o : a job for each completion.

    Ref: PCIe Base Specification, 2.3.1.1 (data return for read requests).
    """

    def __init__(self, *, address_width: int, data_width: int, landing_beats: int) -> None:
        self.address_width = address_width
        self.lanes = data_width // DWORD_BITS
        self.beats = MAX_PAYLOAD_BYTES // (data_width // 8)  # of the longest burst
        if landing_beats < self.beats:
            raise ValueError(
                f"Landing space must hold {MAX_PAYLOAD_BYTES} bytes, "
                f"not {landing_beats!r} beats of {data_width // 8} bytes"
            )
        self.landing_beats = landing_beats
        layout = AddressLayout(address_width=address_width, id_width=1)
        super().__init__(
            {
                "i": In(stream.Signature(WaitingRequest(address_width))),
                "i_max_payload": In(range(PAYLOAD_SIZES)),
                "i_credit": In(1),
                "ar": Out(stream.Signature(layout)),
                "o": Out(stream.Signature(CompletionJob(self.lanes))),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.space = space = BeatCredits(
            streams=1,
            capacity=self.landing_beats,
            burst_beats=self.beats,
            initial=self.landing_beats,
        )
        lane_bits = exact_log2(self.lanes)
        waiting, job, ar = self.i.payload, self.o.payload, self.ar
        descriptor = waiting.head.descriptor

        request = Signal(waiting.shape())
        busy = Signal()
        fresh = Signal()  # no completion of the request has been issued
        dword = Signal(self.address_width - 2)
        dwords = Signal(range(MAX_REQUEST_DWORDS + 1))
        byte_count = Signal(13)
        offset = Signal(2)  # of the first byte in the first dword

        room = Signal(range(MAX_PAYLOAD_DWORDS + 1))  # dwords to the next boundary
        piece = Signal(range(MAX_PAYLOAD_DWORDS + 1))
        beats = Signal(range(self.beats + 2))
        is_memory = Signal()
        last = Signal()
        issue = Signal()
        address = Signal(self.address_width)
        length = Signal.like(ar.payload.len)
        sizes = Array(
            (SMALLEST_PAYLOAD_DWORDS << code) - dword[: exact_log2(SMALLEST_PAYLOAD_DWORDS << code)]
            for code in range(PAYLOAD_SIZES)
        )
        m.d.comb += [
            is_memory.eq(request.source == Source.MEMORY),
            room.eq(sizes[self.i_max_payload]),
            last.eq(~is_memory | (dwords <= room)),
            piece.eq(Mux(last, dwords, room)),
            beats.eq((dword[:lane_bits] + piece + (self.lanes - 1)) >> lane_bits),
            space.i_beats.eq(beats),
            space.i_credit.eq(self.i_credit),
            issue.eq(
                busy
                & (~self.o.valid | self.o.ready)
                & (~is_memory | (space.o_enough & (~ar.valid | ar.ready)))
            ),
            space.i_take.eq(issue & is_memory),
            self.i.ready.eq(~busy | (issue & last)),
            ar.payload.addr.eq(address),
            ar.payload.len.eq(length),
            ar.payload.size.eq(exact_log2(self.lanes * DWORD_BYTES)),
            ar.payload.burst.eq(BurstType.INCR),
        ]

        with m.If(issue):
            m.d.sync += [
                self.o.valid.eq(1),
                job.head.eq(request.head),
                job.source.eq(request.source),
                job.status.eq(request.status),
                job.byte_count.eq(byte_count),
                job.lower_address.eq(dword[:5] << 2 | Mux(fresh, offset, 0)),
                job.dwords.eq(piece),
                job.lane.eq(dword),
                job.word.eq(dword),
                job.empty.eq(request.empty),
                job.last.eq(last),
                fresh.eq(0),
                dword.eq(dword + piece),
                dwords.eq(dwords - piece),
                byte_count.eq(byte_count - (piece << 2) + Mux(fresh, offset, 0)),
                busy.eq(~last),
            ]
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(space.i_take):
            m.d.sync += [
                ar.valid.eq(1),
                address.eq(dword[lane_bits:] << (lane_bits + 2)),
                length.eq(beats - 1),
            ]
        with m.Elif(ar.ready):
            m.d.sync += ar.valid.eq(0)

        first, end = self._edges(m, waiting.head.sideband)
        whole = Signal(range(4 * MAX_REQUEST_DWORDS + 1))
        m.d.comb += whole.eq((descriptor.dwords << 2) - first - end)
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                request.eq(waiting),
                busy.eq(1),
                fresh.eq(1),
                dword.eq(waiting.dword),
                dwords.eq(descriptor.dwords),
                offset.eq(first),
                byte_count.eq(whole),
            ]
            # Requests other than memory reads have no address, and byte counts by type.
            kind = descriptor.request_type
            with m.If((kind == RequestType.IO_READ) | (kind == RequestType.IO_WRITE)):
                m.d.sync += [dword.eq(0), offset.eq(0), byte_count.eq(IO_BYTES)]
            with m.Elif((kind == RequestType.FETCH_ADD) | (kind == RequestType.SWAP)):
                m.d.sync += [dword.eq(0), offset.eq(0)]
            with m.Elif(kind == RequestType.COMPARE_AND_SWAP):  # two operands in, one out
                m.d.sync += [dword.eq(0), offset.eq(0), byte_count.eq(whole >> 1)]
            with m.Elif(waiting.empty):
                m.d.sync += byte_count.eq(1)
        return m

    def _edges(self, m: Module, sideband: data.View) -> tuple[Signal, Signal]:
        """Return the disabled bytes before the first enabled byte and after the last one."""
        first, end = Signal(2), Signal(2)
        enabled = Signal(4)  # of the last dword, which may be the first too
        m.d.comb += enabled.eq(Mux(sideband.last_be.any(), sideband.last_be, sideband.first_be))
        for count in range(1, 4):  # the longest run of zeros wins
            with m.If(~sideband.first_be[:count].any()):
                m.d.comb += first.eq(count)
            with m.If(~enabled[4 - count :].any()):
                m.d.comb += end.eq(count)
        with m.If(~sideband.first_be.any()):
            m.d.comb += [first.eq(0), end.eq(0)]
        return first, end
