"""Millions of vectors through a Verilated floating-point unit, compared with the golden model."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearstep_hw.fp.format import FLAG_NAMES
from nearstep_hw.fp.unit import FpUnit, Operation
from nearstep_sim.build import Model, to_verilog, verilate_library, verilog_of
from nearstep_sim.golden import fp

__all__ = ["LatencyError", "MismatchError", "UnitBench", "check", "golden"]

Bits = NDArray[np.unsignedinteger]


class LatencyError(AssertionError):
    """``o_valid`` differed from ``i_valid`` of ``latency`` cycles before; holds the cycle."""

    def __init__(self, name: str, latency: int, cycle: int) -> None:
        self.cycle = cycle
        super().__init__(
            f"{name}: o_valid at cycle {cycle} is not i_valid of {latency} cycles before"
        )


class MismatchError(AssertionError):
    """A unit and the golden model differ; the first case, and how many there are."""

    def __init__(
        self,
        name: str,
        count: int,
        total: int,
        operands: Sequence[int],
        expected: tuple[int, int | None],
        actual: tuple[int, int | None],
    ) -> None:
        self.count = count
        self.operands = tuple(operands)
        self.expected = expected
        self.actual = actual
        given = ", ".join(f"{x:#x}" for x in operands)
        super().__init__(
            f"{name}: {count} of {total} vectors differ; the first is {name}({given}): "
            f"expected {_describe(*expected)}, got {_describe(*actual)}"
        )


def _describe(z: int, flags: int | None) -> str:
    if flags is None:
        return f"{z:#x}"
    names = [name for k, name in enumerate(FLAG_NAMES) if flags >> k & 1]
    return f"{z:#x} [{' '.join(names) or 'no flags'}]"


@dataclass(frozen=True)
class UnitBench:
    """One unit, Verilated.

    Parameters
    ----------
    operation : Operation
    depth : int, optional
        Latency; the operation's own if left out.
    flags : bool
        Whether the unit has ``o_flags``.
    """

    operation: Operation
    depth: int | None = None
    flags: bool = True

    @property
    def latency(self) -> int:
        return self.operation.depth if self.depth is None else self.depth

    def build(self) -> Path:
        """The shared library, from the cache or built now."""
        name = self.operation.name
        verilog = verilog_of(
            f"fp unit {name} {self.latency} {self.flags}",
            lambda: to_verilog(FpUnit(self.operation, depth=self.latency, flags=self.flags), name),
        )
        return verilate_library(
            f"{name}-{self.latency}",
            [Model(top=name, verilog=verilog, prefix="Vunit")],
            [Path(__file__).with_suffix(".cpp")],
            defines={"OPERANDS": self.operation.operands, "FLAGS": int(self.flags)},
        )

    def run(
        self, operands: Sequence[Bits], *, stall_seed: int = 0
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint8] | None]:
        """Results and flags (None without flags) of operations, in order.

        ``operands``: one array of patterns an operand. ``stall_seed`` other than 0 puts random idle
        cycles, with random operands, between the operations. Raises :class:`LatencyError`.
        """
        columns = [np.ascontiguousarray(x, dtype=np.uint32) for x in operands]
        if len(columns) != self.operation.operands or len({len(x) for x in columns}) != 1:
            raise ValueError(
                f"{self.operation.name} takes {self.operation.operands} arrays of equal length, "
                f"not arrays of {[len(x) for x in columns]}"
            )
        count = len(columns[0])
        z = np.zeros(count, dtype=np.uint32)
        flags = np.zeros(count, dtype=np.uint8)
        pointers = [x.ctypes.data for x in columns] + [None] * (3 - len(columns))
        function = ctypes.CDLL(str(self.build())).run_vectors
        function.restype = ctypes.c_int64
        function.argtypes = [
            ctypes.c_int64,
            *[ctypes.c_void_p] * 5,
            ctypes.c_int64,
            ctypes.c_uint64,
        ]
        cycles = function(
            count, *pointers, z.ctypes.data, flags.ctypes.data, self.latency, stall_seed
        )
        if cycles < 0:
            raise LatencyError(self.operation.name, self.latency, -1 - cycles)
        return z, flags if self.flags else None


def golden(operation: Operation, operands: Sequence[Bits]) -> tuple[Bits, NDArray[np.uint8]]:
    """Patterns and flags that the golden model gives."""
    if operation.kind == "convert":
        return fp.convert(operands[0], operation.source, operation.target)
    result: tuple[Bits, NDArray[np.uint8]] = getattr(fp, operation.kind)(
        *operands, operation.source
    )
    return result


def check(bench: UnitBench, operands: Sequence[Bits], *, stall_seed: int = 0) -> int:
    """Compares a unit with the golden model; returns how many vectors were compared.

    Raises :class:`MismatchError` with the first difference, or :class:`LatencyError`.
    """
    z, flags = bench.run(operands, stall_seed=stall_seed)
    expected_z, expected_flags = golden(bench.operation, operands)
    wrong = z != expected_z
    if flags is not None:
        wrong |= flags != expected_flags
    if wrong.any():
        k = int(np.argmax(wrong))
        raise MismatchError(
            bench.operation.name,
            int(wrong.sum()),
            len(z),
            [int(x[k]) for x in operands],
            (int(expected_z[k]), None if flags is None else int(expected_flags[k])),
            (int(z[k]), None if flags is None else int(flags[k])),
        )
    return len(z)
