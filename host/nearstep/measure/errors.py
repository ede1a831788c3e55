"""What can be wrong where a drive is measured."""

from __future__ import annotations

from pathlib import Path

from nearstep.errors import NearstepError


class MeasureError(NearstepError):
    """Nothing can be measured in a folder.

    Attributes
    ----------
    directory
    reason
    """

    def __init__(self, directory: Path, reason: str) -> None:
        self.directory = directory
        self.reason = reason
        super().__init__(f"{directory}: {reason}")
