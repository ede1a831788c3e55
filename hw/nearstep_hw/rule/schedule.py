"""Schedule of a program's operations with few bits of delay between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nearstep_spec.rule.program import Program

__all__ = ["Schedule"]

_CONDITIONS = frozenset({"lt", "le", "eq", "not", "and", "or", "xor"})


@dataclass(frozen=True)
class Schedule:
    """Start and end of each operation, in cycles after the inputs.

    Attributes
    ----------
    start, end : for each operation of the program; its result is valid at `end`. None for values
        constant during a run: scalars, switches, constants and selections among them.
    latency : cycles from the inputs to the outputs, which are registered.
    """

    start: tuple[int | None, ...]
    end: tuple[int | None, ...]
    latency: int

    @classmethod
    def of(cls, program: Program, depths: Mapping[str, int], input_stage: int = 0) -> "Schedule":
        """Schedule `program` with least latency, and among those schedules with few bits of delay.

        Parameters
        ----------
        depths : cycles of each operation; 0 when not listed.
        input_stage : cycle at which the arrays are valid.
        """
        planner = _Planner(program, depths, input_stage)
        while planner.improve():
            pass
        return cls(tuple(planner.start), tuple(planner.end()), planner.latency)

    def delay_bits(self, program: Program) -> int:
        """Return the bits of register or memory between operations."""
        return _delay_bits(program, self.start, self.end, self.latency)


def _width(op: str) -> int:
    return 1 if op in _CONDITIONS else 32


def _last_use(program: Program, start: Sequence[int | None], latency: int) -> list[int | None]:
    last: list[int | None] = [None] * len(program.operations)
    for each, begin in zip(program.operations, start, strict=True):
        for operand in each.operands:
            if begin is not None:
                last[operand] = max(begin, last[operand] or 0)
    for index in program.results.values():
        last[index] = latency
    return last


def _delay_bits(
    program: Program,
    start: Sequence[int | None],
    end: Sequence[int | None],
    latency: int,
) -> int:
    total = 0
    last = _last_use(program, start, latency)
    for each, ready, used in zip(program.operations, end, last, strict=True):
        if ready is not None and used is not None:
            total += _width(each.op) * (used - ready)
    return total


class _Planner:
    def __init__(self, program: Program, depths: Mapping[str, int], input_stage: int) -> None:
        self.program = program
        self.depth = [depths.get(each.op, 0) for each in program.operations]
        self.start: list[int | None] = []
        self.users: list[list[int]] = [[] for _ in program.operations]
        for index, each in enumerate(program.operations):
            for operand in each.operands:
                self.users[operand].append(index)
            self.start.append(self._earliest(index, input_stage))
        self.latency = max(
            (self._registered(index) for index in program.results.values()), default=0
        )

    def _earliest(self, index: int, input_stage: int) -> int | None:
        each = self.program.operations[index]
        if each.op == "array":
            return input_stage
        ready = [end for end in map(self._end, each.operands) if end is not None]
        if ready:
            return max(ready)
        return input_stage if self.depth[index] else None

    def _end(self, index: int) -> int | None:
        start = self.start[index]
        return None if start is None else start + self.depth[index]

    def _registered(self, index: int) -> int:
        # An output that is not from a pipelined operation gets a register.
        end = self._end(index)
        return (end or 0) + (0 if self.depth[index] else 1)

    def end(self) -> list[int | None]:
        return [self._end(index) for index in range(len(self.start))]

    def improve(self) -> bool:
        """Delay each operation as far as its users allow if that adds no bits; return whether one
        moved."""
        best = _delay_bits(self.program, self.start, self.end(), self.latency)
        moved = False
        for index in reversed(range(len(self.start))):
            begin = self.start[index]
            if begin is None or self.program.operations[index].op == "array":
                continue
            limits = [self.start[user] for user in self.users[index]]
            limit = min((each for each in limits if each is not None), default=self.latency)
            if index in self.program.results.values():
                limit = min(
                    limit, self.latency - (self._registered(index) - (self._end(index) or 0))
                )
            slack = limit - self.depth[index]
            if slack <= begin:
                continue
            self.start[index] = slack
            bits = _delay_bits(self.program, self.start, self.end(), self.latency)
            if bits <= best:
                best, moved = bits, True
            else:
                self.start[index] = begin
        return moved
