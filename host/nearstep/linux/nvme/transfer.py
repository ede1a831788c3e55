"""A command, and its data at PRP entries."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol

from nearstep.linux.nvme.standard import (
    PAGE_BYTES,
    TRANSFER_BYTES,
    Status,
    StatusError,
    require,
)
from nearstep.linux.pci import DmaError


class Memory(Protocol):
    """Memory of the host, as a command may access it."""

    def read(self, address: int, nbytes: int) -> bytes:
        """As `nearstep.linux.pci.Bus.read`."""

    def write(self, address: int, data: bytes) -> None:
        """As `nearstep.linux.pci.Bus.write`."""


def segments(memory: Memory, prp1: int, prp2: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Walk over the pages of a transfer: address and bytes of each part.

    PRP 1 may have an offset of dwords. PRP 2 is a page, or the address of a list if more than one
    follows: the list may begin anywhere in its page, and the last slot of a page of a list that
    goes on is the address of the next page.

    Raises
    ------
    StatusError : an offset where none may be, with `PRP_OFFSET_INVALID`.
    DmaError : a list is not in memory.
    """
    require(prp1 % 4 == 0, Status.PRP_OFFSET_INVALID)
    size = min(nbytes, PAGE_BYTES - prp1 % PAGE_BYTES)
    if size:
        yield prp1, size
    left = nbytes - size
    if 0 < left <= PAGE_BYTES:
        require(prp2 % PAGE_BYTES == 0, Status.PRP_OFFSET_INVALID)
        yield prp2, left
        return
    at = prp2
    require(left == 0 or at % 8 == 0, Status.PRP_OFFSET_INVALID)
    while left:
        pages = -(-left // PAGE_BYTES)
        slots = (PAGE_BYTES - at % PAGE_BYTES) // 8
        count = min(pages, slots)
        entries = struct.unpack(f"<{count}Q", memory.read(at, 8 * count))
        for page in entries if pages <= slots else entries[:-1]:
            require(page % PAGE_BYTES == 0, Status.PRP_OFFSET_INVALID)
            size = min(left, PAGE_BYTES)
            yield page, size
            left -= size
        at = entries[-1]
        require(left == 0 or at % PAGE_BYTES == 0, Status.PRP_OFFSET_INVALID)


class Command:
    """An entry of a submission queue.

    Parameters
    ----------
    entry : its 64 bytes.
    memory : of the host.

    Attributes
    ----------
    dwords : CDW0 to CDW15.
    """

    def __init__(self, entry: bytes, memory: Memory) -> None:
        self.dwords: tuple[int, ...] = struct.unpack("<16I", entry)
        self._memory = memory

    @property
    def opcode(self) -> int:
        return self.dwords[0] & 0xFF

    @property
    def flags(self) -> int:
        """FUSE and PSDT: not 0 for fused commands and SGLs."""
        return self.dwords[0] >> 8 & 0xFF

    @property
    def identifier(self) -> int:
        return self.dwords[0] >> 16

    @property
    def namespace(self) -> int:
        return self.dwords[1]

    def bits(self, dword: int, high: int, low: int = 0) -> int:
        """Bits [high:low] of a dword."""
        return self.dwords[dword] >> low & (1 << high - low + 1) - 1

    def wide(self, dword: int) -> int:
        """64 bits in a dword and the next one."""
        return self.dwords[dword] | self.dwords[dword + 1] << 32

    def segments(self, nbytes: int) -> list[tuple[int, int]]:
        """The parts of the command's data; see `segments`.

        Raises
        ------
        StatusError : an offset is invalid, or the transfer too long.
        """
        require(nbytes <= TRANSFER_BYTES)
        try:
            return list(segments(self._memory, self.wide(6), self.wide(8), nbytes))
        except DmaError:
            raise StatusError(Status.DATA_TRANSFER_ERROR) from None

    def fetch(self, nbytes: int) -> bytes:
        """Read data from the host.

        Raises
        ------
        StatusError : an offset is invalid, the transfer too long, or memory not mapped.
        """
        try:
            return b"".join(self._memory.read(*part) for part in self.segments(nbytes))
        except DmaError:
            raise StatusError(Status.DATA_TRANSFER_ERROR) from None

    def send(self, data: bytes) -> None:
        """Write data to the host.

        Raises
        ------
        StatusError : as `fetch`.
        """
        done = 0
        try:
            for address, size in self.segments(len(data)):
                self._memory.write(address, data[done : done + size])
                done += size
        except DmaError:
            raise StatusError(Status.DATA_TRANSFER_ERROR) from None
