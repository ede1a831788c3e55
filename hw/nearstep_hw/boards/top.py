"""All of a board's design but its clock and its pads."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.ram import AxiRam
from nearstep_hw.boards.device import BoardDevice, manifest_of
from nearstep_hw.boards.outside import pass_on
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.unit_row import UnitMaker, outside_ports
from nearstep_spec.boards.config import BoardConfig


class BoardTop(wiring.Component):
    """`BoardDevice` with its memory: the same on a board and in simulation.

    Parameters
    ----------
    config : of the board.
    unit : makes a functional unit, see `SmartssdCard`.

    Members
    -------
    rx, tx : the line, idle high.
    o_memory_ready : memory can be used.
    o_active : a request is being carried out or answered.
    others : ports of the functional units, if they are outside: see `SmartssdCard`.
    """

    def __init__(self, config: BoardConfig, *, unit: UnitMaker | None = FunctionalUnit) -> None:
        kernel = config.card.kernel
        self.device = BoardDevice(config, manifest_of(config), unit=unit)
        self.memory = AxiRam(
            memory_bytes=config.memory_bytes,
            address_width=kernel.address_width,
            data_width=kernel.data_width,
            id_width=len(self.device.m_axi.ar.payload.id),
        )
        self.outside = outside_ports(kernel, unit)
        super().__init__(
            {
                "rx": In(1, init=1),
                "tx": Out(1, init=1),
                "o_memory_ready": Out(1),
                "o_active": Out(1),
                **self.outside,
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.device = device = self.device
        m.submodules.memory = memory = self.memory
        wiring.connect(m, device.m_axi, memory.s_axi)
        registers = device.wishbone
        m.d.comb += [
            device.rx.eq(self.rx),
            self.tx.eq(device.tx),
            self.o_memory_ready.eq(device.o_memory_ready),
            self.o_active.eq(device.o_active),
            device.i_memory_ready.eq(1),
            registers.err.eq(registers.cyc & registers.stb),  # nothing is there
        ]
        pass_on(m, self.outside, device, self)
        return m
