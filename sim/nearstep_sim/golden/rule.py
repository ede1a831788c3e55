"""Bit-exact numpy model of an update rule."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden import fp
from nearstep_spec.errors import NearstepError
from nearstep_spec.rule.expr import float32_bits
from nearstep_spec.rule.rule import Rule

__all__ = ["ArrayMismatchError", "SparseGradient", "evaluate"]

Array = NDArray[Any]

_CHUNK = 1 << 16  # elements computed at a time, so that intermediate values fit the cache


class SparseGradient(NamedTuple):
    """A gradient that is zero but for some elements.

    Attributes
    ----------
    index : shape (pairs,): positions, ascending; of equal ones the last counts.
    value : shape (pairs,): patterns of binary32.
    """

    index: NDArray[np.uint32]
    value: NDArray[np.uint32]


class ArrayMismatchError(NearstepError, ValueError):
    """The arrays of a run do not fit the rule."""


def _extreme(a: Array, b: Array, larger: bool) -> Array:
    a, b = np.broadcast_arrays(a, b)
    first = (a > b) if larger else (a < b)
    # Equal operands have equal bits, except zeros, which differ by the sign.
    x, y = a.view(np.uint32), b.view(np.uint32)
    equal = ((x & y) if larger else (x | y)).view(np.float32)
    ordered = np.where(a == b, equal, np.where(first, a, b))
    return np.where(np.isnan(a) | np.isnan(b), fp.QUIET_NAN32, ordered)


_OPERATIONS: Mapping[str, Callable[..., Array]] = MappingProxyType(
    {
        "add": fp.add32,
        "sub": fp.sub32,
        "mul": fp.mul32,
        "div": fp.div32,
        "fma": lambda a, b, c: fp.fma32(*np.broadcast_arrays(a, b, c)),
        "sqrt": fp.sqrt32,
        "neg": lambda a: (a.view(np.uint32) ^ np.uint32(0x8000_0000)).view(np.float32),
        "abs": lambda a: (a.view(np.uint32) & np.uint32(0x7FFF_FFFF)).view(np.float32),
        "max": lambda a, b: _extreme(a, b, True),
        "min": lambda a, b: _extreme(a, b, False),
        "sign": lambda a: (a > 0).astype(np.float32) - (a < 0).astype(np.float32),
        "select": lambda condition, a, b: np.where(condition, a, b),
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "eq": lambda a, b: a == b,
        "not": lambda a: ~a,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
)


def evaluate(
    rule: Rule, arrays: Mapping[str, Array], scalars: Mapping[str, float]
) -> dict[str, NDArray[np.float32]]:
    """Return the arrays that one run of `rule` writes.

    Parameters
    ----------
    arrays : float32, one for each of `rule.arrays_in`, all of one shape. They are not changed.
    scalars : one for each register; rounded to binary32. A switch is true when not zero.

    Returns
    -------
    dict of str to ndarray of float32 : one for each of `rule.arrays_out`, of that shape.

    Raises
    ------
    ArrayMismatchError
    nearstep_spec.rule.errors.MissingScalarError
    nearstep_spec.rule.errors.UnknownNameError
    """
    rule.check_scalars(scalars)
    if set(arrays) != set(rule.arrays_in):
        raise ArrayMismatchError(
            f"{rule!r} reads {', '.join(rule.arrays_in)}, not {', '.join(arrays) or 'nothing'}"
        )
    shape = arrays[rule.arrays_in[0]].shape if rule.arrays_in else ()
    for name, array in arrays.items():
        if array.dtype != np.float32 or array.shape != shape:
            raise ArrayMismatchError(
                f"Array {name!r} must be float32 of shape {shape}, not {array.dtype} {array.shape}"
            )
    flat = {name: array.reshape(-1) for name, array in arrays.items()}
    size = int(np.prod(shape))
    written = {name: np.empty(size, np.float32) for name in rule.arrays_out}
    with np.errstate(all="ignore"):
        for start in range(0, size, _CHUNK):
            part = {name: array[start : start + _CHUNK] for name, array in flat.items()}
            for name, value in _evaluate_chunk(rule, part, scalars).items():
                written[name][start : start + _CHUNK] = value
    return {name: array.reshape(shape) for name, array in written.items()}


def _constant(bits: int) -> Array:
    return np.array([bits], np.uint32).view(np.float32)


def _evaluate_chunk(
    rule: Rule, arrays: Mapping[str, Array], scalars: Mapping[str, float]
) -> dict[str, Array]:
    values: list[Array] = []
    for each in rule.program.operations:
        if each.op == "array":
            value = arrays[each.name]
        elif each.op == "scalar":
            value = _constant(float32_bits(float(scalars[each.name])))
        elif each.op == "switch":
            value = np.array([bool(scalars[each.name])])
        elif each.op == "constant":
            value = _constant(each.bits)
        else:
            value = _OPERATIONS[each.op](*(values[operand] for operand in each.operands))
        values.append(value)
    return {name: values[index] for name, index in rule.program.results.items()}
