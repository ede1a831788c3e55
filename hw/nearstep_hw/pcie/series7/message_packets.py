"""Conversion of MSI-X messages to memory write packets."""

from amaranth import Cat, Const, Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.pcie.msix import MsixInterruptSignature
from nearstep_hw.pcie.series7.completion_packets import ID_BITS, TxBeat
from nearstep_hw.pcie.series7.stream import LANES
from nearstep_hw.pcie.series7.tlp import PacketHead, RequestWord, swapped
from nearstep_hw.pcie.stream import DWORD_BITS


class MessagePackets(wiring.Component):
    """Sends MSI-X messages as memory writes: the block has the capability, the card the table.

    Messages are enabled while MSI-X and bus mastering are enabled. A message never fails.

    *Timing*: one beat for an address below 4 GiB, two for a higher one.

    Members
    -------
    msix : from the endpoint, one message at a time.
    o : beats of packets.
    i_id : ID of the requester: bus, device, function.
    i_enable, i_mask : MSI-X and bus master enable, function mask.

    Ref: PG054, "MSI-X Mode"; PCIe Base Specification, 6.1.4.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "msix": In(MsixInterruptSignature()),
                "o": Out(stream.Signature(TxBeat)),
                "i_id": In(ID_BITS),
                "i_enable": In(1),
                "i_mask": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        msix, beat = self.msix, self.o.payload
        address, word = Signal.like(msix.address), Signal.like(msix.data)
        waiting = Signal()
        second = Signal()  # the beat with the data of a long packet
        long = Signal()
        head = Signal(PacketHead)
        request = Signal(RequestWord)
        m.d.comb += [
            long.eq(address[DWORD_BITS:].any()),
            head.dwords.eq(1),
            head.payload.eq(1),
            head.long.eq(long),
            request.first_be.eq(-1),
            request.requester.eq(self.i_id),
            msix.enable[0].eq(self.i_enable),
            msix.mask[0].eq(self.i_mask),
            msix.sent.eq(self.o.valid & self.o.ready & beat.last),
            self.o.valid.eq(waiting),
            beat.last.eq(second | ~long),
        ]
        with m.If(second):
            m.d.comb += [beat.data.eq(swapped(word)), beat.keep.eq(1)]
        with m.Else():
            low, high = address[:DWORD_BITS], address[DWORD_BITS:]
            m.d.comb += [
                beat.data.eq(
                    Cat(head, request, Mux(long, Cat(high, low), Cat(low, swapped(word))))
                ),
                beat.keep.eq(Const(-1, LANES)),
            ]
        with m.If(msix.int):
            m.d.sync += [waiting.eq(1), address.eq(msix.address), word.eq(msix.data)]
        with m.Elif(self.o.valid & self.o.ready):
            m.d.sync += [waiting.eq(~beat.last), second.eq(~beat.last)]
        return m
