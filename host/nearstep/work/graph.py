"""Graphs of operations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole
from nearstep.work.hazards import Hazards
from nearstep.work.operation import Action, Operation, Range, Transfer


class Graph(Sequence[Operation]):
    """Operations in program order: one needs those before it alone, so there is no cycle.

    What is not said by `after` follows from the bytes: two operations that touch the same ones,
    of which at least one writes, happen in the order in which they were added.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._hazards = Hazards()

    def add(
        self,
        name: str,
        *holds: str,
        reads: Iterable[Range] = (),
        writes: Iterable[Range] = (),
        after: Iterable[Operation] = (),
        action: Action | None = None,
        seconds: float | None = None,
        transfer: Transfer | None = None,
        priority: int = 0,
    ) -> Operation:
        """Append an operation.

        Parameters
        ----------
        name : for errors and pictures; need not be unique.
        *holds : resources, each of which it has for itself.
        after : operations of this graph that it needs for other reasons than bytes.
        action : starts it on a device.
        seconds : how long it takes by a model, whatever its action takes.
        transfer : it takes as long as these bytes need on links that others share, whatever its
            action takes. Such an operation may hold nothing.
        priority : the lower, the earlier, of those that could be started.

        Raises
        ------
        ArgumentError : it holds nothing or something twice; a range ends before it begins, or
            begins below 0; an operation is none of this graph; it has neither action nor duration
            nor transfer, or the last two; the duration is negative or not finite. Nothing was
            added.
        """
        reads, writes, after = tuple(reads), tuple(writes), tuple(after)
        if not (holds or transfer) or len(set(holds)) != len(holds):
            raise ArgumentError(f"{name}: holds must be one or more resources, not {holds}")
        for each in (*reads, *writes):
            if not (is_whole(each.start) and is_whole(each.stop) and 0 <= each.start <= each.stop):
                raise ArgumentError(f"{name}: a range must have 0 <= start <= stop, not {each}")
        for other in after:
            if not (0 <= other.index < len(self) and self._operations[other.index] is other):
                raise ArgumentError(f"{name}: after must be operations of this graph, not {other}")
        if action is None and seconds is None and transfer is None:
            raise ArgumentError(f"{name}: action, seconds or transfer must be given")
        if seconds is not None and transfer is not None:
            raise ArgumentError(f"{name}: seconds and transfer must not both be given")
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise ArgumentError(f"{name}: seconds must be from 0 and finite, not {seconds}")
        if not is_whole(priority):
            raise ArgumentError(f"{name}: priority must be an integer, not {priority!r}")
        index = len(self)
        needs = self._hazards.add(index, reads, writes) | {other.index for other in after}
        operation = Operation(
            index=index,
            name=name,
            holds=holds,
            reads=reads,
            writes=writes,
            needs=tuple(sorted(needs)),
            action=action,
            seconds=seconds,
            transfer=transfer,
            priority=priority,
        )
        self._operations.append(operation)
        return operation

    def __len__(self) -> int:
        return len(self._operations)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._operations)

    @overload
    def __getitem__(self, index: int) -> Operation: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Operation]: ...

    def __getitem__(self, index: int | slice) -> Operation | Sequence[Operation]:
        return self._operations[index]
