"""What can go wrong on the way to a bitstream."""

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
    """A program is not there.

    Attributes
    ----------
    tool : what a plan calls it.
    sought : where it was expected.
    """

    def __init__(self, tool: str, sought: str, remedy: str) -> None:
        self.tool = tool
        self.sought = sought
        self.remedy = remedy
        super().__init__(f"{tool} is missing: there is no {sought}; {remedy}")


class ToolFailedError(BitstreamError):
    """A program ended with another status than 0.

    Attributes
    ----------
    log : its whole output.
    """

    def __init__(self, tool: str, status: int, log: Path, tail: Sequence[str]) -> None:
        self.tool = tool
        self.status = status
        self.log = log
        lines = "\n".join(tail)
        super().__init__(f"{tool} exited with {status}, expected 0; {log} ends:\n{lines}")


class PlanError(BitstreamError):
    """A plan without what the flow needs of it."""


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
    needed : cells that are needed and cells that there are, by type, of the types that lack.
    fullest : the same of the types that are full most; not empty where each type would fit alone.
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
    """A clock that is slower than it must be.

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
