"""What every board has between its serial line and its memory."""

from amaranth import (
    ClockDomain,
    ClockSignal,
    DomainRenamer,
    Elaboratable,
    Module,
    ResetSignal,
)
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Member, Out

from nearstep_hw.axi.isolate import AxiIsolate
from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_hw.boards.outside import pass_on
from nearstep_hw.serial.board_control import BoardControl
from nearstep_hw.serial.endpoint import SerialEndpoint
from nearstep_hw.serial.uart import divisor_of
from nearstep_hw.serial.wishbone import WishboneSignature
from nearstep_hw.smartssd.card import SmartssdCard
from nearstep_hw.updater.unit_row import UnitMaker, outside_ports
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.csr.model import BLOCK_BYTES
from nearstep_spec.serial.manifest import Manifest


class BoardDevice(wiring.Component):
    """A card of `nearstep_hw.smartssd` behind a serial line, without the memory.

    A reset that the host asks for cuts the card off the memory, which keeps what it holds, and
    resets nothing but the card: line and memory controller go on.

    Parameters
    ----------
    config : of the board.
    manifest : what it says of itself.
    card : of that configuration.

    Members
    -------
    rx, tx : the line, idle high.
    m_axi : to the memory, half duplex.
    wishbone : to the registers of the memory controller.
    i_memory_ready : the memory needs no initialisation, or has had it.
    o_memory_ready : it is ready, or the host says so.
    o_active : a request is being carried out or answered.
    others : ports of the functional units, if they are outside: see `SmartssdCard`; then
        `o_units_reset` as well, which resets them.
    """

    def __init__(self, config: BoardConfig, manifest: Manifest, card: SmartssdCard) -> None:
        kernel = config.card.kernel
        widths = {"address_width": kernel.address_width, "data_width": kernel.data_width}
        id_width = len(card.m_axi.ar.payload.id)
        self.card = card
        self.control = BoardControl()
        self.endpoint = SerialEndpoint(
            divisor=divisor_of(clock_hz=config.described.system_hz, baud=config.link_baud),
            manifest=manifest.encode(),
            csr_address_width=(BLOCK_BYTES * len(config.card.maps()) - 1).bit_length(),
            **widths,
        )
        port = Axi4Signature(**widths, id_width=id_width)
        self.isolate = AxiIsolate(**widths, id_width=id_width)
        self.outside = outside_ports(kernel, card.unit)
        super().__init__(
            {
                "rx": In(1, init=1),
                "tx": Out(1, init=1),
                "m_axi": Out(port),
                "wishbone": Out(WishboneSignature()),
                "i_memory_ready": In(1),
                "o_memory_ready": Out(1),
                "o_active": Out(1),
                **self.outside,
                **units_reset(card.unit),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.endpoint = endpoint = self.endpoint
        m.submodules.control = control = self.control
        m.submodules.isolate = isolate = self.isolate
        m.submodules.card = DomainRenamer("card")(self.card)
        m.domains.card = ClockDomain("card", local=True)
        card = self.card

        wiring.connect(m, endpoint.csr, card.csr)
        wiring.connect(m, endpoint.board, control.csr)
        wiring.connect(m, endpoint.wishbone, wiring.flipped(self.wishbone))
        connect_channels(m, card.s_axi, endpoint.m_axi)
        wiring.connect(m, card.m_axi, isolate.s_axi)
        wiring.connect(m, isolate.m_axi, wiring.flipped(self.m_axi))
        m.d.comb += [
            ClockSignal("card").eq(ClockSignal()),
            ResetSignal("card").eq(control.o_reset),  # a register, high after a reset of the board
            endpoint.rx.eq(self.rx),
            self.tx.eq(endpoint.tx),
            endpoint.i_reset.eq(control.o_reset),
            control.i_dropped.eq(endpoint.o_dropped),
            control.i_framing_error.eq(endpoint.o_framing_error),
            control.i_memory_ready.eq(self.i_memory_ready),
            control.i_isolated.eq(isolate.o_isolated),
            control.i_idle.eq(isolate.o_idle),
            isolate.i_isolate.eq(control.o_isolate),
            self.o_memory_ready.eq(control.o_memory_ready),
            self.o_active.eq(endpoint.o_active),
        ]
        pass_on(m, self.outside, card, self)
        if card.unit is None:
            m.d.comb += self.o_units_reset.eq(control.o_reset)
        return m


def units_reset(unit: UnitMaker | None) -> dict[str, Member]:
    """Port that resets functional units outside; none if they are inside."""
    return {"o_units_reset": Out(1)} if unit is None else {}
