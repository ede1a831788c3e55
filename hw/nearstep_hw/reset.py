"""Registered reset."""

from amaranth import (
    ClockDomain,
    ClockSignal,
    Const,
    DomainRenamer,
    Elaboratable,
    Module,
    ResetSignal,
    Signal,
    Value,
)
from amaranth.lib import wiring


class RegisteredReset(wiring.Component):
    """Wraps a component, with the same ports, and resets it from a register, a cycle late.

    The component's reset depends on no input: a simulator need not reevaluate all registers when an
    input changes, and a long net is registered.

    *Timing*: as of the component; inputs are valid from the second cycle without reset on.

    Parameters
    ----------
    component : in the clock domain `sync`.
    """

    def __init__(self, component: wiring.Component) -> None:
        self.component = component
        super().__init__(component.signature)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        held = Signal(init=1, reset_less=True)
        m.domains.held = ClockDomain("held", local=True)
        m.d.sync += held.eq(ResetSignal())
        m.d.comb += [ClockSignal("held").eq(ClockSignal()), ResetSignal("held").eq(held)]
        m.submodules.component = DomainRenamer("held")(self.component)
        inner = self.component.signature.flatten(self.component)
        for (_, member, inside), (_, _, outside) in zip(
            inner, self.signature.flatten(self), strict=True
        ):
            to, source = (outside, inside) if member.flow is wiring.Out else (inside, outside)
            if not isinstance(to, Const):  # such as `ready` of a stream that never waits
                m.d.comb += Value.cast(to).eq(Value.cast(source))
        return m
