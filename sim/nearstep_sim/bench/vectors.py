"""Millions of vectors through Verilated floating-point units, compared with the golden model."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_hw.fp.unit import FpOperation
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench import fp_bank
from nearstep_sim.bench.fp_bank import FpBank, Variant
from nearstep_sim.golden import fp
from nearstep_sim.verilate.abi import load
from nearstep_sim.verilate.build import Model, verilate_library, verilog_of
from nearstep_spec.fp import FLAG_NAMES

__all__ = [
    "LatencyError",
    "MismatchError",
    "Outcome",
    "VectorBench",
    "check",
    "compare",
    "golden",
]

Bits = NDArray[np.unsignedinteger]
HARNESS = Path(__file__).with_suffix(".cpp")


class LatencyError(AssertionError):
    """`o_valid` differed from the delayed `i_valid`; has the cycle."""

    def __init__(self, unit: str, cycle: int) -> None:
        self.cycle = cycle
        super().__init__(f"{unit}: o_valid at cycle {cycle} is not i_valid of a latency before")


class MismatchError(AssertionError):
    """A unit and the golden model differ: the first case, and the number of cases."""

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


@dataclass(frozen=True)
class Outcome:
    """Results of a unit: patterns, and flags (None without flags)."""

    z: NDArray[np.uint32]
    flags: NDArray[np.uint8] | None


def _describe(z: int, flags: int | None) -> str:
    if flags is None:
        return f"{z:#x}"
    names = [name for k, name in enumerate(FLAG_NAMES) if flags >> k & 1]
    return f"{z:#x} [{' '.join(names) or 'no flags'}]"


class VectorBench:
    """A bank of units, Verilated, that takes arrays of vectors.

    Parameters
    ----------
    synthesis : converts Verilog and the name of its top to a netlist, which is simulated instead.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        synthesis: Callable[[Path, str], Path] | None = None,
    ) -> None:
        self.variants = tuple(variants)
        self._synthesis = synthesis

    def build(self) -> Path:
        """The shared library, from the cache or built now."""
        key = " ".join(v.label for v in self.variants)
        verilog = verilog_of(
            f"fp_bank {key}",
            lambda: to_verilog(FpBank(self.variants), "fp_bank"),
            sources=[Path(fp_bank.__file__)],
        )
        if self._synthesis is not None:
            verilog = self._synthesis(verilog, "fp_bank")
        units = [
            f"UNIT({k},{v.operation.operands},{int(v.flags)})" for k, v in enumerate(self.variants)
        ]
        return verilate_library(
            "fp_bank",
            [Model(top="fp_bank", verilog=verilog, prefix="Vbank")],
            [HARNESS],
            cxxflags=["-O1"],  # a bank compiles for longer than it runs
            defines={"UNITS": " ".join(units)},
        )

    def run(self, vectors: Sequence[Sequence[Bits]], *, stall_seed: int = 0) -> list[Outcome]:
        """Results of each unit's operations, in order.

        `vectors[k]` holds one array of patterns for each operand of unit k. `stall_seed` other
        than 0 puts random idle cycles, with random operands, between the operations.

        Raises
        ------
        LatencyError
        """
        columns = [self._columns(v, each) for v, each in zip(self.variants, vectors, strict=True)]
        counts = [len(each[0]) for each in columns]
        z = [np.zeros(count, dtype=np.uint32) for count in counts]
        flags = [np.zeros(count, dtype=np.uint8) for count in counts]
        operands = [
            _pointers([each[k] if k < len(each) else None for each in columns]) for k in range(3)
        ]
        latencies = [v.latency for v in self.variants]
        faulty = ctypes.c_int64(-1)
        cycles = load(self.build(), HARNESS).run_vectors(
            (ctypes.c_int64 * len(counts))(*counts),
            *operands,
            _pointers(z),
            _pointers(flags),
            (ctypes.c_int64 * len(counts))(*latencies),
            stall_seed,
            ctypes.byref(faulty),
        )
        if cycles < 0:
            raise LatencyError(self.variants[faulty.value].label, -1 - cycles)
        return [Outcome(z[k], flags[k] if v.flags else None) for k, v in enumerate(self.variants)]

    def _columns(self, variant: Variant, operands: Sequence[Bits]) -> list[NDArray[np.uint32]]:
        columns = [np.ascontiguousarray(x, dtype=np.uint32) for x in operands]
        count = variant.operation.operands
        if len(columns) != count or len({len(x) for x in columns}) != 1:
            raise ValueError(
                f"{variant.operation.name} takes {count} arrays of equal length, "
                f"not arrays of {[len(x) for x in columns]}"
            )
        return columns


def _pointers(arrays: Sequence[NDArray[Any] | None]) -> ctypes.Array[ctypes.c_void_p]:
    pointers = [None if array is None else array.ctypes.data for array in arrays]
    return (ctypes.c_void_p * len(pointers))(*pointers)


def golden(operation: FpOperation, operands: Sequence[Bits]) -> tuple[Bits, NDArray[np.uint8]]:
    """Return patterns and flags of the golden model."""
    if operation.kind == "convert":
        return fp.convert(operands[0], operation.source, operation.target)
    result: tuple[Bits, NDArray[np.uint8]] = getattr(fp, operation.kind)(
        *operands, operation.source
    )
    return result


def compare(variant: Variant, operands: Sequence[Bits], outcome: Outcome) -> int:
    """Compare a unit's results with the golden model's; return how many there were.

    Raises
    ------
    MismatchError : of the first difference.
    """
    expected_z, expected_flags = golden(variant.operation, operands)
    wrong = outcome.z != expected_z
    if outcome.flags is not None:
        wrong |= outcome.flags != expected_flags
    if wrong.any():
        k = int(np.argmax(wrong))
        with_flags = outcome.flags is not None
        raise MismatchError(
            variant.label,
            int(wrong.sum()),
            len(wrong),
            [int(x[k]) for x in operands],
            (int(expected_z[k]), int(expected_flags[k]) if with_flags else None),
            (int(outcome.z[k]), int(outcome.flags[k]) if outcome.flags is not None else None),
        )
    return len(wrong)


def check(
    variants: Sequence[Variant],
    vectors: Sequence[Sequence[Bits]],
    *,
    stall_seed: int = 0,
    synthesis: Callable[[Path, str], Path] | None = None,
) -> list[int]:
    """Run a bank and compare every unit with the golden model; how many vectors each compared."""
    outcomes = VectorBench(variants, synthesis).run(vectors, stall_seed=stall_seed)
    return [compare(*each) for each in zip(variants, vectors, outcomes, strict=True)]
