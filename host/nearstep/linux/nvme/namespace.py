"""What a controller needs of a namespace, and the namespace of the NVM command set: a file."""

from __future__ import annotations

import os
import struct
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nearstep.errors import ArgumentError
from nearstep.linux.nvme.standard import (
    TRANSFER_BYTES,
    CommandSet,
    Nvm,
    Status,
    StatusError,
    require,
)
from nearstep.linux.nvme.transfer import Command

LBA_SHIFT = 12
FAMILY = uuid.UUID("6e656172-7374-6570-8000-000000000000")
"""UUID of which those of namespaces are derived."""

Run = Callable[[Command], int | None]
Result = TypeVar("Result")


class Namespace(ABC):
    """A namespace: one command set over one kind of storage.

    Commands run in the controller's I/O thread, admin commands and logs in its admin thread.

    Attributes
    ----------
    command_set : CSI.
    number, serial : NSID, and the controller's serial number; given by the controller.
    """

    command_set: CommandSet
    number: int = 0
    serial: str = ""

    @property
    @abstractmethod
    def commands(self) -> Mapping[int, Run]:
        """I/O commands by opcode: each returns DW0 and DW1 of its completion, or raises
        `StatusError`.
        """

    @property
    def admin_commands(self) -> Mapping[int, Run]:
        """Admin commands by opcode, as `commands`."""
        return {}

    @property
    def logs(self) -> Mapping[int, Callable[[], bytes]]:
        """Contents of log pages, by identifier."""
        return {}

    @property
    def identification(self) -> bytes:
        """Data of Identify Namespace for the command set (CNS 05h); zeros follow."""
        return b""

    @property
    def uuid(self) -> bytes:
        return uuid.uuid5(FAMILY, f"{self.serial} {self.number}").bytes

    def reset(self) -> None:  # noqa: B027  most have no state
        """Forget what a controller reset ends."""

    def flush(self) -> None:  # noqa: B027  only drives have caches
        """Make completed writes durable."""

    @abstractmethod
    def close(self) -> None:
        """Close the storage, after the last command."""


@dataclass
class Traffic:
    """Commands of a host that succeeded, and their bytes, since a drive was opened."""

    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class DriveNamespace(Namespace):
    """The drive's file as blocks of 4 KiB.

    Parameters
    ----------
    path : an existing file, of whole blocks.

    Attributes
    ----------
    traffic

    Raises
    ------
    ArgumentError : the size of the file is 0 or no multiple of a block.
    OSError : it cannot be opened for writing.
    """

    command_set = CommandSet.NVM

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        nbytes = os.fstat(self._fd).st_size
        if nbytes == 0 or nbytes % (1 << LBA_SHIFT):
            os.close(self._fd)
            raise ArgumentError(
                f"drive {path} must be of whole blocks of {1 << LBA_SHIFT} bytes, not {nbytes}"
            )
        self.blocks = nbytes >> LBA_SHIFT
        self.traffic = Traffic()

    @property
    def commands(self) -> Mapping[int, Run]:
        return {Nvm.FLUSH: self._flush, Nvm.WRITE: self._write, Nvm.READ: self._read}

    def identify_blocks(self) -> bytes:
        """Data of Identify Namespace (CNS 00h)."""
        data = bytearray(4096)
        struct.pack_into("<QQQ", data, 0, self.blocks, self.blocks, self.blocks)
        struct.pack_into("<I", data, 128, LBA_SHIFT << 16)  # LBA format 0, the only one
        data[104:120] = self.uuid  # NGUID
        return bytes(data)

    def read_blocks(self, first: int, count: int) -> bytes:
        """Read blocks.

        Raises
        ------
        StatusError : they are not in the namespace, or the file cannot be read.
        """
        require(first + count <= self.blocks, Status.LBA_OUT_OF_RANGE)
        data = self._storage(lambda: os.pread(self._fd, count << LBA_SHIFT, first << LBA_SHIFT))
        require(len(data) == count << LBA_SHIFT, Status.INTERNAL_ERROR)
        return data

    def flush(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _span(self, command: Command) -> tuple[int, int]:
        first, count = command.wide(10), command.bits(12, 15) + 1
        require(count << LBA_SHIFT <= TRANSFER_BYTES)
        require(first + count <= self.blocks, Status.LBA_OUT_OF_RANGE)
        return first, count

    def _read(self, command: Command) -> None:
        data = self.read_blocks(*self._span(command))
        command.send(data)
        self.traffic.reads += 1
        self.traffic.read_bytes += len(data)

    def _write(self, command: Command) -> None:
        first, count = self._span(command)
        data = command.fetch(count << LBA_SHIFT)
        written = self._storage(lambda: os.pwrite(self._fd, data, first << LBA_SHIFT))
        require(written == len(data), Status.INTERNAL_ERROR)
        if command.bits(12, 30, 30):  # force unit access
            self._flush(command)
        self.traffic.writes += 1
        self.traffic.written_bytes += len(data)

    def _flush(self, command: Command) -> None:
        self._storage(self.flush)

    def _storage(self, access: Callable[[], Result]) -> Result:
        try:
            return access()
        except OSError:
            raise StatusError(Status.INTERNAL_ERROR) from None


def reachable(namespaces: Sequence[Namespace], number: int) -> Namespace | None:
    """The namespace with this number, or None."""
    return namespaces[number - 1] if 0 < number <= len(namespaces) else None
