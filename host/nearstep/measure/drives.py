"""Rates of a drive, from a file written and read past the system's cache."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from nearstep.errors import ArgumentError, Fielded, NearstepError
from nearstep.measure.clocked import seconds
from nearstep.storage.aligned import aligned_bytes

DEPTHS = (1, 2, 4, 8, 16)
"""Requests in flight."""

BLOCK_BYTES = 1 << 20
PAGE_BYTES = 4096
"""Bytes of a request for latency."""

LATENCY_RUNS = 64
ENOUGH = 0.95
"""Share of the best rate that the reported depth reaches."""

BlockCopy = Callable[[int, int], None]
"""Transfers block `i` with the buffer of thread `j`."""


class MeasureError(Fielded, NearstepError):
    """The drive of a folder cannot be measured."""

    template = "{directory}: {reason}"
    directory: Path
    reason: str


@dataclass(frozen=True)
class DriveRates:
    """Rates and latencies of a drive.

    Attributes
    ----------
    read_bytes_per_s, write_bytes_per_s : by queue depth.
    read_latency_s, write_latency_s : of 4 KiB at depth 1, the median.
    """

    read_bytes_per_s: Mapping[int, float]
    write_bytes_per_s: Mapping[int, float]
    read_latency_s: float
    write_latency_s: float

    @property
    def depth(self) -> int:
        """The least depth with 95 % of both best rates, or else with the best lesser share."""
        reads, writes = self.read_bytes_per_s, self.write_bytes_per_s
        best = max(reads.values()), max(writes.values())
        shares = {each: min(reads[each] / best[0], writes[each] / best[1]) for each in reads}
        return max(shares, key=lambda depth: min(shares[depth], ENOUGH))


def drive_rates(
    directory: Path,
    file_bytes: int,
    report: Callable[[str], None] = lambda step: None,
) -> DriveRates:
    """Write and read a file of this size, once at each depth, and remove the file.

    Parameters
    ----------
    directory : on the drive.
    file_bytes : a multiple of `BLOCK_BYTES`.
    report : called with a line before each of `len(DEPTHS) * 2 + 1` steps.

    Raises
    ------
    ArgumentError : the size is not a multiple.
    MeasureError : the path is no folder, has no room, or does not support O_DIRECT.
    """
    if file_bytes < BLOCK_BYTES or file_bytes % BLOCK_BYTES:
        raise ArgumentError(f"file_bytes must be a multiple of {BLOCK_BYTES}, not {file_bytes}")
    if not directory.is_dir():
        raise MeasureError(directory, "is no folder")
    free = shutil.disk_usage(directory).free
    if free < 2 * file_bytes:
        raise MeasureError(directory, f"has {free} bytes free, not {2 * file_bytes}")
    blocks = file_bytes // BLOCK_BYTES
    buffers = [_buffer() for _ in range(max(DEPTHS))]
    with _direct(directory) as file:

        def write(block: int, thread: int) -> None:
            _whole(os.pwritev(file, [buffers[thread]], block * BLOCK_BYTES))

        def read(block: int, thread: int) -> None:
            _whole(os.preadv(file, [buffers[thread]], block * BLOCK_BYTES))

        rates: dict[str, dict[int, float]] = {"write": {}, "read": {}}
        for name, transfer in (("write", write), ("read", read)):
            for depth in DEPTHS:
                report(f"drive: {name} at queue depth {depth}")
                rates[name][depth] = file_bytes / _time(transfer, blocks, depth)
        report("drive: latency")
        page = buffers[0][:PAGE_BYTES]
        places = itertools.cycle(range(0, file_bytes, max(PAGE_BYTES, file_bytes // 64)))
        latency = {
            "write": seconds(lambda: os.pwritev(file, [page], next(places)), runs=LATENCY_RUNS),
            "read": seconds(lambda: os.preadv(file, [page], next(places)), runs=LATENCY_RUNS),
        }
    return DriveRates(rates["read"], rates["write"], latency["read"], latency["write"])


def _time(transfer: BlockCopy, blocks: int, depth: int) -> float:
    """Time the transfer of all blocks by so many threads."""
    left = iter(range(blocks))

    def work(thread: int) -> None:
        for block in left:  # atomic in the interpreter
            transfer(block, thread)

    with ThreadPoolExecutor(depth) as pool:
        start = perf_counter()
        list(pool.map(work, range(depth)))
        return max(perf_counter() - start, 1e-9)


def _whole(moved: int) -> None:
    if moved != BLOCK_BYTES:
        raise OSError(errno.EIO, f"{moved} of {BLOCK_BYTES} bytes were moved")


def _buffer() -> memoryview:
    """A buffer on a page boundary, with bytes that no drive can compress."""
    made = aligned_bytes(BLOCK_BYTES)
    made[:] = np.frombuffer(os.urandom(BLOCK_BYTES), np.uint8)
    return made.data


@contextmanager
def _direct(directory: Path) -> Iterator[int]:
    """Open a new file past the system's cache, and remove it at the end."""
    with ExitStack() as stack:
        fault = "cannot be written"
        try:
            handle, name = tempfile.mkstemp(prefix="nearstep-", dir=directory)
            stack.callback(os.unlink, name)
            os.close(handle)
            fault = "does not support O_DIRECT"
            file = os.open(name, os.O_RDWR | os.O_DIRECT)
            stack.callback(os.close, file)
            fault = "failed"
            yield file
        except OSError as error:
            raise MeasureError(directory, f"{fault}: {error.strerror}") from error
