"""Tensors on drives, in generations: all of one, or all of the next."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from nearstep.backends.base import Completion, Ended
from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole
from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.checksum import crc32
from nearstep.storage.committing import flush_all, write_index
from nearstep.storage.drive import QUEUE_DEPTH, Drive, start
from nearstep.storage.drive_errors import (
    ClosedStoreError,
    DriveAccessError,
    DriveFullError,
    DriveTimeoutError,
    NoGenerationError,
    StorageError,
    UncertainCommitError,
    UnknownTensorError,
)
from nearstep.storage.drive_set import EXTENT_BYTES, Place, create_set, open_set
from nearstep.storage.extent_jobs import Flat, Source, read_job, write_job
from nearstep.storage.extents import Run, Table, Tensor, blocks_of
from nearstep.storage.generation import Generation
from nearstep.storage.generation_view import GenerationView
from nearstep.storage.index import checked_json, checked_tensor, pack_index
from nearstep.storage.pending import Pending
from nearstep.storage.recovery import account, find
from nearstep.storage.spans import check_span, flat_bytes, widened
from nearstep.storage.superblock import MOST_RUNS, SLOTS, Superblock
from nearstep.storage.transfer import TIMEOUT_S
from nearstep.storage.under_way import UnderWay


class Store:
    """Named tensors on the drives of a set.

    Tensors are bytes. Each is striped over the drives by extents, or lies on one of them. What is
    written goes to free blocks, and counts from `commit` on, all at once: after a power cut, or the
    end of the process at any point, the drives hold the last generation that was committed, whole.
    The one before it stays until the next commit. Nothing else that was written is to be seen
    again.

    Reads and writes take what was written since the last commit into account. Those of the same
    blocks are carried out one after the other; a store may be used from several threads.

    Parameters
    ----------
    drives : of a set, all of them, in order.
    generation : to go on from; None for the last one.
    read_only

    Attributes
    ----------
    drives
    notes : what was found that is not as it should be, but that nothing depends on: a superblock
        that is not whole, or the index of a generation that is not used.

    Raises
    ------
    NoGenerationError, TornIndexError, DriveIOError
    """

    def __init__(
        self, drives: Sequence[Drive], *, generation: int | None = None, read_only: bool = False
    ) -> None:
        self.drives = tuple(drives)
        self._read_only = read_only
        self._lock = threading.RLock()
        self._under_way = UnderWay()
        self._closed = False
        self._uncertain: int | None = None
        self._set_id = drives[0].header.set_id
        self._step = drives[0].header.extent_bytes // BLOCK_BYTES
        if not read_only:
            flush_all(drives)  # what is read now may be in a cache, of a process that was killed
        found = find(drives, generation)
        self.notes = found.notes
        self._current, self._other, self._last = found.current, found.other, found.last
        self._space, self._dying = account(found, [drive.header.blocks for drive in drives])
        self._pending = self._fresh()
        _open.add(self)

    @classmethod
    def create(
        cls,
        places: Sequence[Place],
        *,
        drive_bytes: int,
        owner: str,
        extent_bytes: int = EXTENT_BYTES,
        overwrite: bool = False,
        direct: bool = True,
        queue_depth: int = QUEUE_DEPTH,
        timeout_s: float = TIMEOUT_S,
    ) -> Self:
        """Make drives and open them: as `create_set` and `Store.open`.

        Raises
        ------
        ArgumentError, StorageError : as these two say.
        """
        create_set(
            places,
            drive_bytes=drive_bytes,
            owner=owner,
            extent_bytes=extent_bytes,
            overwrite=overwrite,
            direct=direct,
        )
        return cls.open(
            places, owner=owner, direct=direct, queue_depth=queue_depth, timeout_s=timeout_s
        )

    @classmethod
    def open(
        cls,
        places: Sequence[Place],
        *,
        owner: str | None,
        generation: int | None = None,
        direct: bool = True,
        read_only: bool = False,
        queue_depth: int = QUEUE_DEPTH,
        timeout_s: float = TIMEOUT_S,
    ) -> Self:
        """Open all drives of a set, in any order, for this process alone.

        Parameters
        ----------
        places : files, block devices.
        owner : name of the model or job whose they must be; None takes anybody's.
        generation : to go on from; None for the last one.
        direct : with O_DIRECT. If not, data go through the page cache, and processor and memory
            are taken by that.
        read_only
        queue_depth : reads and writes under way on each drive, at most.
        timeout_s : without any progress, after which a wait gives up.

        Raises
        ------
        ArgumentError : something cannot be meant so.
        NotADriveError, FormatVersionError, DriveSizeError, OwnerError, ForeignDriveError,
            IncompleteSetError, DriveLockedError, DriveVanishedError, DriveAccessError,
            DirectIOError, DriveIOError : none stays open.
        NoGenerationError : there is none, or not that one.
        TornIndexError : it is damaged; names what there is beside it.
        """
        drives = open_set(
            places,
            owner=owner,
            queue_depth=queue_depth,
            direct=direct,
            read_only=read_only,
            timeout_s=timeout_s,
        )
        try:
            return cls(drives, generation=generation, read_only=read_only)
        except BaseException:
            for drive in drives:
                drive.close()
            raise

    @property
    def generation(self) -> int:
        """The last one that was committed, or the one that the store was opened at."""
        return self._current.number

    @property
    def generations(self) -> Mapping[int, Mapping[str, Any]]:
        """Meta data of each generation that is on the drives, by number."""
        with self._lock:
            held = [self._current] if self._other is None else [self._current, self._other]
            return {each.number: each.meta for each in sorted(held, key=lambda g: g.number)}

    @property
    def meta(self) -> Mapping[str, Any]:
        """Meta data of the last commit."""
        return self._current.meta

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By name, with what was added and removed since the last commit."""
        with self._lock:
            return dict(self._pending.tensors)

    @property
    def free_bytes(self) -> int:
        """Bytes that can be written before the next commit."""
        with self._lock:
            return sum(self._space.free) * BLOCK_BYTES

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all blocks that tensors, and their indices, can have, of all generations."""
        return sum(d.header.blocks - 1 - len(SLOTS) for d in self.drives) * BLOCK_BYTES

    def add(
        self,
        name: str,
        nbytes: int,
        attributes: Mapping[str, Any] | None = None,
        *,
        drive: int | None = None,
    ) -> None:
        """Add a tensor of `nbytes`, all zeros, which take no space until they are written.

        Parameters
        ----------
        name
        nbytes
        attributes : what is to be kept with it, in JSON.
        drive : that all of it is to lie on; None stripes it over all.

        Raises
        ------
        UnknownTensorError : there is one of this name.
        ArgumentError : it cannot be called so, JSON cannot hold the attributes, or there is no such
            drive.
        StorageError
        """
        checked_tensor(name, nbytes)
        if drive is not None and not (is_whole(drive) and 0 <= drive < len(self.drives)):
            raise ArgumentError(f"drive must be from 0 to {len(self.drives) - 1}, not {drive!r}")
        kept = checked_json(f"attributes of {name!r}", attributes)
        with self._lock:
            self._check_writable(f"add {name!r}")
            first, pinned = (0, False) if drive is None else (int(drive), True)
            self._pending.add(Tensor(name, nbytes, kept, Table.of_hole(0, 1), first, pinned))

    def remove(self, name: str) -> None:
        """Remove a tensor: of the next generation, not of those that are committed.

        Raises
        ------
        UnknownTensorError : there is none of this name.
        StorageError
        """
        with self._lock:
            self._check_writable(f"remove {name!r}")
            tensor = self._pending.tensor(name)
            self._under_way.join(name, 0, tensor.blocks, writes=True)
            self._pending.remove(name)

    def submit_write(self, name: str, data: Any, offset: int = 0) -> Completion:
        """Begin to write `data` to a tensor, from byte `offset` on; it must not change until that
        has ended.

        What does not start and end with an extent reads the rest of that first.

        Parameters
        ----------
        name
        data : a contiguous array, or what has a buffer. Of `aligned_empty` there is no copy.
        offset

        Raises
        ------
        UnknownTensorError : there is none of this name.
        OutOfBoundsError : it is shorter.
        ArgumentError : `data` is no contiguous array.
        DriveFullError : nothing was changed.
        FailedGenerationError : a write since the last commit failed.
        StorageError
        """
        flat = flat_bytes("data", data)
        with self._lock:
            self._check_writable(f"write {name!r}")
            self._pending.check(f"write {name!r}")
            tensor = self._pending.tensor(name)
            check_span(tensor, offset, flat.nbytes)
            if not flat.nbytes:
                return Ended()
            first, last = offset // BLOCK_BYTES, blocks_of(offset + flat.nbytes)
            first, last = widened(tensor.table, first, last)
            self._under_way.join(name, first, last, writes=True)
            table, before = self._pending.place(
                name,
                first,
                last,
                lambda: self._under_way.join(name, 0, tensor.blocks, writes=True),
            )
            source = self._source(tensor, self._last + 1)
            jobs = []
            for number, old in zip(table.covering(first, last), before, strict=True):
                job = write_job(source, table, number, old, offset, flat)
                drive = self.drives[int(table.rows["drive"][number])]
                jobs.append((drive, self._pending.guarded(job)))
            transfer = start(f"write of {name!r}", jobs)
            self._under_way.add(name, first, last, transfer, writes=True)
            return transfer

    def submit_read(self, name: str, out: Any, offset: int = 0) -> Completion:
        """Begin to read a tensor into `out`, from byte `offset` on: what was written last,
        committed or not.

        Every extent that is touched is read whole, and its CRC is looked at. After an error the
        contents of `out` are undefined.

        Parameters
        ----------
        name
        out : a contiguous array that can be written, or what has such a buffer.
        offset

        Raises
        ------
        UnknownTensorError : there is none of this name.
        OutOfBoundsError : it is shorter.
        ArgumentError : `out` is no contiguous array that can be written.
        FailedGenerationError : a write since the last commit failed.
        StorageError
        """
        with self._lock:
            self._check_open(f"read {name!r}")
            self._pending.check(f"read {name!r}")
            return self._submit_read(self._pending.tensor(name), self._current, out, offset)

    def write(self, name: str, data: Any, offset: int = 0) -> None:
        """Write `data` to a tensor, from byte `offset` on: `submit_write`, and its end.

        Raises
        ------
        UnknownTensorError, OutOfBoundsError, ArgumentError : as `submit_write`.
        DriveFullError, StorageError
        """
        self.submit_write(name, data, offset).wait()

    def read(self, name: str, out: Any, offset: int = 0) -> None:
        """Read a tensor into `out`, from byte `offset` on: `submit_read`, and its end.

        Raises
        ------
        UnknownTensorError, OutOfBoundsError, ArgumentError : as `submit_read`.
        TornExtentError : the drive does not hold what was written.
        StorageError
        """
        self.submit_read(name, out, offset).wait()

    def at(self, generation: int) -> GenerationView:
        """A generation that is on the drives, to be read.

        Raises
        ------
        NoGenerationError : it is not there.
        StorageError
        """
        with self._lock:
            self._check_open(f"open generation {generation}")
            return GenerationView(self._held(generation), self._submit_view)

    def commit(self, meta: Mapping[str, Any] | None = None) -> int:
        """Make what was written, added and removed the next generation, and return its number.

        When this returns it outlasts a power cut. Payload and index are flushed on all drives
        before the superblock is written, and then that is.

        Parameters
        ----------
        meta : what is to be kept with it, in JSON, such as the step.

        Raises
        ------
        FailedGenerationError : a write failed. Nothing was committed; `abort` goes back.
        DriveFullError : there is no space for the index. Nothing was committed or lost.
        DriveVanishedError, DriveIOError : nothing was committed; `abort` goes back.
        UncertainCommitError : the last write failed. Open the drives again to go on.
        ArgumentError : JSON cannot hold `meta`.
        StorageError
        """
        kept = checked_json("meta", meta)
        with self._lock:
            self._check_writable("commit")
            self._under_way.join_all()
            self._pending.check("commit")
            number = self._last + 1
            data = pack_index(number, kept, list(self._pending.tensors.values()))
            runs = self._space.take(blocks_of(len(data)), 0)
            if len(runs) > MOST_RUNS:
                self._space.release(runs)
                detail = f" in {MOST_RUNS} pieces at most, for the index"
                raise DriveFullError(len(data), self.free_bytes, detail)
            self._write_index(data, runs, number)
            slot = next(each for each in SLOTS if each != self._current.slot)
            superblock = Superblock(self._set_id, number, len(data), crc32(data), runs)
            self._write_slot(slot, superblock.pack(), number)
            self._advance(Generation(number, slot, kept, self._pending.tensors, runs))
            return number

    def abort(self) -> None:
        """Forget what was written, added and removed since the last commit.

        Raises
        ------
        StorageError
        """
        with self._lock:
            self._check_writable("abort")
            self._under_way.join_all()
            self._space.release(self._pending.fresh_runs())
            self._pending = self._fresh()

    def drop_other(self) -> None:
        """Give up the generation that is not gone on from, if there is one: its blocks are free
        then, before the next commit would free them.

        Raises
        ------
        StorageError
        """
        with self._lock:
            self._check_writable("drop a generation")
            self._under_way.join_all()
            if self._other is None:
                return
            dropped, self._other = self._other, None
            zeros = aligned_bytes(BLOCK_BYTES)
            self._write_slot(dropped.slot, zeros, self._current.number)
            self._space.release(self._dying)
            self._dying = []

    def close(self) -> None:
        """Wait for what is under way, and give the drives back.

        What was not committed is lost. Closing twice does nothing.
        """
        with self._lock:
            self._closed = True
            for drive in self.drives:
                drive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({[drive.name for drive in self.drives]}, generation {self.generation})"

    def _check_open(self, action: str) -> None:
        if self._closed:
            raise ClosedStoreError("the store", action)
        for drive in self.drives:
            drive.check_open(action)
        if self._uncertain is not None:
            raise ClosedStoreError(
                "the store", action, f"in doubt about generation {self._uncertain}: open it again"
            )

    def _check_writable(self, action: str) -> None:
        self._check_open(action)
        if self._read_only:
            raise DriveAccessError(self.drives[0].name, f"cannot {action}: it was opened read_only")

    def _fresh(self) -> Pending:
        return Pending(self._current, self._space, self._step, len(self.drives))

    def _held(self, number: int) -> Generation:
        for each in (self._current, self._other):
            if each is not None and each.number == number:
                return each
        raise NoGenerationError(number, self.generations)

    def _source(self, tensor: Tensor, generation: int) -> Source:
        others = tuple(each for each in self.generations if each != generation)
        return Source(self.drives, tensor.name, tensor.nbytes, generation, others)

    def _submit_view(self, view: Generation, name: str, out: Any, offset: int) -> Completion:
        with self._lock:
            self._check_open(f"read {name!r}")
            if self._held(view.number) is not view:
                raise NoGenerationError(view.number, self.generations)
            if name not in view.tensors:
                raise UnknownTensorError(name, f"generation {view.number} has none of this name")
            return self._submit_read(view.tensors[name], view, out, offset)

    def _submit_read(
        self, tensor: Tensor, generation: Generation, out: Any, offset: int
    ) -> Completion:
        flat = flat_bytes("out", out, writes=True)
        check_span(tensor, offset, flat.nbytes)
        if not flat.nbytes:
            return Ended()
        first, last = offset // BLOCK_BYTES, blocks_of(offset + flat.nbytes)
        first, last = widened(tensor.table, first, last)
        self._under_way.join(tensor.name, first, last, writes=False)
        source, table = self._source(tensor, generation.number), tensor.table
        transfer = start(
            f"read of {tensor.name!r}",
            [
                (
                    self.drives[0 if extent.is_hole else extent.drive],
                    read_job(source, extent, offset, flat),
                )
                for extent in table.extents(table.covering(first, last))
            ],
        )
        self._under_way.add(tensor.name, first, last, transfer, writes=False)
        return transfer

    def _write_index(self, data: bytes, runs: Sequence[Run], number: int) -> None:
        """Have payload and index outlast a power cut, or have failed."""
        self._uncertain = number  # while something is under way that nobody waits for
        try:
            write_index(self.drives, data, runs)
        except DriveTimeoutError:
            raise  # blocks that are being written are not free
        except StorageError as error:
            self._space.release(runs)
            self._pending.failed = error  # a flush that failed may have lost the payload
            self._uncertain = None
            raise
        self._uncertain = None

    def _write_slot(self, slot: int, block: Flat, number: int) -> None:
        """Write a superblock, and flush it. After an error nobody knows what it is."""
        self._uncertain = number
        try:
            self.drives[0].write(slot, block).wait()
            self.drives[0].flush().wait()
        except StorageError as error:
            raise UncertainCommitError(number) from error
        self._uncertain = None

    def _advance(self, committed: Generation) -> None:
        """The new generation counts: blocks of the last but one are free."""
        self._space.release(self._dying)
        self._dying = [*self._pending.replaced, *self._current.index_runs]
        self._other, self._current = self._current, committed
        self._last = committed.number
        for tensor in committed.tensors.values():
            tensor.table.fresh[:] = False
        self._pending = self._fresh()


_open: weakref.WeakSet[Store] = weakref.WeakSet()


def _unlock() -> None:
    """In a child after `fork()`: no other thread is there, whichever had a store locked."""
    for store in list(_open):
        store._lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)
