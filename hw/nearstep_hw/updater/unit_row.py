"""The functional units of a kernel, inside or outside of a top."""

from collections.abc import Callable

from amaranth import ClockSignal, Elaboratable, Module, ResetInserter, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Member, Out

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.kernel_core import KernelCore, pairs_clock, unit_bank
from nearstep_hw.updater.unit_bank import ELEMENT_WIDTH
from nearstep_spec.rule.rule import Rule
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import update_rule

UnitMaker = Callable[[Rule], wiring.Component]
"""Makes a functional unit for the rule of a kernel: any component with the ports of one."""


class UnitRow(wiring.Component):
    """The functional units of a kernel, in lockstep.

    *Timing*: that of the unit.

    Parameters
    ----------
    unit : see `UnitMaker`. A port `i_reset`, if there is one, resets the unit.

    Members
    -------
    fu : the port to the kernel.
    i_reset : clears the pipelines.
    """

    def __init__(
        self,
        config: UpdateKernelConfig,
        unit: UnitMaker = FunctionalUnit,
    ) -> None:
        self.config = config
        self.unit = unit
        super().__init__({"fu": In(unit_bank(config)), "i_reset": In(1)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        fu = self.fu
        rule = update_rule(self.config)
        plain = self.unit is FunctionalUnit
        options = {"technology": self.config.technology} if plain else {}
        for index in range(self.config.units):
            unit = self.unit(rule, **options)
            m.submodules[f"unit{index}"] = ResetInserter(self.i_reset)(unit)
            if "i_reset" in unit.signature.members:
                m.d.comb += unit.i_reset.eq(self.i_reset)
            lane = slice(ELEMENT_WIDTH * index, ELEMENT_WIDTH * (index + 1))
            m.d.comb += [unit.i_en.eq(fu.i_en), unit.i_valid.eq(fu.i_valid)]
            for name in (*rule.scalars, *rule.switches):
                m.d.comb += getattr(unit, f"s_{name}").eq(getattr(fu, f"s_{name}"))
            for name in rule.arrays_in:
                m.d.comb += getattr(unit, f"i_{name}").eq(getattr(fu, f"i_{name}")[lane])
            for name in rule.arrays_out:
                m.d.comb += getattr(fu, f"o_{name}")[lane].eq(getattr(unit, f"o_{name}"))
            if index == 0:
                m.d.comb += fu.o_valid.eq(unit.o_valid)
        return m


def outside_ports(config: UpdateKernelConfig, unit: UnitMaker | None) -> dict[str, Member]:
    """Return the ports of a top for outside functional units and the clock of pairs; none if the
    units are inside.
    """
    return {"fu": Out(unit_bank(config)), **pairs_clock(config)} if unit is None else {}


def connect_units(
    m: Module,
    top: wiring.Component,
    shell: KernelCore,
    unit: UnitMaker | None,
    *,
    reset: Value | None = None,
) -> None:
    """Connect the kernel of a top to its functional units, or to ports for them.

    Parameters
    ----------
    m, top : module and component of the top, with `outside_ports`.
    shell : the kernel.
    unit : makes a unit; None: the units are outside.
    reset : resets the units that are inside.
    """
    config = shell.config
    if unit is None:
        wiring.connect(m, shell.fu, wiring.flipped(top.fu))
    else:
        m.submodules.units = units = UnitRow(config, unit)
        wiring.connect(m, shell.fu, units.fu)
        if reset is not None:
            m.d.comb += units.i_reset.eq(reset)
    if not config.compression:
        return
    if "i_pairs_clk" in top.signature.members:
        m.d.comb += [
            shell.i_pairs_clk.eq(top.i_pairs_clk),
            top.o_pairs_enable.eq(shell.o_pairs_enable),
        ]
    else:
        m.d.comb += shell.i_pairs_clk.eq(ClockSignal())
