"""Locks: one process owns a drive."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
from pathlib import Path

from nearstep.storage.drive_errors import DriveAccessError, DriveLockedError


def lock(path: str, fd: int, *, shared: bool = False) -> None:
    """Lock an open file for its descriptor alone, until the descriptor is closed or the process
    ends; if `shared`, other readers may have it, too.

    Raises
    ------
    DriveLockedError : another descriptor holds the lock.
    """
    if _lock(path, fd, shared=shared):
        return
    if holder(os.fstat(fd)) == os.getpid():
        gc.collect()  # a store that failed here may be in a cycle with its error
        if _lock(path, fd, shared=shared):
            return
    raise locked(path, os.fstat(fd))


def _lock(path: str, fd: int, *, shared: bool) -> bool:
    """Try to lock a file, and return whether the lock was acquired.

    Raises
    ------
    DriveAccessError : the filesystem does not support locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        reason = f"it cannot be locked: {error.strerror}"
        raise DriveAccessError(path, reason, error.errno) from error
    return True


def locked(path: str, found: os.stat_result) -> DriveLockedError:
    """Return the error for a drive that is in use."""
    pid = holder(found)
    return DriveLockedError(path, pid, _command(pid))


def holder(found: os.stat_result) -> int | None:
    """Return the process that holds the lock of a file; None if the system does not tell."""
    wanted = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if fields[1:2] == ["FLOCK"] and fields[5:6] == [wanted] and int(fields[4]) > 0:
            return int(fields[4])
    return None


def _command(pid: int | None) -> str:
    """Return the command line of a process; empty if the system does not tell."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words if word)[:100]
