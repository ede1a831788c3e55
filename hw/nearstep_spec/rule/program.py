"""A rule's arithmetic as a list of operations: shared, folded, and in the order of dependence."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

import numpy as np

from nearstep_spec.rule.errors import Location, RuleCycleError, RuleTypeError, UnknownNameError
from nearstep_spec.rule.expr import Expression, float32_bits

__all__ = ["ARITHMETIC", "OPERATIONS", "Program", "RuleOperation"]

#: Operations that round, each on an arithmetic unit in hardware.
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "fma", "sqrt"})

#: Every operation, with its number of operands.
OPERATIONS: Mapping[str, int] = MappingProxyType(
    {
        "array": 0,
        "scalar": 0,
        "switch": 0,
        "constant": 0,
        "add": 2,
        "sub": 2,
        "mul": 2,
        "div": 2,
        "fma": 3,
        "sqrt": 1,
        "neg": 1,
        "abs": 1,
        "max": 2,
        "min": 2,
        "sign": 1,
        "select": 3,
        "lt": 2,
        "le": 2,
        "eq": 2,
        "not": 1,
        "and": 2,
        "or": 2,
        "xor": 2,
    }
)

_LEAVES = frozenset({"array", "scalar", "switch", "constant"})
_COMMUTATIVE = frozenset({"add", "mul", "max", "min", "eq", "and", "or", "xor"})
_SIGN = 0x8000_0000
_QUIET_NAN = 0x7FC0_0000


@dataclass(frozen=True)
class RuleOperation:
    """One operation of a program.

    Attributes
    ----------
    op : a key of `OPERATIONS`.
    operands : indices of earlier operations of the same program.
    name : of an array, a scalar or a switch; else empty.
    bits : pattern of a constant; else 0.
    location : the first line of the rule that uses the operation.
    """

    op: str
    operands: tuple[int, ...]
    name: str
    bits: int
    location: Location


class Program:
    """The operations that a set of results needs, each once.

    Equal operations on equal operands are one operation (a commutative one in either order).
    Constants are folded. No identity is used that could change a bit of any result.

    Parameters
    ----------
    results : the expressions to compute, by name.

    Attributes
    ----------
    operations : a tuple. Operands always precede their use.
    results : index of the operation of each result.

    Raises
    ------
    RuleCycleError : a result depends on itself through `next_value`.
    UnknownNameError : `next_value` names no result.
    """

    def __init__(self, results: Mapping[str, Expression]) -> None:
        builder = _Builder(results)
        wanted = {name: builder.index(expression) for name, expression in results.items()}
        live: set[int] = set()
        pending = list(wanted.values())
        while pending:
            index = pending.pop()
            if index not in live:
                live.add(index)
                pending.extend(builder.operations[index].operands)
        renumbered = {old: new for new, old in enumerate(sorted(live))}
        self.operations = tuple(
            RuleOperation(
                each.op,
                tuple(renumbered[operand] for operand in each.operands),
                each.name,
                each.bits,
                each.location,
            )
            for each in (builder.operations[old] for old in renumbered)
        )
        self.results = MappingProxyType({name: renumbered[old] for name, old in wanted.items()})

    def units(self) -> Mapping[str, int]:
        """How many units of each arithmetic operation the program needs, in hardware."""
        count = Counter(each.op for each in self.operations if each.op in ARITHMETIC)
        return {op: count[op] for op in OPERATIONS if count[op]}

    def digest(self) -> str:
        """Hexadecimal digest of the arithmetic, independent of source locations."""
        parts = [(each.op, each.operands, each.name, each.bits) for each in self.operations]
        text = repr((parts, sorted(self.results.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def names(self, op: str) -> frozenset[str]:
        """Names of the leaves of one kind (`array`, `scalar`, `switch`) that are read."""
        return frozenset(each.name for each in self.operations if each.op == op)


class _Builder:
    """Turns expressions into operations, children first, without recursion."""

    def __init__(self, results: Mapping[str, Expression]) -> None:
        self.results = results
        self.operations: list[RuleOperation] = []
        self._by_key: dict[tuple[str, tuple[int, ...], str, int], int] = {}
        self._done: dict[int, int] = {}

    def index(self, root: Expression) -> int:
        path: list[Expression] = [root]
        on_path = {id(root)}
        while path:
            node = path[-1]
            children = self._children(node)
            missing = next((child for child in children if id(child) not in self._done), None)
            if missing is None:
                self._done[id(node)] = self._finish(node, children)
                on_path.discard(id(path.pop()))
            elif id(missing) in on_path:
                start = next(i for i, each in enumerate(path) if each is missing)
                raise RuleCycleError(
                    [f"{each.op} {each.name}".strip() for each in [*path[start:], missing]],
                    node.location,
                )
            else:
                path.append(missing)
                on_path.add(id(missing))
        return self._done[id(root)]

    def _children(self, node: Expression) -> tuple[Expression, ...]:
        if node.op == "next":
            if node.name not in self.results:
                raise UnknownNameError("state or output", node.name, self.results, node.location)
            return (self.results[node.name],)
        if OPERATIONS.get(node.op) != len(node.operands):
            raise RuleTypeError(
                f"{node.op!r} with {len(node.operands)} operands is no operation", node.location
            )
        return node.operands

    def _finish(self, node: Expression, children: tuple[Expression, ...]) -> int:
        operands = tuple(self._done[id(child)] for child in children)
        if node.op == "next":
            return operands[0]
        same = self._identity(node.op, operands)
        if same is not None:
            return same
        folded = self._fold(node.op, operands)
        if folded is not None:
            return self._add("constant", (), "", folded, node.location)
        return self._add(node.op, operands, node.name, node.bits, node.location)

    def _add(
        self, op: str, operands: tuple[int, ...], name: str, bits: int, location: Location
    ) -> int:
        ordered = operands
        if op in _COMMUTATIVE:
            ordered = tuple(sorted(operands))
        elif op == "fma":
            ordered = (*sorted(operands[:2]), operands[2])
        key = (op, ordered, name, bits)
        if key not in self._by_key:
            self._by_key[key] = len(self.operations)
            self.operations.append(RuleOperation(op, operands, name, bits, location))
        return self._by_key[key]

    def _identity(self, op: str, operands: tuple[int, ...]) -> int | None:
        first = self.operations[operands[0]] if operands else None
        if op == "select" and operands[1] == operands[2]:
            return operands[1]
        if first is not None and op == first.op and op in ("neg", "not"):
            return first.operands[0]
        if first is not None and op == first.op == "abs":
            return operands[0]
        return None

    def _fold(self, op: str, operands: tuple[int, ...]) -> int | None:
        nodes = [self.operations[operand] for operand in operands]
        if op in _LEAVES or any(node.op != "constant" for node in nodes):
            return None
        bits = [node.bits for node in nodes]
        if op == "neg":
            return bits[0] ^ _SIGN
        if op == "abs":
            return bits[0] & ~_SIGN
        if op == "fma":
            return _fold_fma(*bits)
        if op in ARITHMETIC:
            values = [np.uint32(each).view(np.float32) for each in bits]
            function = {
                "add": np.add,
                "sub": np.subtract,
                "mul": np.multiply,
                "div": np.divide,
                "sqrt": np.sqrt,
            }[op]
            with np.errstate(all="ignore"):
                result = function(*values)
            return _QUIET_NAN if np.isnan(result) else int(np.float32(result).view(np.uint32))
        return None


def _fold_fma(a: int, b: int, c: int) -> int | None:
    """Fold a * b + c of finite constants if the sum is not zero; None leaves it to the hardware."""
    numbers = [float(np.uint32(each).view(np.float32)) for each in (a, b, c)]
    if not all(math.isfinite(number) for number in numbers):
        return None
    x, y, z = (Fraction(number) for number in numbers)
    exact = x * y + z
    if exact == 0:
        return None
    nearest = float(exact)
    error = exact - Fraction(nearest)
    if error and not np.float64(nearest).view(np.uint64) & np.uint64(1):
        # Round to odd in binary64, so that the final rounding to binary32 is correct.
        nearest = math.nextafter(nearest, math.inf if error > 0 else -math.inf)
    return float32_bits(nearest)
