"""Several update rules as one, with their arithmetic units shared."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .errors import RuleError
from .expr import Condition, Expression, Value, select
from .program import ARITHMETIC, Operation
from .rule import Rule

__all__ = ["combine", "selector"]

#: What sharing a unit saves, in the order of its size; only the order and the rough ratio matter.
_WORTH: Mapping[str, int] = {"div": 12, "sqrt": 10, "fma": 6, "mul": 4, "add": 3, "sub": 3}


def selector(rule: Rule) -> str:
    """Name of the switch that chooses ``rule`` in a combination; the first rule has none."""
    return f"is_{rule.name}"


def combine(name: str, rules: Sequence[Rule]) -> Rule:
    """One rule that is any of ``rules``, by switches.

    With all switches 0 it is the first rule; with the :func:`selector` of another it is that one,
    bit for bit. Arrays, scalars and switches of one name are shared. An array that the chosen rule
    does not have is neither needed nor meaningful.

    Units of one kind are shared between rules, with their operands selected. Which ones is found
    by aligning the operations of each rule, in the order of dependence, with those before it; so no
    cycle can come about.

    Raises
    ------
    ValueError
        Fewer than two rules, or two of one name.
    RuleError
        Rules list their arrays in orders that contradict each other, or have outputs.
    """
    if len(rules) < 2:
        raise ValueError(f"A combination must be of at least two rules, not {len(rules)}")
    names = [rule.name for rule in rules]
    if len(set(names)) != len(names):
        raise ValueError(f"Rules of a combination must have different names, not {names}")
    for rule in rules:
        if rule.outputs:
            raise RuleError(f"Rule {rule.name!r} of a combination has outputs", rule.location)
    arrays = _union(rules)
    states = tuple(a for a in arrays if any(a in rule.states for rule in rules))
    scalars = tuple(dict.fromkeys(s for rule in rules for s in rule.scalars))
    own = tuple(dict.fromkeys(s for rule in rules for s in rule.switches))
    chosen = tuple(selector(rule) for rule in rules[1:])

    def define(**leaves: Expression) -> Mapping[str, Value]:
        return _Merge(rules, leaves).results(states)

    parameters = [
        inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY)
        for each in (*arrays, *scalars, *own, *chosen)
    ]
    define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Rule(
        name,
        define,
        states=states,
        inputs=tuple(a for a in arrays if a not in states),
        scalars=scalars,
        switches=(*own, *chosen),
    )


def _union(rules: Sequence[Rule]) -> tuple[str, ...]:
    """Arrays of all rules, in an order that agrees with each of them."""
    before: dict[str, set[str]] = {}
    for rule in rules:
        for index, name in enumerate(rule.arrays_in):
            before.setdefault(name, set()).update(rule.arrays_in[:index])
    merged: list[str] = []
    while len(merged) < len(before):
        ready = [n for n in before if n not in merged and before[n] <= set(merged)]
        if not ready:
            orders = " and ".join(str(rule.arrays_in) for rule in rules)
            raise RuleError(
                f"Arrays of a combination must have one order, not {orders}", rules[-1].location
            )
        merged.append(ready[0])
    return tuple(merged)


@dataclass
class _Slot:
    """One unit of hardware: an operation of each rule that uses it, by the rule's number."""

    op: str
    users: dict[int, int] = field(default_factory=dict)
    value: Value | None = None


class _Merge:
    def __init__(self, rules: Sequence[Rule], leaves: Mapping[str, Expression]) -> None:
        self._rules = rules
        self._leaves = leaves
        self._made: dict[tuple[int, int], Expression] = {}
        slots: list[_Slot] = []
        for number, rule in enumerate(rules):
            slots = _align(slots, number, rule.program.operations)
        self._slot_of = {
            (number, index): slot for slot in slots for number, index in slot.users.items()
        }
        for slot in slots:  # in an order that is one of dependence for every rule
            self._make(slot)

    def results(self, states: Sequence[str]) -> dict[str, Value]:
        results = {}
        for state in states:
            by_rule = {
                number: self._value(number, rule.program.results[state])
                for number, rule in enumerate(self._rules)
                if state in rule.program.results
            }
            results[state] = self._choose(by_rule)
        return results

    def _make(self, slot: _Slot) -> None:
        operands = []
        for place in range(len(self._operation(*next(iter(slot.users.items()))).operands)):
            by_rule = {
                number: self._value(number, self._operation(number, index).operands[place])
                for number, index in slot.users.items()
            }
            operands.append(self._choose(by_rule))
        slot.value = Value(slot.op, *operands)

    def _choose(self, by_rule: Mapping[int, Value]) -> Value:
        """The value of the rule that is chosen; of the lowest, if it is another."""
        numbers = sorted(by_rule)
        chosen = by_rule[numbers[0]]
        for number in numbers[1:]:
            condition = self._leaves[selector(self._rules[number])]
            assert isinstance(condition, Condition)
            if by_rule[number] is not chosen:
                chosen = select(condition, by_rule[number], chosen)
        return chosen

    def _value(self, number: int, index: int) -> Value:
        made = self._expression(number, index)
        assert isinstance(made, Value)
        return made

    def _operation(self, number: int, index: int) -> Operation:
        return self._rules[number].program.operations[index]

    def _expression(self, number: int, index: int) -> Expression:
        slot = self._slot_of.get((number, index))
        if slot is not None:
            assert slot.value is not None
            return slot.value
        if (number, index) not in self._made:
            each = self._operation(number, index)
            kind = Condition if each.op in _CONDITIONS else Value
            self._made[number, index] = (
                self._leaves[each.name]
                if each.op in ("array", "scalar", "switch")
                else kind(
                    each.op, *(self._expression(number, i) for i in each.operands), bits=each.bits
                )
            )
        return self._made[number, index]


_CONDITIONS = frozenset({"lt", "le", "eq", "not", "and", "or", "xor"})


def _align(slots: Sequence[_Slot], number: int, operations: Sequence[Operation]) -> list[_Slot]:
    """Slots with the arithmetic of one more rule: as much as possible shared, the rest inserted.

    The alignment of two sequences with the greatest worth of what is shared.
    """
    new = [(i, each.op) for i, each in enumerate(operations) if each.op in ARITHMETIC]
    best = [[0] * (len(new) + 1) for _ in range(len(slots) + 1)]
    for a in range(len(slots) - 1, -1, -1):
        for b in range(len(new) - 1, -1, -1):
            best[a][b] = max(best[a + 1][b], best[a][b + 1])
            if slots[a].op == new[b][1]:
                best[a][b] = max(best[a][b], best[a + 1][b + 1] + _WORTH[new[b][1]])
    merged: list[_Slot] = []
    a = b = 0
    while a < len(slots) or b < len(new):
        both = a < len(slots) and b < len(new)
        if both and slots[a].op == new[b][1]:
            if best[a][b] == best[a + 1][b + 1] + _WORTH[new[b][1]]:
                merged.append(_Slot(slots[a].op, {**slots[a].users, number: new[b][0]}))
                a, b = a + 1, b + 1
                continue
        if b == len(new) or (a < len(slots) and best[a][b] == best[a + 1][b]):
            merged.append(slots[a])
            a += 1
        else:
            merged.append(_Slot(new[b][1], {number: new[b][0]}))
            b += 1
    return merged
