"""Executes register requests, word by word."""

from amaranth import Cat, Const, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.serial import wishbone
from nearstep_hw.serial.request import PAGE_BITS, AccessSignature
from nearstep_hw.serial.timeout import Timeout
from nearstep_hw.serial.uart import BYTE_BITS
from nearstep_hw.serial.wishbone import WishboneSignature
from nearstep_spec.csr.model import ADDRESS_WIDTH, WORD_BITS, WORD_BYTES
from nearstep_spec.serial.protocol import MOST_DATA, Op, Space, Status


class WordAccess(wiring.Component):
    """Accesses registers of the device, of the board, and of the memory controller.

    The first word that fails ends a request: with DECERR if the address is outside of the port,
    with SLVERR if the port answers with an error, and with BUS_TIMEOUT after `timeout_cycles`
    without an answer. After a timeout a register port gets no other access before the late answer;
    a Wishbone cycle is terminated.

    *Timing*: a word takes up to 8 cycles plus its access.

    Parameters
    ----------
    csr_address_width : bits of a byte address of `csr`.
    timeout_cycles : cycles after which an access fails.

    Members
    -------
    access : the request.
    csr, board : register ports.
    wishbone : port to the memory controller.
    i_reset : the device behind `csr` is in reset: an outstanding answer is cancelled.
    """

    def __init__(self, *, csr_address_width: int, timeout_cycles: int) -> None:
        self.timeout = Timeout(timeout_cycles)
        super().__init__(
            {
                "access": In(AccessSignature()),
                "csr": Out(CsrSignature(csr_address_width)),
                "board": Out(CsrSignature()),
                "wishbone": Out(WishboneSignature()),
                "i_reset": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.timeout = timeout = self.timeout
        access, header = self.access, self.access.header
        is_write = Signal()
        address = Signal(PAGE_BITS)
        left = Signal(range(MOST_DATA + 1))
        word = Signal(WORD_BITS)
        byte = Signal(range(WORD_BYTES))
        ask, wait = Signal(), Signal()
        free, ack, error, value = self._ports(m, address, word, is_write, ask, wait)

        m.d.comb += [
            timeout.i_run.eq(ask | wait),
            access.failed.eq(address),
            access.read_data.payload.eq(word[:BYTE_BITS]),
        ]
        m.d.sync += is_write.eq(header.op == Op.WRITE)
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [
                    address.eq(header.address),
                    left.eq(header.length),
                    byte.eq(0),
                    access.status.eq(Status.OK),
                ]
                with m.If(access.valid & ~access.done):
                    m.next = "MAP"
            with m.State("MAP"):
                m.next = "NEXT"
                with m.If(self._unmapped(m)):
                    m.d.sync += access.status.eq(Status.DECERR)
                    m.next = "END"
            with m.State("NEXT"):
                m.next = "ASK"
                with m.If(left == 0):
                    m.next = "END"
                with m.Elif(is_write):
                    m.next = "GATHER"
            with m.State("GATHER"):
                m.d.comb += access.write_data.ready.eq(1)
                with m.If(access.write_data.valid):
                    m.d.sync += [
                        word.eq(Cat(word[BYTE_BITS:], access.write_data.payload)),
                        byte.eq(byte + 1),
                    ]
                    with m.If(byte == WORD_BYTES - 1):
                        m.next = "ASK"
            with m.State("ASK"):
                m.d.comb += ask.eq(1)
                with m.If(free):
                    m.next = "WAIT"
                with m.Elif(timeout.o_expired):
                    m.d.sync += access.status.eq(Status.BUS_TIMEOUT)
                    m.next = "END"
            with m.State("WAIT"):
                m.d.comb += wait.eq(1)
                with m.If(ack):
                    m.next = "CHECK"
                with m.Elif(timeout.o_expired):
                    m.d.sync += access.status.eq(Status.BUS_TIMEOUT)
                    m.next = "END"
            with m.State("CHECK"):
                with m.If(~is_write):
                    m.d.sync += word.eq(value)
                m.next = "GIVE"
                with m.If(error):
                    m.d.sync += access.status.eq(Status.SLVERR)
                    m.next = "END"
            with m.State("GIVE"):
                m.d.comb += access.read_data.valid.eq(~is_write)
                m.d.sync += [word.eq(word[BYTE_BITS:]), byte.eq(byte + 1)]
                with m.If(is_write | (byte == WORD_BYTES - 1)):
                    m.d.sync += [
                        address.eq(address + WORD_BYTES),
                        left.eq(left - WORD_BYTES),
                        byte.eq(0),
                    ]
                    m.next = "NEXT"
            with m.State("END"):
                m.d.comb += access.done.eq(1)
                m.next = "IDLE"
        return m

    def _unmapped(self, m: Module) -> Signal:
        """Return whether the address is outside of the port."""
        header, unmapped = self.access.header, Signal()
        widths = {
            Space.REGISTERS: self.csr.signature.address_width,
            Space.BOARD: ADDRESS_WIDTH,
            Space.CONTROLLER: wishbone.ADDRESS_BITS + ceil_log2(WORD_BYTES),
        }
        with m.Switch(header.space):
            for space, width in widths.items():
                with m.Case(space):
                    m.d.comb += unmapped.eq(header.address[width:] != 0)
        return unmapped

    def _ports(
        self,
        m: Module,
        address: Signal,
        word: Signal,
        is_write: Signal,
        ask: Signal,
        wait: Signal,
    ) -> tuple[Signal, Signal, Signal, Signal]:
        """Drive the ports; return whether the selected one is free and has answered, its error and
        value.

        Error and value are valid a cycle after the answer.
        """
        space = self.access.header.space
        whole = Cat(address, self.access.header.address[PAGE_BITS:])
        free, ack = Signal(), Signal()
        error, value = Signal(), Signal(WORD_BITS)
        for name, csr in (("csr", self.csr), ("board", self.board)):
            chosen = Signal(name=f"on_{name}")
            owes = Signal(name=f"{name}_owes")
            wanted = Space.REGISTERS if name == "csr" else Space.BOARD
            m.d.comb += [
                csr.address.eq(whole),
                csr.write_data.eq(word),
                csr.write_mask.eq(Const(1).replicate(WORD_BYTES)),
                csr.read.eq(ask & chosen & ~owes & ~is_write),
                csr.write.eq(ask & chosen & ~owes & is_write),
            ]
            m.d.sync += chosen.eq(space == wanted)
            with m.If(csr.read | csr.write):
                m.d.sync += owes.eq(1)
            with m.Elif(csr.ack):
                m.d.sync += owes.eq(0)
            if name == "csr":
                with m.If(self.i_reset):
                    m.d.sync += owes.eq(0)
            with m.If(chosen):
                m.d.comb += [free.eq(~owes), ack.eq(csr.ack)]
                m.d.sync += [error.eq(csr.error), value.eq(csr.read_data)]
        bus, on_bus = self.wishbone, Signal()
        m.d.sync += on_bus.eq(space == Space.CONTROLLER)
        m.d.comb += [
            bus.adr.eq(whole[ceil_log2(WORD_BYTES) :]),
            bus.dat_w.eq(word),
            bus.sel.eq(Const(1).replicate(WORD_BYTES)),
            bus.we.eq(is_write),
            bus.cyc.eq(wait & on_bus),
            bus.stb.eq(wait & on_bus),
        ]
        with m.If(on_bus):
            m.d.comb += [free.eq(1), ack.eq(bus.ack | bus.err)]
            m.d.sync += [error.eq(bus.err), value.eq(bus.dat_r)]
        return free, ack, error, value
