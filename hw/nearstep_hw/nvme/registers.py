"""Registers of a controller."""

from amaranth import Cat, Const, Elaboratable, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.nvme.layout import BASE_BITS, DOORBELL_BITS, PAGE_BITS, POINTER_BITS
from nearstep_spec.csr.model import WORD_BITS, WORD_BYTES
from nearstep_spec.nvme import AQA_MASK, CAP, COMMAND_SETS, READY_TIME, VERSION, Register

ADDRESS_BITS = bits_for(2 * Register.DOORBELLS - 1)  # of a byte of registers and doorbells
ENABLE = 0
SETS, PAGES_AND_ARBITRATION, SHUTDOWN = slice(4, 7), slice(7, 14), slice(14, 16)
NOT_SHUT, SHUTTING, SHUT = 0, 1, 2


class NvmeRegisters(wiring.Component):
    """CAP, VS, CC, CSTS, AQA, ASQ, ACQ, CRTO and doorbells.

    The controller is enabled, or fatally wrong (CSTS.CFS) because of its configuration, when CC.EN
    was set and all that was disabled before has ended. CSTS.RDY rises with it, and falls when all
    has ended. Words that are no register are 0 and cannot be written; a write of less than a word
    changes nothing; none of it is an error. Nothing but disabling clears CSTS.CFS.

    *Timing*: an access takes a cycle; a doorbell, `o_clear` and their effects are in its cycle.

    Members
    -------
    csr : register port; 64-bit registers as two words.
    o_ring : a doorbell is written.
    o_completions, o_number, o_value : which one, and its value.
    o_clear : CC.EN falls.
    o_start : the admin queue is created.
    o_base, o_last : of its submission and completion queue.
    i_quiet : no access to memory of the host is under way.
    i_fail : CSTS.CFS is set.
    o_ready, o_failed : CSTS.RDY and CSTS.CFS.
    o_enabled : CC.EN and CSTS.RDY.
    o_shutting : CC.SHN was set, and caches must be flushed.
    i_flushed : caches are flushed.
    """

    csr: In(CsrSignature(ADDRESS_BITS))
    o_ring: Out(1)
    o_completions: Out(1)
    o_number: Out(DOORBELL_BITS)
    o_value: Out(WORD_BITS)
    o_clear: Out(1)
    o_start: Out(1)
    o_base: Out(BASE_BITS).array(2)
    o_last: Out(POINTER_BITS).array(2)
    i_quiet: In(1)
    i_fail: In(1)
    o_ready: Out(1)
    o_enabled: Out(1)
    o_failed: Out(1)
    o_shutting: Out(1)
    i_flushed: In(1)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        csr = self.csr
        cc, aqa = Signal(WORD_BITS), Signal(WORD_BITS)
        bases = Signal(2 * WORD_BITS, name="asq"), Signal(2 * WORD_BITS, name="acq")
        shut = Signal(2)
        wanted = Signal()  # CC.EN was set, and nothing has come of it
        write, doorbell = Signal(), Signal()
        pages, sizes, known, legal = Signal(), Signal(), Signal(), Signal()
        value = csr.write_data
        word = csr.address[2:]

        m.d.comb += [
            write.eq(csr.write & csr.write_mask.all()),
            doorbell.eq(csr.address[-1]),
            self.o_ring.eq(write & doorbell),
            self.o_completions.eq(csr.address[2]),
            self.o_number.eq(csr.address[3:]),
            self.o_value.eq(value),
            self.o_shutting.eq(shut == SHUTTING),
            self.o_enabled.eq(self.o_ready & cc[ENABLE]),
            pages.eq(Cat(base[:PAGE_BITS] == 0 for base in bases).all()),
            sizes.eq(Cat(last != 0 for last in self.o_last).all()),
            known.eq(Cat(cc[SETS] == number for number in COMMAND_SETS).any()),
            legal.eq(pages & sizes & known & (cc[PAGES_AND_ARBITRATION] == 0)),
        ]
        for number, base in enumerate(bases):
            m.d.comb += [
                self.o_base[number].eq(base[PAGE_BITS:]),
                self.o_last[number].eq(aqa.word_select(number, WORD_BITS // 2)),
            ]

        with m.If(self.i_fail):
            m.d.sync += self.o_failed.eq(1)
        with m.If(self.i_flushed & self.o_shutting):
            m.d.sync += shut.eq(SHUT)
        with m.If(self.o_ready & ~cc[ENABLE] & self.i_quiet):
            m.d.sync += self.o_ready.eq(0)
        with m.If(wanted & cc[ENABLE] & ~self.o_ready & self.i_quiet):
            m.d.comb += self.o_start.eq(legal & ~self.o_clear)
            m.d.sync += [wanted.eq(0), self.o_ready.eq(legal), self.o_failed.eq(~legal)]

        words = {
            **self._halves(Register.CAP, Const(CAP, 2 * WORD_BITS)),
            Register.VS: Const(VERSION, WORD_BITS),
            Register.CC: cc,
            Register.CSTS: Cat(self.o_ready, self.o_failed, shut),
            Register.AQA: aqa,
            **self._halves(Register.ASQ, bases[0]),
            **self._halves(Register.ACQ, bases[1]),
            Register.CRTO: Const(READY_TIME, WORD_BITS),
        }
        m.d.sync += [csr.ack.eq(csr.read | csr.write), csr.read_data.eq(0)]
        with m.Switch(word):
            for offset, content in words.items():
                with m.Case(offset // WORD_BYTES):
                    m.d.sync += csr.read_data.eq(Mux(csr.read, content, 0))
                    with m.If(write):
                        if offset == Register.CC:
                            self._configure(m, cc, shut, wanted)
                        elif offset == Register.AQA:
                            m.d.sync += aqa.eq(value & AQA_MASK)
                        elif Register.ASQ <= offset < Register.CRTO:
                            m.d.sync += content.eq(value)
        return m

    @staticmethod
    def _halves(offset: int, value: Signal) -> dict[int, Signal]:
        """Return the words of a 64-bit register."""
        return {offset: value[:WORD_BITS], offset + WORD_BYTES: value[WORD_BITS:]}

    def _configure(self, m: Module, cc: Signal, shut: Signal, wanted: Signal) -> None:
        """Write CC: enable, disable, shut down."""
        value = self.csr.write_data
        m.d.sync += cc.eq(value)
        with m.If(value[ENABLE] & ~cc[ENABLE]):
            m.d.sync += wanted.eq(1)
        with m.Elif(~value[ENABLE] & cc[ENABLE]):
            m.d.comb += self.o_clear.eq(1)
            m.d.sync += [wanted.eq(0), self.o_failed.eq(0), shut.eq(NOT_SHUT)]
        with m.If((value[SHUTDOWN] != 0) & (cc[SHUTDOWN] == 0)):
            m.d.sync += shut.eq(SHUTTING)
        with m.Elif((value[SHUTDOWN] == 0) & (cc[SHUTDOWN] != 0)):
            m.d.sync += shut.eq(NOT_SHUT)
