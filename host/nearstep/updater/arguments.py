"""Checked hyper-parameters of an optimizer, and the kernel's scalars computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nearstep.errors import ArgumentError
from nearstep.scalars import flag
from nearstep.updater.checks import check_scalars, check_step, real
from nearstep_spec.rule.errors import RuleError
from nearstep_spec.rule.optimizer import (
    FIRST,
    FIRST_RUN,
    STEP,
    Choice,
    Flag,
    Form,
    Hyper,
    Number,
    Numbers,
    Optimizer,
    Part,
)


@dataclass(frozen=True, kw_only=True)
class RuleArguments:
    """Scalars of one run of a rule.

    Attributes
    ----------
    form : form of the rule, with its arithmetic in the kernel's order.
    scalars : by register, switches included.
    given : the arguments, as text.
    step : t; None if none was given.
    """

    rule: str
    form: Form
    scalars: Mapping[str, float | int]
    given: str
    step: int | None = None

    def check(self) -> None:
        """Raise `ArgumentError` unless the scalars fit binary32 registers."""
        check_scalars(self.scalars, self.given)

    def also(self, name: str, value: float) -> RuleArguments:
        """These arguments, and one more register that holds its argument unchanged."""
        scalars, given = {**self.scalars, name: value}, f"{self.given}, {name}={value}"
        return replace(self, scalars=scalars, given=given)


def rule_arguments(
    optimizer: Optimizer,
    order: str,
    *,
    step: int | None = None,
    first: bool = False,
    part: Part = FIRST_RUN,
    **given: Any,
) -> RuleArguments:
    """Compute the arguments of a step of an optimizer.

    Parameters
    ----------
    order : of the arithmetic in the kernel.
    step : t, from 1; required if the rule depends on it.
    first : state of the selected rule alone is empty.
    part : the run of a step that has two.
    **given : hyper-parameters; others have defaults.

    Raises
    ------
    ArgumentError : a hyper-parameter is unknown, missing or invalid, or conflicts with another.
    """
    for name in given:
        if name not in optimizer.hyper:
            known = ", ".join(optimizer.hyper)
            raise ArgumentError(f"{optimizer.name} has no hyper-parameter {name!r}, but {known}")
    if step is not None:
        check_step(step)
    first = flag(FIRST, first)
    values = {name: _value(name, kind, given) for name, kind in optimizer.hyper.items()}
    conflict = None if optimizer.conflict is None else optimizer.conflict(values)
    if conflict is not None:
        name, expected = conflict
        raise ArgumentError(f"{name} must be {expected}, not {values[name]!r}")
    form = optimizer.form(values)
    rule, chosen = form.rule.name, form.ordered(order)
    if step is None and STEP in chosen.takes:
        raise ArgumentError(f"{STEP} must be given: {rule} depends on it")
    shown = [name for name, kind in optimizer.hyper.items() if isinstance(kind, Number)]
    text = [f"{name}={values[name]}" for name in shown if name not in optimizer.initial.values()]
    if optimizer.counts and step is not None:
        text.append(f"{STEP}={step}")
    try:
        scalars = chosen.registers(values, 1 if step is None else step, first, part)
    except RuleError as error:
        raise ArgumentError(str(error)) from error
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ArgumentError(
            f"{form.rule.location}: the scalars of {rule} cannot be computed with "
            f"{', '.join(text)}: {type(error).__name__}: {error}"
        ) from error
    return RuleArguments(rule=rule, form=chosen, scalars=scalars, given=", ".join(text), step=step)


def _value(name: str, kind: Hyper, given: Mapping[str, Any]) -> Any:
    """A checked hyper-parameter."""
    value = given.get(name, kind.default)
    if isinstance(kind, Choice):
        if not kind.holds(value):
            raise ArgumentError(f"{name} must be {kind.expected}, not {value!r}")
        return kind.default if value is None else value
    if isinstance(kind, Flag):
        return flag(name, value)
    if isinstance(kind, Numbers):
        count = {2: "two"}.get(len(kind.default), str(len(kind.default)))
        wanted = f"{name} must be {count} numbers {kind.expected}"
        sequence = isinstance(value, Sequence) and not isinstance(value, str)
        if not sequence or len(value) != len(kind.default):
            raise ArgumentError(f"{wanted}, not {value!r}")
        numbers = tuple(real(name, each) for each in value)
        if not all(map(kind.holds, numbers)):
            raise ArgumentError(f"{wanted}, not {value}")
        return numbers
    if value is None:
        raise ArgumentError(f"{name} must be given")
    number = real(name, value)
    if not kind.holds(number):
        low = kind.expected.replace("at least 0", "not negative")
        raise ArgumentError(f"{name} must be {low}, not {value}")
    return number
