"""The update rules that kernels are built of, by name: plain data."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from nearstep_spec.rule import scale
from nearstep_spec.rule.adagrad import ADAGRAD
from nearstep_spec.rule.adam import ADAM_AMSGRAD, ORDERS
from nearstep_spec.rule.combine import combine, selector
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.sgd import SGD, SGD_MOMENTUM

__all__ = ["ARRAYS", "RULES", "RuleSet", "rule_named"]

ARRAYS = ("p", "g", "m", "v")
"""Arrays of Adam: parameters, gradients, first and second moments. Of others, a rule has some of
them, or more."""

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "adam_amsgrad": ADAM_AMSGRAD,
        "sgd": SGD,
        "sgd_momentum": SGD_MOMENTUM,
        "adagrad": ADAGRAD,
    }
)
"""Rules beside ``adam``, which has a choice of orders."""


def rule_named(name: str, order: str) -> Rule:
    """The rule of a name; ``order`` is that of Adam's arithmetic.

    Raises
    ------
    KeyError
    """
    return ORDERS[order][0] if name == "adam" else RULES[name]


class RuleSet:
    """The rules that one kernel has, and the rule that is all of them.

    Parameters
    ----------
    names : sequence of str
        At least one; the first is index 0.
    order : str
        Of Adam's arithmetic.
    scaled : bool
        Whether gradients are multiplied by a scalar first, see :func:`~.scale.scaled`.

    Members
    -------
    rules : tuple of Rule
    whole : Rule
        The one rule, or the combination.
    """

    def __init__(self, names: Sequence[str], order: str, *, scaled: bool = False) -> None:
        self.names = tuple(names)
        rules = tuple(rule_named(name, order) for name in self.names)
        whole = rules[0] if len(rules) == 1 else combine("_".join(self.names), rules)
        self.rules = tuple(map(scale.scaled, rules)) if scaled else rules
        self.whole = scale.scaled(whole) if scaled else whole

    @property
    def selectors(self) -> tuple[str, ...]:
        """Switches of the whole rule that choose rules 1, 2 and so on."""
        return tuple(selector(rule) for rule in self.rules[1:])

    @property
    def switches(self) -> tuple[str, ...]:
        """Switches of the whole rule that are the rules' own."""
        return tuple(name for name in self.whole.switches if name not in self.selectors)
