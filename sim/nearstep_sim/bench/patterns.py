"""Operand patterns that reach the corners of floating-point arithmetic, seeded."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearstep_hw.fp.unit import FpOperation
from nearstep_sim.golden import fp
from nearstep_spec.fp import FpFormat

__all__ = [
    "biased",
    "close",
    "crossed",
    "exhaustive",
    "neighbourhoods",
    "specials",
    "uniform",
    "vectors",
]

Bits = NDArray[np.uint32]


def specials(fmt: FpFormat) -> Bits:
    """Return special patterns of both signs, each once.

    Zeros, the least and greatest subnormal and normal numbers and their neighbours, powers of two
    over the whole range and their neighbours, all-ones significands, halfway significands,
    infinities, quiet and signalling NaN.
    """
    mantissa = fmt.mantissa
    positive = {
        *range(4),
        fmt.max_subnormal,
        fmt.max_subnormal - 1,
        fmt.max_finite,
        fmt.max_finite - 1,
        fmt.infinity,
        fmt.quiet_nan,
        fmt.quiet_nan + 1,
        fmt.infinity + 1,
        fmt.quiet_nan - 1,
        fmt.sign_bit - 1,
    }
    positive |= {1 << k for k in range(0, mantissa, 3)}
    near_one = range(fmt.bias - 3, fmt.bias + 4)
    precision = fmt.precision
    spread = (-2 * precision - 1, -precision - 1, -precision, -mantissa, mantissa, precision)
    fields = {1, 2, 3, precision, precision + 1, fmt.exponent_ones - 2, fmt.exponent_ones - 1}
    fields |= {*near_one, *(fmt.bias + k for k in spread), fmt.bias // 2, fmt.bias * 3 // 2}
    for field in fields:
        if 0 < field < fmt.exponent_ones:
            base = field << mantissa
            half = 1 << (mantissa - 1)
            ones = (1 << mantissa) - 1
            positive |= {base, base + 1, base - 1, base + half, base + half + 1, base + ones - 1}
    values = np.array(sorted(x for x in positive if 0 <= x < fmt.sign_bit), dtype=np.uint32)
    return np.concatenate([values, values | np.uint32(fmt.sign_bit)])


def exhaustive(fmt: FpFormat, operands: int) -> list[Bits]:
    """Every combination of all patterns of a small format."""
    every = np.arange(1 << fmt.width, dtype=np.uint32)
    return [x.ravel() for x in np.meshgrid(*[every] * operands, indexing="ij")]


def neighbourhoods(source: FpFormat, target: FpFormat) -> Bits:
    """Patterns of `source` at and around every number of `target` and every halfway point.

    Ten for each pattern of `target`: itself and the point half way up, each with the two
    neighbours below and above. `target` has the shorter significand.
    """
    every = np.arange(1 << target.width, dtype=np.uint32)
    wide = fp.convert(every, target, source)[0].astype(np.int64)
    subnormal = (every & np.uint32(target.sign_bit - 1)) < target.min_normal
    above = fp.convert(every + np.uint32(1), target, source)[0].astype(np.int64)
    half = np.where(subnormal & (above > wide), (above - wide) // 2, 0)
    half = np.where(half == 0, 1 << (source.mantissa - target.mantissa - 1), half)
    points = [base + step for base in (wide, wide + half) for step in (-2, -1, 0, 1, 2)]
    return (np.concatenate(points) & ((1 << source.width) - 1)).astype(np.uint32)


def crossed(fmt: FpFormat, operands: int, rng: np.random.Generator, limit: int) -> list[Bits]:
    """Return combinations of special patterns: all, or `limit` of them at random."""
    values = specials(fmt)
    if len(values) ** operands <= limit:
        return [x.ravel() for x in np.meshgrid(*[values] * operands, indexing="ij")]
    return [rng.choice(values, limit) for _ in range(operands)]


def uniform(fmt: FpFormat, operands: int, rng: np.random.Generator, count: int) -> list[Bits]:
    """Any pattern, all equally likely."""
    return [rng.integers(0, 1 << fmt.width, count, dtype=np.uint32) for _ in range(operands)]


def biased(fmt: FpFormat, operands: int, rng: np.random.Generator, count: int) -> list[Bits]:
    """Exponents near the ends or near one, and significands of long runs of equal bits."""
    return [_biased(fmt, rng, count) for _ in range(operands)]


def _biased(fmt: FpFormat, rng: np.random.Generator, count: int) -> Bits:
    top = fmt.exponent_ones
    reach = min(fmt.precision + 3, top // 2)
    near = rng.integers(0, reach, count)
    choice = rng.integers(0, 4, count)
    one = np.clip(fmt.bias - reach // 2 + near, 0, top)
    field = np.choose(choice, [near, top - 1 - near, one, rng.integers(0, top, count)])
    return _assemble(fmt, rng, field, _runs(fmt, rng, count))


def _runs(fmt: FpFormat, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Fractions: random, or ones between two random positions, inverted or not, plus or minus 1."""
    ones = 1 << fmt.mantissa
    low = rng.integers(0, fmt.mantissa + 1, count)
    high = rng.integers(0, fmt.mantissa + 1, count)
    run = np.abs((1 << high) - (1 << low))
    run = np.where(rng.random(count) < 0.5, run, ones - 1 - run) + rng.integers(-1, 2, count)
    return np.where(rng.random(count) < 0.4, rng.integers(0, ones, count), run) & (ones - 1)


def _assemble(
    fmt: FpFormat,
    rng: np.random.Generator,
    field: NDArray[np.int64],
    fraction: NDArray[np.int64],
) -> Bits:
    sign = rng.integers(0, 2, len(field)) << (fmt.width - 1)
    return (sign | (field << fmt.mantissa) | fraction).astype(np.uint32)


def close(fmt: FpFormat, rng: np.random.Generator, x: Bits) -> Bits:
    """A partner for each `x`: a few units in the last place or a few exponents away, any sign."""
    count = len(x)
    magnitude = (x & np.uint32(fmt.sign_bit - 1)).astype(np.int64)
    places = rng.integers(-3, 4, count)
    exponents = rng.integers(-fmt.precision - 2, fmt.precision + 3, count) << fmt.mantissa
    noise = rng.integers(0, 1 << fmt.mantissa, count)
    moved = np.choose(
        rng.integers(0, 3, count),
        [magnitude + places, magnitude + exponents + places, (magnitude + exponents) ^ noise],
    )
    sign = rng.integers(0, 2, count) << (fmt.width - 1)
    return (np.clip(moved, 0, fmt.sign_bit - 1) | sign).astype(np.uint32)


def vectors(operation: FpOperation, count: int, seed: int) -> list[Bits]:
    """Return about `count` operand tuples for an operation, of all relevant kinds, shuffled.

    Returns
    -------
    list[Bits] : one array an operand, patterns of the source format in the low bits of uint32.
    """
    rng = np.random.default_rng(seed)
    fmt, operands = operation.source, operation.operands
    share = count // 4
    parts = [crossed(fmt, operands, rng, share), uniform(fmt, operands, rng, share)]
    rest = (count - sum(len(part[0]) for part in parts)) // 2
    parts.append(biased(fmt, operands, rng, rest))
    parts.append(_TARGETED[operation.kind](operation, rng, rest))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = rng.permutation(len(columns[0]))
    return [column[order] for column in columns]


def _mixed(fmt: FpFormat, rng: np.random.Generator, count: int) -> Bits:
    pick = rng.random(count) < 0.5
    return np.where(pick, _biased(fmt, rng, count), uniform(fmt, 1, rng, count)[0])


def _for_add(operation: FpOperation, rng: np.random.Generator, count: int) -> list[Bits]:
    x = _mixed(operation.source, rng, count)
    return [x, close(operation.source, rng, x)]


def _for_mul(operation: FpOperation, rng: np.random.Generator, count: int) -> list[Bits]:
    """Products around the least normal and subnormal numbers and around overflow."""
    fmt = operation.source
    x = _mixed(fmt, rng, count)
    field = ((x >> np.uint32(fmt.mantissa)) & np.uint32(fmt.exponent_ones)).astype(np.int64)
    around = np.where(
        rng.random(count) < 0.75,
        rng.integers(1 - fmt.precision - 3, 4, count),
        rng.integers(fmt.exponent_ones - 3, fmt.exponent_ones + 2, count),
    )
    partner = np.clip(around - np.maximum(field, 1) + fmt.bias, 0, fmt.exponent_ones - 1)
    return [x, _assemble(fmt, rng, partner, _runs(fmt, rng, count))]


def _for_fma(operation: FpOperation, rng: np.random.Generator, count: int) -> list[Bits]:
    """Addends close to minus the rounded product; products near the ends of the range."""
    fmt = operation.source
    half = count // 2
    free = [_mixed(fmt, rng, half), _mixed(fmt, rng, half)]
    ends = _for_mul(operation, rng, count - half)
    x, y = (np.concatenate(pair) for pair in zip(free, ends, strict=True))
    product = fp.mul(x, y, fmt)[0].astype(np.uint32)
    negated = product ^ np.uint32(fmt.sign_bit)
    partner = close(fmt, rng, product)
    return [x, y, np.where(rng.random(count) < 0.3, negated, partner)]


def _for_div(operation: FpOperation, rng: np.random.Generator, count: int) -> list[Bits]:
    """Return operands with quotients that are short, or near the ends of the range."""
    fmt = operation.source
    x, y = _for_mul(operation, rng, count)
    product = fp.mul(x, y, fmt)[0].astype(np.uint32)
    return [np.where(rng.random(count) < 0.5, product, x), y]


def _for_sqrt(operation: FpOperation, rng: np.random.Generator, count: int) -> list[Bits]:
    """Return squares, and numbers within a few units in the last place of them."""
    fmt = operation.source
    x = _mixed(fmt, rng, count)
    square = fp.mul(x, x, fmt)[0].astype(np.int64) + rng.integers(-2, 3, count)
    return [np.clip(square, 0, fmt.infinity).astype(np.uint32)]


def _for_convert(operation: FpOperation, rng: np.random.Generator, count: int) -> list[Bits]:
    """Numbers of the target format, the points halfway between them, and their neighbours."""
    source, target = operation.source, operation.target
    x = rng.integers(0, 1 << target.width, count, dtype=np.uint32)
    wide = fp.convert(x, target, source)[0].astype(np.int64)
    half = 1 << max(source.mantissa - target.mantissa - 1, 0)
    near = wide + half * rng.integers(-1, 2, count) + rng.integers(-2, 3, count)
    return [(near & ((1 << source.width) - 1)).astype(np.uint32)]


_TARGETED: dict[str, Callable[[FpOperation, np.random.Generator, int], list[Bits]]] = {
    "add": _for_add,
    "sub": _for_add,
    "mul": _for_mul,
    "fma": _for_fma,
    "div": _for_div,
    "sqrt": _for_sqrt,
    "convert": _for_convert,
}
