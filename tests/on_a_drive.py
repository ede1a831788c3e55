"""Folders for drives: files with O_DIRECT cannot lie in memory, as `/tmp` does on some machines."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_errors import DirectIOError
from nearstep.storage.store import Store

BUILD = Path(__file__).parents[1] / "build"


_known: dict[int, bool] = {}
"""Of each filesystem that was asked."""


def has_direct(folder: Path) -> bool:
    """Whether drives can be files of a folder."""
    filesystem = folder.stat().st_dev
    if filesystem not in _known:
        _known[filesystem] = _tried(folder)
    return _known[filesystem]


def _tried(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        Store.create([probe], drive_bytes=64 * BLOCK_BYTES, owner="probe").close()
    except DirectIOError as error:
        print(f"{folder}: {error}")
        return False
    probe.unlink()
    return True


@contextmanager
def on_a_drive(folder: Path) -> Iterator[Path]:
    """The folder, or if it is in memory one below `build`."""
    if has_direct(folder):
        yield folder
        return
    BUILD.mkdir(exist_ok=True)
    other = Path(tempfile.mkdtemp(prefix="drives-", dir=BUILD))
    try:
        yield other
    finally:
        shutil.rmtree(other)
