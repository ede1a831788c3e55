"""The registers of a board, and the reset of its device."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.csr.bank import CsrBank
from nearstep_hw.csr.signature import CsrSignature
from nearstep_spec.boards.registers import board_map

RESET_CYCLES = 16
"""That a reset of the device takes at least."""


class BoardControl(wiring.Component):
    """Registers of `nearstep_spec.boards.registers`, and a reset that leaves memory whole.

    A reset cuts the device off its path to memory, see `nearstep_hw.axi.isolate.AxiIsolate`; then
    resets it until that path is idle, for `RESET_CYCLES` at least; then joins the two again.
    `status.resetting` is high from the access on. A path that never becomes idle, as one whose
    memory does not answer, leaves it high.

    *Timing*: `o_isolate` two cycles behind the write, `o_reset` a cycle behind `i_isolated`.
    All outputs are registers.

    Members
    -------
    csr : register port.
    i_memory_ready : the memory can be used, whatever the host says.
    i_dropped, i_framing_error : strobes to be counted, see `SerialEndpoint`.
    o_isolate : to `AxiIsolate.i_isolate`.
    i_isolated, i_idle : from `AxiIsolate`; of several, all are.
    o_reset : to the device, and to all of its path on its side of the isolation; high after the
        reset of the board too, until the first pass is through.
    o_resetting : `status.resetting`.
    o_memory_ready : `status.memory_ready`.
    """

    csr: In(CsrSignature())
    i_memory_ready: In(1)
    i_dropped: In(1)
    i_framing_error: In(1)
    o_isolate: Out(1, init=1)
    i_isolated: In(1)
    i_idle: In(1)
    o_reset: Out(1, init=1)
    o_resetting: Out(1, init=1)
    o_memory_ready: Out(1)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.bank = bank = CsrBank(board_map(), cut=True)
        cycles, dropped, framing_errors = Signal(64), Signal(32), Signal(32)
        count = Signal(range(RESET_CYCLES))

        wiring.connect(m, wiring.flipped(self.csr), bank.bus)
        m.d.comb += [
            bank.i_status_resetting.eq(self.o_resetting),
            bank.i_status_memory_ready.eq(self.o_memory_ready),
            bank.i_cycles.eq(cycles),
            bank.i_dropped.eq(dropped),
            bank.i_framing_errors.eq(framing_errors),
        ]
        m.d.sync += [
            self.o_memory_ready.eq(self.i_memory_ready | bank.o_memory_ready),
            cycles.eq(cycles + 1),
            dropped.eq(dropped + self.i_dropped),
            framing_errors.eq(framing_errors + self.i_framing_error),
        ]
        with m.FSM():
            with m.State("RESET"):  # first: the board begins with a reset of its device
                m.d.sync += [self.o_isolate.eq(1), self.o_resetting.eq(1)]
                with m.If(self.i_isolated):
                    m.d.sync += [self.o_reset.eq(1), count.eq(count + 1)]
                    with m.If(count == RESET_CYCLES - 1):
                        m.next = "DRAIN"
            with m.State("DRAIN"), m.If(self.i_idle):
                m.d.sync += self.o_reset.eq(0)
                m.next = "JOIN"
            with m.State("JOIN"):
                m.d.sync += self.o_isolate.eq(0)
                with m.If(~self.i_isolated):
                    m.d.sync += self.o_resetting.eq(0)
                    m.next = "RUN"
            with m.State("RUN"), m.If(bank.o_control_reset):
                m.d.sync += [self.o_resetting.eq(1), count.eq(0)]
                m.next = "RESET"
        return m
