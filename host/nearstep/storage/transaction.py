"""What will be the next generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from nearstep.storage.extents import Extent, Run, Table, Tensor
from nearstep.storage.free_map import FreeMap
from nearstep.storage.generation import Generation


class Transaction:
    """The next generation: tensors of the last one, of which those that are written get tables of
    their own.

    It has all that a store changes, so that a commit or an abort is one assignment: of another
    transaction. Of generations on the drives nothing is written; which blocks are free is derived
    from their extents and those here, and noted nowhere.

    Parameters
    ----------
    current : the last generation.
    other : the one beside it, or None.
    last : the highest number of any.
    step : blocks of an extent at most.
    blocks : of each drive.

    Attributes
    ----------
    tensors : by name.
    failed : the first error of a write, or None.
    changing : a tensor whose new extents nobody writes yet: if that was interrupted, nobody will.
    doubt : slot of the superblock that is being written: if that was interrupted, nobody knows
        what it holds.
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
        self.failed: Exception | None = None
        self.changing: str | None = None
        self.doubt: int | None = None

    def next(self, committed: Generation | None = None) -> Transaction:
        """A new one: after this has been committed, or anew."""
        if committed is None:
            return Transaction(self.current, self.other, self.last, self._step, self._blocks)
        return Transaction(committed, self.current, committed.number, self._step, self._blocks)

    def check(self, action: str) -> None:
        """Raise `FailedGenerationError` if a write has failed."""
        failed = self.failed
        if failed is None and self.changing is not None:
            failed = InterruptedWriteError(self.changing)
        if failed is not None:
            raise FailedGenerationError(
                f"cannot {action}: a write of this generation failed; abort() goes back to "
                f"generation {self.current.number}"
            ) from failed

    def tensor(self, name: str) -> Tensor:
        """Raise `UnknownTensorError` if there is none of this name."""
        found = self.tensors.get(name)
        if found is None:
            raise UnknownTensorError(name, "there is none of this name")
        return found

    def add(self, tensor: Tensor) -> None:
        """Add a tensor that has not been written, all zeros.

        Raises
        ------
        UnknownTensorError : there is one of this name.
        """
        if tensor.name in self.tensors:
            raise UnknownTensorError(tensor.name, "there is one of this name already")
        table, first = Table.of_hole(tensor.blocks, self._step), tensor.first_drive
        if not tensor.pinned:
            first = self._next_drive
            self._next_drive = (first + len(table)) % len(self._blocks)
        self.tensors[tensor.name] = Tensor(
            tensor.name, tensor.nbytes, tensor.attributes, table, first, tensor.pinned
        )

    def place(
        self, name: str, first: int, last: int, settle: Callable[[], None]
    ) -> tuple[Table, list[list[Extent]]]:
        """Allocate blocks [first, last) of a tensor that are to be written.

        They stay where they are if they were written since the last commit. The tensor is
        `changing` then.

        Parameters
        ----------
        first, last : blocks of whole extents, on which no transfer is under way.
        settle : waits for the writes of the tensor that are under way, whose extents get other
            numbers then.

        Returns
        -------
        table : in which every extent that has one of the blocks is fresh.
        before : for each of them, extents that have what it had before, if it is the first or the
            last: others are written whole.

        Raises
        ------
        DriveFullError, DriveTimeoutError : nothing was changed.
        """
        tensor = self.tensor(name)
        table = tensor.table.thawed()
        groups = table.stale(table.covering(first, last))
        spans = [(int(table.starts[each.start]), int(table.starts[each.stop])) for each in groups]
        runs = self._allocate(tensor, spans)
        same = all(
            [each.blocks for each in new] == table.rows["blocks"][group.start : group.stop].tolist()
            for group, new in zip(groups, runs, strict=True)
        )
        if not same:
            settle()
        held = list(table.extents(table.covering(first, last)))  # with their CRCs, as they are now
        self.changing = name
        for group, new in zip(reversed(groups), reversed(runs), strict=True):
            if same:
                table.replace(group, new)
            else:
                table = table.spliced(group, new)  # from the last one on: numbers of others stay
        self.tensors[name] = tensor.with_table(table)
        now = [table.extent(each) for each in table.covering(first, last)]
        before: list[list[Extent]] = [[] for _ in now]
        for end in (0, -1):
            before[end] = _sharing(held, now[end])
        return table, before

    def guarded(self, job: Job) -> Job:
        """A job of a write, whose error keeps this generation from being committed."""

        def run(bounces: Bounces) -> None:
            try:
                job(bounces)
            except Exception as error:
                if self.failed is None:
                    self.failed = error
                raise

        return run

    def free_map(self) -> FreeMap:
        """What neither this nor a generation on the drives has."""
        return FreeMap(self._blocks, self._used())

    def take(self, wanted: Sequence[tuple[int, int]], *, pinned: bool = False) -> list[list[Run]]:
        """Blocks for extents, of which each has a number of blocks and a drive to begin with.

        Raises
        ------
        DriveFullError : nothing was changed.
        """
        for _ in range(2):
            free = self._free = self._free or self.free_map()
            try:
                return [free.take(*each, pinned=pinned) for each in wanted]
            except DriveFullError:
                self._free = None  # what was taken and is not used is free in the next one
        only = wanted[0][1] if pinned else None
        there = self.free_map().blocks(only) * BLOCK_BYTES
        detail = f" on {len(self._blocks)} drives" if only is None else f" on drive {only}"
        raise DriveFullError(sum(count for count, _ in wanted) * BLOCK_BYTES, there, detail)

    def forget_other(self) -> None:
        """The other generation is not on the drives any more."""
        self.other = None
        self._free = None

    def _allocate(self, tensor: Tensor, spans: Sequence[tuple[int, int]]) -> list[list[Run]]:
        """For each span of a tensor's blocks new ones, in extents."""
        step, runs = self._step, []
        cuts = [
            [
                (
                    min(step, last - at),
                    (tensor.first_drive + (0 if tensor.pinned else at // step)) % len(self._blocks),
                )
                for at in range(first, last, step)
            ]
            for first, last in spans
        ]
        taken = iter(self.take([each for cut in cuts for each in cut], pinned=tensor.pinned))
        for cut in cuts:
            runs.append([run for _ in cut for run in next(taken)])
        return runs

    def _used(self) -> Iterator[NDArray[Any]]:
        yield from (each.table.rows for each in self.tensors.values())
        for generation in (self.current, self.other):
            if generation is not None:
                yield generation.extents()


def _sharing(extents: Iterable[Extent], wanted: Extent) -> list[Extent]:
    """Those that have any block of another."""
    return [each for each in extents if each.start < wanted.stop and wanted.start < each.stop]
