"""The general averaging operation, as a rule: z = a x + b y.

Ref: Smart-Infinity, V-A.
"""

from collections.abc import Mapping

from nearstep_spec.rule.expr import Value, fma
from nearstep_spec.rule.rule import Rule

__all__ = ["AXPBY"]


def _axpby(x: Value, y: Value, *, a: Value, b: Value) -> Mapping[str, Value]:
    """Two roundings: of b * y, and of the sum."""
    return {"z": fma(a, x, b * y)}


AXPBY = Rule("axpby", _axpby, states=(), inputs=("x", "y"), outputs=("z",), scalars=("a", "b"))
