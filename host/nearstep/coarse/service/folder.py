"""Temporary folders that are removed with their process, even after a kill."""

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
    """Create a folder of this process, and remove it at the end.

    Folders of killed processes are removed first: a process locks its folder while it runs.
    """
    for each in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _locked(each):
            shutil.rmtree(each)
    with contextlib.ExitStack() as stack:
        while True:
            made = Path(tempfile.mkdtemp(prefix=PREFIX))
            with contextlib.suppress(OSError):  # another process removed it before it was locked
                stack.enter_context(_locked(made))
                break
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, or raise `OSError` if it belongs to another user or process, or is missing."""
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
