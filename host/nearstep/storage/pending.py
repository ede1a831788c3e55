"""What will be the next generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nearstep.storage.bounces import Bounces
from nearstep.storage.drive import Job
from nearstep.storage.drive_errors import FailedGenerationError, UnknownTensorError
from nearstep.storage.extents import Extent, Run, Table, Tensor
from nearstep.storage.generation import Generation
from nearstep.storage.space import Space


class Pending:
    """The next generation: tensors of the last one, of which those that are written get tables of
    their own.

    Extents of the last one are never written.

    Parameters
    ----------
    base : the last generation.
    space
    step : blocks of an extent at most.
    drives : number of them.

    Attributes
    ----------
    tensors : by name.
    replaced : runs of the last generation that this one does not need.
    failed : the first error of a write, or None.
    """

    def __init__(self, base: Generation, space: Space, step: int, drives: int) -> None:
        self._base = base
        self._space = space
        self._step = step
        self._drives = drives
        striped = (each for each in base.tensors.values() if not each.pinned)
        self._next_drive = sum(len(each.table) for each in striped) % drives
        self.tensors: dict[str, Tensor] = dict(base.tensors)
        self.replaced: list[Run] = []
        self.failed: Exception | None = None

    def check(self, action: str) -> None:
        """Raise `FailedGenerationError` if a write has failed."""
        if self.failed is not None:
            raise FailedGenerationError(
                f"cannot {action}: a write of this generation failed; abort() goes back to "
                f"generation {self._base.number}"
            ) from self.failed

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
        table = Table.of_hole(tensor.blocks, self._step)
        if tensor.pinned:
            self.tensors[tensor.name] = tensor.with_table(table)
            return
        self.tensors[tensor.name] = Tensor(
            tensor.name, tensor.nbytes, tensor.attributes, table, self._next_drive
        )
        self._next_drive = (self._next_drive + len(table)) % self._drives

    def remove(self, name: str) -> None:
        """Remove a tensor, none of whose transfers is under way."""
        table = self.tensor(name).table
        del self.tensors[name]
        self._drop(table.extents(), table)

    def place(
        self, name: str, first: int, last: int, settle: Callable[[], None]
    ) -> tuple[Table, list[list[Extent]]]:
        """Places for blocks [first, last) of a tensor that are to be written: where they are, if
        written since the last commit, else new ones.

        Parameters
        ----------
        name
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
        old = tensor.table
        groups = _stale(old, old.covering(first, last))
        count = sum(int(old.starts[g.stop] - old.starts[g.start]) for g in groups)
        self._space.check(count, tensor.first_drive if tensor.pinned else None)
        runs = [
            self._new_runs(tensor, int(old.starts[group.start]), int(old.starts[group.stop]))
            for group in groups
        ]
        same = all(
            [each.blocks for each in new] == old.rows["blocks"][group.start : group.stop].tolist()
            for group, new in zip(groups, runs, strict=True)
        )
        if not same:
            try:
                settle()
            except BaseException:
                for new in runs:
                    self._space.release(new)
                raise
        held = list(old.extents(old.covering(first, last)))  # with their CRCs, as they are now
        for group in groups:
            self._drop(old.extents(group), old)
        base = self._base.tensors.get(name)
        table = old.copy() if base is not None and base.table is old else old
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

    def fresh_runs(self) -> list[Run]:
        """What was written since the last commit."""
        return [
            extent.run
            for tensor in self.tensors.values()
            for extent in tensor.table.extents()
            if tensor.table.fresh[extent.number]
        ]

    def _new_runs(self, tensor: Tensor, first: int, last: int) -> list[Run]:
        runs = []
        for at in range(first, last, self._step):
            turn = 0 if tensor.pinned else at // self._step
            drive = (tensor.first_drive + turn) % self._drives
            count = min(self._step, last - at)
            runs += self._space.take(count, drive, pinned=tensor.pinned)
        return runs

    def _drop(self, extents: Iterable[Extent], table: Table) -> None:
        for extent in extents:
            if table.fresh[extent.number]:
                self._space.release([extent.run])
            elif not extent.is_hole:
                self.replaced.append(extent.run)


def _stale(table: Table, numbers: range) -> list[range]:
    """Those of the extents that were not written since the last commit, in runs of neighbours."""
    groups: list[range] = []
    for number in numbers:
        if table.fresh[number]:
            continue
        if groups and groups[-1].stop == number:
            groups[-1] = range(groups[-1].start, number + 1)
        else:
            groups.append(range(number, number + 1))
    return groups


def _sharing(extents: Iterable[Extent], wanted: Extent) -> list[Extent]:
    """Those that have any block of another."""
    return [each for each in extents if each.start < wanted.stop and wanted.start < each.stop]
