"""What a commit does to drives before its superblock is written."""

from __future__ import annotations

from collections.abc import Sequence

from nearstep.storage.aligned import padded
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive import Drive
from nearstep.storage.extents import Run
from nearstep.storage.transfer import Transfer


def write_index(drives: Sequence[Drive], data: bytes, runs: Sequence[Run]) -> None:
    """Write an index, and have it and the payload outlast a power cut.

    They may be flushed together: no superblock speaks of either yet.

    Raises
    ------
    DriveVanishedError, DriveIOError, ShortTransferError : nothing is under way.
    DriveTimeoutError : something still is.
    """
    held = padded(data)
    at, transfers = 0, []
    for run in runs:
        nbytes = run.blocks * BLOCK_BYTES
        transfers.append(drives[run.drive].write(run.block, held[at : at + nbytes]))
        at += nbytes
    _wait_all(transfers)
    for drive in drives:
        drive.blocks.check_present()
    flush_all(drives)


def flush_all(drives: Sequence[Drive]) -> None:
    """Flush all drives at once.

    Raises
    ------
    DriveVanishedError, DriveIOError : nothing is under way.
    DriveTimeoutError : something still is.
    """
    _wait_all([drive.flush() for drive in drives])


def _wait_all(transfers: Sequence[Transfer]) -> None:
    """Wait for the end of all, and raise the first error."""
    for transfer in transfers:
        transfer.join()
    for transfer in transfers:
        transfer.wait()
