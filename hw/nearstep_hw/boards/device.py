"""The part of a board between its serial line and its memory."""

from collections.abc import Mapping

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
from nearstep_spec.boards.design import BoardDesign
from nearstep_spec.serial.manifest import Manifest

CARD_PORTS = ("csr", "s_axi", "m_axi", "o_interrupt")
"""Ports of every card: a device of any family with these ports, the last one optional."""


class BoardDevice(wiring.Component):
    """A card, such as `SmartssdCard`, behind a serial line, without the memory.

    A reset by the host isolates the card from the memory, whose contents are kept, and resets only
    the card: line and memory controller continue.

    Parameters
    ----------
    manifest : description of the board.
    card : the device of that configuration.

    Members
    -------
    rx, tx : the line, idle high.
    m_axi : to the memory, half duplex.
    wishbone : to the registers of the memory controller.
    i_memory_ready : the memory is initialised, or needs no initialisation.
    o_memory_ready : hardware or host report that the memory is ready.
    o_active : a request is being executed or answered.
    others : ports of the card but `CARD_PORTS`: pins of links, ports of outside functional units;
        for the latter also `o_units_reset`, their reset.
    """

    def __init__(self, config: BoardDesign, manifest: Manifest, card: wiring.Component) -> None:
        widths, id_width = memory_port(card)
        self.card = card
        self.control = BoardControl()
        self.endpoint = SerialEndpoint(
            divisor=divisor_of(clock_hz=config.described.system_hz, baud=config.link_baud),
            manifest=manifest.encode(),
            csr_address_width=len(card.csr.address),
            **widths,
        )
        port = Axi4Signature(**widths, id_width=id_width)
        self.isolate = AxiIsolate(**widths, id_width=id_width)
        self.outside = outside_of(card)
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
                **units_reset(card),
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
        if units_reset(card):
            m.d.comb += self.o_units_reset.eq(control.o_reset)
        return m


def memory_port(card: wiring.Component) -> tuple[dict[str, int], int]:
    """Return the address and data widths of a card's memory port, and the width of its IDs."""
    asked, data = card.m_axi.ar.payload, card.m_axi.r.payload.data
    return {"address_width": len(asked.addr), "data_width": len(data)}, len(asked.id)


def outside_of(card: wiring.Component) -> Mapping[str, Member]:
    """Return the ports of a card that the top has too."""
    members = card.signature.members.items()
    return {name: member for name, member in members if name not in CARD_PORTS}


def units_reset(card: wiring.Component) -> dict[str, Member]:
    """Return the reset port of outside functional units, if there are any."""
    return {"o_units_reset": Out(1)} if "fu" in card.signature.members else {}
