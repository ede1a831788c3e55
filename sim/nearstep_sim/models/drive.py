"""Drives in memory, with power cuts at any write and injected faults."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nearstep.storage.blocks import BLOCK_BYTES, Blocks, Bytes
from nearstep.storage.drive_errors import DriveIOError, DriveVanishedError

SECTOR_BYTES = 512
"""Bytes that a drive writes atomically: the least guarantee of any drive."""


@dataclass(frozen=True)
class Write:
    """A write that ended: bytes from a block of a drive on."""

    drive: int
    block: int
    data: bytes


@dataclass(frozen=True)
class Flush:
    """A flush of a drive; `NOWHERE`: one that was acknowledged and not done."""

    drive: int


NOWHERE = -1


Event = Write | Flush


@dataclass
class Journal:
    """Journal of the writes and flushes of several drives, in order of completion."""

    events: list[Event] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, event: Event) -> None:
        with self.lock:
            self.events.append(event)


class MemoryBlocks(Blocks):
    """A drive in memory.

    Parameters
    ----------
    image : its bytes, which are copied.
    drive : number in the journal.
    journal : journal of the operations.

    Attributes
    ----------
    image : current contents, without a power cut.
    fault : called with `read`, `write`, `flush` or `look`, and the block, before the operation; its
        exception is raised.
    lie : called with `write` or `flush`, and the block, of what is acknowledged; returns the block
        to which it really goes, or None for a write that is lost or a flush that is not done.
    caches : whether reads return what was acknowledged until the power is cut.
    """

    def __init__(self, image: bytes, drive: int = 0, journal: Journal | None = None) -> None:
        self.name = f"memory{drive}"
        self.count = len(image) // BLOCK_BYTES
        self.image = bytearray(image)
        self.fault: Callable[[str, int], None] = lambda action, block: None
        self.lie: Callable[[str, int], int | None] = lambda action, block: block
        self.caches = True
        self._drive = drive
        self._journal = Journal() if journal is None else journal
        self._closed = False

    def read(self, block: int, out: Bytes) -> None:
        self._check("read", block, out)
        at = block * BLOCK_BYTES
        out[:] = np.frombuffer(bytes(self.image[at : at + out.nbytes]), np.uint8)

    def write(self, block: int, data: Bytes) -> None:
        self._check("write", block, data)
        seen = Write(self._drive, block, data.tobytes())
        to = self.lie("write", block)
        last = self.count - data.nbytes // BLOCK_BYTES  # where it fits in
        done = replace(seen, data=b"") if to is None else replace(seen, block=min(to, last))
        seen = seen if self.caches else done
        at = seen.block * BLOCK_BYTES
        self.image[at : at + len(seen.data)] = seen.data
        self._journal.add(done)

    def flush(self) -> None:
        self.fault("flush", 0)
        self._journal.add(Flush(NOWHERE if self.lie("flush", 0) is None else self._drive))

    def check_present(self) -> None:
        self.fault("look", 0)

    def close(self) -> None:
        self._closed = True

    def _check(self, action: str, block: int, data: Bytes) -> None:
        if self._closed:
            raise AssertionError(f"{action} of a drive that is closed")
        if data.nbytes % BLOCK_BYTES or data.ctypes.data % BLOCK_BYTES:
            raise AssertionError(f"{action} of unaligned data")
        if not 0 <= block <= block + data.nbytes // BLOCK_BYTES <= self.count:
            raise AssertionError(f"{action} at block {block} of {self.count}")
        self.fault(action, block)


class FailAt:
    """A fault: the `number`-th `action`, counted from 0, is an error of the drive.

    Parameters
    ----------
    action : `read`, `write`, `flush` or `look`.
    code : of the system's error; ENODEV pulls the drive out.
    lasts : whether all later operations fail too.
    """

    def __init__(
        self, action: str, number: int = 0, code: int = errno.EIO, *, lasts: bool = False
    ) -> None:
        self._action = action
        self._left = number
        self._code = code
        self.lasts = lasts
        self.fired = 0

    def __call__(self, action: str, block: int) -> None:
        if action != self._action and not (self.lasts and self.fired):
            return
        self._left -= 1
        if self._left == -1 or (self.lasts and self._left < -1):
            self.fired += 1
            if self._code == errno.ENODEV:
                raise DriveVanishedError("memory", f"{action} at block {block}: it is gone")
            raise DriveIOError(
                "memory", action, block, OSError(self._code, os.strerror(self._code))
            )


def unflushed(events: Sequence[Event]) -> list[int]:
    """Return the indices of the writes without a later flush of their drive."""
    flushed: dict[int, int] = {}
    for at, event in enumerate(events):
        if isinstance(event, Flush):
            flushed[event.drive] = at
    return [
        at
        for at, event in enumerate(events)
        if isinstance(event, Write) and at > flushed.get(event.drive, -1)
    ]


Kept = dict[int, Sequence[int]]
"""Sectors of unflushed writes, by index, that reached the drive."""


def after_cut(images: Sequence[bytes], events: Sequence[Event], kept: Kept) -> list[bytes]:
    """Return the drives after a power cut: flushed writes, and `kept` sectors of the others."""
    drives = [bytearray(image) for image in images]
    lost = set(unflushed(events))
    for at, event in enumerate(events):
        if not isinstance(event, Write):
            continue
        base, drive = event.block * BLOCK_BYTES, drives[event.drive]
        if at not in lost:
            drive[base : base + len(event.data)] = event.data
            continue
        for sector in kept.get(at, ()):
            first = sector * SECTOR_BYTES
            part = event.data[first : first + SECTOR_BYTES]
            drive[base + first : base + first + len(part)] = part
    return [bytes(drive) for drive in drives]


def every_cut(events: Sequence[Event], most: int, rng: random.Random) -> Iterator[Kept]:
    """Yield the sets of sectors of unflushed writes that may reach the drives in a power cut.

    If the writes have at most `most` subsets, every subset, and its last write torn after each
    sector; else every prefix and random subsets up to `most`, and the last write torn in three
    ways.
    """
    open_writes = unflushed(events)
    every = 1 << len(open_writes) <= most
    subsets: set[tuple[int, ...]] = set()
    if every:
        for count in range(len(open_writes) + 1):
            subsets.update(itertools.combinations(open_writes, count))
    else:
        subsets.update(tuple(open_writes[:count]) for count in range(len(open_writes) + 1))
        while len(subsets) < most:
            subsets.add(tuple(at for at in open_writes if rng.random() < 0.5))
    for subset in sorted(subsets):
        whole: Kept = {at: range(_sectors(events[at])) for at in subset}
        yield whole
        if not subset:
            continue
        last = subset[-1]
        count = _sectors(events[last])
        yield {**whole, last: [sector for sector in range(count) if rng.random() < 0.5]}
        for sectors in range(1, count) if every else {1, count - 1}:
            yield {**whole, last: range(sectors)}


def _sectors(event: Event) -> int:
    return len(event.data) // SECTOR_BYTES if isinstance(event, Write) else 0
