"""Tensors on drives, in atomically committed generations."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from nearstep.backends.base import Completion, Ended
from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole
from nearstep.storage.aligned import aligned_bytes, flat_bytes, padded
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.checksum import crc32
from nearstep.storage.drive import QUEUE_DEPTH, TIMEOUT_S, Drive, DriveTransfer, Job, flushes
from nearstep.storage.drive_errors import (
    ClosedStoreError,
    DamagedSuperblockWarning,
    DriveAccessError,
    DriveFullError,
    DriveTimeoutError,
    NoGenerationError,
    StorageError,
    TornIndexError,
    UncertainCommitError,
    UnknownTensorError,
)
from nearstep.storage.drive_set import EXTENT_BYTES, DriveLike, create_set, open_set
from nearstep.storage.extent_jobs import Flat, Source, read_job, write_job
from nearstep.storage.extents import Run, Table, Tensor, blocks_of, parts_of
from nearstep.storage.generation import Generation, GenerationView, Slot, find
from nearstep.storage.in_flight import InFlight
from nearstep.storage.index import Names, checked_json, checked_tensor, pack_index
from nearstep.storage.superblock import (
    FIRST_FREE,
    MOST_RUNS,
    SLOTS,
    Superblock,
    copies,
    end_of,
)
from nearstep.storage.transaction import Transaction


class Store:
    """Named tensors on the drives of a set.

    A tensor is a range of bytes, striped over the drives by extents or kept on one drive. Writes
    use free blocks, and `commit` makes all writes valid at once: after a power cut or the end of
    the process at any point, the drives hold the last committed generation. The generation before
    is kept until the next commit. Uncommitted writes are lost.

    Reads return the last write, committed or not. Transfers of the same blocks run one after the
    other; several threads may use a store.

    Parameters
    ----------
    drives : all drives of a set, in order.
    generation : number to start from; None for the last.

    Attributes
    ----------
    notes : damage that the opened generation does not have: a superblock that was torn by a power
        cut, or a damaged index of the other generation or of a kept one, which is lost. Damage of a
        superblock that no power cut explains is a `DamagedSuperblockWarning`.
    written : superblock of the last commit here, complete or not; None: there was none.
    """

    def __init__(
        self, drives: Sequence[Drive], *, generation: int | None = None, read_only: bool = False
    ) -> None:
        self.drives = tuple(drives)
        self._read_only = read_only
        self._lock = threading.RLock()
        self._in_flight = InFlight()
        self._closed = False
        self._uncertain: int | None = None
        self.written: Superblock | None = None
        header = drives[0].header
        if not read_only:
            # The drives' caches may still hold writes of a killed process.
            DriveTransfer("flush", flushes(drives)).begin().wait()
        found = find(drives, generation)
        self.notes = found.notes
        for each in found.warnings:
            warnings.warn(each, stacklevel=3)
        step, blocks = header.extent_bytes // BLOCK_BYTES, [each.header.blocks for each in drives]
        self._transaction = Transaction(found.current, found.other, found.last, step, blocks)
        if not read_only:
            self._repair(found.slots)
        _open.add(self)

    @classmethod
    def create(
        cls,
        places: Sequence[DriveLike],
        *,
        drive_bytes: int,
        owner: str,
        extent_bytes: int = EXTENT_BYTES,
        overwrite: bool = False,
        direct: bool = True,
        queue_depth: int = QUEUE_DEPTH,
        timeout_s: float = TIMEOUT_S,
    ) -> Self:
        """Create drives and open them: `create_set`, then `Store.open`."""
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
        places: Sequence[DriveLike],
        *,
        owner: str | None,
        generation: int | None = None,
        direct: bool = True,
        read_only: bool = False,
        queue_depth: int = QUEUE_DEPTH,
        timeout_s: float = TIMEOUT_S,
    ) -> Self:
        """Open all drives of a set for this process alone.

        Parameters
        ----------
        places : files or block devices, in any order.
        owner : expected model or job; None accepts any.
        generation : number to start from; None for the last.
        direct : use O_DIRECT; otherwise data is copied through the page cache.
        queue_depth : most reads and writes in flight on each drive.
        timeout_s : seconds without progress after which a wait fails.

        Raises
        ------
        ArgumentError : an invalid argument.
        NotADriveError, FormatVersionError, DriveSizeError, OwnerError, ForeignDriveError,
            IncompleteSetError, DriveLockedError, DriveVanishedError, DriveAccessError,
            DirectIOError, DriveIOError : all drives have been closed.
        NoGenerationError : the set has no generation, or not this one.
        TornIndexError : the generation is damaged; the error names the others.
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
        """Number of the generation that was committed last, or opened."""
        return self._transaction.current.number

    @property
    def superblock(self) -> Superblock:
        """Superblock of that generation: another commit of the same number has another one."""
        return self._transaction.current.superblock

    @property
    def generations(self) -> Mapping[int, Mapping[str, Any]]:
        """Metadata of each generation on the drives, by number."""
        with self._lock:
            return {each.number: each.meta for each in self._held}

    @property
    def meta(self) -> Mapping[str, Any]:
        """Metadata of the last commit."""
        return self._transaction.current.meta

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors by name, with uncommitted additions and removals."""
        with self._lock:
            return dict(self._transaction.tensors)

    @property
    def free_bytes(self) -> int:
        """Bytes that can be written before the next commit."""
        with self._lock:
            return self._transaction.free_map().blocks() * BLOCK_BYTES

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all blocks for tensors and indices of all generations."""
        return sum(end_of(drive.header.blocks) - FIRST_FREE for drive in self.drives) * BLOCK_BYTES

    def add(
        self,
        name: str,
        nbytes: int,
        attributes: Mapping[str, Any] | None = None,
        *,
        drive: int | None = None,
        extent_bytes: int | None = None,
    ) -> None:
        """Add a tensor of `nbytes` zeros, which use no space until they are written.

        Parameters
        ----------
        attributes : the owner's, stored as JSON.
        drive : the only drive to use; None stripes the tensor over all drives.
        extent_bytes : most bytes of an extent, in whole blocks; None, and at most: those of the
            set.

        Raises
        ------
        UnknownTensorError : the name is in use.
        ArgumentError : an invalid name, size, drive or extent, or attributes that JSON cannot
            represent.
        """
        checked_tensor(name, nbytes)
        most = self.drives[0].header.extent_bytes
        given = most if extent_bytes is None else extent_bytes
        if not (is_whole(given) and given % BLOCK_BYTES == 0 and 0 < given <= most):
            expected = f"extent_bytes must be whole blocks of {BLOCK_BYTES}, at most {most}"
            raise ArgumentError(f"{expected}, not {extent_bytes!r}")
        if drive is not None and not (is_whole(drive) and 0 <= drive < len(self.drives)):
            raise ArgumentError(f"drive must be from 0 to {len(self.drives) - 1}, not {drive!r}")
        kept = checked_json(f"attributes of {name!r}", attributes)
        with self._lock:
            self._check_writable(f"add {name!r}")
            first, pinned = (0, False) if drive is None else (int(drive), True)
            step, hole = (extent_bytes or 0) // BLOCK_BYTES, Table.of_hole(0, 1)
            self._transaction.add(Tensor(name, nbytes, kept, hole, first, pinned, step))

    def remove(self, name: str) -> None:
        """Remove a tensor from the next generation; committed generations keep it.

        Raises
        ------
        UnknownTensorError : there is no tensor of this name.
        """
        with self._lock:
            self._check_writable(f"remove {name!r}")
            tensor = self._transaction.tensor(name)
            self._in_flight.join(name, 0, tensor.blocks, writes=True)
            del self._transaction.tensors[name]

    def submit_write(self, name: str, data: Any, offset: int = 0) -> Completion:
        """Begin a write of `data` to a tensor from byte `offset` on; `data` must not change until
        the end.

        A partly written extent is read first.

        Parameters
        ----------
        data : a contiguous array or buffer. One of `aligned_empty` is written without a copy.

        Raises
        ------
        UnknownTensorError : there is no tensor of this name.
        OutOfBoundsError : the tensor is shorter.
        ArgumentError : `data` is not a contiguous array.
        DriveFullError : nothing was changed.
        FailedGenerationError : a write since the last commit failed.
        """
        flat = flat_bytes("data", data)
        with self._lock:
            self._check_writable(f"write {name!r}")
            transaction = self._transaction
            transaction.check(f"write {name!r}")
            tensor = transaction.tensor(name)
            first, last = tensor.span(offset, flat.nbytes)
            if not flat.nbytes:
                return Ended()
            self._in_flight.join(name, first, last, writes=True)
            new, old = transaction.place(name, first, last)
            source = self._source(tensor, transaction.last + 1)
            jobs = []
            for extent in new:
                job = write_job(source, extent, old, offset, flat, transaction.crcs)
                jobs.append((self.drives[extent.drive], transaction.guarded(job)))
            transfer = DriveTransfer(f"write of {name!r}", jobs)
            self._in_flight.add(name, first, last, transfer, writes=True)
            transaction.changing = None  # after an interrupt, a wait begins the transfer
            return transfer.begin()

    def submit_read(self, name: str, out: Any, offset: int = 0) -> Completion:
        """Begin a read of a tensor's last write into `out` from byte `offset` on.

        Whole extents are read and their CRCs checked. After an error the contents of `out` are
        undefined.

        Parameters
        ----------
        out : a contiguous, writeable array or buffer.

        Raises
        ------
        UnknownTensorError : there is no tensor of this name.
        OutOfBoundsError : the tensor is shorter.
        ArgumentError : `out` is not a contiguous, writeable array.
        FailedGenerationError : a write since the last commit failed.
        """
        with self._lock:
            self._check_open(f"read {name!r}")
            transaction = self._transaction
            transaction.check(f"read {name!r}")
            tensor = transaction.tensor(name)
            return self._submit_read(tensor, transaction.current, out, offset, transaction)

    def write(self, name: str, data: Any, offset: int = 0) -> None:
        """Write `data` to a tensor from byte `offset` on: `submit_write`, then wait."""
        self.submit_write(name, data, offset).wait()

    def read(self, name: str, out: Any, offset: int = 0) -> None:
        """Read a tensor into `out` from byte `offset` on: `submit_read`, then wait."""
        self.submit_read(name, out, offset).wait()

    def holds(self, name: str, data: Any) -> bool:
        """Return whether the last generation has `data` as a whole tensor, by the CRCs of its
        extents; False for a tensor with an extent that was never written."""
        flat, tensor = flat_bytes("data", data), self._transaction.current.tensors.get(name)
        if tensor is None or tensor.nbytes != flat.nbytes:
            return False
        for extent in tensor.table.extents():
            part = flat[extent.start * BLOCK_BYTES : extent.stop * BLOCK_BYTES]
            rest = bytes(extent.blocks * BLOCK_BYTES - part.nbytes)
            if extent.is_hole or crc32(rest, crc32(part)) != extent.crc:
                return False
        return True

    def at(self, generation: int) -> GenerationView:
        """Open a generation on the drives for reading.

        Raises
        ------
        NoGenerationError : the generation is not on the drives.
        TornIndexError : its index is damaged.
        """
        with self._lock:
            self._check_open(f"open generation {generation}")
            return GenerationView(self._find(generation), self._submit_view)

    def commit(
        self,
        meta: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        decide: Callable[[], object] | None = None,
    ) -> int:
        """Commit writes, additions and removals as the next generation, and return its number.

        A commit that has returned outlasts a power cut: payload and index are flushed on all drives
        before the superblock is written and flushed.

        Parameters
        ----------
        meta : metadata of the generation, stored as JSON, such as the step.
        name : under which later generations keep this one, until `drop`. Its blocks stay in use.
        decide : called when payload and index are durable, before the superblock is written: the
            first phase of a commit of several stores has ended. If it raises, nothing was
            committed; `abort` rolls back.

        Raises
        ------
        FailedGenerationError : a write failed. Nothing was committed; `abort` rolls back.
        DriveFullError : there is no space for the index. Nothing was committed or lost.
        DriveVanishedError, DriveIOError : nothing was committed; `abort` rolls back.
        UncertainCommitError : the last write failed. Open the drives again.
        ArgumentError : JSON cannot represent `meta`, or the name is in use.
        """
        checked = checked_json("meta", meta)
        with self._lock:
            self._check_writable("commit")
            if name in self._transaction.kept:
                raise ArgumentError(f"name must be a new one, not {name!r}: drop the other first")
            self._in_flight.join_all()
            transaction = self._transaction
            transaction.check("commit")
            number = transaction.last + 1
            tensors = transaction.summed()
            kept = dict(transaction.kept)
            indices = {key: each.superblock.index for key, each in kept.items()}
            data = pack_index(number, checked, list(tensors.values()), Names(name, indices))
            (runs,) = transaction.take([(blocks_of(len(data)), 0)])
            if len(runs) > MOST_RUNS:
                detail = f" in {MOST_RUNS} pieces at most, for the index"
                raise DriveFullError(len(data), self.free_bytes, detail)
            slot = next(each for each in SLOTS if each != transaction.current.slot)
            set_id = self.drives[0].header.set_id
            superblock = Superblock(set_id, number, len(data), crc32(data), runs)
            transaction.doubt = slot
            self._write_index(data, runs)
            if decide is not None:
                transaction.doubt = None  # nothing is in flight, and the slot is as it was
                decide()
                transaction.doubt = slot
            if transaction.other is not None and transaction.other.number > self.generation:
                self._give_up(transaction, transaction.other, number)
            self.written = superblock
            self._write_slot(slot, superblock.pack(), number, commits=True)
            committed = Generation(slot, checked, tensors, superblock, name, kept)
            self._transaction = transaction.next(committed)
            return number

    def abort(self) -> None:
        """Roll back to the last commit that returned, not to an interrupted one; what `drop` has
        dropped stays so."""
        with self._lock:
            self._check_writable("abort")
            self._in_flight.join_all()
            self._transaction = self._transaction.next()

    @property
    def kept(self) -> Mapping[str, int]:
        """Generations that are kept, by name: `at` reads them."""
        with self._lock:
            return {name: each.number for name, each in self._transaction.kept.items()}

    def drop(self, name: str) -> None:
        """Keep a generation no longer, from the next commit on, rolled back before it or not; its
        blocks are free after the one that follows.

        Raises
        ------
        ArgumentError : there is no generation of this name.
        """
        with self._lock:
            self._check_writable(f"drop {name!r}")
            if name not in self._transaction.kept:
                raise self._no_kept(name)
            del self._transaction.kept[name]

    def restore(self, name: str) -> GenerationView:
        """Begin the next generation with the tensors of a kept one, in place of those since the
        last commit: no data is copied.

        Raises
        ------
        ArgumentError : there is no generation of this name.
        TornIndexError : its index is damaged.
        """
        with self._lock:
            self._check_writable(f"restore {name!r}")
            if name not in self._transaction.kept:
                raise self._no_kept(name)
            found = self._find(self._transaction.kept[name].number)
            self._in_flight.join_all()
            self._transaction = self._transaction.next()
            self._transaction.tensors = dict(found.tensors)
            return self.at(found.number)

    def _no_kept(self, name: str) -> ArgumentError:
        return ArgumentError(f"name must be one of {sorted(self._transaction.kept)}, not {name!r}")

    def drop_other(self) -> None:
        """Free the blocks of the previous generation now instead of at the next commit."""
        with self._lock:
            self._check_writable("drop a generation")
            self._in_flight.join_all()
            transaction = self._transaction
            if transaction.other is None:
                return
            self._give_up(transaction, transaction.other, self.generation)
            transaction.doubt = None

    def close(self) -> None:
        """Wait for transfers in flight, and close the drives; closing twice does nothing.

        Uncommitted writes are lost. After an `OSError` of a drive all are closed.
        """
        with self._lock:
            self._closed = True
            errors = []
            for drive in self.drives:
                try:
                    drive.close()
                except OSError as error:
                    errors.append(error)
            if errors:
                raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        if self._transaction.doubt is not None:
            self._roll_back(self._transaction, self._transaction.doubt)

    def _roll_back(self, transaction: Transaction, slot: int) -> None:
        """Roll back an interrupted commit: write the previous superblock to its slot again."""
        self._in_flight.join_all()
        before = [each for each in self._held if each.slot == slot]
        block = before[0].superblock.pack() if before else aligned_bytes(BLOCK_BYTES)
        self._write_slot(slot, block, transaction.last + 1, commits=False, backwards=True)
        transaction.doubt = None

    def _give_up(self, transaction: Transaction, other: Generation, number: int) -> None:
        """Remove the other generation from the drives, and leave its slot in doubt; an error is one
        of the commit of `number`."""
        transaction.doubt = other.slot
        newer, zeros = other.number > transaction.current.number, aligned_bytes(BLOCK_BYTES)
        self._write_slot(other.slot, zeros, number, commits=False, backwards=newer)
        transaction.forget_other()

    @property
    def _held(self) -> list[Generation]:
        """Generations on the drives, oldest first."""
        there = (self._transaction.current, self._transaction.other)
        return sorted((each for each in there if each is not None), key=lambda each: each.number)

    def _find(self, number: int) -> Generation:
        for each in (*self._held, *self._transaction.kept.values()):
            if each.number == number and each.damage:
                raise TornIndexError(number, each.damage, whole=[*self.generations])
            if each.number == number:
                return each
        raise NoGenerationError(number, self.generations)

    def _source(self, tensor: Tensor, generation: int) -> Source:
        others = tuple(each for each in self.generations if each != generation)
        return Source(self.drives, tensor.name, tensor.nbytes, generation, others)

    def _submit_view(self, view: Generation, name: str, out: Any, offset: int) -> Completion:
        with self._lock:
            self._check_open(f"read {name!r}")
            if self._find(view.number) is not view:
                raise NoGenerationError(view.number, self.generations)
            if name not in view.tensors:
                raise UnknownTensorError(name, f"is not in generation {view.number}")
            return self._submit_read(view.tensors[name], view, out, offset)

    def _submit_read(
        self,
        tensor: Tensor,
        generation: Generation,
        out: Any,
        offset: int,
        transaction: Transaction | None = None,
    ) -> Completion:
        """Begin a read; of the last write if there is a `transaction`, which must not have failed
        when its writes have ended."""
        flat = flat_bytes("out", out, writes=True)
        first, last = tensor.span(offset, flat.nbytes)
        if not flat.nbytes:
            return Ended()
        self._in_flight.join(tensor.name, first, last, writes=False)
        if transaction is not None:
            transaction.check(f"read {tensor.name!r}")
        source, jobs = self._source(tensor, generation.number), []
        for extent in self._transaction.extents(tensor.table, first, last):
            drive = self.drives[0 if extent.is_hole else extent.drive]
            jobs.append((drive, read_job(source, extent, offset, flat)))
        transfer = DriveTransfer(f"read of {tensor.name!r}", jobs)
        self._in_flight.add(tensor.name, first, last, transfer, writes=False)
        return transfer.begin()

    def _write_index(self, data: bytes, runs: Sequence[Run]) -> None:
        """Write the index, then flush index and payload before a superblock refers to either."""
        jobs = [
            (self.drives[run.drive], self.drives[run.drive].write_job(run.block, part))
            for run, part in parts_of(padded(data), runs)
        ]
        try:
            self._run("write of an index", jobs)
            for drive in self.drives:
                drive.blocks.check_present()
            self._run("flush", flushes(self.drives))
        except StorageError as error:
            self._transaction.failed = error  # a failed flush may have lost the payload
            if not isinstance(error, DriveTimeoutError):
                self._transaction.doubt = None  # nothing is in flight
            raise

    def _write_slot(
        self, slot: int, block: Flat, number: int, *, commits: bool, backwards: bool = False
    ) -> None:
        """Write and flush the first copy of a superblock, then write the second copy; `backwards`
        in the reverse order, where the newest superblock is overwritten: a power cut tears its
        second copy alone, as in a commit.

        If `commits`, an error of the second copy is a warning: the generation does not depend on
        that copy. After any other error the content of the slot is unknown.
        """
        drive = self.drives[0]
        for at in copies(slot, drive.header.blocks)[:: -1 if backwards else 1]:
            try:
                self._run("write of a superblock", [(drive, drive.write_job(at, block))])
                if at == slot or not commits:
                    self._run("flush", flushes([drive]))
            except StorageError as error:
                if at == slot or not commits:
                    self._uncertain = number
                    raise UncertainCommitError(number) from error
                reason = f"block {at}: {error}"
                warnings.warn(
                    DamagedSuperblockWarning(drive.name, slot, reason, [number], lost=False),
                    stacklevel=4,
                )

    def _repair(self, slots: Sequence[Slot]) -> None:
        """Write the newest copy over older and damaged ones: a drive may remap a bad sector."""
        drive = self.drives[0]
        for slot in slots:
            if slot.superblock is not None:
                for at in (at for at, each in slot.copies.items() if each != slot.superblock):
                    with contextlib.suppress(StorageError):  # the next generation is written there
                        self._run("repair", [(drive, drive.write_job(at, slot.superblock.pack()))])

    def _run(self, what: str, jobs: Sequence[tuple[Drive, Job]]) -> None:
        transfer = DriveTransfer(what, jobs)
        self._in_flight.add("", 0, 0, transfer, writes=True)
        transfer.begin().wait()


_open: weakref.WeakSet[Store] = weakref.WeakSet()


def _unlock() -> None:
    """Replace the locks of all stores in a child after `fork()`: the thread that held one may not
    exist there."""
    for store in list(_open):
        store._lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)
