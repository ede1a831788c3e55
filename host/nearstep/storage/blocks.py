"""Blocks of a file or block device: the lowest layer of storage, which tests replace."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nearstep.errors import ArgumentError
from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.drive_errors import (
    DirectIOError,
    DriveAccessError,
    DriveFullError,
    DriveIOError,
    DriveSizeError,
    DriveVanishedError,
    NotADriveError,
    ShortTransferError,
)
from nearstep.storage.lock import lock, locked

BLOCK_BYTES = 4096
"""Bytes of a block: the unit of offsets, sizes and addresses."""

GONE = {errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ENOMEDIUM, errno.ESHUTDOWN}
"""Error numbers of a device that has been removed."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
"""Filesystems in memory. Newer kernels accept and ignore O_DIRECT there."""

Bytes = NDArray[Any]

Move = Callable[..., int]
"""`os.preadv` or `os.pwritev`: (descriptor, arrays of bytes, offset) to bytes transferred."""


@dataclass(frozen=True)
class Calls:
    """System calls that transfer data."""

    preadv: Move = os.preadv
    pwritev: Move = os.pwritev
    fdatasync: Callable[[int], None] = os.fdatasync


SYSTEM = Calls()


class Blocks(ABC):
    """An array of blocks with synchronous calls, which several threads may make.

    Attributes
    ----------
    name : for messages.
    count : number of blocks.
    """

    name: str
    count: int

    @abstractmethod
    def read(self, block: int, out: Bytes) -> None:
        """Read whole blocks from `block` on into `out`, an aligned array of bytes.

        Raises
        ------
        DriveIOError, ShortTransferError, DriveVanishedError
        """

    @abstractmethod
    def write(self, block: int, data: Bytes) -> None:
        """Write whole blocks from `block` on; the next `flush` makes them durable.

        Raises
        ------
        DriveIOError, ShortTransferError, DriveVanishedError, DriveFullError
        """

    @abstractmethod
    def flush(self) -> None:
        """Make every completed write durable.

        Raises
        ------
        DriveIOError, DriveVanishedError
        """

    @abstractmethod
    def check_present(self) -> None:
        """Raise `DriveVanishedError` if the drive's path no longer names this file."""

    @abstractmethod
    def close(self) -> None:
        """Close the blocks; closing twice does nothing."""


class BlockFile(Blocks):
    """A regular file or block device, locked for this process; if it is only read, for readers.

    Parameters
    ----------
    direct : use O_DIRECT; otherwise data is copied through the page cache.

    Raises
    ------
    DriveVanishedError : there is no such file.
    NotADriveError : the path is neither a regular file nor a block device.
    DriveAccessError : the file cannot be opened or locked.
    DirectIOError : the filesystem does not support O_DIRECT.
    DriveLockedError : the file is in use.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        direct: bool = True,
        read_only: bool = False,
        calls: Calls = SYSTEM,
    ) -> None:
        self.name = str(path)
        self._path = Path(path).absolute()
        self._calls = calls
        self._fd = _open(self.name, direct=direct, read_only=read_only)
        try:
            if direct:
                _check_direct(self.name, self._fd)
            lock(self.name, self._fd, shared=read_only)
            self._identity = _identity(os.fstat(self._fd))
            self.count = os.lseek(self._fd, 0, os.SEEK_END) // BLOCK_BYTES
            if direct and self.count:
                _probe(self.name, self._fd, calls)
        except BaseException:
            self.close()
            raise

    def read(self, block: int, out: Bytes) -> None:
        self._move("read", self._calls.preadv, block, out)

    def write(self, block: int, data: Bytes) -> None:
        self._move("write", self._calls.pwritev, block, data)

    def flush(self) -> None:
        try:
            self._calls.fdatasync(self._fd)
        except OSError as error:
            raise self._error("flush", 0, 0, error) from error

    def check_present(self) -> None:
        try:
            found = _identity(os.stat(self._path))
        except OSError as error:
            raise DriveVanishedError(self.name, f"cannot be found: {error.strerror}") from error
        if found != self._identity:
            raise DriveVanishedError(self.name, "another file has its name now")

    def close(self) -> None:
        fd, self._fd = self._fd, -1  # after an error, too, the number may be another file's
        if fd >= 0:
            os.close(fd)

    def _move(self, action: str, call: Move, block: int, data: Bytes) -> None:
        """Transfer all bytes; after a partial transfer, as at a signal, repeat the call for the
        rest."""
        done = 0
        while done < data.nbytes:
            try:
                moved = call(self._fd, [data[done:]], block * BLOCK_BYTES + done)
            except OSError as error:
                raise self._error(action, block, data.nbytes - done, error) from error
            done += moved
            if not moved or (done % BLOCK_BYTES and done < data.nbytes):
                raise ShortTransferError(self.name, action, block, data.nbytes, done)

    def _error(self, action: str, block: int, nbytes: int, error: OSError) -> Exception:
        if error.errno in GONE:
            return DriveVanishedError(self.name, f"{action} at block {block}: {error.strerror}")
        if error.errno in FULL and action == "write":
            return DriveFullError(nbytes, 0, f" below {self.name}: {error.strerror}")
        return DriveIOError(self.name, action, block, error)


def create_file(path: str | Path, nbytes: int, *, overwrite: bool = False) -> bool:
    """Create a regular file of `nbytes` with all blocks allocated, or check the size of a block
    device.

    After an error a new file is removed, and an existing one has its old size.

    Parameters
    ----------
    nbytes : rounded up to whole blocks.
    overwrite : accept a file that is not empty, or a block device.

    Returns
    -------
    bool : whether the file is new.

    Raises
    ------
    NotADriveError : the file is not empty and `overwrite` is not set, or the path is neither a
        regular file nor a block device.
    DriveFullError : there is not enough space.
    DriveSizeError : the block device is smaller than `nbytes`.
    DriveLockedError : the file is in use.
    DriveAccessError
    """
    name, nbytes = str(path), -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
    fd, new = _open_or_create(name)
    whole = False
    try:
        if stat.S_ISBLK(os.fstat(fd).st_mode):
            _check_device(name, fd, nbytes, overwrite=overwrite)
        else:
            _fill(name, fd, nbytes, overwrite=overwrite)
        whole = True
    finally:
        if new and not whole:
            with contextlib.suppress(OSError):
                os.unlink(name)
        os.close(fd)
    return new


def _open_or_create(name: str) -> tuple[int, bool]:
    """Return a descriptor, and whether the file is new."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        with contextlib.suppress(FileExistsError):
            return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o644), True
        _check_kind(name, os.stat(name).st_mode)
        return os.open(name, flags), False
    except OSError as error:
        raise DriveAccessError(name, f"cannot be created: {error.strerror}", error.errno) from error


def _check_kind(name: str, mode: int) -> None:
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise NotADriveError(name, "it must be a regular file or a block device")


def _check_device(name: str, fd: int, nbytes: int, *, overwrite: bool) -> None:
    there = os.lseek(fd, 0, os.SEEK_END)
    if not overwrite:
        raise NotADriveError(name, "a block device needs overwrite=True")
    if there < nbytes:
        raise DriveSizeError(name, nbytes, there)


def _fill(name: str, fd: int, nbytes: int, *, overwrite: bool) -> None:
    """Allocate the blocks of a regular file, and flush its size and directory entry."""
    found = os.fstat(fd).st_size
    if found and not overwrite:
        raise NotADriveError(name, f"a new drive must be an empty file, not {found} bytes")
    lock(name, fd)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.fsync(fd)
        sync_folder(Path(name).absolute().parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, found)
        if error.errno in FULL:
            space = os.fstatvfs(fd)
            raise DriveFullError(nbytes, space.f_bavail * space.f_frsize, f" for {name}") from error
        raise DriveAccessError(name, f"cannot be created: {error.strerror}", error.errno) from error


def _open(name: str, *, direct: bool, read_only: bool) -> int:
    if "\0" in name:
        raise ArgumentError(f"path must name a file, not {name!r}")
    flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC
    try:
        mode = os.stat(name).st_mode
        _check_kind(name, mode)
        if stat.S_ISBLK(mode):
            flags |= os.O_EXCL  # the kernel's own lock: neither mounted nor in an array
        return os.open(name, flags | (os.O_DIRECT if direct else 0))
    except FileNotFoundError as error:
        raise DriveVanishedError(name, "there is no such file") from error
    except OSError as error:
        if error.errno == errno.EINVAL and direct:
            raise DirectIOError(name, "its filesystem does not support O_DIRECT") from error
        if error.errno == errno.EBUSY:  # a block device
            raise locked(name, os.stat(name)) from error
        raise DriveAccessError(name, f"cannot be opened: {error.strerror}", error.errno) from error


def _check_direct(name: str, fd: int) -> None:
    if stat.S_ISBLK(os.fstat(fd).st_mode):
        return  # only the device's name is in memory
    kind = filesystem(fd)
    if kind in MEMORY:
        raise DirectIOError(name, f"it is on a {kind}, a filesystem in memory")


def _probe(name: str, fd: int, calls: Calls) -> None:
    """Check that blocks of this size and alignment are accepted."""
    try:
        calls.preadv(fd, [aligned_bytes(BLOCK_BYTES)], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            reason = f"O_DIRECT does not support blocks of {BLOCK_BYTES} bytes there"
            raise DirectIOError(name, reason) from error


def filesystem(fd: int) -> str:
    """Return the type of an open file's filesystem; empty if unknown."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        if len(fields) > 2 and fields[2] == wanted and "-" in fields:
            return fields[fields.index("-") + 1]
    return ""


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
