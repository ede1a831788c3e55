"""One process a drive."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
from pathlib import Path

from nearstep.storage.drive_errors import DriveAccessError, DriveLockedError


def lock(path: str, fd: int) -> None:
    """Take an open file for its descriptor alone, until that is closed, also by the end of the
    process.

    Raises
    ------
    DriveLockedError : somebody has it.
    DriveAccessError : its filesystem has no locks.
    """
    if _is_free(path, fd):
        return
    if holder(os.fstat(fd)) == os.getpid():
        gc.collect()  # what failed here, and nobody has any more, is in a cycle with its error
        if _is_free(path, fd):
            return
    raise locked(path, os.fstat(fd))


def _is_free(path: str, fd: int) -> bool:
    """Whether it has been taken."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        reason = f"it cannot be locked: {error.strerror}"
        raise DriveAccessError(path, reason, error.errno) from error
    return True


def locked(path: str, found: os.stat_result) -> DriveLockedError:
    """The error of a drive that somebody has."""
    pid = holder(found)
    return DriveLockedError(path, pid, _command(pid))


def holder(found: os.stat_result) -> int | None:
    """The process that has a file locked, None if the system does not tell."""
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
    """What a process was started as; empty if that is not to be had."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words if word)[:100]
