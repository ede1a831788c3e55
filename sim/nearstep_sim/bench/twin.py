"""Comparison of two texts of one block, Verilated, with the same random inputs."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nearstep_sim.verilate.abi import load
from nearstep_sim.verilate.build import Model, stored, verilate_library

__all__ = ["TwinError", "TwinRun", "run_twins"]

Port = tuple[str, str, int]
HARNESS = Path(__file__).with_suffix(".cpp")


class TwinError(AssertionError):
    """The two differ: in which output, in which cycle, and how."""

    def __init__(self, port: str, cycle: int, expected: int, actual: int) -> None:
        self.port = port
        self.cycle = cycle
        self.expected = expected
        self.actual = actual
        super().__init__(f"{port} in cycle {cycle}: expected {expected:#x}, got {actual:#x}")


@dataclass(frozen=True)
class TwinRun:
    """Amount of the comparison.

    Attributes
    ----------
    cycles : clock cycles.
    compared : values of outputs, two a cycle and output.
    changed : outputs that changed at all.
    """

    cycles: int
    compared: int
    changed: int


def run_twins(
    top: str,
    first: Path,
    second: Path,
    ports: Sequence[Port],
    *,
    cycles: int,
    seed: int,
    cxxflags: Sequence[str] = ("-O1",),
) -> TwinRun:
    """Drive both with the same random inputs and occasional resets, and compare all outputs.

    For 64 cycles at a time every input has a likelihood of ones, which may be 0 or 1: queues fill
    and empty, handshakes stall.

    Parameters
    ----------
    top : module in both texts.
    first, second : Verilog; the first gives the expected outputs.
    ports : as of `nearstep_hw.verilog.flat_ports`; one clock and its reset, `clk` and `rst`.
    cycles : clock cycles.
    seed : of the inputs.
    cxxflags : of the models.

    Raises
    ------
    TwinError : of the first difference.
    """
    kinds = {"INPUT": "input", "OUTPUT": "output"}
    named = {
        macro: [p for p in ports if p[1] == way and p[0] not in ("clk", "rst")]
        for macro, way in kinds.items()
    }
    lines = ["#pragma once"]
    for macro, each in named.items():
        rows = [
            f"{macro}({name.replace('__', '___05F')}, {number}, {width})"
            for number, (name, _, width) in enumerate(each)
        ]
        lines += [f"#define {macro}S {' '.join(rows)}", f"#define {macro}_COUNT {len(rows)}"]
    header = stored("design", {"ports.hpp": "\n".join(lines) + "\n", "twin.cpp": _harness()})
    library = verilate_library(
        f"twin_{top}",
        [
            Model(top=top, verilog=first, prefix="Vfirst"),
            Model(top=top, verilog=second, prefix="Vsecond"),
        ],
        [header / "twin.cpp"],
        cxxflags=cxxflags,
    )
    words = max(width for _, _, width in ports) // 32 + 2
    report = (ctypes.c_uint64 * 4)()
    expected, actual = (ctypes.c_uint32 * words)(), (ctypes.c_uint32 * words)()
    compared = load(library, HARNESS).twin_run(seed, cycles, report, expected, actual)
    if report[1]:
        values = [int.from_bytes(bytes(each), "little") for each in (expected, actual)]
        raise TwinError(named["OUTPUT"][report[3]][0], report[2], values[0], values[1])
    return TwinRun(cycles, compared, report[0])


def _harness() -> str:
    """The harness; the header of the ports is written beside its copy."""
    return HARNESS.read_text(encoding="utf-8")
