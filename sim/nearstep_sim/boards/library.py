"""The library of a simulated board."""

from __future__ import annotations

from pathlib import Path

from amaranth import IOPort
from amaranth.hdl._ir import PortDirection

from nearstep_hw.boards.litedram import BOTH_WAYS, PADS
from nearstep_hw.boards.top import BoardTop
from nearstep_hw.verilog import to_verilog
from nearstep_sim.verilate.build import Model, verilate_library, verilog_of
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.codec import digest

HARNESS = Path(__file__).with_name("board.cpp")
CELLS = Path(__file__).with_name("cells.v")
TOP = "board_top"


def board_verilog(config: BoardConfig) -> str:
    """Verilog of `BoardTop`, as it is in a bitstream, with the cells at its pads."""
    if config.memory == "blockram":
        return to_verilog(BoardTop(config), TOP)
    board = config.described
    widths = {"a": board.row_bits, "ba": board.bank_bits, "dm": board.memory_bits // 8}
    widths["dq"] = board.memory_bits
    pads = {name: IOPort(widths.get(name, 1), name=f"sdram_{name}") for name in PADS["sdr"]}
    ways = {True: PortDirection.Inout, False: PortDirection.Output}
    top = BoardTop(config, pads=pads)
    assert top.core is not None
    text = to_verilog(
        top, TOP, pads={pad.name: (pad, ways[name in BOTH_WAYS]) for name, pad in pads.items()}
    )
    return text + top.core.verilog + CELLS.read_text(encoding="utf-8")


def board_library(config: BoardConfig) -> Path:
    """The shared library of `board.cpp` for a configuration."""
    verilog = verilog_of(f"board {digest(config)}", lambda: board_verilog(config), sources=(CELLS,))
    model = Model(top=TOP, verilog=verilog, prefix="Vboard", flags=("--pins-inout-enables",))
    defines = {"BOARD_HAS_SDRAM": int(config.memory == "dram")}
    return verilate_library("board", [model], [HARNESS], defines=defines)
