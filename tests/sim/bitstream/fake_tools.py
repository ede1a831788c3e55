"""Programs in place of Yosys, nextpnr and ecppack, which write what a test gives them."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearstep_sim.bitstream.tools import TOOLS

PROGRAM = """#!{python} -IS
import json, pathlib, sys
name, given = {name!r}, json.loads(pathlib.Path({case!r}).read_text())
if sys.argv[1:] in (["--version"], ["-V"]):
    print("fake", name, "1.0")
    sys.exit()
options = dict(zip(sys.argv[1:], sys.argv[2:]))
seed = options.get("--seed", "")
given = given.get(name, {{}})
given = given.get(seed, given)
for option, text in given.get("files", {{}}).items():
    pathlib.Path(options[option]).write_text(text)
print(given.get("said", ""), flush=True)
sys.exit(given.get("status", 0))
"""
CHIP = "lfe5u_85f"


def path_step(kind: str, delay: float, start: str, end: str, **more: object) -> dict[str, Any]:
    """A step of a path in a report of nextpnr."""
    ends = {
        "from": {"cell": start, "loc": [3, 4], "port": "Q"},
        "to": {"cell": end, "loc": [5, 4], "port": "D"},
    }
    return {"type": kind, "delay": delay, **ends, **more}


STEPS = [
    path_step("clk-to-q", 0.5, "unit.a_FF", "unit.a_FF"),
    path_step(
        "routing", 1.0, "unit.a_FF", "unit.lut", net="unit.a", sources=["nearstep_hw/fp/add.py:7"]
    ),
    path_step("logic", 0.25, "unit.lut", "unit.lut"),
    path_step("routing", 2.0, "unit.lut", "b_FF", net="b_DI", sources=["/share/cells.v:1.2-3"]),
    path_step("setup", 0.0, "b_FF", "b_FF"),
]


def raw_report(
    achieved: float, needed: float = 100.0, used: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """A report of nextpnr with one clock of the design and one of the link."""
    clock = "posedge $glbnet$clk"
    cells = {"TRELLIS_COMB": 5, "TRELLIS_FF": 2, "DP16KD": 0, **(used or {})}
    return {
        "fmax": {
            "$glbnet$clk": {"achieved": achieved, "constraint": needed},
            "link": {"achieved": 200.0, "constraint": 12.0},
        },
        "critical_paths": [
            {"from": clock, "to": clock, "path": STEPS[:2]},
            {"from": clock, "to": clock, "path": STEPS},
            {"from": clock, "to": "<async>", "path": [*STEPS, *STEPS]},
        ],
        "utilization": {cell: {"used": n, "available": 208} for cell, n in cells.items()},
    }


def placed_netlist() -> dict[str, Any]:
    """A netlist of nextpnr with cells of two blocks, and a net."""
    places = {
        "unit.a_FF": ("TRELLIS_FF", "X3/Y4/SLICEA.FF0"),
        "unit.lut": ("TRELLIS_COMB", "X5/Y4/SLICED.K1"),
        "unit.memory": ("DP16KD", "X7/Y22/EBR0"),
        "b_FF": ("TRELLIS_FF", "X5/Y4/SLICEB.FF1"),
        "write": ("TRELLIS_RAMW", "X6/Y4/SLICEC.RAMW"),
        "unplaced": ("TRELLIS_FF", ""),
    }
    cells = {
        name: {"type": kind, "attributes": {"NEXTPNR_BEL": bel, "src": f"{name}.py:1"}}
        for name, (kind, bel) in places.items()
    }
    routing = "X3/Y4/Q0;;1;X4/Y4/H02;X4/Y4/a->b;1;X5/Y4/D7;X5/Y4/b->c;1"
    nets = {"a": {"attributes": {"ROUTING": routing}}, "open": {"attributes": {}}}
    module = {"settings": {"arch.type": CHIP}, "cells": cells, "netnames": nets}
    return {"modules": {"top": module}}


def place_and_route(achieved: float, **more: Any) -> dict[str, Any]:
    """What nextpnr does: `more` are `said` and `status`."""
    files = {
        "--report": json.dumps(raw_report(achieved)),
        "--write": json.dumps(placed_netlist()),
        "--textcfg": f".device LFE5U-85F {achieved}",
        "--log": "Info: Packing\nWarning: net 'x' does not exist\n",
    }
    return {"files": files, **more}


def install(folder: Path, environment: Any, nextpnr: Mapping[str, Any]) -> None:
    """Put programs into a folder, and name them in the environment.

    Parameters
    ----------
    folder
    environment : monkeypatch of a test.
    nextpnr : what it does, or that by seed.
    """
    folder.mkdir(exist_ok=True)
    case = folder / "case.json"
    packed = {"files": {"--bit": "bits", "--svf": "svf"}}
    yosys = {"files": {"-l": "1. Executing SYNTH_ECP5 pass.\n"}}
    case.write_text(json.dumps({"yosys": yosys, "nextpnr-ecp5": nextpnr, "ecppack": packed}))
    for tool in TOOLS.values():
        path = folder / tool.name
        path.write_text(PROGRAM.format(python=sys.executable, name=tool.name, case=str(case)))
        path.chmod(0o755)
        environment.setenv(tool.variable, str(path))
