"""Errors of snapshot files."""

from __future__ import annotations

from pathlib import Path

from nearstep.errors import Fielded, NearstepError


class SnapshotError(NearstepError):
    """A snapshot could not be taken, saved or loaded."""


class SnapshotSaveError(SnapshotError, OSError):
    """A snapshot could not be written. The new file was removed; older ones are intact.

    Attributes
    ----------
    errno : of the system's error, such as `ENOSPC`, or None.
    """

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"cannot save {path}: {error}")
        self.path = path
        self.errno = error.errno


class TornSnapshotError(Fielded, SnapshotError):
    """A file that is not a complete snapshot. Nothing was loaded.

    Attributes
    ----------
    last_good : the newest older generation that is intact; None if there is none.
    """

    template = "cannot load {path}: {reason}; {hint}"
    path: Path
    reason: str
    last_good: Path | None = None

    @property
    def hint(self) -> str:
        if self.last_good is None:
            return "there is no good one"
        return f"the last good one is {self.last_good}"


class SnapshotVersionError(Fielded, SnapshotError):
    """A snapshot file of another version of the format. Nothing was loaded."""

    template = "{path} must have version {expected} of snapshot files, not version {found}"
    path: Path
    expected: int
    found: str
