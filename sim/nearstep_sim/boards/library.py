"""The library of a simulated board."""

from __future__ import annotations

from pathlib import Path

from amaranth import IOPort
from amaranth.hdl._ir import PortDirection

from nearstep_hw.boards.litedram import BOTH_WAYS, PADS
from nearstep_hw.boards.top import BoardTop
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.unit_row import UnitMaker
from nearstep_hw.verilog import to_verilog
from nearstep_sim.updater.library import device_library
from nearstep_sim.verilate.build import Model, verilate_library, verilog_of
from nearstep_spec.boards.coarse_board import CoarseBoardConfig
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.codec import digest

HARNESS = Path(__file__).with_name("board.cpp")
RING = Path(__file__).with_name("ring.cpp")
CELLS = Path(__file__).with_name("cells.v")
TOP = "board_top"


def board_verilog(
    config: BoardConfig | CoarseBoardConfig, *, unit: UnitMaker | None = FunctionalUnit
) -> str:
    """Return the Verilog of `BoardTop` of a bitstream, with the cells of its pads.

    Parameters
    ----------
    unit : makes a functional unit of an updater; None: the units are outside.
    """
    if config.memory == "blockram":
        return to_verilog(BoardTop(config, unit=unit), TOP)
    board = config.described
    widths = {"a": board.row_bits, "ba": board.bank_bits, "dm": board.memory_bits // 8}
    widths["dq"] = board.memory_bits
    pads = {name: IOPort(widths.get(name, 1), name=f"sdram_{name}") for name in PADS["sdr"]}
    ways = {True: PortDirection.Inout, False: PortDirection.Output}
    top = BoardTop(config, pads=pads, unit=unit)
    assert top.core is not None
    text = to_verilog(
        top, TOP, pads={pad.name: (pad, ways[name in BOTH_WAYS]) for name, pad in pads.items()}
    )
    return text + top.core.verilog + CELLS.read_text(encoding="utf-8")


def board_library(config: BoardConfig, *, native: bool = False) -> Path:
    """The shared library of `board.cpp` for a configuration.

    Parameters
    ----------
    native : the functional units are the C++ kernel, not RTL.
    """
    unit = None if native else FunctionalUnit
    verilog = verilog_of(
        f"board native={native} {digest(config)}",
        lambda: board_verilog(config, unit=unit),
        sources=(CELLS,),
    )
    model = Model(top=TOP, verilog=verilog, prefix="Vshell", flags=("--pins-inout-enables",))
    defines = {
        "BOARD_HAS_SDRAM": int(config.memory == "dram"),
        "BOARD_HAS_NATIVE_UNITS": int(native),
    }
    if not native:
        return verilate_library("board", [model], [HARNESS], defines=defines)
    kernel = config.card.kernel
    return device_library(
        "board_native",
        model,
        [HARNESS],
        kernel,
        trace=False,
        pairs_clock=bool(kernel.compression),
        defines=defines,
    )


def ring_library(config: CoarseBoardConfig) -> Path:
    """Build the shared library of `ring.cpp` for a configuration: one model, an object for each
    board.
    """
    verilog = verilog_of(f"coarse board {digest(config)}", lambda: board_verilog(config))
    return verilate_library(
        "board_ring", [Model(top=TOP, verilog=verilog, prefix="Vboard")], [RING]
    )
