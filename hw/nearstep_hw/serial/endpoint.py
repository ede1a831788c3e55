"""The board's end of the serial link."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import Axi4Signature
from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.serial.wishbone import WishboneSignature
from nearstep_spec.csr.model import ADDRESS_WIDTH

WINDOW = 7
"""Requests that are held, unless told otherwise: they fill 8 KiB, and at 3 Mbaud they take longer
than the 16 ms that a USB adapter may keep their answers back."""


class SerialEndpoint(wiring.Component):
    """Carries out what a host asks for on a serial line, as `nearstep_spec.serial` says.

    Parameters
    ----------
    divisor : clock cycles of a bit, see `divisor_of`.
    manifest : the text behind `Space.MANIFEST`.
    address_width, data_width : bits of the memory port; data 32 to 1024.
    csr_address_width : bits of a byte address of the device's registers.
    window : requests that are held.
    timeout_cycles : that an access may take, before it is answered with BUS_TIMEOUT.

    Members
    -------
    rx, tx : the line, idle high; `rx` is synchronised here.
    csr : registers of the device.
    board : registers of the board, see `BoardControl`.
    m_axi : memory. RREADY and BREADY are always high; bursts have at most 16 beats.
    wishbone : registers of the memory controller.
    i_reset : what is behind `csr` and `m_axi` is being reset: what they owe is forgotten.
    o_dropped : strobe: a frame was damaged, too short or too long, or found no room.
    o_framing_error : strobe: a byte without a stop bit.
    o_active : a request is being carried out or answered.
    """

    def __init__(
        self,
        *,
        divisor: int,
        manifest: bytes,
        address_width: int,
        data_width: int,
        csr_address_width: int = ADDRESS_WIDTH,
        window: int = WINDOW,
        timeout_cycles: int = 1 << 16,
    ) -> None:
        super().__init__(
            {
                "rx": In(1, init=1),
                "tx": Out(1, init=1),
                "csr": Out(CsrSignature(csr_address_width)),
                "board": Out(CsrSignature()),
                "m_axi": Out(
                    Axi4Signature(address_width=address_width, data_width=data_width, id_width=1)
                ),
                "wishbone": Out(WishboneSignature()),
                "i_reset": In(1),
                "o_dropped": Out(1),
                "o_framing_error": Out(1),
                "o_active": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        return m
