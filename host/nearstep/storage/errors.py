"""What can go wrong with files of snapshots."""

from __future__ import annotations

from pathlib import Path

from nearstep.errors import NearstepError


class SnapshotError(NearstepError):
    """A snapshot could not be taken, saved or loaded."""


class SnapshotSaveError(SnapshotError, OSError):
    """A snapshot could not be written to its file. There is no new file; older ones are intact.

    Attributes
    ----------
    path
    errno : of the system's error, such as `ENOSPC`, or None.
    """

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"cannot save {path}: {error}")
        self.path = path
        self.errno = error.errno


class TornSnapshotError(SnapshotError):
    """A file that is no whole snapshot. Nothing was loaded.

    Attributes
    ----------
    path
    reason
    last_good : the newest older generation that is whole.
    """

    def __init__(self, path: Path, reason: str, last_good: Path | None = None) -> None:
        self.path = path
        self.reason = reason
        self.last_good = last_good
        hint = "there is no good one" if last_good is None else f"the last good one is {last_good}"
        super().__init__(f"cannot load {path}: {reason}; {hint}")
