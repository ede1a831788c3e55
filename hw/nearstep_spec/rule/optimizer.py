"""An optimizer as data: its rules, hyper-parameters, registers of a step, and state.

Register map, step of the driver, class of torch, golden model and checks derive from the optimizer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from nearstep_spec.rule.errors import RuleError, UnknownNameError
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scalars import float32

__all__ = ["Choice", "Conflict", "Flag", "Form", "Hyper", "Number", "Numbers", "Optimizer", "Part"]

FIRST = "first"
PART = "part"
STEP = "step"
GRADIENT = "g"
DEFAULT_ORDER = "default"

Conflict = tuple[str, str]
"""Name of a hyper-parameter, and its valid values."""


class Part(NamedTuple):
    """A run of a step that has two, see `Optimizer.between`.

    Attributes
    ----------
    number : 0, or 1 in the second run.
    shape : of the parameters of the second run.
    format : of the parameters of the second run, in memory.
    """

    number: int = 0
    shape: tuple[int, ...] = ()
    format: str = "fp32"


FIRST_RUN = Part()


@dataclass(frozen=True)
class Number:
    """A hyper-parameter that is a finite number in [low, below).

    Parameters
    ----------
    default : None: the value must be given.
    allowed : text for the bounds, if the default text does not fit.
    whole : only whole numbers are valid.
    """

    default: float | None = None
    low: float = 0.0
    below: float = math.inf
    allowed: str = ""
    whole: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` is valid."""
        is_within = math.isfinite(value) and self.low <= value < self.below
        return is_within and not (self.whole and value % 1)

    @property
    def expected(self) -> str:
        """Describe the valid values."""
        if self.allowed:
            return self.allowed
        kind = "a whole number " if self.whole else ""
        if math.isinf(self.below):
            return f"{kind}finite and at least {self.low:g}"
        return f"{kind}in [{self.low:g}, {self.below:g})"


@dataclass(frozen=True)
class Numbers(Number):
    """A hyper-parameter that is several numbers, each of them in [low, below): betas.

    Parameters
    ----------
    default : determines the number of values.
    """

    default: tuple[float, ...] = ()  # type: ignore[assignment]
    below: float = 1.0


@dataclass(frozen=True)
class Flag:
    """A hyper-parameter that is true or false."""

    default: bool = False


@dataclass(frozen=True)
class Choice:
    """A hyper-parameter that is one of several names; None is the default."""

    default: str
    names: tuple[str, ...]

    def holds(self, value: object) -> bool:
        """Whether `value` is valid."""
        return value is None or value in self.names

    @property
    def expected(self) -> str:
        """Describe the valid values."""
        return f"None or one of {', '.join(self.names)}"


Hyper = Number | Numbers | Flag | Choice


@dataclass(frozen=True, kw_only=True)
class Form:
    """One of the rules of an optimizer.

    Parameters
    ----------
    scalars : computes every register of the rule, rounded to binary32 afterwards. Its parameters
        are names of hyper-parameters, and optionally `step` (t, from 1), `first` (state of this
        form alone is empty), and `part` (`Part`, the run of a step that has two).
    when : the form is selected if this hyper-parameter is not 0; among several the last.
    orders : variants with another order of the arithmetic, by name in configurations.
    remainder : a rule with the same registers and arrays, for elements of a tensor behind the last
        whole vector, if torch's fused step on a CPU rounds these differently.
    """

    rule: Rule
    scalars: Callable[..., Mapping[str, float]]
    when: str = ""
    orders: Mapping[str, Form] = field(default_factory=dict)
    remainder: Rule | None = None

    @cached_property
    def takes(self) -> tuple[str, ...]:
        """Parameters of `scalars`."""
        return tuple(inspect.signature(self.scalars).parameters)

    @property
    def starts(self) -> bool:
        """Whether the first step initialises the state."""
        return FIRST in self.takes

    @cached_property
    def digest(self) -> str:
        """Digest of the rule's arithmetic."""
        return self.rule.digest

    def ordered(self, order: str) -> Form:
        """Return the variant of this form with an order, or the form itself if there is none."""
        return self.orders.get(order, self)

    def registers(
        self, values: Mapping[str, Any], step: int, first: bool, part: Part = FIRST_RUN
    ) -> dict[str, float | int]:
        """Compute the registers of a run: scalars as floats exact in binary32, switches as
        0 or 1.
        """
        known = {**values, STEP: step, FIRST: first, PART: part}
        made = self.scalars(**{name: known[name] for name in self.takes})
        self.rule.check_scalars(made)
        return {
            name: int(bool(made[name])) if width == 1 else float32(made[name])
            for name, width in self.rule.registers().items()
        }


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer.

    Parameters
    ----------
    rule, scalars, remainder : as of `Form`: the default form.
    hyper : hyper-parameters, in their order.
    state : torch's keys of a parameter's state, with the array of each. Arrays that not every form
        has may be missing.
    name : default: that of the rule.
    forms : other forms.
    orders : as of `Form`.
    counts : torch keeps a `step`.
    initial : hyper-parameter that is the initial value of an array, if not 0.
    from_start : torch makes state in the constructor, not in the first step.
    conflict : returns the error of a combination of valid hyper-parameters, or None.
    between : the part of a step that is not elementwise. A step then runs the rule twice: the first
        run has the gradients, and the second run has what this function returns of them, tensor by
        tensor, on the host. Its parameters are `g`, names of states except `p`, with the values of
        the first run, names of hyper-parameters, and `part`, the second run. The result has the
        shape of `g`, and is rounded to bf16 if `g` is in bf16.
    dimensions : that parameters must have; None: any number.

    Raises
    ------
    RuleError : one of its subclasses, naming the line of the rule: names contradict each other, or
        `scalars` does not return the rule's registers.
    """

    rule: Rule
    scalars: Callable[..., Mapping[str, float]]
    remainder: Rule | None = None
    hyper: Mapping[str, Hyper]
    state: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    forms: Sequence[Form] = ()
    orders: Mapping[str, Form] = field(default_factory=dict)
    counts: bool = False
    initial: Mapping[str, str] = field(default_factory=dict)
    from_start: bool = False
    conflict: Callable[[Mapping[str, Any]], Conflict | None] | None = None
    between: Callable[..., Any] | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.rule.name)
        parts = [] if self.between is None else [PART]
        known = (*self.hyper, *([STEP] if self.counts else []), FIRST, *parts)
        for reserved in {STEP, FIRST, PART} & set(self.hyper):
            raise RuleError(f"{reserved!r} is no hyper-parameter's name", self.rule.location)
        for form in self.all_forms:
            location = form.rule.location
            for name in form.takes:
                if name not in known:
                    raise UnknownNameError("hyper-parameter", name, known, location)
        for form in self.forms:
            if form.when not in self.hyper:
                raise UnknownNameError("hyper-parameter", form.when, self.hyper, form.rule.location)
        if len(self.by_rule) != 1 + len(self.forms):
            raise RuleError(f"Forms of {self.name!r} must have different rules", self.rule.location)
        arrays = {each for form in self.all_forms for each in form.rule.states}
        given = (GRADIENT, *self.state.values(), *self.hyper, PART)
        for each in self._between_takes:
            if each not in given:
                raise UnknownNameError("array or hyper-parameter", each, given, self.rule.location)
        for each in (*self.state.values(), *self.initial):
            if each not in arrays:
                raise UnknownNameError("state", each, sorted(arrays), self.rule.location)
        for each in self.initial.values():
            if each not in self.hyper:
                raise UnknownNameError("hyper-parameter", each, self.hyper, self.rule.location)
        self._check_registers()

    def _check_registers(self) -> None:
        """Check `scalars` of every form with the defaults, if all exist."""
        values = self.defaults
        if None not in values.values():
            for form in self.all_forms:
                form.registers(values, 1, False)

    @cached_property
    def _main(self) -> Form:
        return Form(
            rule=self.rule, scalars=self.scalars, orders=self.orders, remainder=self.remainder
        )

    @property
    def all_forms(self) -> tuple[Form, ...]:
        """List every form, including other orders of the arithmetic; the first is the default."""
        return (self._main, *self.forms, *self.orders.values())

    @cached_property
    def by_rule(self) -> Mapping[str, Form]:
        """Map names of rules in configurations to forms."""
        return {each.rule.name: each for each in (self._main, *self.forms)}

    @cached_property
    def choices(self) -> tuple[Form, ...]:
        """List forms in the order in which their conditions are checked: the default is the
        last.
        """
        return tuple(self.by_rule.values())[::-1]

    @cached_property
    def extra(self) -> Mapping[str, tuple[str, ...]]:
        """Map the name of each form's rule to its state that not every form has."""
        return {
            name: tuple(key for key in self.keys(form) if key in self.optional)
            for name, form in self.by_rule.items()
        }

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the hyper-parameters; None for required ones."""
        return {name: each.default for name, each in self.hyper.items()}

    @cached_property
    def _between_takes(self) -> tuple[str, ...]:
        return () if self.between is None else tuple(inspect.signature(self.between).parameters)

    def second_gradient(
        self, arrays: Mapping[str, Any], values: Mapping[str, Any], part: Part
    ) -> Any:
        """Return the gradient of the second run of a step that has two.

        Parameters
        ----------
        arrays : tensors of one parameter: the gradient of the first run, and moments after it.
        values : hyper-parameters.
        part : the second run.
        """
        assert self.between is not None, "the step has two runs"
        known = {**values, **arrays, PART: part}
        return self.between(**{name: known[name] for name in self._between_takes})

    @property
    def optional(self) -> frozenset[str]:
        """Keys of state that not every form has."""
        shared = set.intersection(*(set(each.rule.states) for each in self.by_rule.values()))
        return frozenset(key for key, array in self.state.items() if array not in shared)

    def form(self, values: Mapping[str, Any]) -> Form:
        """Select the form for these hyper-parameters."""
        return next(each for each in self.choices if not each.when or values[each.when])

    def keys(self, form: Form) -> tuple[str, ...]:
        """List the keys of the state that a form updates."""
        return tuple(key for key, array in self.state.items() if array in form.rule.states)

    @classmethod
    def of_rule(cls, rule: Rule) -> Optimizer:
        """Make an optimizer of a rule alone: its registers are the hyper-parameters, without
        defaults.
        """

        def scalars(**values: float) -> Mapping[str, float]:
            return values

        names = [*rule.scalars, *rule.switches]
        parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in names]
        scalars.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        hyper: dict[str, Hyper] = {each: Number(low=-math.inf) for each in rule.scalars}
        hyper |= {each: Flag() for each in rule.switches if each != FIRST}
        state = {each: each for each in rule.states if each != "p"}
        return cls(rule=rule, scalars=scalars, hyper=hyper, state=state)
