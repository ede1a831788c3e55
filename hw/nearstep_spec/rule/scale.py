"""Update rules with a factor on their gradients."""

import inspect
from collections.abc import Mapping
from typing import cast

from nearstep_spec.rule.errors import RuleError
from nearstep_spec.rule.expr import Expression, Value
from nearstep_spec.rule.rule import Rule

__all__ = ["GRADIENT", "GRADIENT_SCALE", "scaled"]

GRADIENT = "g"
GRADIENT_SCALE = "gradient_scale"


def scaled(rule: Rule) -> Rule:
    """Return `rule`, of the same name, with every gradient multiplied by a scalar first.

    The product is rounded once, before any other operation. A factor of 1.0 changes no number; a
    NaN becomes the default NaN.

    Parameters
    ----------
    rule : must have an array `g`, and no scalar `gradient_scale`.

    Raises
    ------
    RuleError : the rule has no `g`, or already a `gradient_scale`.
    """
    names = tuple(inspect.signature(rule.definition).parameters)
    if GRADIENT not in rule.arrays_in or GRADIENT_SCALE in names:
        raise RuleError(
            f"A rule to be scaled must have an array {GRADIENT!r} and no {GRADIENT_SCALE!r}, "
            f"unlike {rule.name!r} of {', '.join(names)}",
            rule.location,
        )

    def define(**leaves: Expression) -> Mapping[str, Value]:
        factor = cast(Value, leaves.pop(GRADIENT_SCALE))
        scaled = cast(Value, leaves[GRADIENT]) * factor
        return rule.definition(**{**leaves, GRADIENT: scaled})

    return rule.redefined(define, GRADIENT_SCALE)
