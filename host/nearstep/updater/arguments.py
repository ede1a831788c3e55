"""Arguments of each update rule, checked, as what the registers of a kernel get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nearstep.errors import ArgumentError
from nearstep.scalars import flag
from nearstep.updater.checks import check_hyperparameters, check_scalars
from nearstep_spec.rule.adagrad import adagrad_scalars
from nearstep_spec.rule.adam import ORDERS
from nearstep_spec.rule.sgd import sgd_momentum_scalars, sgd_scalars


@dataclass(frozen=True, kw_only=True)
class RuleArguments:
    """What one run of a rule computes with.

    Attributes
    ----------
    rule: str
    scalars: Mapping[str, float | int]
        By register, switches included.
    given: str
        The arguments that they follow from, as text.
    """

    rule: str
    scalars: Mapping[str, float | int]
    given: str

    def check(self) -> None:
        """Raise :class:`ArgumentError` unless binary32 registers hold the scalars."""
        check_scalars(self.scalars, self.given)

    def also(self, name: str, value: float) -> RuleArguments:
        """These, and one register more that holds its argument as it is."""
        scalars = {**self.scalars, name: value}
        return RuleArguments(rule=self.rule, scalars=scalars, given=f"{self.given}, {name}={value}")


def adam_arguments(
    order: str,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    rule: str = "adam",
) -> RuleArguments:
    """Arguments of Adam, with the arithmetic in ``order``, or of a rule with the same numbers;
    raises :class:`ArgumentError`."""
    check_hyperparameters(step, betas, lr=lr, eps=eps, weight_decay=weight_decay)
    decoupled = flag("decoupled", decoupled)
    _, scalars_of = ORDERS[order]
    return RuleArguments(
        rule=rule,
        scalars=scalars_of(lr, betas, eps, weight_decay, step, decoupled),
        given=f"{lr=}, {betas=}, {eps=}, {weight_decay=}, {step=}",
    )


def sgd_arguments(
    order: str,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
) -> RuleArguments:
    """Arguments of SGD, with momentum or without; raises :class:`ArgumentError`."""
    check_hyperparameters(
        1, (0.0, 0.0), lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay
    )
    nesterov, first = flag("nesterov", nesterov), flag("first", first)
    if nesterov and (momentum == 0.0 or dampening != 0.0):
        raise ArgumentError("nesterov needs a momentum and no dampening")
    given = f"{lr=}, {momentum=}, {dampening=}, {weight_decay=}"
    if momentum == 0.0:
        return RuleArguments(rule="sgd", scalars=sgd_scalars(lr, weight_decay), given=given)
    scalars = sgd_momentum_scalars(lr, momentum, dampening, weight_decay, nesterov, first)
    return RuleArguments(rule="sgd_momentum", scalars=scalars, given=given)


def adagrad_arguments(
    order: str, *, step: int, lr: float, lr_decay: float, weight_decay: float, eps: float
) -> RuleArguments:
    """Arguments of Adagrad; raises :class:`ArgumentError`."""
    check_hyperparameters(
        step, (0.0, 0.0), lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps
    )
    return RuleArguments(
        rule="adagrad",
        scalars=adagrad_scalars(lr, lr_decay, weight_decay, eps, step),
        given=f"{lr=}, {lr_decay=}, {weight_decay=}, {eps=}, {step=}",
    )


ARGUMENTS: Mapping[str, Callable[..., RuleArguments]] = MappingProxyType(
    {
        "adam": adam_arguments,
        "adam_amsgrad": adam_arguments,
        "sgd": sgd_arguments,
        "sgd_momentum": sgd_arguments,
        "adagrad": adagrad_arguments,
    }
)
"""What checks the arguments of a rule, by its name."""
