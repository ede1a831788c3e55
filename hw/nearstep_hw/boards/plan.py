"""Inputs of the tool flow for the bitstream of a board."""

import sysconfig
from importlib import import_module
from pathlib import Path
from typing import Any

from amaranth.build import Attrs, Pins, Platform, Resource, Subsignal
from amaranth.build.run import BuildPlan
from amaranth_boards.resources import UARTResource

import nearstep_hw
import nearstep_spec
from nearstep_hw.boards.ecp5 import Ecp5Board
from nearstep_hw.boards.tool_options import ROUTING, SYNTHESIS
from nearstep_spec.boards.board import Board
from nearstep_spec.boards.coarse_board import CoarseBoardConfig
from nearstep_spec.boards.config import BoardConfig

__all__ = ["NAME", "plan", "platform_of"]

NAME = "top"
"""Name of the design and of the plan's files: `top.il`, `build_top.sh`, `top.bit`."""

CONNECTOR = ("io", 0)
"""Connector with the pins of `Board.line`."""

LINKS = ("gpio", 0)
"""Connector with the pins of `Board.links`."""


def platform_of(board: Board) -> Platform:
    """Return a platform of amaranth-boards with the serial line as its first UART, and the pins
    between boards as resources `link`, pulled down for a defined level without a cable.
    """
    module, _, name = board.platform.partition(":")
    platform: Platform = getattr(import_module(module), name)()
    if board.line is not None:
        rx, tx = board.line
        attributes = Attrs(IO_TYPE="LVCMOS33")
        platform.add_resources([UARTResource(0, rx=rx, tx=tx, conn=CONNECTOR, attrs=attributes)])
    for number, (driven, read) in enumerate(board.links):
        platform.add_resources(
            [
                Resource(
                    "link",
                    number,
                    Subsignal("o", Pins(driven, dir="o", conn=LINKS), Attrs(SLEWRATE="SLOW")),
                    Subsignal("i", Pins(read, dir="i", conn=LINKS), Attrs(PULLMODE="DOWN")),
                    Attrs(IO_TYPE="LVCMOS33"),
                )
            ]
        )
    return platform


def plan(config: BoardConfig | CoarseBoardConfig, *, seed: int = 1, **overrides: Any) -> BuildPlan:
    """Return files and script of the tool flow, deterministic for a configuration and tools.

    Parameters
    ----------
    seed : of the placement.
    overrides : of the platform: `synth_opts`, `nextpnr_opts` (which the seed is added to), ...
    """
    settings = {"synth_opts": SYNTHESIS, "nextpnr_opts": ROUTING} | overrides
    settings["nextpnr_opts"] += f" --seed {seed}"
    platform = platform_of(config.described)
    made: BuildPlan = platform.build(Ecp5Board(config), name=NAME, do_build=False, **settings)
    for name, content in made.files.items():
        if isinstance(content, str):
            made.files[name] = _without_folders(content)
    return made


def _without_folders(text: str) -> str:
    """Replace paths of sources by paths relative to their packages."""
    folders = [Path(package.__path__[0]).parent for package in (nearstep_hw, nearstep_spec)]
    paths = sysconfig.get_paths()
    for folder in (*map(str, folders), paths["purelib"], paths["platlib"], paths["stdlib"]):
        text = text.replace(f"{folder}/", "")
    return text
