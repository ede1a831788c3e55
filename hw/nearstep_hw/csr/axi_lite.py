"""Bridge from AXI4-Lite to the register port."""

from amaranth.hdl import Module, Signal
from amaranth.lib.wiring import Component, In, Out, Signature

from nearstep_hw.csr.signature import CsrSignature
from nearstep_spec.csr.block import Response
from nearstep_spec.csr.model import ADDRESS_WIDTH, WORD_BITS, WORD_BYTES

PROT_BITS = 3
RESPONSE_BITS = 2


class AxiLiteSignature(Signature):
    """An AXI4-Lite port with 32-bit data, from the manager's side, with the names of AMBA."""

    def __init__(self, address_width: int = ADDRESS_WIDTH) -> None:
        self.address_width = address_width
        super().__init__(
            {
                "awaddr": Out(address_width),
                "awprot": Out(PROT_BITS),
                "awvalid": Out(1),
                "awready": In(1),
                "wdata": Out(WORD_BITS),
                "wstrb": Out(WORD_BYTES),
                "wvalid": Out(1),
                "wready": In(1),
                "bresp": In(RESPONSE_BITS),
                "bvalid": In(1),
                "bready": Out(1),
                "araddr": Out(address_width),
                "arprot": Out(PROT_BITS),
                "arvalid": Out(1),
                "arready": In(1),
                "rdata": In(WORD_BITS),
                "rresp": In(RESPONSE_BITS),
                "rvalid": In(1),
                "rready": Out(1),
            }
        )


class AxiLiteAdapter(Component):
    """Bridge from AXI4-Lite to a register port.

    Every request has exactly one response, in order within reads and within writes; SLVERR is
    `error` of the register port. One request of each channel is held, so that address and data
    of a write may arrive in any order. Reads have priority but cannot starve writes: the next read
    is accepted only after the response to the last. `awprot` and `arprot` are ignored.

    *Timing*: 3 cycles from the last handshake of a request to its `bvalid` or `rvalid`; at best a
    write or a read every 3 cycles, with a bank that answers in a cycle. All outputs but `awready`,
    `wready` and `arready`, which are the complement of a register, are registers.

    Members
    -------
    s_axil : subordinate port.
    csr : register port, to be connected to `CsrBank.bus`.
    """

    s_axil: In(AxiLiteSignature())
    csr: Out(CsrSignature())

    def elaborate(self, platform: object) -> Module:
        m = Module()
        axi, csr = self.s_axil, self.csr

        has_aw = Signal()
        has_w = Signal()
        has_ar = Signal()
        awaddr = Signal.like(axi.awaddr)
        wdata = Signal.like(axi.wdata)
        wstrb = Signal.like(axi.wstrb)
        araddr = Signal.like(axi.araddr)
        m.d.comb += [axi.awready.eq(~has_aw), axi.wready.eq(~has_w), axi.arready.eq(~has_ar)]
        with m.If(axi.awvalid & axi.awready):
            m.d.sync += [has_aw.eq(1), awaddr.eq(axi.awaddr)]
        with m.If(axi.wvalid & axi.wready):
            m.d.sync += [has_w.eq(1), wdata.eq(axi.wdata), wstrb.eq(axi.wstrb)]
        with m.If(axi.arvalid & axi.arready):
            m.d.sync += [has_ar.eq(1), araddr.eq(axi.araddr)]

        response = Signal.like(axi.bresp)
        m.d.comb += response.eq(Response.OKAY)
        with m.If(csr.error):
            m.d.comb += response.eq(Response.SLVERR)
        with m.If(axi.bready):
            m.d.sync += axi.bvalid.eq(0)
        with m.If(axi.rready):
            m.d.sync += axi.rvalid.eq(0)

        can_write = Signal()
        can_read = Signal()
        m.d.comb += [
            can_write.eq(has_aw & has_w & ~axi.bvalid),
            can_read.eq(has_ar & ~axi.rvalid),
            csr.write_data.eq(wdata),
            csr.write_mask.eq(wstrb),
        ]
        with m.FSM():
            with m.State("IDLE"):
                with m.If(can_read):
                    m.d.comb += [csr.address.eq(araddr), csr.read.eq(1)]
                    m.next = "READ"
                with m.Elif(can_write):
                    m.d.comb += [csr.address.eq(awaddr), csr.write.eq(1)]
                    m.next = "WRITE"
            with m.State("READ"), m.If(csr.ack):
                m.d.sync += [
                    has_ar.eq(0),
                    axi.rvalid.eq(1),
                    axi.rdata.eq(csr.read_data),
                    axi.rresp.eq(response),
                ]
                m.next = "IDLE"
            with m.State("WRITE"), m.If(csr.ack):
                m.d.sync += [
                    has_aw.eq(0),
                    has_w.eq(0),
                    axi.bvalid.eq(1),
                    axi.bresp.eq(response),
                ]
                m.next = "IDLE"
        return m
