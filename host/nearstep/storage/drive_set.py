"""Sets of drives, created and opened together."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole
from nearstep.storage.aligned import aligned_bytes, padded
from nearstep.storage.blocks import BLOCK_BYTES, BlockFile, Blocks, create_file
from nearstep.storage.checksum import crc32
from nearstep.storage.drive import QUEUE_DEPTH, TIMEOUT_S, Drive, check_depth
from nearstep.storage.drive_errors import (
    DriveSizeError,
    ForeignDriveError,
    IncompleteSetError,
    NoDriveError,
    StorageError,
)
from nearstep.storage.extents import Run, blocks_of
from nearstep.storage.header import (
    HEADER_BLOCK,
    MAGIC,
    Header,
    check_owner_name,
    clipped,
    fingerprint,
    read_header,
)
from nearstep.storage.index import pack_index
from nearstep.storage.superblock import FIRST_FREE, SLOTS, Superblock, copies

DriveLike = str | Path | Blocks
"""A drive: the path of a file or block device, or open blocks."""

EXTENT_BYTES = 1 << 20
"""Default of the most bytes of an extent."""

EXTENT_LIMIT = 1 << 32
"""Limit of an extent's bytes, exclusive: a header has 32 bits for them."""

DRIVE_LIMIT = 1 << 63
"""Limit of a drive's bytes, exclusive: file offsets are signed 64-bit numbers."""

LEAST_BLOCKS = FIRST_FREE + 5
"""Blocks of the smallest drive."""


def create_set(
    places: Sequence[DriveLike],
    *,
    drive_bytes: int,
    owner: str,
    extent_bytes: int = EXTENT_BYTES,
    overwrite: bool = False,
    direct: bool = True,
) -> None:
    """Create new drives of `drive_bytes` each, with the empty generation 0.

    Parameters
    ----------
    drive_bytes : whole blocks; open blocks have their own size.
    owner : name of the model or job.
    extent_bytes : most bytes of an extent: whole blocks, below `EXTENT_LIMIT`.
    overwrite : accept block devices and files that are not empty; their contents are lost.
    direct : use O_DIRECT.

    Raises
    ------
    ArgumentError : an invalid argument.
    NotADriveError, DriveFullError, DriveSizeError, DriveAccessError, DriveLockedError,
        DirectIOError : new files have been removed.
    """
    check_owner_name(owner)
    check_places(places)
    _check_bytes("drive_bytes", drive_bytes, LEAST_BLOCKS * BLOCK_BYTES, DRIVE_LIMIT)
    _check_bytes("extent_bytes", extent_bytes, BLOCK_BYTES, EXTENT_LIMIT)
    opened: list[Blocks] = []
    made: list[str] = []
    try:
        for place in places:
            if isinstance(place, Blocks):
                opened.append(place)
                continue
            if create_file(place, drive_bytes, overwrite=overwrite):
                made.append(str(place))
            opened.append(BlockFile(place, direct=direct))
        ours = (extent_bytes, clipped(owner).decode(), fingerprint(owner))
        set_id, headers = uuid.uuid4(), []
        for index, (place, blocks) in enumerate(zip(places, opened, strict=True)):
            size = _size(blocks, place, drive_bytes)
            headers.append(Header(set_id, index, len(opened), size, *ours))
        format_set(opened, headers)
    except BaseException:
        for name in made:
            with contextlib.suppress(OSError):
                os.unlink(name)
        raise
    finally:
        for place, blocks in zip(places, opened, strict=False):
            if blocks is not place:
                blocks.close()


def format_set(opened: Sequence[Blocks], headers: Sequence[Header]) -> None:
    """Write the metadata of a new set: each drive's header after its superblocks, so that a drive
    is invalid until it is complete, then the second copy of the superblock."""
    zeros = aligned_bytes(BLOCK_BYTES)
    for blocks in opened:
        blocks.write(HEADER_BLOCK, zeros)
        blocks.flush()
    for blocks, header in zip(opened, headers, strict=True):
        for at in (at for slot in SLOTS for at in copies(slot, header.blocks)):
            blocks.write(at, zeros)
    data = pack_index(0, {}, [])
    opened[0].write(FIRST_FREE, padded(data))
    run = Run(0, FIRST_FREE, blocks_of(len(data)))
    superblock = Superblock(headers[0].set_id, 0, len(data), crc32(data), [run])
    first, second = copies(SLOTS[0], headers[0].blocks)
    opened[0].write(first, superblock.pack())
    for blocks in opened:
        blocks.flush()
    for blocks, header in zip(opened, headers, strict=True):
        blocks.write(HEADER_BLOCK, header.pack())
        blocks.flush()
    opened[0].write(second, superblock.pack())
    opened[0].flush()


def open_set(
    places: Sequence[DriveLike],
    *,
    owner: str | None,
    queue_depth: int = QUEUE_DEPTH,
    direct: bool = True,
    read_only: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> list[Drive]:
    """Open all drives of a set, in any order, for this process alone, and return them in order.

    Parameters
    ----------
    owner : expected owner of the drives; None accepts any.
    queue_depth, direct, read_only, timeout_s : of `Drive` and `BlockFile`.
    """
    check_places(places)
    check_depth(queue_depth)
    if owner is not None:
        check_owner_name(owner)
    opened: list[Blocks] = []
    try:
        headers = []
        for place in places:
            if isinstance(place, Blocks):
                opened.append(place)
            else:
                opened.append(BlockFile(place, direct=direct, read_only=read_only))
            headers.append(read_header(opened[-1]))
        _check_set(opened, headers, owner)
        pairs = sorted(zip(opened, headers, strict=True), key=lambda pair: pair[1].index)
        return [
            Drive(blocks, header, queue_depth=queue_depth, timeout_s=timeout_s)
            for blocks, header in pairs
        ]
    except BaseException:
        for blocks in opened:
            blocks.close()
        raise


def drives_in(folder: str | Path) -> list[Path]:
    """Return the drives in a folder, sorted by name.

    Raises
    ------
    NoDriveError : the folder has no drive.
    """
    begun = beginnings(folder)
    found = [path for path, begin in begun.items() if begin == MAGIC]
    if not found:
        raise NoDriveError(str(folder), MAGIC, {str(path): each for path, each in begun.items()})
    return found


def beginnings(folder: str | Path) -> dict[Path, bytes]:
    """Return the first bytes of a folder's files, as many as identify a drive, sorted by name.

    Raises
    ------
    StorageError : the folder cannot be read.
    """
    found = {}
    try:
        for path in sorted(Path(folder).iterdir()):
            if path.is_file() or path.is_block_device():
                with path.open("rb") as file:
                    found[path] = file.read(len(MAGIC))
    except OSError as error:
        raise StorageError(f"cannot look for drives in {folder}: {error}") from error
    return found


def check_places(places: Sequence[DriveLike]) -> None:
    """Raise `ArgumentError` unless `places` is a list of different drives."""
    if isinstance(places, str | Path | Blocks) or not places:
        raise ArgumentError(f"drives must be a list of at least one path, not {places!r}")
    for place in places:
        if not isinstance(place, str | Path | Blocks):
            raise ArgumentError(f"a drive must be given by its path, not {place!r}")
    paths = [os.path.abspath(place) for place in places if not isinstance(place, Blocks)]
    if len(set(paths)) < len(paths):
        raise ArgumentError(f"drives must be different files, not {', '.join(map(str, paths))}")


def _check_bytes(what: str, value: object, least: int, limit: int) -> None:
    if not is_whole(value) or value % BLOCK_BYTES:
        raise ArgumentError(f"{what} must be a multiple of {BLOCK_BYTES}, not {value!r}")
    if not least <= value < limit:
        raise ArgumentError(f"{what} must be at least {least} and below {limit}, not {value!r}")


def _size(blocks: Blocks, place: DriveLike, drive_bytes: int) -> int:
    count = blocks.count if isinstance(place, Blocks) else drive_bytes // BLOCK_BYTES
    if blocks.count < max(count, LEAST_BLOCKS):
        expected = max(count, LEAST_BLOCKS) * BLOCK_BYTES
        raise DriveSizeError(blocks.name, expected, blocks.count * BLOCK_BYTES)
    return count


def _check_set(opened: Sequence[Blocks], headers: Sequence[Header], owner: str | None) -> None:
    first = headers[0]
    for blocks, header in zip(opened, headers, strict=True):
        header.check_owner(blocks.name, owner)
        if header.set_id != first.set_id:
            raise ForeignDriveError(blocks.name, first.set_id, header.set_id)
    indices = [header.index for header in headers]
    if sorted(indices) != list(range(first.drives)):
        raise IncompleteSetError(first.drives, indices)
