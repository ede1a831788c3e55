"""Forwarding of the ports of outside functional units."""

from collections.abc import Mapping

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Member


def pass_on(m: Module, ports: Mapping[str, Member], inner: object, outer: object) -> None:
    """Connect the ports of `outside_ports`, by name, of a submodule and of the component."""
    for name, member in ports.items():
        inside, outside = getattr(inner, name), getattr(outer, name)
        if member.is_signature:
            wiring.connect(m, inside, wiring.flipped(outside))
        elif member.flow is In:
            m.d.comb += inside.eq(outside)
        else:
            m.d.comb += outside.eq(inside)
