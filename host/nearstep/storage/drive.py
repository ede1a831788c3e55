"""A drive: blocks that several threads read and write at once."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import ArgumentError, OutOfBoundsError
from nearstep.scalars import is_whole
from nearstep.storage.aligned import is_aligned
from nearstep.storage.blocks import BLOCK_BYTES, Blocks, Bytes
from nearstep.storage.bounces import Bounces
from nearstep.storage.drive_errors import ClosedStoreError
from nearstep.storage.header import Header
from nearstep.storage.transfer import TIMEOUT_S, Transfer

QUEUE_DEPTH = 8
"""Reads or writes that a drive works on at once, if nothing is said: a thread whose call has
returned waits for Python's lock before the next one, and the drive has others meanwhile."""

MAX_QUEUE_DEPTH = 256

SUMMING = 2
"""Threads beyond the depth of the queue: they make CRCs, or copy, while it is full."""

Job = Callable[[Bounces], None]
"""Part of a transfer; gets buffers as large as an extent for arrays that the drive cannot reach."""

_Task = tuple[Job, Transfer] | None


class _Ended:
    """Parts that have ended."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()


class Drive:
    """A drive of a set, with as many reads and writes under way as its queue is deep.

    Each is one `preadv` or `pwritev` of a thread of its own, without Python's lock; two threads
    more make CRCs meanwhile. Python's binding of io_uring was no faster (docs/storage.md has the
    figures).

    Parameters
    ----------
    blocks
    header
    queue_depth
    timeout_s : without any progress, for `Transfer.wait`.

    Attributes
    ----------
    blocks, header, queue_depth
    bytes_read, bytes_written : moved since the drive was opened.
    flushes

    Raises
    ------
    ArgumentError : the depth is none.
    """

    def __init__(
        self,
        blocks: Blocks,
        header: Header,
        *,
        queue_depth: int = QUEUE_DEPTH,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        check_depth(queue_depth)
        self.blocks = blocks
        self.header = header
        self.queue_depth = queue_depth
        self.timeout_s = timeout_s
        self.bytes_read = self.bytes_written = self.flushes = 0
        self._count_lock = threading.Lock()
        self._queue = threading.BoundedSemaphore(queue_depth)
        self._ended = _Ended()
        self._bounces = Bounces(header.extent_bytes)
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._closed = False
        self._stop = weakref.finalize(self, _stop, self._tasks, self._threads, blocks)
        self._stop.atexit = False
        _open.add(self)

    @property
    def name(self) -> str:
        return self.blocks.name

    def check_open(self, action: str) -> None:
        """Raise `ClosedStoreError` unless it is open, and of this process."""
        if self._closed:
            raise ClosedStoreError(f"drive {self.name}", action)
        if os.getpid() != self._process:
            reason = f"of process {self._process}, which opened it"
            raise ClosedStoreError(f"drive {self.name}", action, reason)

    def read_now(self, block: int, out: Bytes) -> None:
        """Read whole blocks into an aligned array, in this thread.

        Raises
        ------
        DriveIOError, ShortTransferError, DriveVanishedError
        """
        with self._queue:
            self.blocks.read(block, out)
        with self._count_lock:
            self.bytes_read += out.nbytes

    def write_now(self, block: int, data: Bytes) -> None:
        """Write whole blocks from an aligned array, in this thread.

        Raises
        ------
        DriveIOError, ShortTransferError, DriveVanishedError, DriveFullError
        """
        with self._queue:
            self.blocks.write(block, data)
        with self._count_lock:
            self.bytes_written += data.nbytes

    def flush_now(self) -> None:
        """Flush what has been written, in this thread.

        Raises
        ------
        DriveIOError, DriveVanishedError
        """
        self.blocks.flush()
        with self._count_lock:
            self.flushes += 1

    def read(self, block: int, out: NDArray[Any]) -> Transfer:
        """Begin to read from `block` on into `out`, a contiguous array of whole blocks.

        Raises
        ------
        OutOfBoundsError : the drive has not so many blocks.
        ArgumentError : it is not so.
        ClosedStoreError
        """
        return self._pieces("read", block, out, self._read_piece)

    def write(self, block: int, data: NDArray[Any]) -> Transfer:
        """Begin to write a contiguous array of whole blocks; it must not change until the end.

        Raises
        ------
        OutOfBoundsError : the drive has not so many blocks.
        ArgumentError : it is not so.
        ClosedStoreError
        """
        return self._pieces("write", block, data, self._write_piece)

    def flush(self) -> Transfer:
        """Begin to flush the writes that have ended.

        Raises
        ------
        ClosedStoreError
        """
        return start(f"flush of {self.name}", [(self, lambda _: self.flush_now())])

    def submit(self, job: Job, transfer: Transfer) -> None:
        """Have a thread of the drive do one part of a transfer."""
        if len(self._threads) < self.queue_depth + SUMMING:
            thread = threading.Thread(
                target=_work, args=(self._tasks, self._ended, self._bounces), daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._tasks.put((job, transfer))

    def close(self) -> None:
        """Wait for what is under way, and give the drive back. Closing twice does nothing."""
        self._closed = True
        self._stop()  # in a child after fork() there is nothing left to do

    def _pieces(
        self,
        action: str,
        block: int,
        data: NDArray[Any],
        piece: Callable[[int, Bytes], Job],
    ) -> Transfer:
        self.check_open(action)
        if not data.flags.c_contiguous or data.nbytes % BLOCK_BYTES:
            raise ArgumentError(
                f"what is to be {action} must be whole blocks of {BLOCK_BYTES} bytes"
            )
        last = block + data.nbytes // BLOCK_BYTES
        if block < 0 or last > self.header.blocks:
            raise OutOfBoundsError(f"blocks of {self.name}", block, last, self.header.blocks)
        flat, step = data.reshape(-1).view(np.uint8), self.header.extent_bytes
        jobs = [
            (self, piece(block + at // BLOCK_BYTES, flat[at : at + step]))
            for at in range(0, flat.nbytes, step)
        ]
        return start(f"{action} of {self.name}", jobs)

    def _read_piece(self, block: int, out: Bytes) -> Job:
        def job(bounces: Bounces) -> None:
            if is_aligned(out):
                self.read_now(block, out)
                return
            with bounces.lend(out.nbytes) as bounce:
                self.read_now(block, bounce)
                out[:] = bounce

        return job

    def _write_piece(self, block: int, data: Bytes) -> Job:
        def job(bounces: Bounces) -> None:
            if is_aligned(data):
                self.write_now(block, data)
                return
            with bounces.lend(data.nbytes) as bounce:
                bounce[:] = data
                self.write_now(block, bounce)

        return job


_open: weakref.WeakSet[Drive] = weakref.WeakSet()


def _let_go() -> None:
    """In a child after `fork()`: the drives are its parent's, and their locks end with the parent's
    use of them, not with the child."""
    for drive in list(_open):
        drive._stop.detach()
        drive.blocks.close()


os.register_at_fork(after_in_child=_let_go)


def check_depth(depth: object) -> None:
    """Raise `ArgumentError` unless a queue can be so deep."""
    if not is_whole(depth) or not 1 <= depth <= MAX_QUEUE_DEPTH:
        raise ArgumentError(f"queue_depth must be 1 to {MAX_QUEUE_DEPTH}, not {depth!r}")


def start(what: str, jobs: Sequence[tuple[Drive, Job]]) -> Transfer:
    """Begin a transfer of these parts, each on its drive.

    Raises
    ------
    ClosedStoreError : nothing was begun.
    """
    drives = {id(drive): drive for drive, _ in jobs}.values()
    for drive in drives:
        drive.check_open(what)
    timeout_s = max((drive.timeout_s for drive in drives), default=TIMEOUT_S)
    transfer = Transfer(what, len(jobs), _progress_of(drives), timeout_s)
    for drive, job in jobs:
        drive.submit(job, transfer)
    return transfer


def _progress_of(drives: Iterable[Drive]) -> Callable[[], int]:
    counts = [drive._ended for drive in drives]
    return lambda: sum(each.count for each in counts)


def _work(tasks: queue.SimpleQueue[_Task], ended: _Ended, bounces: Bounces) -> None:
    """One thread of a drive, which it does not know, so that one that nobody uses ends."""
    while (task := tasks.get()) is not None:
        job, transfer = task
        error: Exception | None = None
        try:
            job(bounces)
        except Exception as raised:
            error = raised
        with ended.lock:
            ended.count += 1
        transfer.end_part(error)
        del task, job, transfer, error  # nothing of the user's lives on in a thread that waits


def _stop(
    tasks: queue.SimpleQueue[_Task], threads: Sequence[threading.Thread], blocks: Blocks
) -> None:
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    blocks.close()
