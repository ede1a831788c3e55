"""Folders that last as long as a process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "nearstep-service-"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of this process; those of processes that were killed are removed.

    A process has a lock on its folder as long as it lives.
    """
    for each in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _locked(each):
            shutil.rmtree(each)
    with contextlib.ExitStack() as stack:
        while True:
            made = Path(tempfile.mkdtemp(prefix=PREFIX))
            with contextlib.suppress(OSError):  # another process has taken it for one that is left
                stack.enter_context(_locked(made))
                break
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder. Raises `OSError` if it is another user's or process's, or not there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(f"{folder} is another user's")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not folder.exists():
            raise FileNotFoundError(f"{folder} was removed")
        yield
    finally:
        os.close(descriptor)
