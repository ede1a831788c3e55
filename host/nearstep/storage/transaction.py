"""The transaction of a store: the next, uncommitted generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from numpy.typing import NDArray

from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.bounces import Bounces
from nearstep.storage.drive import Job
from nearstep.storage.drive_errors import (
    DriveFullError,
    FailedGenerationError,
    InterruptedWriteError,
    UnknownTensorError,
)
from nearstep.storage.extents import ExtentRow, Run, Table, Tensor
from nearstep.storage.free_map import FreeMap
from nearstep.storage.generation import Generation


class Transaction:
    """The next generation: the last generation's tensors, with new tables for written ones.

    A transaction holds all mutable state of a store, so a commit or an abort is one assignment of
    another transaction. Generations on the drives are never overwritten; free blocks are not
    recorded, but derived from the extents of generations and transaction.

    Parameters
    ----------
    current : the last generation.
    other : the other generation on the drives, or None.
    last : the highest generation number.
    step : most blocks of an extent, of tensors that do not say.
    blocks : of each drive.

    Attributes
    ----------
    tensors : by name.
    kept : earlier generations by name, which the next one keeps.
    crcs : CRC-32 of each extent allocated by this transaction; 0 until the extent is written.
    failed : the first error of a write, or None.
    changing : tensor with new extents whose write has not been queued, as after an interrupt.
    doubt : slot of the superblock that is being written; unknown after an interrupt.
    """

    def __init__(
        self,
        current: Generation,
        other: Generation | None,
        last: int,
        step: int,
        blocks: Sequence[int],
    ) -> None:
        self.current = current
        self.other = other
        self.last = last
        self._step = step
        self._blocks = blocks
        self._free: FreeMap | None = None
        striped = (each for each in current.tensors.values() if not each.pinned)
        self._next_drive = sum(len(each.table) for each in striped) % len(blocks)
        self.tensors: dict[str, Tensor] = dict(current.tensors)
        self.kept = dict(current.kept)
        if current.name:
            self.kept[current.name] = replace(current, kept={})
        self.crcs: dict[Run, int] = {}
        self.failed: Exception | None = None
        self.changing: str | None = None
        self.doubt: int | None = None

    def next(self, committed: Generation | None = None) -> Transaction:
        """Return the transaction that follows this one's commit or abort; after an abort
        generations that were dropped stay so."""
        if committed is None:
            aborted = Transaction(self.current, self.other, self.last, self._step, self._blocks)
            aborted.kept = self.kept
            return aborted
        return Transaction(committed, self.current, committed.number, self._step, self._blocks)

    def check(self, action: str) -> None:
        """Raise `FailedGenerationError` if a write has failed."""
        failed = self.failed
        if failed is None and self.changing is not None:
            failed = InterruptedWriteError(self.changing)
        if failed is not None:
            raise FailedGenerationError(
                f"cannot {action}: a write of this generation failed; abort() rolls back to "
                f"generation {self.current.number}"
            ) from failed

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by name, or raise `UnknownTensorError`."""
        found = self.tensors.get(name)
        if found is None:
            raise UnknownTensorError(name, "does not exist")
        return found

    def add(self, tensor: Tensor) -> None:
        """Add an unwritten tensor, all zeros.

        Raises
        ------
        UnknownTensorError : the name is in use.
        """
        if tensor.name in self.tensors:
            raise UnknownTensorError(tensor.name, "exists already")
        step = tensor.step or self._step
        table, first = Table.of_hole(tensor.blocks, step), tensor.first_drive
        if not tensor.pinned:
            first = self._next_drive
            self._next_drive = (first + len(table)) % len(self._blocks)
        self.tensors[tensor.name] = replace(tensor, table=table, first_drive=first)

    def place(self, name: str, first: int, last: int) -> tuple[list[ExtentRow], list[ExtentRow]]:
        """Allocate blocks [first, last) of a tensor for a write, and set `changing` to the tensor.

        Extents written since the last commit keep their blocks.

        Parameters
        ----------
        first, last : blocks of whole extents without a write in flight.

        Returns
        -------
        new : extents of these blocks, all owned by this transaction.
        old : extents with the previous contents.

        Raises
        ------
        DriveFullError : nothing was changed.
        """
        tensor = self.tensor(name)
        table = tensor.table
        old = self.extents(table, first, last)
        stale = (each for each in old if each.run not in self.crcs)
        counted = groupby(enumerate(stale), lambda pair: pair[1].number - pair[0])
        groups = [[extent for _, extent in group] for _, group in counted]
        runs = self._allocate(tensor, [(group[0].start, group[-1].stop) for group in groups])
        self.changing = name
        self.crcs.update((run, 0) for cut in runs for run in cut)
        for group, cut in zip(reversed(groups), reversed(runs), strict=True):
            table = table.spliced(range(group[0].number, group[-1].number + 1), cut)
        self.tensors[name] = replace(tensor, table=table)
        return self.extents(table, first, last), old

    def extents(self, table: Table, first: int, last: int) -> list[ExtentRow]:
        """Return the extents that contain any of the blocks [first, last), with current CRCs."""
        return list(table.extents(table.covering(first, last), self.crcs))

    def summed(self) -> dict[str, Tensor]:
        """Return all tensors, with the CRCs of written extents."""
        return {
            name: replace(each, table=each.table.summed(self.crcs))
            if each is not self.current.tensors.get(name)
            else each
            for name, each in self.tensors.items()
        }

    def guarded(self, job: Job) -> Job:
        """Return a job of a write whose error fails this transaction."""

        def run(bounces: Bounces) -> None:
            try:
                job(bounces)
            except Exception as error:
                if self.failed is None:
                    self.failed = error
                raise

        return run

    def free_map(self) -> FreeMap:
        """Return a map of the blocks that neither this transaction nor a generation uses."""
        return FreeMap(self._blocks, self._used())

    def take(self, wanted: Sequence[tuple[int, int]], *, pinned: bool = False) -> list[list[Run]]:
        """Allocate runs for extents, each given by its blocks and the first drive to try.

        Raises
        ------
        DriveFullError : nothing was changed.
        """
        for _ in range(2):
            free = self._free = self._free or self.free_map()
            try:
                return [free.take(*each, pinned=pinned) for each in wanted]
            except DriveFullError:
                self._free = None  # blocks allocated in vain are free in the next map
        only = wanted[0][1] if pinned else None
        there = self.free_map().blocks(only) * BLOCK_BYTES
        detail = f" on {len(self._blocks)} drives" if only is None else f" on drive {only}"
        raise DriveFullError(sum(count for count, _ in wanted) * BLOCK_BYTES, there, detail)

    def forget_other(self) -> None:
        """Drop the other generation, which is no longer on the drives."""
        self.other = self._free = None

    def _allocate(self, tensor: Tensor, spans: Sequence[tuple[int, int]]) -> list[list[Run]]:
        """Allocate extents for each span of a tensor's blocks."""
        step = tensor.step or self._step

        def drive(at: int) -> int:
            turn = 0 if tensor.pinned else at // step
            return (tensor.first_drive + turn) % len(self._blocks)

        cuts = [
            [(min(step, stop - at), drive(at)) for at in range(start, stop, step)]
            for start, stop in spans
        ]
        taken = iter(self.take([each for cut in cuts for each in cut], pinned=tensor.pinned))
        return [[run for _ in cut for run in next(taken)] for cut in cuts]

    def _used(self) -> list[NDArray[Any]]:
        there = [each.extents() for each in (self.current, self.other) if each is not None]
        return [*(each.table.rows for each in self.tensors.values()), *there]
