"""Errors of the bitstream flow."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from nearstep_spec.errors import NearstepError

__all__ = [
    "BitstreamError",
    "DoesNotFitError",
    "FolderError",
    "PlanError",
    "TimingError",
    "ToolFailedError",
    "ToolMissingError",
]


class BitstreamError(NearstepError, RuntimeError):
    """No bitstream, or none that may be used."""


class ToolMissingError(BitstreamError):
    """A program is missing.

    Attributes
    ----------
    tool : name in a plan.
    sought : expected place.
    """

    def __init__(self, tool: str, sought: str, remedy: str) -> None:
        self.tool = tool
        self.sought = sought
        self.remedy = remedy
        super().__init__(f"{tool} is missing: there is no {sought}; {remedy}")


class ToolFailedError(BitstreamError):
    """A program ended with a status other than 0.

    Attributes
    ----------
    log : whole output.
    """

    def __init__(self, tool: str, status: int, log: Path, tail: Sequence[str]) -> None:
        self.tool = tool
        self.status = status
        self.log = log
        lines = "\n".join(tail)
        super().__init__(f"{tool} exited with {status}, expected 0; {log} ends:\n{lines}")


class PlanError(BitstreamError):
    """A plan lacks a part that the flow needs."""


class FolderError(BitstreamError):
    """Results cannot be written."""

    def __init__(self, folder: Path, reason: str) -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(f"{folder} cannot be written: {reason}; choose another with --output")


class DoesNotFitError(BitstreamError):
    """A design that the chip has no room for.

    Attributes
    ----------
    needed : needed and available cells, by type, of the types that do not fit.
    fullest : the same of the fullest types; not empty if each type alone would fit.
    """

    def __init__(
        self,
        needed: Mapping[str, tuple[int, int]],
        fullest: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.needed = dict(needed)
        self.fullest = dict(fullest or {})
        if needed:
            said = "; ".join(
                f"{cell}: {used:,} needed, {most:,} present ({used - most:,} too many)"
                for cell, (used, most) in needed.items()
            )
        else:
            said = "no place was found for every cell: " + "; ".join(
                f"{cell}: {used:,} of {most:,}" for cell, (used, most) in self.fullest.items()
            )
        super().__init__(f"the design does not fit: {said}")


class TimingError(BitstreamError):
    """A clock is slower than required.

    Attributes
    ----------
    clocks : MHz that are reached and MHz that are needed, by clock.
    folder : where the report is.
    """

    def __init__(self, clocks: Mapping[str, tuple[float, float]], folder: Path) -> None:
        self.clocks = dict(clocks)
        self.folder = folder
        said = "; ".join(
            f"{clock} reaches {achieved:.2f} MHz of {needed:.2f} MHz "
            f"({needed - achieved:.2f} MHz short)"
            for clock, (achieved, needed) in clocks.items()
        )
        super().__init__(f"timing failed: {said}; the report is in {folder}")
