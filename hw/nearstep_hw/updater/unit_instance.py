"""A functional unit that is a Verilog module of its own."""

from amaranth import ClockSignal, Elaboratable, Instance, ResetSignal
from amaranth.lib import wiring
from amaranth.lib.wiring import In

from nearstep_hw.rule.rtl import unit_ports
from nearstep_spec.rule.rule import Rule

UNIT_MODULE = "adam_fu"


class UnitInstance(wiring.Component):
    """Instance of a functional unit that is converted separately, once for all units.

    The Verilog text of the module must be appended. Amaranth's simulator cannot simulate the
    instance.

    *Timing*: that of the unit.

    Parameters
    ----------
    rule : rule of the unit.
    module : name of its module.

    Members
    -------
    i_reset : resets the unit, as `rst` does.
    others : see `FunctionalUnit`.
    """

    def __init__(self, rule: Rule, *, module: str = UNIT_MODULE) -> None:
        self.module = module
        super().__init__({"i_reset": In(1), **unit_ports(rule)})

    def elaborate(self, platform: object) -> Elaboratable:
        ports = {
            f"{'i' if member.flow is In else 'o'}_{name}": getattr(self, name)
            for name, member in self.signature.members.items()
            if name != "i_reset"
        }
        return Instance(
            self.module, i_clk=ClockSignal(), i_rst=ResetSignal() | self.i_reset, **ports
        )
