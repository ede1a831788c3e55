"""The optimizers of the package, and their rules, by name: plain data.

An optimizer of the package is in `OPTIMIZERS` of a module beside this one; there is no other list.
A user's optimizer is named `FILE.py:NAME`.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from nearstep_spec.blockwise import DYNAMIC8, DYNAMIC8_UNSIGNED
from nearstep_spec.errors import NearstepError
from nearstep_spec.rule import scale
from nearstep_spec.rule.combine import combine, selector
from nearstep_spec.rule.errors import RuleError
from nearstep_spec.rule.file import is_in_file, load
from nearstep_spec.rule.optimizer import DEFAULT_ORDER, Optimizer
from nearstep_spec.rule.rule import Rule

__all__ = [
    "ARRAYS",
    "BY_RULE",
    "OPTIMIZERS",
    "RuleSet",
    "UnknownRuleError",
    "optimizer_named",
    "optimizer_of",
]

PARAMETERS = "p"
FP32 = "fp32"

NEVER_NEGATIVE = frozenset({"v", "v_max", "d"})
"""States of rules of the package that are means, sums or maxima of squares."""

ARRAYS = (PARAMETERS, "g", "m", "v")
"""Arrays of Adam: parameters, gradients, first and second moments. Other rules have fewer, or more.
"""


def _declared() -> dict[str, Optimizer]:
    """Every optimizer of the package's modules, by name."""
    folder = str(Path(__file__).parent)
    names = sorted(each.name for each in pkgutil.iter_modules([folder]))
    modules = (
        importlib.import_module(f"{__package__}.{name}")
        for name in names
        if f"{__package__}.{name}" != __name__
    )
    found = (each for module in modules for each in getattr(module, "OPTIMIZERS", ()))
    return {each.name: each for each in found}


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(_declared())
"""Optimizers of the package."""

BY_RULE: Mapping[str, Optimizer] = MappingProxyType(
    {
        rule: next(each for each in OPTIMIZERS.values() if rule in each.by_rule)
        for each in OPTIMIZERS.values()
        for rule in each.by_rule
    }
)
"""Optimizer of each rule, by the name that configurations have; of several the first."""


class UnknownRuleError(NearstepError, ValueError):
    """No rule or optimizer has this name."""

    def __init__(self, what: str, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(f"{what} must be of {', '.join(known)}, or FILE.py:NAME, not {name!r}")


def optimizer_named(name: str) -> Optimizer:
    """Find an optimizer by name: one of the package, or `FILE.py:NAME`.

    Raises
    ------
    UnknownRuleError, RuleFileError
    """
    if is_in_file(name):
        return load(name)
    if name not in OPTIMIZERS:
        raise UnknownRuleError("optimizer", name, tuple(OPTIMIZERS))
    return OPTIMIZERS[name]


def optimizer_of(name: str) -> Optimizer:
    """Find the optimizer of a name in `rules=`: that of a rule of the package, or `FILE.py:NAME`.

    Raises
    ------
    UnknownRuleError, RuleFileError
    """
    if is_in_file(name):
        return load(name)
    if name not in BY_RULE:
        raise UnknownRuleError("rules", name, tuple(BY_RULE))
    return BY_RULE[name]


class RuleSet:
    """The rules of one kernel, and their combination.

    Parameters
    ----------
    names : at least one; the first is index 0. `FILE.py:NAME` is every rule of an optimizer.
    order : of Adam's arithmetic.
    scaled : whether gradients are multiplied by a scalar first, see `.scale.scaled`.
    parameter_format, state_format : formats in memory of `p`, and of other states, see `Rule`.
        `fp32` leaves formats to the rules; for states of the package that are never negative
        `dynamic8` is `dynamic8u`.

    Attributes
    ----------
    names : of every rule, a tuple; the same in every order.
    optimizers : that of each rule.
    whole : the one rule, or the combination.
    digests : of the arithmetic of each rule, unscaled, and of its own formats.

    Raises
    ------
    UnknownRuleError, RuleFileError
    RuleError : two rules of one name, rules that cannot be combined or scaled, or formats for a
        rule with its own.
    """

    def __init__(
        self,
        names: Sequence[str],
        order: str,
        *,
        scaled: bool = False,
        parameter_format: str = FP32,
        state_format: str = FP32,
    ) -> None:
        forms = []
        for name in names:
            optimizer = optimizer_of(name)
            chosen = optimizer.by_rule if is_in_file(name) else (name,)
            forms += [(each, optimizer, optimizer.by_rule[each]) for each in chosen]
        self.names = tuple(name for name, _, _ in forms)
        self.optimizers = tuple(optimizer for _, optimizer, _ in forms)
        self.digests = tuple(form.ordered(order).digest for _, _, form in forms)
        self._plain = tuple(
            _stored(
                form.ordered(order).rule,
                parameter_format,
                state_format,
                frozenset() if optimizer.name not in OPTIMIZERS else NEVER_NEGATIVE,
            )
            for _, optimizer, form in forms
        )
        self._scaled = scaled
        # Rules that lack `order`, though other rules of their optimizer have it.
        self.unordered = tuple(
            name
            for name, optimizer, form in forms
            if optimizer.orders and order not in (DEFAULT_ORDER, *form.orders)
        )

    @cached_property
    def whole(self) -> Rule:
        whole = (
            self._plain[0] if len(self._plain) == 1 else combine("_".join(self.names), self._plain)
        )
        return scale.scaled(whole) if self._scaled else whole

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(map(scale.scaled, self._plain)) if self._scaled else self._plain

    @property
    def selectors(self) -> tuple[str, ...]:
        """Switches of the combination that select rules 1, 2 and so on."""
        return tuple(selector(rule) for rule in self.rules[1:])

    @property
    def switches(self) -> tuple[str, ...]:
        """Switches of the combination that belong to the rules."""
        return tuple(name for name in self.whole.switches if name not in self.selectors)


def _stored(
    rule: Rule, parameter_format: str, state_format: str, never_negative: frozenset[str]
) -> Rule:
    """Return `rule` with its states in these formats."""
    wanted = {
        each: parameter_format if each == PARAMETERS else state_format for each in rule.states
    }
    if state_format == DYNAMIC8:
        wanted.update(dict.fromkeys(never_negative.intersection(rule.states), DYNAMIC8_UNSIGNED))
    formats = {each: form for each, form in wanted.items() if form != FP32}
    if not formats:
        return rule
    if rule.formats:
        raise RuleError(
            f"Rule {rule.name!r} has formats of its own "
            f"({', '.join(f'{k} {v}' for k, v in rule.formats.items())}); "
            "parameter_format and state_format must be fp32 with it",
            rule.location,
        )
    return Rule(
        rule.name,
        rule.definition,
        states=rule.states,
        inputs=rule.inputs,
        outputs=rule.outputs,
        scalars=rule.scalars,
        switches=rule.switches,
        formats=formats,
    )
