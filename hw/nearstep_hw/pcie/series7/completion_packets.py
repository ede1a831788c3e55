"""Conversion of the CC stream to completion packets."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.pcie.descriptor import COMPLETION_DWORDS, CompletionDescriptor, Status
from nearstep_hw.pcie.series7.stream import LANES, WIDTH
from nearstep_hw.pcie.series7.tlp import CompletionHead, PacketType, swapped
from nearstep_hw.pcie.stream import DWORD_BITS, CcSignature

TxBeat = data.StructLayout({"data": unsigned(WIDTH), "keep": unsigned(LANES), "last": unsigned(1)})
"""Dwords of a packet, and a valid bit for each."""

ID_BITS = 16  # bus, device, function


class CompletionPackets(wiring.Component):
    """Converts each completion to a packet: the header replaces the descriptor.

    The copy of the request after the descriptor of an unsuccessful completion is dropped.

    *Timing*: one cycle; a beat a cycle.

    Members
    -------
    cc : the stream.
    o : beats of packets.
    i_id : ID of the completer: bus, device, function.

    Ref: PG213, "Completer Completion Descriptor Format"; PCIe Base Specification, 2.2.9.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "cc": In(CcSignature(WIDTH)),
                "o": Out(stream.Signature(TxBeat)),
                "i_id": In(ID_BITS),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        cc, beat = self.cc, self.o.payload
        head_bits = COMPLETION_DWORDS * DWORD_BITS
        descriptor = CompletionDescriptor(cc.tdata[:head_bits])
        packet = Signal(CompletionHead)
        head = packet.head
        good = Signal()
        m.d.comb += [
            good.eq(descriptor.status == Status.SUCCESSFUL),
            head.payload.eq(good & (descriptor.dwords != 0)),
            head.packet_type.eq(
                Mux(descriptor.locked, PacketType.LOCKED_COMPLETION, PacketType.COMPLETION)
            ),
            head.traffic_class.eq(descriptor.traffic_class),
            head.attributes.eq(descriptor.attributes),
            head.id_ordering.eq(descriptor.attributes[-1]),
            head.poisoned.eq(descriptor.poisoned),
            head.dwords.eq(descriptor.dwords),
            packet.byte_count.eq(descriptor.byte_count),
            packet.status.eq(descriptor.status),
            packet.completer.eq(self.i_id),
            packet.lower_address.eq(descriptor.lower_address),
            packet.tag.eq(descriptor.tag),
            packet.requester.eq(descriptor.requester_id),
        ]

        inside = Signal()
        forget = Signal()
        payload = swapped(cc.tdata)
        only_head = Signal()
        m.d.comb += [
            cc.tready.eq(~self.o.valid | self.o.ready),
            only_head.eq(~inside & ~head.payload),
        ]
        with m.If(cc.tready):
            m.d.sync += self.o.valid.eq(cc.tvalid & ~(inside & forget))
        with m.If(cc.tready & cc.tvalid):
            m.d.sync += [
                inside.eq(~cc.tlast),
                beat.data.eq(Mux(inside, payload, Cat(packet, payload[head_bits:]))),
                beat.keep.eq(Mux(only_head, (1 << COMPLETION_DWORDS) - 1, cc.tkeep)),
                beat.last.eq(cc.tlast | only_head),
            ]
            with m.If(~inside):
                m.d.sync += forget.eq(~head.payload)
        return m
