"""An Adam kernel on a DDR4 channel of its own, without host or arbiter: what `bench` measures."""

from amaranth import Cat, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearstep_hw.csr.axi_lite import AxiLiteSignature
from nearstep_hw.dram.controller import DramController
from nearstep_hw.updater.update_kernel import UpdateKernel
from nearstep_spec.rule.rule import Rule
from nearstep_spec.updater.config import UpdateKernelConfig

LATENCY = 78  # of the functional unit in the default order
WIDTH = 32


class StandInUnit(wiring.Component):
    """p ^ g, m + 1, v - 1, with the ports and the latency of a functional unit.

    Results identify their operands; their values do not affect the traffic on the bus.
    """

    def __init__(self, rule: Rule) -> None:
        super().__init__(
            {
                "i_en": In(1),
                "i_valid": In(1),
                **{f"i_{name}": In(WIDTH) for name in rule.arrays_in},
                **{f"s_{name}": In(WIDTH) for name in rule.scalars},
                **{f"s_{name}": In(1) for name in rule.switches},
                "o_valid": Out(1),
                **{f"o_{name}": Out(WIDTH) for name in rule.arrays_out},
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        depth = 1 << LATENCY.bit_length()
        m.submodules.delay = delay = Memory(shape=3 * WIDTH, depth=depth, init=[])
        write_port, read_port = delay.write_port(), delay.read_port()
        position = Signal(range(depth))
        valid = Signal(LATENCY)
        m.d.comb += [
            write_port.addr.eq(position),
            write_port.data.eq(
                Cat(self.i_p ^ self.i_g, (self.i_m + 1)[:WIDTH], (self.i_v - 1)[:WIDTH])
            ),
            write_port.en.eq(self.i_en),
            read_port.addr.eq(position - (LATENCY - 1)),
            read_port.en.eq(self.i_en),
            Cat(self.o_p, self.o_m, self.o_v).eq(read_port.data),
            self.o_valid.eq(valid[-1]),
        ]
        with m.If(self.i_en):
            m.d.sync += [position.eq(position + 1), valid.eq(Cat(self.i_valid, valid))]
        return m


class KernelOnChannel(wiring.Component):
    """The movers of an Adam kernel, with stand-in units, and a controller.

    Members
    -------
    s_axil : registers of the kernel.
    dfi, i_enable, o_idle, i_debt, o_debt : of the controller, as are those of the slots.
    """

    def __init__(self, config: UpdateKernelConfig, controller: DramController) -> None:
        self.kernel = UpdateKernel(config, unit=StandInUnit)
        self.controller = controller
        super().__init__(
            {
                "s_axil": In(AxiLiteSignature()),
                **{
                    name: member
                    for name, member in controller.signature.members.items()
                    if name != "s_axi"
                },
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.kernel = kernel = self.kernel
        m.submodules.controller = controller = self.controller
        wiring.connect(m, wiring.flipped(self.s_axil), kernel.s_axil)
        wiring.connect(m, kernel.m_axi, controller.s_axi)
        wiring.connect(m, controller.dfi, wiring.flipped(self.dfi))
        for name, member in self.signature.members.items():
            if name in ("s_axil", "dfi"):
                continue
            mine, its = getattr(self, name), getattr(controller, name)
            m.d.comb += mine.eq(its) if member.flow is Out else its.eq(mine)
        return m
