"""The registers of a board, and the reset of its device."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.csr.bank import CsrBank
from nearstep_hw.csr.signature import CsrSignature
from nearstep_spec.boards.registers import board_map

RESET_CYCLES = 16
"""Least cycles of a device reset."""


class BoardControl(wiring.Component):
    """Registers of `nearstep_spec.boards.registers`, and a device reset that keeps memory intact.

    A reset isolates the device from memory, see `nearstep_hw.axi.isolate.AxiIsolate`; then asserts
    `o_reset` until the path to memory is idle, for at least `RESET_CYCLES`; then reconnects the
    device. `status.resetting` is high from the access on, and stays high if the path never becomes
    idle, as when memory does not answer.

    *Timing*: `o_isolate` four cycles after the write, `o_reset` a cycle after `i_isolated`.
    All outputs are registers.

    Members
    -------
    csr : register port.
    i_memory_ready : memory is ready; ORed with the bit that the host writes.
    i_dropped, i_framing_error : strobes to be counted, see `SerialEndpoint`.
    o_isolate : to `AxiIsolate.i_isolate`.
    i_isolated, i_idle : from `AxiIsolate`; the AND of several.
    o_reset : to the device and to its path up to the isolation; high after a reset of the board
        too, until the first device reset ends.
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
            with m.State("RESET"):  # initial state: the board resets its device first
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
