"""MSI-X: the vector table, its pending bits, and messages through the hard block."""

from amaranth import Array, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.csr.signature import CsrSignature
from nearstep_spec.csr.model import WORD_BITS, WORD_BYTES
from nearstep_spec.pcie import MAX_VECTORS, MSIX_PBA_OFFSET, MSIX_TABLE_OFFSET

ENTRY_WORDS = 4  # low and high half of the address, data, vector control
ADDRESS_BITS = 2 * WORD_BITS
PENDING_BITS = 64  # of a word of the pending bit array
FUNCTIONS = 4  # bits of the hard block's enables; this endpoint is function 0


class MsixInterruptSignature(wiring.Signature):
    """Interface between a function with its own MSI-X table and the hard block.

    Members
    -------
    enable, mask : `cfg_interrupt_msix_enable`, `cfg_interrupt_msix_mask`.
    int, address, data : ports `cfg_interrupt_msix_...`; valid in the cycle of `int`.
    sent, fail : outcome; `cfg_interrupt_msi_sent` and `cfg_interrupt_msi_fail` of PCIE4 blocks.

    Ref: PG213, "Configuration Interrupt Controller Interface".
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "enable": In(FUNCTIONS),
                "mask": In(FUNCTIONS),
                "int": Out(1),
                "address": Out(ADDRESS_BITS),
                "data": Out(WORD_BITS),
                "sent": In(1),
                "fail": In(1),
            }
        )


class Msix(wiring.Component):
    """Vectors of function 0.

    A request sets the pending bit of its vector, masked or not. A pending vector is sent, and its
    bit cleared, when MSI-X is enabled and neither the function nor the vector is masked; the lowest
    vector first. A message that the hard block could not send becomes pending again.

    *Timing*: `int` rises two cycles after the request; the next message waits for `sent` or `fail`.

    Parameters
    ----------
    vectors : number of vectors.

    Members
    -------
    i_request : a bit for each vector, high for one cycle for each interrupt.
    bus : the table and the pending bits; addresses count from `MSIX_TABLE_OFFSET`. Accesses of
        other words and writes of pending bits are errors.
    cfg : to the hard block.

    Ref: PCIe Base Specification, 6.1.4 and 7.7.2.
    """

    def __init__(self, vectors: int) -> None:
        if not 1 <= vectors <= MAX_VECTORS:
            raise ValueError(f"Vectors must be 1 to {MAX_VECTORS}, not {vectors!r}")
        self.vectors = vectors
        super().__init__(
            {
                "i_request": In(vectors),
                "bus": In(CsrSignature()),
                "cfg": Out(MsixInterruptSignature()),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        vectors, bus, cfg = range(self.vectors), self.bus, self.cfg
        address = [Signal(ADDRESS_BITS, name=f"address{i}") for i in vectors]
        message = [Signal(WORD_BITS, name=f"data{i}") for i in vectors]
        masked = Signal(self.vectors, init=-1)
        pending = Signal(self.vectors)
        free = Signal(self.vectors)
        chosen = Signal(range(self.vectors))
        again = Signal(self.vectors)  # the message that could not be sent
        going = Signal(self.vectors)

        m.d.comb += free.eq(pending & ~masked & (cfg.enable[0] & ~cfg.mask[0]).replicate(len(free)))
        for vector in reversed(vectors):
            with m.If(free[vector]):
                m.d.comb += chosen.eq(vector)
        m.d.sync += [
            cfg.int.eq(0),
            pending.eq((pending & ~going) | again | self.i_request),
        ]
        with m.FSM():
            with m.State("IDLE"), m.If(free.any()):
                m.d.comb += going.eq(1 << chosen)
                m.d.sync += [
                    cfg.int.eq(1),
                    cfg.address.eq(Array(address)[chosen]),
                    cfg.data.eq(Array(message)[chosen]),
                ]
                sending = Signal.like(chosen)
                m.d.sync += sending.eq(chosen)
                m.next = "SENDING"
            with m.State("SENDING"):
                with m.If(cfg.sent | cfg.fail):
                    m.next = "IDLE"
                with m.If(cfg.fail & ~cfg.sent):
                    m.d.comb += again.eq(1 << sending)

        self._registers(m, bus, address, message, masked, pending)
        return m

    def _registers(
        self,
        m: Module,
        bus: wiring.PureInterface,
        address: list[Signal],
        message: list[Signal],
        masked: Signal,
        pending: Signal,
    ) -> None:
        word = Signal(WORD_BITS)
        known = Signal()
        writable = Signal()
        write = Signal()
        m.d.comb += write.eq(bus.write & bus.write_mask.all())
        with m.Switch(bus.address[2:]):
            for vector in range(self.vectors):
                places = (
                    address[vector][:WORD_BITS],
                    address[vector][WORD_BITS:],
                    message[vector],
                    masked[vector],
                )
                for index, place in enumerate(places):
                    with m.Case(vector * ENTRY_WORDS + index):
                        m.d.comb += [word.eq(place), known.eq(1), writable.eq(1)]
                        with m.If(write):
                            m.d.sync += place.eq(bus.write_data)
            first = (MSIX_PBA_OFFSET - MSIX_TABLE_OFFSET) // WORD_BYTES
            for index in range(-(-self.vectors // PENDING_BITS) * PENDING_BITS // WORD_BITS):
                bits = pending[index * WORD_BITS : (index + 1) * WORD_BITS]
                with m.Case(first + index):
                    m.d.comb += [word.eq(bits), known.eq(1)]
        m.d.sync += [
            bus.ack.eq(bus.read | bus.write),
            bus.error.eq((bus.read & ~known) | (bus.write & ~(write & writable))),
            bus.read_data.eq(word & bus.read.replicate(WORD_BITS)),
        ]
