"""Errors of the measurement of a drive."""

from __future__ import annotations

from pathlib import Path

from nearstep.errors import Fielded, NearstepError


class MeasureError(Fielded, NearstepError):
    """The drive of a folder cannot be measured."""

    template = "{directory}: {reason}"
    directory: Path
    reason: str
