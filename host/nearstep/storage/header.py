"""The first block of a drive: format, set and owner."""

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
"""Magic, version, block bytes, UUID of the set, index, drives, blocks, extent bytes, fingerprint of
the owner and length of the owner's name, which follows."""

OWNER_BYTES = 1024
"""Most bytes of the owner's name in a header, for messages. The fingerprint covers the whole
name."""

CRC_AT = BLOCK_BYTES - 4


@dataclass(frozen=True)
class Header:
    """The header of a drive, written once.

    Attributes
    ----------
    index, drives : number of the drive in the set, and size of the set.
    blocks : of the drive, with the header.
    extent_bytes : most bytes of an extent; consecutive extents are on consecutive drives.
    owner : name of the model or job, cut to `OWNER_BYTES`.
    owner_digest : SHA-256 of the whole name.
    """

    set_id: uuid.UUID
    index: int
    drives: int
    blocks: int
    extent_bytes: int
    owner: str
    owner_digest: bytes

    def pack(self) -> Bytes:
        """Return the header as a block."""
        name, set_id = clipped(self.owner), self.set_id.bytes
        numbers = (self.index, self.drives, self.blocks, self.extent_bytes)
        fields = (MAGIC, VERSION, BLOCK_BYTES, set_id, *numbers, self.owner_digest, len(name))
        return sealed(LAYOUT.pack(*fields) + name)

    def check_owner(self, path: str, owner: str | None) -> None:
        """Raise `OwnerError` unless `owner` is None or owns the drive."""
        if owner is not None and fingerprint(owner) != self.owner_digest:
            raise OwnerError(path, owner, self.owner)


def fingerprint(owner: str) -> bytes:
    """Return the SHA-256 of an owner's name, by which owners are compared."""
    return hashlib.sha256(owner.encode()).digest()


def clipped(owner: str) -> bytes:
    """Return the part of a name that fits into a header, in whole characters of UTF-8."""
    return owner.encode()[:OWNER_BYTES].decode(errors="ignore").encode()


def check_owner_name(owner: object) -> None:
    """Raise `ArgumentError` unless `owner` is a valid name."""
    if not isinstance(owner, str) or not owner:
        raise ArgumentError(f"owner must be the name of a model or job, not {owner!r}")


def sealed(fields: bytes) -> Bytes:
    """Return a block of these bytes, padded with zeros, with a CRC-32 at the end."""
    block = aligned_bytes(BLOCK_BYTES)
    block[: len(fields)] = bytearray(fields)
    block[CRC_AT:] = bytearray(crc32(block[:CRC_AT]).to_bytes(4, "little"))
    return block


def is_whole(block: Bytes) -> bool:
    """Return whether the CRC-32 at the end of a block is right."""
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
        raise NotADriveError(path, "its header is torn: the CRC-32 is wrong")
    if size != BLOCK_BYTES or index >= drives or extent < BLOCK_BYTES or extent % BLOCK_BYTES:
        raise NotADriveError(path, "its header has invalid fields")
    if blocks.count < count:
        raise DriveSizeError(path, count * BLOCK_BYTES, blocks.count * BLOCK_BYTES)
    name = data[LAYOUT.size : LAYOUT.size + length].decode(errors="replace")
    return Header(uuid.UUID(bytes=set_id), index, drives, count, extent, name, digest)
