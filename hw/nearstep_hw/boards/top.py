"""A board's design without clock and pads."""

from collections.abc import Mapping
from types import MappingProxyType

from amaranth import Elaboratable, IOPort, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Member, Out

from nearstep_hw.axi.cut import AxiCut
from nearstep_hw.axi.ram import AxiRam
from nearstep_hw.axi.signature import connect_channels
from nearstep_hw.boards.coarse_card import CoarseCard
from nearstep_hw.boards.device import BoardDevice, memory_port, outside_of, units_reset
from nearstep_hw.boards.identity import manifest_of
from nearstep_hw.boards.litedram import LiteDram, LiteDramCore, clock_ports, core_of
from nearstep_hw.boards.outside import pass_on
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.smartssd.card import SmartssdCard
from nearstep_hw.updater.unit_row import UnitMaker
from nearstep_spec.boards.coarse_board import CoarseBoardConfig
from nearstep_spec.boards.config import BoardConfig

NO_PADS: Mapping[str, IOPort] = MappingProxyType({})


class BoardTop(wiring.Component):
    """`BoardDevice` with a memory: the same on a board and in simulation.

    Parameters
    ----------
    pads : pads of the DRAM, by name in `PADS`; none with block RAM.
    unit : see `SmartssdCard`.

    Members
    -------
    rx, tx : the line, idle high.
    o_memory_ready : memory is ready.
    others : clock ports of a memory that generates its clock, see `LiteDram`; ports of the card,
        see `BoardDevice`.

    Raises
    ------
    LiteDramError : a package that makes the memory controller is missing, or fails.
    """

    def __init__(
        self,
        config: BoardConfig | CoarseBoardConfig,
        *,
        pads: Mapping[str, IOPort] = NO_PADS,
        unit: UnitMaker | None = FunctionalUnit,
    ) -> None:
        board = config.described
        card: SmartssdCard | CoarseCard
        if isinstance(config, CoarseBoardConfig):
            card = CoarseCard(config.device)
        else:
            card = SmartssdCard(config.card, unit=unit)
        widths, id_width = memory_port(card)
        widths["id_width"] = id_width
        self.core: LiteDramCore | None = None
        if config.memory == "dram":
            options = {name: widths[name] for name in ("data_width", "id_width")}
            self.core = core_of(board, **options)
        self.device = BoardDevice(config, manifest_of(config, self.core), card)
        self.memory: AxiRam | LiteDram
        if self.core is None:
            self.memory = AxiRam(memory_bytes=config.memory_bytes, **widths)
            self.through: dict[str, Member] = {}
        else:
            self.memory = LiteDram(board, self.core, pads, **widths)
            self.through = clock_ports(board)
        self.outside = {**outside_of(card), **units_reset(card)}
        super().__init__(
            {
                "rx": In(1, init=1),
                "tx": Out(1, init=1),
                "o_memory_ready": Out(1),
                **self.through,
                **self.outside,
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.device = device = self.device
        m.submodules.memory = memory = self.memory
        registers = device.wishbone

        m.d.comb += [
            device.rx.eq(self.rx),
            self.tx.eq(device.tx),
            self.o_memory_ready.eq(device.o_memory_ready),
        ]
        if isinstance(memory, LiteDram):
            # LiteDRAM's `ready` is late in its cycle.
            m.submodules.cut = cut = AxiCut(device.m_axi.signature, waits=True)
            connect_channels(m, device.m_axi, cut.s_axi)
            connect_channels(m, cut.m_axi, memory.s_axi)
            wiring.connect(m, registers, memory.wishbone)
            m.d.comb += device.i_memory_ready.eq(memory.o_ready)
        else:
            wiring.connect(m, device.m_axi, memory.s_axi)
            m.d.comb += [
                device.i_memory_ready.eq(1),
                registers.err.eq(registers.cyc & registers.stb),  # no registers
            ]
        pass_on(m, self.through, memory, self)
        pass_on(m, self.outside, device, self)
        return m
