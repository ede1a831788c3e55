"""Parser of the CQ stream: turns beats into chunks of payload, each with its descriptor."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from nearstep_hw.pcie.descriptor import (
    DESCRIPTOR_DWORDS,
    RequestDescriptor,
    RequestSideband,
)
from nearstep_hw.pcie.stream import DWORD_BITS, DWORD_BYTES, CqSignature, check_width, cq_user


class RequestHead(data.StructLayout):
    """Descriptor and sideband of a request.

    Members
    -------
    descriptor : as received.
    sideband : byte enables and hints.
    """

    def __init__(self) -> None:
        super().__init__({"descriptor": RequestDescriptor, "sideband": RequestSideband})


class RequestChunk(data.StructLayout):
    """Some dwords of a request's payload; a request without payload is one empty chunk.

    Parameters
    ----------
    width : bits of the CQ stream.

    Members
    -------
    head : head of the request, the same in each of its chunks.
    data, enable : dwords from bit 0 on, and a bit for each of their bytes.
    dwords : number of dwords.
    last : the request ends.
    discontinue : only with `last`: the hard block found the request damaged; drop it.
    """

    def __init__(self, width: int) -> None:
        super().__init__(
            {
                "head": RequestHead(),
                "data": unsigned(width),
                "enable": unsigned(width // 8),
                "dwords": unsigned(bits_for(width // DWORD_BITS)),
                "last": unsigned(1),
                "discontinue": unsigned(1),
            }
        )


class RequestParser(wiring.Component):
    """Strips the descriptors from the CQ stream.

    *Timing*: one cycle; a beat a cycle. A beat without payload gives no chunk, unless the request
    ends with the beat.

    Parameters
    ----------
    width : bits of the stream.

    Members
    -------
    cq : the stream.
    o : chunks.
    """

    def __init__(self, width: int) -> None:
        check_width(width)
        self.width = width
        super().__init__(
            {"cq": In(CqSignature(width)), "o": Out(stream.Signature(RequestChunk(width)))}
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        user = cq_user(self.width)
        cq, chunk = self.cq, self.o.payload
        tuser, head = cq.tuser, chunk.head
        descriptor_bits = DESCRIPTOR_DWORDS * DWORD_BITS
        lanes = self.width // DWORD_BITS
        inside = Signal()  # after the first beat of a request
        opening = Signal()  # the beat has the end of the descriptor
        skipped = min(DESCRIPTOR_DWORDS, lanes)  # dwords of descriptor in that beat
        dwords = Signal(range(lanes + 1))
        take = Signal()

        m.d.comb += [
            cq.tready.eq(~self.o.valid | self.o.ready),
            take.eq(cq.tvalid & cq.tready),
            dwords.eq(sum(cq.tkeep) - Mux(opening, skipped, 0)),
        ]
        if lanes < DESCRIPTOR_DWORDS:
            second = Signal()
            m.d.comb += opening.eq(second)
            emit = Signal()
            m.d.comb += emit.eq(inside & (~second | cq.tlast))
            with m.If(take):
                m.d.sync += second.eq(~inside)
        else:
            m.d.comb += opening.eq(~inside)
            emit = Signal()
            m.d.comb += emit.eq(inside | cq.tlast | (cq.tkeep[skipped:] != 0))

        with m.If(take):
            m.d.sync += [
                inside.eq(~cq.tlast),
                chunk.data.eq(cq.tdata),
                chunk.enable.eq(tuser[user.byte_en : user.byte_en + self.width // 8]),
                chunk.dwords.eq(dwords),
                chunk.last.eq(cq.tlast),
                chunk.discontinue.eq(cq.tlast & tuser[user.discontinue]),
            ]
            if lanes > DESCRIPTOR_DWORDS:
                with m.If(opening):
                    m.d.sync += [
                        chunk.data.eq(cq.tdata[descriptor_bits:]),
                        chunk.enable.eq(
                            tuser[
                                user.byte_en + DESCRIPTOR_DWORDS * DWORD_BYTES : user.byte_en
                                + self.width // 8
                            ]
                        ),
                    ]
            with m.If(~inside):
                m.d.sync += [
                    head.sideband.first_be.eq(tuser[user.first_be : user.first_be + 4]),
                    head.sideband.last_be.eq(tuser[user.last_be : user.last_be + 4]),
                    head.sideband.tph_present.eq(tuser[user.tph_present]),
                    head.sideband.tph_type.eq(tuser[user.tph_type : user.tph_type + 2]),
                    head.sideband.tph_st_tag.eq(tuser[user.tph_st_tag : user.tph_st_tag + 8]),
                ]
            if lanes < DESCRIPTOR_DWORDS:
                with m.If(~inside):
                    m.d.sync += head.descriptor.eq(
                        Cat(cq.tdata, head.descriptor.as_value()[self.width :])
                    )
                with m.Elif(opening):
                    m.d.sync += head.descriptor.eq(
                        Cat(head.descriptor.as_value()[: self.width], cq.tdata)
                    )
            else:
                with m.If(opening):
                    m.d.sync += head.descriptor.eq(cq.tdata[:descriptor_bits])
        with m.If(take):
            m.d.sync += self.o.valid.eq(emit)
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        return m
