"""A drive: blocks that several threads read and write."""

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
from nearstep.storage.blocks import BLOCK_BYTES, Blocks, Bytes
from nearstep.storage.bounces import Bounces
from nearstep.storage.drive_errors import ClosedStoreError, DriveTimeoutError
from nearstep.storage.header import Header

QUEUE_DEPTH = 8
"""Default number of reads and writes in flight on a drive: the drive serves the others while a
thread whose call has returned waits for Python's lock."""

MAX_QUEUE_DEPTH = 256

SUMMING = 2
"""Threads beyond the queue depth, which compute CRCs or copy while the queue is full."""

Job = Callable[[Bounces], None]
"""Part of a transfer; the bounce buffers replace arrays that are not aligned."""

TIMEOUT_S = 120.0
"""Seconds without progress after which a wait raises `DriveTimeoutError`."""


class DriveTransfer(Completion):
    """Reads or writes of drives.

    `cycles` is None: drives have no device time. A wait fails after `timeout_s` seconds in which no
    part of any transfer of these drives ended.

    Parameters
    ----------
    what : name for messages.
    jobs : parts, each with its drive.
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
        """Queue the parts on their drives.

        After an interrupt `join` queues the parts again: each request runs at most one part that
        has not begun, so no part runs twice.
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
        """Return the first error of a part; None while the transfer is in flight."""
        return self._error if self.ended else None

    @property
    def cycles(self) -> None:
        return None

    def wait(self, max_cycles: int | None = None) -> Self:
        """Wait for the end of all parts, and return self.

        Parameters
        ----------
        max_cycles : ignored: a drive has no cycles.

        Raises
        ------
        DriveTimeoutError : no part ended in time. The transfer continues.
        StorageError : the transfer failed with `error`.
        """
        self.join()
        if self._error is not None:
            raise self._error
        return self

    def join(self) -> None:
        """Wait for the end of the transfer, with or without an error.

        Raises
        ------
        DriveTimeoutError
        ClosedStoreError : this process is a child of the one that began the transfer; the threads
            do not exist here.
        """
        if self._left == 0:
            return
        if os.getpid() != self._process:  # before the lock, which another thread may have held
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
        """Run the next part that has not begun, if any."""
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
        """Record the end of a part, with its error."""
        with self._count_lock:
            if self._error is None:
                self._error = error
            self._left -= 1
            if self._left == 0:
                self._jobs = {}  # release the drives
                self._all_ended.set()

    def _progress(self) -> int:
        return sum(drive.ended.count for drive in self._jobs)


_Task = tuple[DriveTransfer, deque[Job]] | None
"""A transfer with its parts that have not begun; None ends the thread."""


class Ended:
    """Count of the parts of transfers that have ended."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()


class Drive:
    """A drive of a set, with up to `queue_depth` reads and writes in flight.

    Each is one `preadv` or `pwritev` in its own thread, without Python's lock; two more threads
    compute CRCs meanwhile. Python's binding of io_uring was no faster (docs/storage.md).

    Parameters
    ----------
    timeout_s : seconds without progress after which `DriveTransfer.wait` fails.

    Attributes
    ----------
    bytes_read, bytes_written : since the drive was opened.
    ended : count of parts that have ended.
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
        self._threads_began = False
        self._process = os.getpid()
        self._closed = False
        self._stop = weakref.finalize(self, _stop, self._tasks, self._threads, blocks)
        self._stop.atexit = False
        _open.add(self)

    @property
    def name(self) -> str:
        return self.blocks.name

    def check_open(self, action: str) -> None:
        """Raise `ClosedStoreError` unless the drive is open and belongs to this process."""
        if self._closed:
            raise ClosedStoreError(f"drive {self.name}", action)
        if os.getpid() != self._process:
            reason = f"of process {self._process}, which opened it"
            raise ClosedStoreError(f"drive {self.name}", action, reason)

    def read_now(self, block: int, out: Bytes) -> None:
        """Read whole blocks into an aligned array in this thread."""
        with self._queue:
            self.blocks.read(block, out)
        with self._count_lock:
            self.bytes_read += out.nbytes

    def write_now(self, block: int, data: Bytes) -> None:
        """Write whole blocks from an aligned array in this thread."""
        with self._queue:
            self.blocks.write(block, data)
        with self._count_lock:
            self.bytes_written += data.nbytes

    def flush_job(self, _: Bounces) -> None:
        """Flush all completed writes, as a part of a transfer."""
        self.blocks.flush()
        with self._count_lock:
            self.flushes += 1

    def read(self, block: int, out: NDArray[Any]) -> DriveTransfer:
        """Begin a read from `block` on into `out`, a contiguous array of whole blocks."""
        return self._pieces("read", block, out, self._read_job)

    def write(self, block: int, data: NDArray[Any]) -> DriveTransfer:
        """Begin a write of a contiguous array of whole blocks, which must not change until the
        end."""
        return self._pieces("write", block, data, self.write_job)

    def submit(self, transfer: DriveTransfer, jobs: deque[Job]) -> None:
        """Queue the next part of a transfer for a thread of the drive."""
        if not self._threads_began:
            thread = threading.Thread(
                target=_work, args=(self._tasks, self.ended, self._bounces), daemon=True
            )
            self._threads.append(thread)
            thread.start()
            alive = sum(each.is_alive() for each in self._threads)  # fewer after an interrupt
            self._threads_began = alive >= self.queue_depth + SUMMING
        self._tasks.put((transfer, jobs))

    def close(self) -> None:
        """Wait for transfers in flight, and close the blocks; closing twice does nothing."""
        self._closed = True
        _stop(self._tasks, self._threads, self.blocks)
        self._stop.detach()

    def _pieces(
        self,
        action: str,
        block: int,
        data: NDArray[Any],
        piece: Callable[[int, Bytes], Job],
    ) -> DriveTransfer:
        """Begin a transfer in pieces of one extent each.

        Raises
        ------
        OutOfBoundsError : the drive has fewer blocks.
        ArgumentError : the array is not contiguous, or not of whole blocks.
        """
        self.check_open(action)
        if not data.flags.c_contiguous or data.nbytes % BLOCK_BYTES:
            raise ArgumentError(
                f"array of a {action} must be contiguous, of whole blocks of {BLOCK_BYTES} bytes"
            )
        last = block + data.nbytes // BLOCK_BYTES
        if block < 0 or last > self.header.blocks:
            raise OutOfBoundsError(f"blocks of {self.name}", block, last, self.header.blocks)
        flat, step = data.reshape(-1).view(np.uint8), self.header.extent_bytes
        jobs = [
            (self, piece(block + at // BLOCK_BYTES, flat[at : at + step]))
            for at in range(0, flat.nbytes, step)
        ]
        return DriveTransfer(f"{action} of {self.name}", jobs).begin()

    def _read_job(self, block: int, out: Bytes) -> Job:
        def job(bounces: Bounces) -> None:
            with bounces.reach(out) as memory:
                self.read_now(block, memory)
                if memory is not out:
                    out[:] = memory

        return job

    def write_job(self, block: int, data: Bytes) -> Job:
        """Return a part of a transfer that writes whole blocks from an array."""

        def job(bounces: Bounces) -> None:
            with bounces.reach(data) as memory:
                if memory is not data:
                    memory[:] = data
                self.write_now(block, memory)

        return job


_open: weakref.WeakSet[Drive] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the drives in a child after `fork()`: the parent holds their locks."""
    for drive in list(_open):
        drive._stop.detach()
        drive.blocks.close()


os.register_at_fork(after_in_child=_close_in_child)


def check_depth(depth: object) -> None:
    """Raise `ArgumentError` unless `depth` is a valid queue depth."""
    if not is_whole(depth) or not 1 <= depth <= MAX_QUEUE_DEPTH:
        raise ArgumentError(f"queue_depth must be 1 to {MAX_QUEUE_DEPTH}, not {depth!r}")


def flushes(drives: Sequence[Drive]) -> list[tuple[Drive, Job]]:
    """Return parts of a transfer that flush these drives in parallel."""
    return [(drive, drive.flush_job) for drive in drives]


def _work(tasks: queue.SimpleQueue[_Task], ended: Ended, bounces: Bounces) -> None:
    """Run the loop of a drive's thread, without a reference to the drive so that it can be
    collected."""
    while (task := tasks.get()) is not None:
        transfer, jobs = task
        transfer.run_part(jobs, bounces)
        with ended.lock:
            ended.count += 1
        del task, transfer, jobs  # an idle thread holds no array of the user
    tasks.put(None)  # end the other threads


def _stop(
    tasks: queue.SimpleQueue[_Task], threads: Sequence[threading.Thread], blocks: Blocks
) -> None:
    tasks.put(None)
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join()
    blocks.close()
