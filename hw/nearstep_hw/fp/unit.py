"""One floating-point operation as a component with ports of its own."""

from collections.abc import Callable
from dataclasses import dataclass

from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.fp import add, convert, div, fma, mul, sqrt
from nearstep_hw.fp.pipeline import DSP48E2, Pipeline, Staged
from nearstep_hw.fp.result import FpResult
from nearstep_spec.errors import NearstepError
from nearstep_spec.fp import BF16, FP16, FP32, FpFormat

__all__ = ["MAX_DEPTH", "OPERATIONS", "DepthError", "FpOperation", "FpUnit", "arithmetic"]

MAX_DEPTH = 256
"""Greatest latency of a unit, cycles."""


class DepthError(NearstepError, ValueError):
    """A latency is out of range."""

    def __init__(self, name: str, depth: object) -> None:
        self.name = name
        self.depth = depth
        super().__init__(f"Depth of {name} must be an integer from 1 to {MAX_DEPTH}, not {depth!r}")


@dataclass(frozen=True, kw_only=True)
class FpOperation:
    """An operation on given formats.

    Attributes
    ----------
    name : name of the unit, such as `fp32_add`.
    kind : `add`, `sub`, `mul`, `fma`, `div`, `sqrt` or `convert`.
    source, target : formats of the operands and of the result.
    operands : number of operands, 1 to 3.
    depth : default latency in cycles.
    build : `build(pipe, *operands, depth=..., flags=...)` adds the operation to a pipeline.
    """

    name: str
    kind: str
    source: FpFormat
    target: FpFormat
    operands: int
    depth: int
    build: Callable[..., FpResult]


def arithmetic(kind: str, fmt: FpFormat) -> FpOperation:
    """Return the operation `kind` (any but `convert`) within one format."""

    def build(pipe: Pipeline, *operands: Staged, depth: int, flags: bool) -> FpResult:
        return function(pipe, fmt, *operands, depth=depth, flags=flags, **options)

    options = {"subtract": kind == "sub"} if kind in ("add", "sub") else {}
    function, operands, depth = {
        "add": (add.add, 2, add.DEPTH),
        "sub": (add.add, 2, add.DEPTH),
        "mul": (mul.mul, 2, mul.DEPTH),
        "fma": (fma.fma, 3, fma.DEPTH),
        "div": (div.div, 2, div.default_depth(fmt)),
        "sqrt": (sqrt.sqrt, 1, sqrt.default_depth(fmt)),
    }[kind]
    return FpOperation(
        name=f"{fmt.name}_{kind}",
        kind=kind,
        source=fmt,
        target=fmt,
        operands=operands,
        depth=depth,
        build=build,
    )


def conversion(source: FpFormat, target: FpFormat) -> FpOperation:
    """Return the conversion from `source` to `target`."""

    def build(pipe: Pipeline, a: Staged, *, depth: int, flags: bool) -> FpResult:
        return convert.convert(pipe, source, target, a, depth=depth, flags=flags)

    return FpOperation(
        name=f"{source.name}_to_{target.name}",
        kind="convert",
        source=source,
        target=target,
        operands=1,
        depth=convert.DEPTH,
        build=build,
    )


OPERATIONS = {
    operation.name: operation
    for operation in (
        *(arithmetic(kind, FP32) for kind in ("add", "sub", "mul", "fma", "div", "sqrt")),
        conversion(FP16, FP32),
        conversion(FP32, FP16),
        conversion(BF16, FP32),
        conversion(FP32, BF16),
    )
}
"""The operations that have a unit, by name."""


class FpUnit(wiring.Component):
    """Pipelined floating-point unit.

    IEEE 754: round to nearest even, subnormal numbers; a NaN result is the default quiet NaN.

    *Timing*: latency `depth` cycles exactly, from registers; one operation every cycle; no
    back-pressure. `o_z` and `o_flags` are valid only while `o_valid` is 1. Reset clears only the
    valid bits.

    Parameters
    ----------
    operation : a name of `OPERATIONS`, or an operation on other formats.
    depth : latency in cycles, 1 to `MAX_DEPTH`. Fewer stages than steps merge steps, more divide
        them.
    flags : False leaves `o_flags` out.
    multiplier : see `Pipeline`.

    Members
    -------
    i_valid : In(1).
    i_a, i_b, i_c : In(width of the operands), as many as the operation takes.
    o_valid : Out(1).
    o_z : Out(width of the result).
    o_flags : Out(5), from bit 0 inexact, underflow, overflow, divide by zero, invalid.

    Raises
    ------
    KeyError : for an unknown name.
    DepthError : for a latency out of range.
    """

    def __init__(
        self,
        operation: str | FpOperation,
        *,
        depth: int | None = None,
        flags: bool = True,
        multiplier: tuple[int, int] = DSP48E2,
    ) -> None:
        self.operation = OPERATIONS[operation] if isinstance(operation, str) else operation
        self.depth = self.operation.depth if depth is None else depth
        self.flags = flags
        self.multiplier = multiplier
        if not isinstance(self.depth, int) or not 1 <= self.depth <= MAX_DEPTH:
            raise DepthError(self.operation.name, self.depth)
        operands = "abc"[: self.operation.operands]
        super().__init__(
            {
                "i_valid": In(1),
                **{f"i_{letter}": In(self.operation.source.width) for letter in operands},
                "o_valid": Out(1),
                "o_z": Out(self.operation.target.width),
                **({"o_flags": Out(5)} if flags else {}),
            }
        )

    @property
    def latency(self) -> int:
        """Cycles from an operand to its result."""
        return self.depth

    def elaborate(self, platform: object) -> Module:
        m = Module()
        pipe = Pipeline(m, multiplier=self.multiplier)
        operands = [
            pipe.source(getattr(self, f"i_{letter}")) for letter in "abc"[: self.operation.operands]
        ]
        result = self.operation.build(pipe, *operands, depth=self.depth, flags=self.flags)
        m.d.comb += [
            self.o_z.eq(pipe.at(result.z, self.depth)),
            self.o_valid.eq(pipe.valid(self.i_valid, self.depth)),
        ]
        if result.flags is not None:
            m.d.comb += self.o_flags.eq(pipe.at(result.flags, self.depth))
        return m
