"""Several update rules as one, with their arithmetic units shared."""

import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from nearstep_spec.rule.errors import RuleError
from nearstep_spec.rule.expr import Condition, Expression, Value, select
from nearstep_spec.rule.program import ARITHMETIC, Program, RuleOperation
from nearstep_spec.rule.rule import Rule

__all__ = ["combine", "selector"]

#: Relative cost of a unit, by LUTs and DSPs; `_MULTIPLEXER` is that of one more rule on a unit.
_COST: Mapping[str, int] = MappingProxyType(
    {"add": 10, "mul": 10, "fma": 19, "div": 30, "sqrt": 25}
)
_MULTIPLEXER = 1
#: Approximate cycles of each unit: of datapaths of equal cost the shortest is taken.
_CYCLES: Mapping[str, int] = MappingProxyType({"add": 5, "mul": 5, "fma": 7, "div": 17, "sqrt": 15})
_TRIES = 40
_SEED = 1


def selector(rule: Rule) -> str:
    """Return the name of the switch that selects `rule` in a combination; the first rule
    has none.
    """
    return f"is_{rule.name}"


def combine(name: str, rules: Sequence[Rule]) -> Rule:
    """Combine `rules` into one rule with switches that select one of them.

    With all switches 0 the combination computes the first rule; with the `selector` of another
    rule, that rule, bit for bit. Arrays, scalars and switches of one name are shared. An array that
    the selected rule does not have is ignored.

    Operations of different rules share a unit with selected operands where that costs less than
    separate units: a - b is a + (-b), and an fma replaces a product (with an addend of -0) or a sum
    (with a factor of 1), which round the same. The operations of each rule, in an order of
    dependence, are aligned with those of earlier rules, so that no cycle can arise; the cheapest of
    several orders is taken, deterministically.

    Raises
    ------
    ValueError : fewer than two rules, or two of one name.
    RuleError : rules list their arrays in contradictory orders, a name has different meanings or
        formats in two rules, or a name is the selector of a rule.
    """
    if len(rules) < 2:
        raise ValueError(f"A combination must be of at least two rules, not {len(rules)}")
    names = [rule.name for rule in rules]
    if len(set(names)) != len(names):
        raise ValueError(f"Rules of a combination must have different names, not {names}")
    kinds = _kinds(rules)
    by_size = sorted(range(len(rules)), key=lambda k: -len(rules[k].program.operations))
    rng = random.Random(_SEED)
    best: tuple[int, int] | None = None
    chosen: Rule | None = None
    for attempt in range(_TRIES):
        slots: list[_Slot] = []
        for number in by_size:
            program = rules[number].program
            slots = _merged(slots, program, number, _order(program, rng if attempt else None))
        cost = sum(_COST[slot.kind] + _MULTIPLEXER * (len(slot.uses) - 1) for slot in slots)
        if best is not None and cost > best[0]:
            continue
        whole = _built(name, rules, kinds, slots)
        rank = (cost, _cycles(whole.program))
        if best is None or rank < best:
            best, chosen = rank, whole
    assert chosen is not None
    return chosen


def _kinds(rules: Sequence[Rule]) -> dict[str, str]:
    """Return the kind of each name; switches that select a rule last."""
    kinds: dict[str, str] = {}
    arrays = _union(rules)
    written = {state for rule in rules for state in rule.states}
    for rule in rules:
        declared = {
            **dict.fromkeys(rule.arrays_in, "array"),
            **dict.fromkeys(rule.outputs, "output"),
            **dict.fromkeys(rule.scalars, "scalar"),
            **dict.fromkeys(rule.switches, "switch"),
        }
        for each, kind in declared.items():
            if kinds.setdefault(each, kind) != kind:
                raise RuleError(
                    f"{each!r} is of kind {kind} here, and of kind {kinds[each]} in another rule",
                    rule.location,
                )
    for rule in rules[1:]:
        if selector(rule) in kinds:
            raise RuleError(f"{selector(rule)!r} is the switch of the rule", rule.location)
        kinds[selector(rule)] = "switch"
    for each in arrays:
        kinds[each] = "state" if each in written else "input"
    return {**{each: kinds[each] for each in arrays}, **kinds}


def _built(
    name: str, rules: Sequence[Rule], kinds: Mapping[str, str], slots: list["_Slot"]
) -> Rule:
    def define(**leaves: Expression) -> dict[str, Value]:
        builder = _Builder(rules, slots, leaves)
        results: dict[str, dict[int, Expression]] = {}
        for number, rule in enumerate(rules):
            for array, index in rule.program.results.items():
                results.setdefault(array, {})[number] = builder.value(number, index)
        return {array: cast(Value, builder.choose(each)) for array, each in results.items()}

    named = {
        kind: tuple(each for each in kinds if kinds[each] == kind)
        for kind in ("state", "input", "output", "scalar", "switch")
    }
    cast(Any, define).__signature__ = inspect.Signature(
        [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY)
            for each in kinds
            if kinds[each] != "output"
        ]
    )
    return Rule(
        name,
        define,
        states=named["state"],
        inputs=named["input"],
        outputs=named["output"],
        scalars=named["scalar"],
        switches=named["switch"],
        formats=_formats(rules),
    )


def _formats(rules: Sequence[Rule]) -> dict[str, str]:
    """Return the formats of the states; rules that share a state must agree."""
    found: dict[str, str] = {}
    for rule in rules:
        for state in rule.states:
            form = rule.formats.get(state, "fp32")
            if found.setdefault(state, form) != form:
                raise RuleError(
                    f"State {state!r} is {form} here, and {found[state]} in another rule",
                    rule.location,
                )
    return {state: form for state, form in found.items() if form != "fp32"}


def _union(rules: Sequence[Rule]) -> tuple[str, ...]:
    """Order the arrays of all rules consistently with each rule."""
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
    """One unit: its kind, and for each rule that uses it the operation in that rule's program."""

    kind: str
    uses: dict[int, int] = field(default_factory=dict)


def _kind(op: str) -> str:
    return "add" if op == "sub" else op  # a - b is a + (-b), bit for bit


def _joined(one: str, other: str) -> str | None:
    """Return the unit that computes both, or None: fma(a, b, -0) is a * b, and fma(1, a, b) is a +
    b.
    """
    if one == other:
        return one
    if {one, other} <= {"fma", "mul", "add"} and "fma" in (one, other):
        return "fma"
    return None


def _order(program: Program, rng: random.Random | None) -> list[int]:
    """List the arithmetic operations of a program: as written, or in another order of
    dependence.
    """
    needs: list[set[int]] = []
    for each in program.operations:
        below: set[int] = set()
        for operand in each.operands:
            below |= needs[operand]
            if program.operations[operand].op in ARITHMETIC:
                below.add(operand)
        needs.append(below)
    left = [k for k, each in enumerate(program.operations) if each.op in ARITHMETIC]
    if rng is None:
        return left
    order: list[int] = []
    while left:
        ready = [k for k in left if not needs[k] & set(left)]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


def _merged(slots: list[_Slot], program: Program, number: int, order: list[int]) -> list[_Slot]:
    """Align `slots` and the operations of one more rule, both in their order, at the least cost."""
    kinds = [_kind(program.operations[k].op) for k in order]
    best: dict[tuple[int, int], tuple[int, str]] = {(0, 0): (0, "")}
    for i in range(len(slots) + 1):
        for j in range(len(order) + 1):
            choices = []
            if i:
                choices.append((best[i - 1, j][0] + _COST[slots[i - 1].kind], "keep"))
            if j:
                choices.append((best[i, j - 1][0] + _COST[kinds[j - 1]], "new"))
            if i and j and (both := _joined(slots[i - 1].kind, kinds[j - 1])):
                choices.append((best[i - 1, j - 1][0] + _COST[both] + _MULTIPLEXER, "join"))
            if choices:
                best[i, j] = min(choices)
    result: list[_Slot] = []
    i, j = len(slots), len(order)
    while i or j:
        step = best[i, j][1]
        if step == "new":
            j -= 1
            result.append(_Slot(kinds[j], {number: order[j]}))
            continue
        i -= 1
        slot = slots[i]
        if step == "keep":
            result.append(slot)
        else:
            j -= 1
            both = _joined(slot.kind, kinds[j])
            assert both is not None
            result.append(_Slot(both, {**slot.uses, number: order[j]}))
    return result[::-1]


def _cycles(program: Program) -> int:
    end: list[int] = []
    for each in program.operations:
        start = max((end[operand] for operand in each.operands), default=0)
        end.append(start + _CYCLES.get(_kind(each.op), 0))
    return max(end[index] for index in program.results.values())


class _Builder:
    """Build the expressions of the common datapath, slot by slot."""

    def __init__(self, rules: Sequence[Rule], slots: list[_Slot], leaves: Mapping[str, Expression]):
        self.rules = rules
        self.leaves = leaves
        self.values: list[dict[int, Expression]] = [{} for _ in rules]
        self.constants: dict[int, Value] = {}
        for slot in slots:
            self._unit(slot)

    def constant(self, bits: int) -> Value:
        return self.constants.setdefault(bits, Value("constant", bits=bits))

    def value(self, number: int, index: int) -> Expression:
        """Return the value of operation `index` of a rule, whose arithmetic is in earlier slots."""
        known = self.values[number]
        if index not in known:
            each = self.rules[number].program.operations[index]
            if each.op in ("array", "scalar", "switch"):
                known[index] = self.leaves[each.name]
            elif each.op == "constant":
                known[index] = self.constant(each.bits)
            else:
                operands = [self.value(number, k) for k in each.operands]
                made = Condition if each.op in _CONDITIONS else Value
                known[index] = made(each.op, *operands)
        return known[index]

    def choose(self, by_rule: Mapping[int, Expression]) -> Expression:
        """Select the value of the running rule; unlisted rules may have any value."""
        numbers = sorted(by_rule)
        chosen = by_rule[numbers[0]]
        for number in numbers[1:]:
            if by_rule[number] is not chosen:
                name = selector(self.rules[number])
                switch = cast(Condition, self.leaves[name])
                chosen = select(switch, cast(Value, by_rule[number]), cast(Value, chosen))
        return chosen

    def _unit(self, slot: _Slot) -> None:
        operands = {
            number: self._operands(number, slot.kind, self.rules[number].program.operations[index])
            for number, index in slot.uses.items()
        }
        first = next(iter(operands.values()))
        for given in operands.values():
            # The first two operands of a sum, a product or an fma commute.
            swapped = [given[1], given[0], *given[2:]] if slot.kind in _COMMUTE else given
            same = [sum(a is b for a, b in zip(each, first, strict=True)) for each in
                    (given, swapped)]  # fmt: skip
            if same[1] > same[0]:
                given[:2] = swapped[:2]
        columns = [
            self.choose({number: given[place] for number, given in operands.items()})
            for place in range(len(first))
        ]
        result = Value(slot.kind, *columns)
        for number, index in slot.uses.items():
            self.values[number][index] = result

    def _operands(self, number: int, kind: str, each: RuleOperation) -> list[Expression]:
        given = [self.value(number, k) for k in each.operands]
        if each.op == "sub":
            given[1] = Value("neg", given[1])
        if kind == "fma" and each.op == "mul":
            given.append(self.constant(0x8000_0000))
        elif kind == "fma" and each.op in ("add", "sub"):
            given = [self.constant(0x3F80_0000), given[0], given[1]]
        return given


_CONDITIONS = frozenset({"lt", "le", "eq", "not", "and", "or", "xor"})
_COMMUTE = frozenset({"add", "mul", "fma"})
