"""Constraint stubs: a clock, and delays to fill in."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

__all__ = ["PARTS", "Part", "constraints"]

Port = tuple[str, str, int]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A chip for which stubs are written.

    Attributes
    ----------
    name : short, in the names of files.
    part : Vivado's name.
    source : use and source of the part.
    clock_hz : clock of the fabric.
    clock_source : source of the clock frequency.
    """

    name: str
    part: str
    source: str
    clock_hz: int
    clock_source: str


PARTS = (
    Part(
        name="ku15p",
        part="xcku15p-ffva1156-2LV-e",
        source="Samsung SmartSSD (Smart-Infinity, section VII-A: Kintex UltraScale+ KU15P). The "
        "paper names neither package nor speed grade; these are of public designs for that card.",
        clock_hz=250_000_000,
        clock_source="user clock of a PCIe Gen3 x4 block with 128 bits; the paper names no clock",
    ),
    Part(
        name="zu19eg",
        part="xczu19eg-ffvb1517-2LV-e",
        source="AXDIMM (AXDIMM paper, Table 1).",
        clock_hz=200_000_000,
        clock_source="the kernel's side of the DIMM's PHY (AXDIMM paper, section 3.1)",
    ),
)
"""The FPGAs of the papers' devices."""


def constraints(top: str, ports: Sequence[Port], part: Part) -> str:
    """Return the constraints of `top` for a part as XDC.

    The clock, and lines to fill in for the delays of each group of inputs and outputs; no pins,
    since no board is chosen.

    Parameters
    ----------
    ports : name, direction (`input` or `output`) and width of each, as of `flat_ports`.
    """
    lines = [
        f"# {top} on {part.part}",
        f"# {part.source}",
        "# A stub: nobody has chosen pins or I/O standards, and the delays are to be filled in.",
        "# Without them it fits a synthesis out of context.",
        "",
        f"# {part.clock_hz / 1e6:g} MHz: {part.clock_source}",
        f"create_clock -name clk -period {1e9 / part.clock_hz:.3f} [get_ports clk]",
        "",
        "# rst is synchronous to clk and high for at least one cycle.",
    ]
    for direction in ("input", "output"):
        named = [name for name, way, _ in ports if way == direction and name != "clk"]
        for group, names in groupby(sorted(named, key=_group), key=_group):
            pattern = f"{group}__*" if any("__" in name for name in names) else group
            for limit in ("max", "min"):
                lines.append(
                    f"# set_{direction}_delay -clock clk -{limit} <ns> [get_ports {{{pattern}}}]"
                )
    return "\n".join(lines) + "\n"


def _group(name: str) -> str:
    """Return the interface of a port: `s_axil` of `s_axil__awaddr`; else the port itself."""
    return name.partition("__")[0]
