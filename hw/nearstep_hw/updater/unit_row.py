"""The functional units of a kernel, side by side."""

from collections.abc import Callable

from amaranth import Elaboratable, Module, ResetInserter
from amaranth.lib import wiring
from amaranth.lib.wiring import In

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.shell import unit_bank
from nearstep_hw.updater.unit_bank import ELEMENT_WIDTH
from nearstep_spec.rule.rule import Rule
from nearstep_spec.updater.config import AdamKernelConfig
from nearstep_spec.updater.registers import update_rule


class UnitRow(wiring.Component):
    """As many functional units as the kernel has, all in step.

    *Timing*: that of the unit.

    Parameters
    ----------
    config : of the kernel.
    unit : makes a functional unit for the rule; any component with its ports will do. One that
        has a port `i_reset` as well is reset by it.

    Members
    -------
    fu : the port that the kernel sees.
    i_reset : forgets what is in the pipelines.
    """

    def __init__(
        self,
        config: AdamKernelConfig,
        unit: Callable[[Rule], wiring.Component] = FunctionalUnit,
    ) -> None:
        self.config = config
        self.unit = unit
        super().__init__({"fu": In(unit_bank(config)), "i_reset": In(1)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        fu = self.fu
        rule = update_rule(self.config)
        for index in range(self.config.units):
            unit = self.unit(rule)
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
