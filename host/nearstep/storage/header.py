"""The first block of a drive: its format, set and owner."""

from __future__ import annotations

import hashlib
import struct
import uuid
from dataclasses import dataclass

from nearstep.errors import ArgumentError
from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES, Blocks, Bytes
from nearstep.storage.checksum import crc32
from nearstep.storage.drive_errors import (
    DriveSizeError,
    FormatVersionError,
    NotADriveError,
    OwnerError,
)

MAGIC = b"NSDRIVE\n"
VERSION = 2
HEADER_BLOCK = 0
LAYOUT = struct.Struct("<8sII16sIIQI32sH")
"""Magic, version, bytes of a block, UUID of the set, index, drives, blocks, bytes of an extent,
fingerprint and length of the name of the owner, which follows."""

OWNER_BYTES = 1024
"""Bytes of an owner's name that are kept, for messages. The fingerprint is of all of it."""

CRC_AT = BLOCK_BYTES - 4


@dataclass(frozen=True)
class Header:
    """The header of a drive, written once.

    Attributes
    ----------
    index, drives : which drive of how many.
    blocks : of the drive, header included.
    extent_bytes : of an extent, at most: consecutive ones are on consecutive drives.
    owner : name of the model or job, as far as it fits.
    owner_digest : SHA-256 of that name.
    """

    set_id: uuid.UUID
    index: int
    drives: int
    blocks: int
    extent_bytes: int
    owner: str
    owner_digest: bytes

    def pack(self) -> Bytes:
        """The block."""
        name, set_id = clipped(self.owner), self.set_id.bytes
        numbers = (self.index, self.drives, self.blocks, self.extent_bytes)
        fields = (MAGIC, VERSION, BLOCK_BYTES, set_id, *numbers, self.owner_digest, len(name))
        return sealed(LAYOUT.pack(*fields) + name)

    def check_owner(self, path: str, owner: str | None) -> None:
        """Raise `OwnerError` unless the drive is of `owner`, if one is given."""
        if owner is not None and fingerprint(owner) != self.owner_digest:
            raise OwnerError(path, owner, self.owner)


def fingerprint(owner: str) -> bytes:
    """SHA-256 of an owner's name, which is compared."""
    return hashlib.sha256(owner.encode()).digest()


def clipped(owner: str) -> bytes:
    """The part of a name that a header has, in whole characters of UTF-8."""
    return owner.encode()[:OWNER_BYTES].decode(errors="ignore").encode()


def check_owner_name(owner: object) -> None:
    """Raise `ArgumentError` unless this can be the name of an owner."""
    if not isinstance(owner, str) or not owner:
        raise ArgumentError(f"owner must be the name of a model or job, not {owner!r}")


def sealed(fields: bytes) -> Bytes:
    """A block of these bytes, zeros, and the CRC-32 of both at the end."""
    block = aligned_bytes(BLOCK_BYTES)
    block[: len(fields)] = bytearray(fields)
    block[CRC_AT:] = bytearray(crc32(block[:CRC_AT]).to_bytes(4, "little"))
    return block


def is_whole(block: Bytes) -> bool:
    """Whether a block is one that `sealed` made."""
    return crc32(block[:CRC_AT]) == int.from_bytes(block[CRC_AT:].tobytes(), "little")


def read_header(blocks: Blocks) -> Header:
    """Read the header of a drive.

    Raises
    ------
    NotADriveError, FormatVersionError, DriveSizeError
    """
    path = blocks.name
    if blocks.count < 1:
        raise NotADriveError(path, f"it has less than a block of {BLOCK_BYTES} bytes")
    block = aligned_bytes(BLOCK_BYTES)
    blocks.read(HEADER_BLOCK, block)
    data = block.tobytes()
    fields = LAYOUT.unpack_from(data)
    magic, version, size, set_id, index, drives, count, extent, digest, length = fields
    if magic != MAGIC:
        raise NotADriveError(path, f"it must begin with {MAGIC!r}, not {magic!r}")
    if version != VERSION:
        raise FormatVersionError(path, VERSION, version)
    if not is_whole(block) or length > OWNER_BYTES:
        raise NotADriveError(path, "its header is torn: the CRC-32 does not fit")
    if size != BLOCK_BYTES or index >= drives or extent < BLOCK_BYTES or extent % BLOCK_BYTES:
        raise NotADriveError(path, "its header makes no sense")
    if blocks.count < count:
        raise DriveSizeError(path, count * BLOCK_BYTES, blocks.count * BLOCK_BYTES)
    name = data[LAYOUT.size : LAYOUT.size + length].decode(errors="replace")
    return Header(uuid.UUID(bytes=set_id), index, drives, count, extent, name, digest)
