"""Accesses of one or two words on register ports."""

from amaranth import Elaboratable, Module, Mux, Signal, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.pcie.route import REGISTER_BITS
from nearstep_spec.csr.model import WORD_BITS
from nearstep_spec.pcie import CSR_BYTES, MSIX_TABLE_OFFSET

assert MSIX_TABLE_OFFSET == CSR_BYTES, "one bit of the address tells the two apart"

RegisterWrite = data.StructLayout(
    {"word": unsigned(REGISTER_BITS), "both": unsigned(1), "data": unsigned(2 * WORD_BITS)}
)
"""A write of one word, or of `both` words of `data`."""

RegisterRead = data.StructLayout({"word": unsigned(REGISTER_BITS), "both": unsigned(1)})
"""A read of one word, or of two."""

RegisterAnswer = data.StructLayout({"data": unsigned(2 * WORD_BITS), "error": unsigned(1)})
"""The words read, and whether an access failed."""


class RegisterAccess(wiring.Component):
    """Shares the registers and the MSI-X table between reads and writes.

    An access of two words is executed as two, the low one first; the second one also if the first
    was an error. Reads and writes alternate.

    *Timing*: two cycles a word and one an access, with ports of one cycle of latency. `ready` is
    high in the last cycle of an access.

    Members
    -------
    i_write, i_read : accesses.
    o_wrote : the write taken in this cycle is done.
    o_write_failed : with `o_wrote`: the write was an error.
    o_answer : answers of reads.
    csr : port of the registers.
    msix : port of the MSI-X table and its pending bits.
    """

    i_write: In(stream.Signature(RegisterWrite))
    i_read: In(stream.Signature(RegisterRead))
    o_wrote: Out(1)
    o_write_failed: Out(1)
    o_answer: Out(stream.Signature(RegisterAnswer))
    csr: Out(CsrSignature())
    msix: Out(CsrSignature())

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        writing = Signal()
        high = Signal()  # the second word
        failed = Signal()
        both = Signal()
        address = Signal(REGISTER_BITS)
        strobe = Signal()
        on_msix = Signal()
        ack = Signal()
        error = Signal()
        word = Signal(WORD_BITS)
        can_read = Signal()
        answer = self.o_answer.payload
        m.d.comb += [
            both.eq(Mux(writing, self.i_write.payload.both, self.i_read.payload.both)),
            address.eq(Mux(writing, self.i_write.payload.word, self.i_read.payload.word) + high),
            on_msix.eq(address[-1]),
            ack.eq(self.csr.ack | self.msix.ack),
            error.eq(Mux(on_msix, self.msix.error, self.csr.error)),
            word.eq(Mux(on_msix, self.msix.read_data, self.csr.read_data)),
            can_read.eq(self.i_read.valid & (~self.o_answer.valid | self.o_answer.ready)),
        ]
        for port, chosen in ((self.csr, ~on_msix), (self.msix, on_msix)):
            m.d.comb += [
                port.address.eq(address[:-1] << 2),
                port.read.eq(strobe & chosen & ~writing),
                port.write.eq(strobe & chosen & writing),
                port.write_data.eq(self.i_write.payload.data.word_select(high, WORD_BITS)),
                port.write_mask.eq(~0),
            ]
        with m.If(self.o_answer.ready):
            m.d.sync += self.o_answer.valid.eq(0)
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [high.eq(0), failed.eq(0)]
                with m.If(can_read & ~(self.i_write.valid & ~writing)):
                    m.d.sync += writing.eq(0)
                    m.next = "ASK"
                with m.Elif(self.i_write.valid):
                    m.d.sync += writing.eq(1)
                    m.next = "ASK"
            with m.State("ASK"):
                m.d.comb += strobe.eq(1)
                m.next = "WAIT"
            with m.State("WAIT"), m.If(ack):
                m.d.sync += [high.eq(1), failed.eq(failed | error)]
                with m.If(~writing):
                    m.d.sync += answer.data.word_select(high, WORD_BITS).eq(word)
                with m.If(both & ~high):
                    m.next = "ASK"
                with m.Else():
                    m.next = "IDLE"
                    with m.If(writing):
                        m.d.comb += [
                            self.i_write.ready.eq(1),
                            self.o_wrote.eq(1),
                            self.o_write_failed.eq(failed | error),
                        ]
                    with m.Else():
                        m.d.comb += self.i_read.ready.eq(1)
                        m.d.sync += [
                            self.o_answer.valid.eq(1),
                            answer.error.eq(failed | error),
                        ]
        return m
