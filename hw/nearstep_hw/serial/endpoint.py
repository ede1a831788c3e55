"""The board's end of the serial link, on a UART."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import connect_channels
from nearstep_hw.serial.byte_endpoint import (
    TIMEOUT_CYCLES,
    WINDOW,
    ByteEndpoint,
    endpoint_ports,
)
from nearstep_hw.serial.uart import UartReceiver, UartTransmitter
from nearstep_spec.csr.model import ADDRESS_WIDTH


class SerialEndpoint(wiring.Component):
    """Executes a host's requests from a serial line, as `nearstep_spec.serial` specifies.

    Flat Verilog ports, besides those of AXI4 and of the register ports: `rx`, `tx`, `wishbone__adr
    dat_w dat_r sel cyc stb we ack err`.

    *Timing*: that of `ByteEndpoint`; a byte of the line takes ten bits of `divisor` cycles, the
    bottleneck of the link. All outputs but `csr` and `board` are registered.

    Parameters
    ----------
    divisor : clock cycles of a bit, see `divisor_of`.
    manifest, address_width, data_width, csr_address_width, window, timeout_cycles : see
        `ByteEndpoint`.

    Members
    -------
    rx, tx : the line, idle high; `rx` is synchronised here.
    csr : registers of the device.
    board : registers of the board, see `BoardControl`.
    m_axi : memory. RREADY and BREADY are always high; bursts have at most 16 beats.
    wishbone : registers of the memory controller.
    i_reset : the device behind `csr` and `m_axi` is in reset: outstanding responses are cancelled.
    o_dropped : strobe: a frame was damaged, too short or too long, or the request buffer was full.
    o_framing_error : strobe: a byte without a stop bit.
    o_active : a request is being executed or answered.

    Raises
    ------
    BaudError, ManifestSizeError
    ValueError : a width, `window` or `timeout_cycles` is out of range.
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
        timeout_cycles: int = TIMEOUT_CYCLES,
    ) -> None:
        self.receiver = UartReceiver(divisor=divisor)
        self.transmitter = UartTransmitter(divisor=divisor)
        self.endpoint = ByteEndpoint(
            manifest=manifest,
            address_width=address_width,
            data_width=data_width,
            csr_address_width=csr_address_width,
            window=window,
            timeout_cycles=timeout_cycles,
        )
        super().__init__(
            {
                "rx": In(1, init=1),
                "tx": Out(1, init=1),
                "o_framing_error": Out(1),
                **endpoint_ports(
                    address_width=address_width,
                    data_width=data_width,
                    csr_address_width=csr_address_width,
                ),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.receiver = receiver = self.receiver
        m.submodules.endpoint = endpoint = self.endpoint
        m.submodules.transmitter = transmitter = self.transmitter

        wiring.connect(m, receiver.o, endpoint.i)
        wiring.connect(m, endpoint.o, transmitter.i)
        for name in ("csr", "board", "wishbone"):
            wiring.connect(m, getattr(endpoint, name), wiring.flipped(getattr(self, name)))
        connect_channels(m, endpoint.m_axi, self.m_axi)
        m.d.comb += [
            receiver.rx.eq(self.rx),
            endpoint.i_damage.eq(receiver.o_framing_error),
            endpoint.i_reset.eq(self.i_reset),
            self.tx.eq(transmitter.tx),
            self.o_framing_error.eq(receiver.o_framing_error),
            self.o_dropped.eq(endpoint.o_dropped),
            self.o_active.eq(endpoint.o_active),
        ]
        return m
