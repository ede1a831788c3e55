"""The two BARs of a card: packets of the host's accesses."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from dataclasses import dataclass

from nearstep.backends.emulated import EmulatedBackend
from nearstep.backends.peer import PeerBackend
from nearstep.errors import OutOfBoundsError, RegisterAccessError
from nearstep.registers import unsigned
from nearstep_spec.smartssd.config import SmartssdConfig

LINK_WORD_BYTES = 4
"""The link counts payload in words, of which the first and the last can be enabled in part."""

MAX_PAYLOAD = 256
"""Most bytes of a posted write, and of a completion; both are split at multiples."""

MAX_READ_REQUEST = 512
"""Most bytes of a read request, which is split at multiples."""

REGISTER_BYTES = (4, 8)
"""Sizes of register accesses; an access of 8 bytes is split into two, the low word first."""


@dataclass
class BarTraffic:
    """Packets on the link and bytes of their payload since the device was opened.

    From these and the overhead of a packet follows the time on a link.

    Attributes
    ----------
    write_tlps, write_bytes : posted writes, to the device.
    read_tlps : read requests, to the device. They have no payload.
    completion_tlps, completion_bytes : completions of reads, from the device.
    """

    write_tlps: int = 0
    write_bytes: int = 0
    read_tlps: int = 0
    completion_tlps: int = 0
    completion_bytes: int = 0

    def count_write(self, address: int, nbytes: int) -> None:
        """Count a write of the memory BAR."""
        self.write_tlps += pieces(address, nbytes, MAX_PAYLOAD)
        self.write_bytes += LINK_WORD_BYTES * pieces(address, nbytes, LINK_WORD_BYTES)

    def count_read(self, address: int, nbytes: int) -> None:
        """Count a completed read of the memory BAR."""
        # Requests end at multiples of completions' ends, and both at multiples of words.
        self.read_tlps += pieces(address, nbytes, MAX_READ_REQUEST)
        self.completion_tlps += pieces(address, nbytes, MAX_PAYLOAD)
        self.completion_bytes += LINK_WORD_BYTES * pieces(address, nbytes, LINK_WORD_BYTES)

    def count_register(self, *, write: bool) -> None:
        """Count an access of a register."""
        if write:
            self.write_tlps += 1
            self.write_bytes += LINK_WORD_BYTES
        else:
            self.read_tlps += 1
            self.completion_tlps += 1
            self.completion_bytes += LINK_WORD_BYTES


def pieces(address: int, nbytes: int, unit: int) -> int:
    """Aligned pieces of `unit` bytes that a range touches."""
    return (address + nbytes - 1) // unit - address // unit + 1 if nbytes else 0


def cut(address: int, nbytes: int, unit: int) -> list[tuple[int, int]]:
    """A range cut at the multiples of `unit`: first byte and size of each part."""
    end = address + nbytes
    edges = [address, *range(address // unit * unit + unit, end, unit), end]
    return [(first, limit - first) for first, limit in itertools.pairwise(edges) if nbytes]


class BarBackend(EmulatedBackend, PeerBackend):
    """A card accessed through BAR0, the registers, and a BAR that maps its memory, by the host and
    by the drive on the card's switch, whose requests are like the host's.

    Writes to memory are posted: a failed write is reported at the next access of registers, read of
    memory, wait or `flush`. None of these passes a posted write. The memory BAR takes accesses of
    every size and alignment; BAR0 those of `REGISTER_BYTES`, aligned.
    """

    family = "smartssd"
    config: SmartssdConfig

    @property
    @abstractmethod
    def traffic(self) -> BarTraffic:
        """Return the traffic on the link."""

    @abstractmethod
    def flush(self) -> None:
        """Flush posted writes to memory.

        Raises
        ------
        PostedWriteError
        """

    def read_bar0(self, address: int, nbytes: int = 4) -> int:
        """Read registers as the host's loads do.

        Raises
        ------
        RegisterAccessError : the BAR does not take the size or the alignment. Nothing was read.
        OutOfBoundsError, BusError, PostedWriteError
        """
        self.check_register(address, nbytes)
        words = [self.read_register(address + at) for at in range(0, nbytes, 4)]
        return sum(word << 32 * index for index, word in enumerate(words))

    def write_bar0(self, address: int, value: int, nbytes: int = 4) -> None:
        """Write registers as the host's stores do.

        Raises
        ------
        RegisterAccessError : the BAR does not take the size or the alignment. Nothing was written.
        FieldValueError : `value` is no integer of `nbytes` bytes, from 0. Nothing was written.
        OutOfBoundsError, BusError, PostedWriteError
        """
        self.check_register(address, nbytes)
        bits = unsigned(f"{nbytes} bytes of registers at {address:#x}", value, 8 * nbytes)
        for index in range(nbytes // 4):
            self.write_register(address + 4 * index, bits >> 32 * index & 0xFFFF_FFFF)

    def check_register(self, address: int, nbytes: int = 4) -> None:
        """Raise an error unless BAR0 accepts the access."""
        if nbytes not in REGISTER_BYTES or address % nbytes:
            sizes = " or ".join(map(str, REGISTER_BYTES))
            raise RegisterAccessError(address, nbytes, f"of {sizes} bytes, aligned")
        self._check_bar("register access", address, nbytes, self.config.register_bytes)

    def check_memory(self, what: str, address: int, nbytes: int) -> None:
        """Raise `OutOfBoundsError` unless the memory BAR has the range."""
        self._check_bar(f"memory {what}", address, nbytes, self.capacity_bytes)

    @staticmethod
    def _check_bar(what: str, address: int, nbytes: int, limit: int) -> None:
        if address < 0 or address + nbytes > limit:
            raise OutOfBoundsError(what, address, address + nbytes, limit)
