"""A PCI function: configuration space, BARs and MSI-X; it knows no virtual machine."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from nearstep.errors import ArgumentError, DeviceError

CONFIG_BYTES = 256
BAR_COUNT = 6
MSIX_OFFSET = 0x40
MSIX_CONTROL, MSIX_ENABLE, MSIX_MASK = MSIX_OFFSET + 2, 1 << 15, 1 << 14
BAR_32, BAR_64, PREFETCHABLE = 0, 0b100, 0b1000
COMMAND, MEMORY_SPACE, BUS_MASTER = 0x04, 1 << 1, 1 << 2


class DmaError(DeviceError):
    """An access of a function to memory that no map, or no right, covers.

    Attributes
    ----------
    address, nbytes
    """

    def __init__(self, action: str, address: int, nbytes: int, reason: str) -> None:
        self.address = address
        self.nbytes = nbytes
        super().__init__(f"cannot {action} {nbytes} bytes at {address:#x}: {reason}")


class Bus(Protocol):
    """What a function can do upstream: the memory of the host and interrupts."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Read memory of the host; raise `DmaError` if any byte is not mapped for reads."""

    def write(self, address: int, data: bytes) -> None:
        """Write memory of the host; raise `DmaError`, and write nothing, if any byte is not mapped
        for writes.
        """

    def interrupt(self, vector: int) -> None:
        """Send a vector of MSI-X; nothing happens if the host listens to none."""


class NoBus:
    """Upstream of a function that nothing is connected to."""

    def read(self, address: int, nbytes: int) -> bytes:
        raise DmaError("read", address, nbytes, "nothing is connected")

    def write(self, address: int, data: bytes) -> None:
        raise DmaError("write", address, len(data), "nothing is connected")

    def interrupt(self, vector: int) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identification of a function.

    Parameters
    ----------
    class_code : 24 bits: class, subclass, interface.
    """

    vendor: int
    device: int
    class_code: int
    revision: int = 0
    subsystem_vendor: int = 0
    subsystem: int = 0


@dataclass(frozen=True, kw_only=True)
class Msix:
    """MSI-X of a function: vectors, and offsets of table and pending bits in a BAR."""

    vectors: int
    bar: int
    table: int
    pending: int


class PciFunction(ABC):
    """A function with memory BARs.

    The server of a virtual machine, or a test, connects a `bus`. Accesses arrive from one thread;
    they return at once, because a virtual processor waits for them: work is done in other threads.

    Parameters
    ----------
    bars : size in bytes of each BAR, by its even number; powers of two of at least 4096.
    kinds : type bits of BARs that are not plain ones of 64 bits.

    Attributes
    ----------
    access_bytes : most bytes of an access of a BAR.

    Raises
    ------
    ArgumentError : a number or size of a BAR is invalid.
    """

    access_bytes = 1 << 20

    def __init__(
        self,
        identity: Identity,
        bars: dict[int, int],
        msix: Msix,
        kinds: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        for number, nbytes in bars.items():
            if number not in (0, 2, 4) or nbytes < 4096 or nbytes & (nbytes - 1):
                raise ArgumentError(f"BAR {number} of {nbytes} bytes is not possible")
        self.bars = dict(bars)
        self.msix = msix
        self.bus: Bus = NoBus()
        self._identity = identity
        self._kinds = kinds
        self._config = bytearray(CONFIG_BYTES)
        self._writable = bytearray(CONFIG_BYTES)
        self._make_config()

    def _make_config(self) -> None:
        who, fields = self._identity, self._config
        fields[:] = bytes(CONFIG_BYTES)
        struct.pack_into("<HHHHB3s", fields, 0, who.vendor, who.device, 0, 1 << 4,
                         who.revision, who.class_code.to_bytes(3, "little"))  # fmt: skip
        struct.pack_into("<HHIB", fields, 0x2C, who.subsystem_vendor, who.subsystem, 0, MSIX_OFFSET)
        for number, nbytes in self.bars.items():
            at, kind = 0x10 + 4 * number, self._kinds.get(number, BAR_64)
            fields[at] = kind
            width = 8 if kind & BAR_64 else 4
            self._writable[at : at + width] = ((1 << 64) - nbytes).to_bytes(8, "little")[:width]
        where = self.msix
        struct.pack_into("<BBHII", fields, MSIX_OFFSET, 0x11, 0, where.vectors - 1,
                         where.table | where.bar, where.pending | where.bar)  # fmt: skip
        struct.pack_into("<H", self._writable, MSIX_CONTROL, MSIX_ENABLE | MSIX_MASK)
        struct.pack_into("<H", self._writable, COMMAND, MEMORY_SPACE | BUS_MASTER | 1 << 10)
        self._writable[0x0C] = self._writable[0x3C] = 0xFF

    @property
    def masters_bus(self) -> bool:
        """Whether the host lets the function access memory."""
        return bool(self._config[COMMAND] & BUS_MASTER)

    def read_config(self, offset: int, nbytes: int) -> bytes:
        """Read configuration space."""
        return bytes(self._config[offset : offset + nbytes])

    def write_config(self, offset: int, data: bytes) -> None:
        """Write configuration space; bits that cannot be written are kept."""
        for at, value in enumerate(data, offset):
            mask = self._writable[at]
            self._config[at] = self._config[at] & ~mask | value & mask

    def dma_read(self, address: int, nbytes: int) -> bytes:
        """Read memory of the host.

        Raises
        ------
        DmaError
        """
        self._check_master("read", address, nbytes)
        return self.bus.read(address, nbytes)

    def dma_write(self, address: int, data: bytes) -> None:
        """Write memory of the host.

        Raises
        ------
        DmaError : nothing was written.
        """
        self._check_master("write", address, len(data))
        self.bus.write(address, data)

    def _check_master(self, action: str, address: int, nbytes: int) -> None:
        if not self.masters_bus:
            raise DmaError(action, address, nbytes, "the function must not master the bus")

    @abstractmethod
    def read_bar(self, number: int, offset: int, nbytes: int) -> bytes:
        """Read a BAR, within its size; bytes that nothing decodes are zero."""

    @abstractmethod
    def write_bar(self, number: int, offset: int, data: bytes) -> None:
        """Write a BAR, within its size; what nothing decodes is dropped."""

    def reset(self) -> None:
        """Reset the function; afterwards nothing that began before accesses memory of the host."""
        self._make_config()

    @abstractmethod
    def close(self) -> None:
        """End the threads of the function. Closing twice does nothing."""


def sizes(function: PciFunction) -> Sequence[int]:
    """Bytes of each BAR, 0 for a missing one."""
    return [function.bars.get(number, 0) for number in range(BAR_COUNT)]
