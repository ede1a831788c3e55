"""A drive: blocks that several threads read and write at once."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion
from nearstep.errors import ArgumentError, OutOfBoundsError
from nearstep.scalars import is_whole
from nearstep.storage.aligned import is_aligned
from nearstep.storage.blocks import BLOCK_BYTES, Blocks, Bytes
from nearstep.storage.bounces import Bounces
from nearstep.storage.drive_errors import ClosedStoreError, DriveTimeoutError
from nearstep.storage.header import Header

QUEUE_DEPTH = 8
"""Reads or writes that a drive works on at once, if nothing is said: a thread whose call has
returned waits for Python's lock before the next one, and the drive has others meanwhile."""

MAX_QUEUE_DEPTH = 256

SUMMING = 2
"""Threads beyond the depth of the queue: they make CRCs, or copy, while it is full."""

Job = Callable[[Bounces], None]
"""Part of a transfer; gets buffers as large as an extent for arrays that the drive cannot reach."""

TIMEOUT_S = 120.0
"""Seconds without any progress after which a wait gives up."""


class Transfer(Completion):
    """Reads or writes of drives.

    Drives have no device time: `cycles` is None, and a wait is bounded by seconds in which no part
    of any transfer of these drives ended.

    Parameters
    ----------
    what : for messages.
    jobs : parts that have to end, each on its drive.

    Raises
    ------
    ClosedStoreError
    """

    def __init__(self, what: str, jobs: Sequence[tuple[Drive, Job]]) -> None:
        self.what = what
        self._jobs: dict[Drive, deque[Job]] = {}
        for drive, job in jobs:
            self._jobs.setdefault(drive, deque()).append(job)
        for drive in self._jobs:
            drive.check_open(what)
        self._timeout_s = max((drive.timeout_s for drive in self._jobs), default=TIMEOUT_S)
        self._begun = False
        self._left = len(jobs)
        self._count_lock = threading.Lock()
        self._all_ended = threading.Event()
        self._error: Exception | None = None
        self._process = os.getpid()

    def begin(self) -> Self:
        """Give the drives their parts.

        If that was interrupted `join` does it again: a drive looks for a part as often as it is
        told to, and does none twice.
        """
        for drive, jobs in self._jobs.items():
            for _ in range(len(jobs)):
                drive.submit(self, jobs)
        self._begun = True
        return self

    @property
    def ended(self) -> bool:
        return self._left == 0

    @property
    def error(self) -> Exception | None:
        """What it failed with, of several parts the first; None while it has not ended."""
        return self._error if self.ended else None

    @property
    def cycles(self) -> None:
        return None

    def wait(self, max_cycles: int | None = None) -> Self:
        """Wait for the end of all parts, and return self.

        Parameters
        ----------
        max_cycles : means nothing here: a drive has no cycles.

        Raises
        ------
        DriveTimeoutError : nothing ended for too long. It goes on.
        ClosedStoreError : as of `join`.
        StorageError : it failed: `error`.
        """
        self.join()
        if self._error is not None:
            raise self._error
        return self

    def join(self) -> None:
        """Wait for the end, whatever it is.

        Raises
        ------
        DriveTimeoutError
        ClosedStoreError : this is a child of the process that began it, and it had not ended when
            the child was made: what carries it out is not here.
        """
        if self._left == 0:
            return
        if os.getpid() != self._process:  # before the lock, which another thread may have had
            reason = f"of process {self._process}, which began it"
            raise ClosedStoreError(f"the {self.what}", "wait", reason)
        if not self._begun:
            self.begin()
        while True:
            before = self._progress()
            if self._all_ended.wait(self._timeout_s):
                return
            if self._progress() == before:
                raise DriveTimeoutError(self.what, self._timeout_s)

    def run_part(self, jobs: deque[Job], bounces: Bounces) -> None:
        """Carry out one of these parts, if there is one that nobody has begun."""
        try:
            job = jobs.popleft()
        except IndexError:
            return
        error: Exception | None = None
        try:
            job(bounces)
        except Exception as raised:
            error = raised
        self.end_part(error)

    def end_part(self, error: Exception | None) -> None:
        """A part has ended, with an error if one is given."""
        with self._count_lock:
            if self._error is None:
                self._error = error
            self._left -= 1
            if self._left == 0:
                self._jobs = {}  # whoever keeps the transfer does not keep the drives
                self._all_ended.set()

    def _progress(self) -> int:
        return sum(drive.ended.count for drive in self._jobs)


_Task = tuple[Transfer, deque[Job]] | None
"""A part of a transfer, to be looked for among those that nobody has begun; None: end."""


class Ended:
    """Parts of transfers that have ended."""

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
    timeout_s : without any progress, for `Transfer.wait`.

    Attributes
    ----------
    bytes_read, bytes_written : moved since the drive was opened.
    ended : parts of transfers that have.

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
        self.ended = Ended()
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
        """Read whole blocks into an aligned array, in this thread."""
        with self._queue:
            self.blocks.read(block, out)
        with self._count_lock:
            self.bytes_read += out.nbytes

    def write_now(self, block: int, data: Bytes) -> None:
        """Write whole blocks from an aligned array, in this thread."""
        with self._queue:
            self.blocks.write(block, data)
        with self._count_lock:
            self.bytes_written += data.nbytes

    def flush_job(self, _: Bounces) -> None:
        """Part of a transfer: flush what has been written."""
        self.blocks.flush()
        with self._count_lock:
            self.flushes += 1

    def read(self, block: int, out: NDArray[Any]) -> Transfer:
        """Begin to read from `block` on into `out`, a contiguous array of whole blocks.

        Raises
        ------
        OutOfBoundsError : the drive has not so many blocks.
        ArgumentError : it is not so.
        """
        return self._pieces("read", block, out, self._read_piece)

    def write(self, block: int, data: NDArray[Any]) -> Transfer:
        """Begin to write a contiguous array of whole blocks; it must not change until the end.

        Raises
        ------
        OutOfBoundsError : the drive has not so many blocks.
        ArgumentError : it is not so.
        """
        return self._pieces("write", block, data, self.write_job)

    def submit(self, transfer: Transfer, jobs: deque[Job]) -> None:
        """Have a thread of the drive do one part of a transfer, if there is one left."""
        if sum(each.is_alive() for each in self._threads) < self.queue_depth + SUMMING:
            thread = threading.Thread(
                target=_work, args=(self._tasks, self.ended, self._bounces), daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._tasks.put((transfer, jobs))

    def close(self) -> None:
        """Wait for what is under way, and give the drive back. Closing twice does nothing."""
        self._closed = True
        _stop(self._tasks, self._threads, self.blocks)
        self._stop.detach()

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
        return Transfer(f"{action} of {self.name}", jobs).begin()

    def _read_piece(self, block: int, out: Bytes) -> Job:
        def job(bounces: Bounces) -> None:
            if is_aligned(out):
                self.read_now(block, out)
                return
            with bounces.lend(out.nbytes) as bounce:
                self.read_now(block, bounce)
                out[:] = bounce

        return job

    def write_job(self, block: int, data: Bytes) -> Job:
        """Part of a transfer: write whole blocks from an array."""

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


def flushes(drives: Sequence[Drive]) -> list[tuple[Drive, Job]]:
    """Parts of a transfer: flush these drives, all at once."""
    return [(drive, drive.flush_job) for drive in drives]


def _work(tasks: queue.SimpleQueue[_Task], ended: Ended, bounces: Bounces) -> None:
    """One thread of a drive, which it does not know, so that one that nobody uses ends."""
    while (task := tasks.get()) is not None:
        transfer, jobs = task
        transfer.run_part(jobs, bounces)
        with ended.lock:
            ended.count += 1
        del task, transfer, jobs  # nothing of the user's lives on in a thread that waits
    tasks.put(None)  # for the others


def _stop(
    tasks: queue.SimpleQueue[_Task], threads: Sequence[threading.Thread], blocks: Blocks
) -> None:
    tasks.put(None)
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join()
    blocks.close()
