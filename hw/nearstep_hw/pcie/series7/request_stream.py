"""Conversion of request packets to the CQ stream."""

from collections.abc import Mapping

from amaranth import Cat, Const, Elaboratable, Module, Mux, Signal, unsigned
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.pcie.descriptor import MAX_REQUEST_DWORDS, RequestDescriptor, RequestType
from nearstep_hw.pcie.series7.rx_align import PacketBeat
from nearstep_hw.pcie.series7.stream import BARS, LANES, WIDTH
from nearstep_hw.pcie.series7.tlp import PacketHead, PacketType, RequestWord, swapped
from nearstep_hw.pcie.stream import DWORD_BITS, DWORD_BYTES, CqSignature, cq_user

NO_BAR = BARS - 1
SOP_BIT = 40  # of TUSER


class RequestStream(wiring.Component):
    """Converts each request to a descriptor and a payload aligned to lane 0.

    Payload is in the byte order of the CQ stream: the first byte on the link is the lowest. A
    digest is stripped. A poisoned memory write ends with `discontinue`. Processing hints are not
    forwarded; all bytes of a read with hints are enabled. Completions, messages and unknown packets
    are dropped: the block has answered them, or they need no answer.

    The function is 0. The BAR is the lowest one hit, or 7, which no endpoint has. The block
    forwards no packet of a wrong length.

    *Timing*: one cycle; a beat a cycle, and one cycle more for a header of three dwords with a
    payload of 4 n + 1 dwords.

    Parameters
    ----------
    apertures : address bits of each BAR, by its number.

    Members
    -------
    i : packets.
    cq : the stream.

    Ref: PG213, "Completer Request Interface"; PCIe Base Specification, 2.2.
    """

    def __init__(self, apertures: Mapping[int, int]) -> None:
        self.apertures = dict(apertures)
        super().__init__({"i": In(stream.Signature(PacketBeat)), "cq": Out(CqSignature(WIDTH))})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        cq, beat, user = self.cq, self.i.payload, cq_user(WIDTH)
        descriptor, first_be, last_be, wanted, discontinue = self._decode(m)
        head = PacketHead(beat.data[:DWORD_BITS])

        room = Signal()
        take = Signal()
        inside = Signal()  # after the first beat of a packet
        short = Signal()  # the header has three dwords
        left = Signal(range(MAX_REQUEST_DWORDS + 1))  # dwords of payload not output yet
        rest = Signal()  # the packet has ended, `held` has its last dword
        held = Signal(DWORD_BITS)
        start = Signal()  # the first dword of payload is next
        first, final = Signal(DWORD_BYTES), Signal(DWORD_BYTES)  # byte enables of the ends
        lone = Signal()  # one dword: `first` alone counts
        forget = Signal()
        payload = swapped(beat.data)
        m.d.comb += [
            room.eq(~cq.tvalid | cq.tready),
            self.i.ready.eq(room & ~rest),
            take.eq(self.i.valid & self.i.ready),
        ]

        shown = Signal(WIDTH)
        count = Signal(range(LANES + 1))
        ends = Signal()
        enables = Signal(LANES * DWORD_BYTES)
        m.d.comb += [
            shown.eq(Mux(short, Cat(held, payload[:-DWORD_BITS]), payload)),
            ends.eq(left <= LANES),
            count.eq(Mux(ends, left, LANES)),
        ]
        for lane in range(LANES):
            each = enables.word_select(lane, DWORD_BYTES)
            with m.If(lane < count):
                m.d.comb += each.eq(Const(-1, DWORD_BYTES))
                with m.If(ends & (count == lane + 1) & ~lone):
                    m.d.comb += each.eq(final)
        with m.If(start):
            m.d.comb += enables[:DWORD_BYTES].eq(first)

        with m.If(room):
            m.d.sync += cq.tvalid.eq(0)
        with m.If((take & inside & (left != 0)) | (room & rest)):
            m.d.sync += [
                cq.tvalid.eq(1),
                cq.tdata.eq(shown),
                cq.tkeep.eq(Cat(lane < count for lane in range(LANES))),
                cq.tlast.eq(ends),
                cq.tuser.eq((enables << user.byte_en) | ((forget & ends) << user.discontinue)),
                left.eq(left - count),
                start.eq(0),
                rest.eq(~rest & beat.last & ~ends),
                held.eq(payload[-DWORD_BITS:]),
            ]
        with m.If(take):
            m.d.sync += inside.eq(~beat.last)
        with m.If(take & ~inside):
            m.d.sync += [
                cq.tvalid.eq(wanted),
                cq.tdata.eq(descriptor),
                cq.tkeep.eq(Const(-1, LANES)),
                cq.tlast.eq(~head.payload),
                cq.tuser.eq(
                    (first_be << user.first_be) | (last_be << user.last_be) | (1 << SOP_BIT)
                ),
                left.eq(Mux(wanted & head.payload, descriptor.dwords, 0)),
                start.eq(1),
                rest.eq(wanted & head.payload & beat.last),
                held.eq(payload[-DWORD_BITS:]),
                short.eq(~head.long),
                first.eq(first_be),
                final.eq(last_be),
                lone.eq(descriptor.dwords == 1),
                forget.eq(discontinue),
            ]
        return m

    def _decode(self, m: Module) -> tuple[Signal, Signal, Signal, Signal, Signal]:
        """Return the descriptor, the byte enables of first and last dword, and whether the packet
        is a request and whether it is poisoned.
        """
        beat = self.i.payload
        head = PacketHead(beat.data[:DWORD_BITS])
        word = RequestWord(beat.data.word_select(1, DWORD_BITS))
        third, fourth = (beat.data.word_select(index, DWORD_BITS) for index in (2, 3))
        descriptor = Signal(RequestDescriptor)
        wanted = Signal()
        first_be, last_be = Signal(DWORD_BYTES), Signal(DWORD_BYTES)
        discontinue = Signal()
        dwords = descriptor.dwords
        m.d.comb += [
            descriptor.address_type.eq(head.address_type),
            descriptor.address.eq(Mux(head.long, Cat(fourth[2:], third), third[2:])),
            dwords.eq(Mux(head.dwords == 0, MAX_REQUEST_DWORDS, head.dwords)),
            descriptor.requester_id.eq(word.requester),
            descriptor.tag.eq(word.tag),
            descriptor.bar.eq(NO_BAR),
            descriptor.traffic_class.eq(head.traffic_class),
            descriptor.attributes.eq(Cat(head.attributes, head.id_ordering)),
        ]
        for bar in reversed(range(NO_BAR)):
            with m.If(beat.bar_hit[bar]):
                m.d.comb += [
                    descriptor.bar.eq(bar),
                    descriptor.aperture.eq(self.apertures.get(bar, 0)),
                ]

        kind = Signal(unsigned(len(descriptor.request_type)))
        with m.Switch(head.packet_type):
            for packet_type, without, with_payload in (
                (PacketType.MEMORY, RequestType.MEMORY_READ, RequestType.MEMORY_WRITE),
                (PacketType.LOCKED_READ, RequestType.LOCKED_READ, None),
                (PacketType.IO, RequestType.IO_READ, RequestType.IO_WRITE),
                (PacketType.FETCH_ADD, None, RequestType.FETCH_ADD),
                (PacketType.SWAP, None, RequestType.SWAP),
                (PacketType.COMPARE_AND_SWAP, None, RequestType.COMPARE_AND_SWAP),
            ):
                with m.Case(packet_type):
                    for payload, request in enumerate((without, with_payload)):
                        if request is not None:
                            with m.If((head.payload == payload) & ~head.prefix):
                                m.d.comb += [wanted.eq(1), kind.eq(request.value)]
        m.d.comb += descriptor.request_type.eq(kind)

        hinted_read = head.hints & (kind == RequestType.MEMORY_READ.value)
        m.d.comb += [
            first_be.eq(Mux(hinted_read, -1, word.first_be)),
            last_be.eq(Mux(hinted_read, (dwords != 1).replicate(DWORD_BYTES), word.last_be)),
            discontinue.eq(head.poisoned & (kind == RequestType.MEMORY_WRITE.value)),
        ]
        return descriptor, first_be, last_be, wanted, discontinue
