"""Update rules in hardware: a pipelined functional unit from one definition."""

from collections.abc import Mapping
from types import MappingProxyType

from amaranth.hdl import Cat, Const, Module, Mux, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.fp import add, div, fma, mul, sqrt
from nearstep_hw.fp.pipeline import Pipeline, Staged
from nearstep_hw.rule.schedule import Schedule
from nearstep_hw.rule.technology import TECHNOLOGIES
from nearstep_spec.fp import FP32
from nearstep_spec.rule.program import RuleOperation
from nearstep_spec.rule.rule import Rule

__all__ = ["DEFAULT_DEPTHS", "FunctionalUnit", "unit_ports"]

DEFAULT_DEPTHS: Mapping[str, int] = next(iter(TECHNOLOGIES.values())).depths
"""Default cycles of each operation."""

_SIGN_BIT = FP32.width - 1


def unit_ports(rule: Rule) -> dict[str, wiring.Member]:
    """Return the members of a functional unit for `rule`, see `FunctionalUnit`."""
    return {
        "i_en": In(1),
        "i_valid": In(1),
        **{f"i_{name}": In(FP32.width) for name in rule.arrays_in},
        **{f"s_{name}": In(width) for name, width in rule.registers().items()},
        "o_valid": Out(1),
        **{f"o_{name}": Out(FP32.width) for name in rule.arrays_out},
    }


class FunctionalUnit(wiring.Component):
    """Pipelined hardware of an update rule: takes one element a cycle.

    Every operation of the rule's program is one arithmetic unit (equal operations are merged); the
    delays that balance the paths between the units are shared by all users of a value.

    *Timing*: a result is output `latency` enabled cycles after its element. Outputs are registers.
    While `i_en` is 0 all registers hold their value and `i_valid` is ignored. `rst` clears the
    valid bits only.

    *Numerics*: binary32 as `nearstep_hw.fp`; equal, bit for bit, to
    `nearstep_sim.golden.rule.evaluate`.

    Parameters
    ----------
    technology : name in `TECHNOLOGIES`: cycles of operations, and multipliers.
    depths : cycles of operations that replace the technology's.
    delay : form of delays, see `nearstep_hw.fp.pipeline.Pipeline`; the technology's by default.
    register_inputs : whether input arrays are registered (one more cycle of latency).

    Members
    -------
    i_en : In(1), clock enable.
    i_valid : In(1).
    i_<array> : In(32), one for each of `rule.arrays_in`, in that order.
    s_<scalar>, s_<switch> : In(32), In(1), one for each of `rule.registers()`. Stable from the
        first element to the last result.
    o_valid : Out(1).
    o_<array> : Out(32), one for each of `rule.arrays_out`.

    Attributes
    ----------
    latency : enabled cycles from `i_valid` to `o_valid`.
    schedule : a `Schedule`.
    key : all parameters of the unit, for caches.

    Ref: AXDIMM, 3.3: fully pipelined units of 31 DSPs and 128 cycles.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        technology: str = next(iter(TECHNOLOGIES)),
        depths: Mapping[str, int] | None = None,
        delay: str | None = None,
        register_inputs: bool = False,
    ) -> None:
        if technology not in TECHNOLOGIES:
            raise ValueError(
                f"Technology must be one of {', '.join(TECHNOLOGIES)}, not {technology!r}"
            )
        unknown = set(depths or ()) - set(DEFAULT_DEPTHS)
        if unknown:
            known = ", ".join(DEFAULT_DEPTHS)
            raise ValueError(f"Depths must be of {known}, not of {', '.join(sorted(unknown))}")
        self.rule = rule
        self.technology = TECHNOLOGIES[technology]
        self.depths = {**self.technology.depths, **(depths or {})}
        for op, depth in self.depths.items():
            if not isinstance(depth, int) or depth < 1:
                raise ValueError(f"Depth of {op!r} must be a positive integer, not {depth!r}")
        self.schedule = Schedule.of(rule.program, self.depths, int(register_inputs))
        self.latency = self.schedule.latency
        self._delay = delay = delay or self.technology.delay
        self.key = (
            f"unit_{rule.name} {rule.program.digest()} {sorted(self.depths.items())} "
            f"delay={delay} register_inputs={register_inputs} "
            f"multiplier={self.technology.multiplier}"
        )
        super().__init__(unit_ports(rule))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        pipe = Pipeline(m, en=self.i_en, delay=self._delay, multiplier=self.technology.multiplier)
        compiler = _Compiler(self, pipe)
        values: list[Staged] = []
        for index, each in enumerate(self.rule.program.operations):
            values.append(compiler.compile(index, each, [values[k] for k in each.operands]))
        for name, index in self.rule.program.results.items():
            value = values[index]
            if value.stage is None:
                value = pipe.source(value.value)
            m.d.comb += getattr(self, f"o_{name}").eq(pipe.at(value, self.latency))
        m.d.comb += self.o_valid.eq(pipe.valid(self.i_valid, self.latency))
        return m


class _Compiler:
    """Compiles the operations of a program to staged values of a pipeline."""

    def __init__(self, unit: FunctionalUnit, pipe: Pipeline) -> None:
        self.unit = unit
        self.pipe = pipe
        self.start = unit.schedule.start
        self.depths = unit.depths
        self._moved: dict[tuple[int, int], Staged] = {}

    def compile(self, index: int, each: RuleOperation, operands: list[Staged]) -> Staged:
        if each.op == "array":
            return self._input(each.name, self.start[index] or 0)
        if each.op in ("scalar", "switch"):
            return self.pipe.constant(getattr(self.unit, f"s_{each.name}"))
        if each.op == "constant":
            return self.pipe.constant(Const(each.bits, FP32.width))
        begin = self.start[index]
        if each.op in _UNITS:
            unit, options = _UNITS[each.op]
            aligned = self._at(operands, begin or 0)
            return unit(
                self.pipe, FP32, *aligned, depth=self.depths[each.op], flags=False, **options
            ).z
        name = f"{each.op}_{index}"
        if begin is None:
            values = [operand.value for operand in operands]
        else:
            values = [self.pipe.at(operand, begin) for operand in operands]
        result = self.pipe.wrap(_LOGIC[each.op](*values), begin, name)
        depth = self.depths.get(each.op, 0)
        return self.pipe.delayed(result, (begin or 0) + depth) if depth else result

    def _input(self, name: str, stage: int) -> Staged:
        value = self.pipe.source(getattr(self.unit, f"i_{name}"), 0)
        return self.pipe.delayed(value, stage) if stage else value

    def _at(self, operands: list[Staged], begin: int) -> list[Staged]:
        """Return the operands, delayed to `begin` unless the latest is valid then."""
        if all(operand.stage is None for operand in operands):
            return [self.pipe.source(operands[0].value, begin), *operands[1:]]
        if self.pipe.latest(*operands) == begin:
            return operands
        return [operand if operand.stage is None else self._move(operand, begin)
                for operand in operands]  # fmt: skip

    def _move(self, operand: Staged, stage: int) -> Staged:
        key = (id(operand), stage)
        if key not in self._moved:
            self._moved[key] = self.pipe.delayed(operand, stage)
        return self._moved[key]


def _magnitude(a: Value) -> Value:
    return a[:_SIGN_BIT]


def _is_nan(a: Value) -> Value:
    return _magnitude(a) > FP32.infinity


def _equal(a: Value, b: Value) -> Value:
    zeros = ~(_magnitude(a) | _magnitude(b)).any()
    return ~_is_nan(a) & ~_is_nan(b) & ((a == b) | zeros)


def _key(a: Value) -> Value:
    """Map a value to an unsigned number of the same order, -0 just below +0; NaN excluded."""
    return a ^ Cat(a[_SIGN_BIT].replicate(_SIGN_BIT), Const(1, 1))


def _less(a: Value, b: Value) -> Value:
    zeros = ~(_magnitude(a) | _magnitude(b)).any()
    return ~_is_nan(a) & ~_is_nan(b) & ~zeros & (_key(a) < _key(b))


def _extreme(a: Value, b: Value, first: Value) -> Value:
    return Mux(_is_nan(a) | _is_nan(b), FP32.quiet_nan, Mux(first, a, b))


def _sign(a: Value) -> Value:
    nothing = _is_nan(a) | ~_magnitude(a).any()
    one = Const(FP32.bias << FP32.mantissa, _SIGN_BIT)
    return Mux(nothing, 0, Cat(one, a[_SIGN_BIT]))


_UNITS = MappingProxyType(
    {
        "add": (add.add, {}),
        "sub": (add.add, {"subtract": True}),
        "mul": (mul.mul, {}),
        "div": (div.div, {}),
        "fma": (fma.fma, {}),
        "sqrt": (sqrt.sqrt, {}),
    }
)

_LOGIC = MappingProxyType(
    {
        "neg": lambda a: Cat(_magnitude(a), ~a[_SIGN_BIT]),
        "abs": lambda a: Cat(_magnitude(a), Const(0, 1)),
        "max": lambda a, b: _extreme(a, b, _key(a) > _key(b)),
        "min": lambda a, b: _extreme(a, b, _key(a) < _key(b)),
        "sign": _sign,
        "select": lambda condition, a, b: Mux(condition, a, b),
        "lt": _less,
        "le": lambda a, b: _less(a, b) | _equal(a, b),
        "eq": _equal,
        "not": lambda a: ~a,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
)
