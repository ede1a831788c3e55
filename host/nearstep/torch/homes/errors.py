"""What can go wrong with state on drives, besides the drives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nearstep.errors import ArgumentError, Fielded
from nearstep.storage.drive_errors import StorageError
from nearstep.torch.errors import HyperparameterError


class MemoryTooSmallError(HyperparameterError):
    """The parameters that are updated at once do not fit into `memory`.

    Attributes
    ----------
    expected, actual : bytes: the least that does, and what was given.
    """

    def __init__(self, label: str, expected: int, actual: int) -> None:
        super().__init__("memory", "", actual)
        self.expected: int = expected  # type: ignore[assignment]
        self.args = (
            f"memory must be at least {expected} bytes, not {actual}: {label} is updated at once",
        )


class ResumeError(Fielded, StorageError):
    """The drives hold no step to resume from, or one that a new optimizer would overwrite.

    Attributes
    ----------
    expected, actual : what the drives should hold, and do.
    """

    template = "the drives must hold {expected}, not {actual}"
    expected: str
    actual: str


class RanksDifferError(ResumeError):
    """Processes of a job whose drives hold different last steps.

    Attributes
    ----------
    ranks : of each rank the generations that its drives hold, the last one first, and how many
        steps each has; none of a rank that does not resume.
    common : the last step that all have; None: there is none.
    """

    def __init__(self, ranks: Mapping[int, Mapping[int, int]], common: int | None) -> None:
        self.ranks = {rank: dict(each) for rank, each in ranks.items()}
        self.common = common
        said = []
        for rank, each in ranks.items():
            held = ", ".join(f"step {step} (generation {number})" for number, step in each.items())
            said.append(f"rank {rank}: {held or 'does not resume'}")
        hint = "no step is on the drives of all"
        if common is not None:
            hint = f'resume="common" goes on from step {common} on all'
        super().__init__("the same last step on all ranks", f"{'; '.join(said)}; {hint}")


class RanksFailedError(Fielded, StorageError):
    """Ranks did not do the same, or one failed: no rank commits a generation, and all roll back.

    If all ranks are there and have the same step, all may repeat it. Otherwise all have to resume.

    Attributes
    ----------
    expected, actual : what this rank was about to do, and what others did.
    """

    template = "all ranks must {expected}; {actual}"
    expected: str
    actual: str


class RanksDisagreeError(Fielded, ArgumentError):
    """Ranks that share parameters make different optimizers. No drive was touched.

    Attributes
    ----------
    what : that is to be the same.
    actual : of each rank.
    """

    template = "all ranks must have the same {what}, not {actual}"
    what: str
    actual: str


class SharedDriveError(Fielded, StorageError):
    """Several ranks are given one drive. No drive was touched."""

    template = "drive {path} must be of one rank, not of ranks {ranks}"
    path: str
    ranks: Sequence[int]


class NothingToResumeError(ResumeError):
    """No generation was ever completed on the drives.

    An optimizer began to make them, and was cut off. Nothing is lost by beginning anew, without
    `resume`, once the files are removed.

    Attributes
    ----------
    places : files, of which the last is to be removed first; none of a store that the caller
        opened, which can be taken as it is.
    """

    def __init__(self, expected: str, places: Sequence[Path]) -> None:
        self.places = tuple(places)
        named = ", ".join(map(str, self.places))
        hint = f"remove {named} and begin anew" if named else "begin anew, without resume"
        super().__init__(expected, f"none: no generation was completed; {hint}")
