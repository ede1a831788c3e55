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
    """Operations in program order: each depends only on earlier ones, so there is no cycle.

    Dependencies other than `after` follow from the bytes: two operations that access the same
    bytes, at least one as a writer, run in the order in which they were added.
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
        *holds : resources, each used exclusively.
        after : dependencies on operations of this graph for other reasons than bytes.
        action : starts it on a device.
        seconds : modelled duration, independent of the action's.
        transfer : bytes on shared links that determine the duration, independent of the action's.
            Such an operation may hold nothing.
        priority : of operations that could start, the lowest is first.

        Raises
        ------
        ArgumentError : no resources, or one twice; a range that ends before it begins, or begins
            below 0; an operation of another graph; neither action nor duration nor transfer, or the
            last two; a negative or infinite duration. Nothing was added.
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
