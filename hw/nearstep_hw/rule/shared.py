"""Several update rules in one datapath, of which a run chooses one: units that rules share."""

import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from .errors import RuleError, UnknownNameError
from .expr import Condition, Expression, Value, select
from .program import ARITHMETIC, Operation, Program
from .rule import Rule

__all__ = ["SharedRules"]

#: What a unit costs beside another, by its LUTs and DSPs, and what a rule more on a unit costs.
_COST: Mapping[str, float] = MappingProxyType(
    {"add": 1.0, "mul": 1.0, "fma": 1.9, "div": 3.0, "sqrt": 2.5}
)
_MULTIPLEXER = 0.1
#: Cycles of each unit, about: of datapaths that cost the same, the shorter one is taken.
_CYCLES: Mapping[str, int] = MappingProxyType({"add": 5, "mul": 3, "fma": 6, "div": 28, "sqrt": 28})
_TRIES = 400
_SEED = 1


@dataclass
class _Slot:
    """One unit: its kind, and for each rule that uses it the operation in that rule's program."""

    kind: str
    uses: dict[int, int] = field(default_factory=dict)


def _kind(op: str) -> str:
    return "add" if op == "sub" else op  # a - b is a + (-b), bit for bit


def _joined(one: str, other: str) -> str | None:
    """The unit that does both, or None: fma(a, b, -0) is a * b, and fma(1, a, b) is a + b."""
    if one == other:
        return one
    if {one, other} <= {"fma", "mul", "add"} and "fma" in (one, other):
        return "fma"
    return None


def _order(program: Program, rng: random.Random) -> list[int]:
    """The arithmetic operations of a program, in one of the orders that dependence allows."""
    needs: list[set[int]] = []
    for each in program.operations:
        below: set[int] = set()
        for operand in each.operands:
            below |= needs[operand]
            if program.operations[operand].op in ARITHMETIC:
                below.add(operand)
        needs.append(below)
    left = [k for k, each in enumerate(program.operations) if each.op in ARITHMETIC]
    order: list[int] = []
    while left:
        ready = [k for k in left if not needs[k] & set(left)]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


def _merged(slots: list[_Slot], program: Program, number: int, order: list[int]) -> list[_Slot]:
    """`slots` and the operations of one more rule, both in their order, at the least cost."""
    kinds = [_kind(program.operations[k].op) for k in order]
    best: dict[tuple[int, int], tuple[float, str]] = {(0, 0): (0.0, "")}
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


class _Builder:
    """Expressions of the common datapath, slot by slot."""

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
        """What the operation `index` of a rule gives; its arithmetic is in earlier slots."""
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
        """The value of the rule that runs; of rules not named, that of any."""
        numbers = sorted(by_rule)
        chosen = by_rule[numbers[0]]
        for number in numbers[1:]:
            if by_rule[number] is not chosen:
                name = _selector(self.rules[number])
                chosen = select(self.leaves[name], by_rule[number], chosen)
        return chosen

    def _unit(self, slot: _Slot) -> None:
        operands = {
            number: self._operands(number, slot.kind, self.rules[number].program.operations[index])
            for number, index in slot.uses.items()
        }
        first = next(iter(operands.values()))
        for given in operands.values():
            # The first two operands of a sum, a product or an fma may change places.
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

    def _operands(self, number: int, kind: str, each: Operation) -> list[Expression]:
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


def _selector(rule: Rule) -> str:
    return f"use_{rule.name}"


def _cycles(program: Program) -> int:
    end: list[int] = []
    for each in program.operations:
        start = max((end[operand] for operand in each.operands), default=0)
        end.append(start + _CYCLES.get(_kind(each.op), 0))
    return max(end[index] for index in program.results.values())


class SharedRules:
    """One datapath that holds several rules; switches choose the one that a run follows.

    Operations of different rules are put on one unit where that costs less than a unit each; then
    its operands are chosen by the rule. Arrays, scalars and switches of one name are the same ports
    and registers. An array that a rule does not write gives a value without a meaning when that
    rule runs.

    Each result has the bits that the rule alone would give: a - b becomes a + (-b), and an fma
    stands in for a product (with an addend of -0) or for a sum (with a factor of 1), which round
    the same.

    Parameters
    ----------
    name : str
    rules : sequence of Rule
        At least one; the first runs when no switch is set.

    Members
    -------
    rule : Rule
        The common datapath, with the switch `use_<name>` for each rule but the first.
    rules : tuple of Rule

    Raises
    ------
    RuleError
        Two rules have one name, or a name means different things in two rules.
    """

    def __init__(self, name: str, rules: Sequence[Rule]) -> None:
        if not rules:
            raise ValueError("Rules to share units must be at least one")
        self.rules = tuple(rules)
        kinds = self._kinds()
        self.slots = self._best(name, kinds)
        self.rule = self._build(name, kinds, self.slots)

    def _kinds(self) -> dict[str, str]:
        kinds: dict[str, str] = {}
        names = [each.name for each in self.rules]
        for number, each in enumerate(self.rules):
            if each.name in names[:number]:
                raise RuleError(f"Two rules have the name {each.name!r}", each.location)
            declared = {
                "state": each.states, "input": each.inputs, "output": each.outputs,
                "scalar": each.scalars, "switch": each.switches,
            }  # fmt: skip
            for kind, members in declared.items():
                for member in members:
                    if kinds.setdefault(member, kind) != kind:
                        raise RuleError(
                            f"{member!r} is a {kind} here, and a {kinds[member]} of another rule",
                            each.location,
                        )
        for each in self.rules[1:]:
            if _selector(each) in kinds:
                raise RuleError(f"{_selector(each)!r} is the switch of the rule", each.location)
            kinds[_selector(each)] = "switch"
        return kinds

    def _best(self, name: str, kinds: Mapping[str, str]) -> list[_Slot]:
        rng = random.Random(_SEED)
        numbers = sorted(
            range(len(self.rules)), key=lambda k: -len(self.rules[k].program.operations)
        )
        found: tuple[float, int] | None = None
        best: list[_Slot] = []
        for _ in range(_TRIES):
            slots: list[_Slot] = []
            for number in numbers:
                program = self.rules[number].program
                slots = _merged(slots, program, number, _order(program, rng))
            cost = sum(_COST[slot.kind] + _MULTIPLEXER * (len(slot.uses) - 1) for slot in slots)
            if found is not None and cost > found[0] + 1e-9:
                continue
            rank = (cost, _cycles(self._build(name, kinds, slots).program))
            if found is None or rank < found:
                found, best = rank, slots
        return best

    def _build(self, name: str, kinds: Mapping[str, str], slots: list[_Slot]) -> Rule:
        rules = self.rules

        def definition(**leaves: Expression) -> dict[str, Value]:
            builder = _Builder(rules, slots, leaves)
            results: dict[str, dict[int, Expression]] = {}
            for number, rule in enumerate(rules):
                for array, index in rule.program.results.items():
                    results.setdefault(array, {})[number] = builder.value(number, index)
            return {array: builder.choose(each) for array, each in results.items()}

        order = [n for kind in ("state", "input", "scalar", "switch") for n in kinds
                 if kinds[n] == kind]  # fmt: skip
        # The ports of the arrays stand in the order of the first rule that has them.
        arrays = [n for rule in rules for n in rule.arrays_in]
        order.sort(key=lambda n: arrays.index(n) if n in arrays else len(arrays))
        definition.__signature__ = inspect.Signature(
            [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in order]
        )
        by_kind = {
            kind: tuple(n for n in kinds if kinds[n] == kind) for kind in set(kinds.values())
        }
        return Rule(
            name,
            definition,
            states=by_kind.get("state", ()),
            inputs=by_kind.get("input", ()),
            outputs=by_kind.get("output", ()),
            scalars=by_kind.get("scalar", ()),
            switches=by_kind.get("switch", ()),
        )

    def registers(self, name: str, scalars: Mapping[str, float]) -> dict[str, float]:
        """All registers of the common datapath for a run of the rule `name`.

        Raises
        ------
        UnknownNameError
            There is no such rule.
        MissingScalarError
        """
        names = [each.name for each in self.rules]
        if name not in names:
            raise UnknownNameError("rule", name, names, self.rule.location)
        chosen = self.rules[names.index(name)]
        chosen.check_scalars(scalars)
        values = {**dict.fromkeys(self.rule.registers(), 0.0), **scalars}
        for each in self.rules[1:]:
            values[_selector(each)] = int(each.name == name)
        return values

    def units(self) -> Mapping[str, int]:
        """Units of the common datapath."""
        return self.rule.units()

    def separate_units(self) -> Mapping[str, int]:
        """Units of as many datapaths as there are rules."""
        total: dict[str, int] = {}
        for each in self.rules:
            for op, count in each.units().items():
                total[op] = total.get(op, 0) + count
        return total
