"""Errors of drives, of sets of drives and of their contents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, field

from nearstep.errors import ArgumentError, Fielded, NearstepError

MOST_OTHERS = 8
"""Files that a message names; it says how many more there are."""


class StorageError(NearstepError):
    """A drive, or a set of drives, could not do what it was asked."""


class NoDriveError(Fielded, StorageError):
    """A folder without a file that begins as a drive does.

    Attributes
    ----------
    expected : bytes that a drive begins with.
    others : files that are there, with the bytes that they begin with.
    """

    template = "there is no drive in {folder}{begun}"
    folder: str
    expected: bytes
    others: Mapping[str, bytes]

    @property
    def begun(self) -> str:
        return _beginnings(self.expected, self.others)


class DriveError(Fielded, StorageError):
    """Base: an error of one drive."""

    path: str


class _ReasonError(DriveError):
    template = "drive {path}: {reason}"
    reason: str


class NotADriveError(_ReasonError):
    """A file or block device that holds no drive of this format, or that is in the place of a new
    one.

    Nothing was written to it.
    """


class FormatVersionError(DriveError):
    """A drive of a format that this release does not read: `expected` and `actual` are versions."""

    template = "drive {path}: version of the format must be {expected}, not {actual}: {hint}"
    expected: int
    actual: int

    @property
    def hint(self) -> str:
        if self.actual > self.expected:
            return "a newer release of nearstep reads it"
        return (
            "save what it holds (optimizer.state_dict()) with the release of nearstep that wrote "
            "it, and load that on new drives"
        )


class OwnerError(DriveError):
    """A drive that belongs to another model or job: `expected` and `actual` are the owners."""

    template = "drive {path}: its owner must be {expected!r}, not {actual!r}"
    expected: str
    actual: str


class ForeignDriveError(DriveError):
    """A drive of another set than its neighbours: `expected` and `actual` are UUIDs."""

    template = "drive {path}: it must be of the set {expected}, not of {actual}"
    expected: object
    actual: object


class IncompleteSetError(Fielded, StorageError):
    """Some of the drives of a set were not named, or one was named twice.

    Attributes
    ----------
    expected : number of drives in the set.
    actual : index of each that was named.
    others : files beside them that begin with other bytes than `magic`, and those bytes: a drive
        whose header is damaged may be among them.
    """

    template = (
        "the set has {expected} drives, 0 to {last}: each must be named once, not {named}{begun}"
    )
    expected: int
    actual: Sequence[int]
    magic: bytes = b""
    others: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return self.expected - 1

    @property
    def named(self) -> list[int]:
        return sorted(self.actual)

    @property
    def begun(self) -> str:
        return _beginnings(self.magic, self.others)


class DriveSizeError(DriveError):
    """A drive that is smaller than its header says, or too small to be made, in bytes."""

    template = "drive {path}: it must have at least {expected} bytes, not {actual}"
    expected: int
    actual: int


class DriveLockedError(DriveError):
    """A drive that another process, or this one, has open.

    Attributes
    ----------
    holder : process that has it, None where the system does not tell.
    name : command line of that process.
    """

    template = "drive {path}: it is in use by {who}"
    holder: int | None
    name: str = ""

    @property
    def who(self) -> str:
        known = "another process" if self.holder is None else f"process {self.holder}"
        return known + (self.name and f" ({self.name})")


class DirectIOError(_ReasonError):
    """A file on which O_DIRECT does not work: its data would go through the page cache."""

    template = "drive {path}: {reason}; direct=False goes through the page cache"


class DriveAccessError(_ReasonError):
    """A drive that may not be opened, or not be written.

    Attributes
    ----------
    errno : of the system's error, or None.
    """

    errno: int | None = None


class DriveVanishedError(_ReasonError):
    """A drive that is gone: unlinked, replaced or pulled out."""


class DriveFullError(Fielded, StorageError):
    """There is less free space than is needed, in bytes. Nothing was changed."""

    template = "{expected} bytes are needed, and {actual} are free{detail}"
    expected: int
    actual: int
    detail: str = ""


class DriveIOError(DriveError):
    """A read, write or flush that the drive answered with an error.

    Attributes
    ----------
    action : `read`, `write` or `flush`.
    block : the first of it.
    error : of the system.
    """

    template = "drive {path}: {action} at block {block}: {why}"
    action: str
    block: int
    error: OSError

    @property
    def errno(self) -> int | None:
        """Number of the system's error, such as `EIO`."""
        return self.error.errno

    @property
    def why(self) -> str:
        return self.error.strerror or str(self.error)


class ShortTransferError(DriveError):
    """A read or write, from `block` on, that moved fewer bytes than asked for, and stopped."""

    template = "drive {path}: {action} at block {block} must move {expected} bytes, not {actual}"
    action: str
    block: int
    expected: int
    actual: int


class DriveTimeoutError(Fielded, StorageError):
    """No transfer that was waited for ended in time; it continues.

    Attributes
    ----------
    seconds : without any progress.
    """

    template = "waited {seconds:g} s for {waited_for}, and nothing ended"
    waited_for: str
    seconds: float


class TornError(Fielded, StorageError):
    """Base: data on a drive that differ from what was written there.

    Attributes
    ----------
    generation : that they belong to.
    whole : other generations that can be opened; their contents have not been read.
    """

    template = "generation {generation}: {reason}; there is {others}"
    generation: int
    _: KW_ONLY
    whole: Iterable[int] = ()

    @property
    def others(self) -> str:
        there = ", ".join(map(str, self.whole))
        return f"generation {there}" if there else "no other generation"


class TornExtentError(TornError):
    """Blocks of a tensor that differ from what was written.

    Attributes
    ----------
    extent : its number within the tensor.
    path, block, blocks : where the extent is.
    expected, actual : CRC-32.
    """

    tensor: str
    extent: int
    path: str
    block: int
    blocks: int
    expected: int
    actual: int

    @property
    def reason(self) -> str:
        return (
            f"extent {self.extent} of {self.tensor!r} ({self.blocks} blocks at {self.block} of "
            f"{self.path}): CRC-32 must be {self.expected:#010x}, not {self.actual:#010x}"
        )


class TornIndexError(TornError):
    """The index of a generation that differs from what was written."""

    reason: str


class NoGenerationError(Fielded, StorageError):
    """A generation that is not on the drives.

    Attributes
    ----------
    expected : the one that was asked for; None for any.
    actual : those that there are.
    """

    template = "{wanted} is not on the drives; there is {there}{detail}"
    expected: int | None
    actual: Iterable[int]
    detail: str = ""

    @property
    def wanted(self) -> str:
        return "a generation" if self.expected is None else f"generation {self.expected}"

    @property
    def there(self) -> str:
        return ", ".join(map(str, self.actual)) or "none"


class FailedGenerationError(StorageError):
    """A write of this generation failed: it cannot be committed, only aborted.

    Its `__cause__` is the error of the write. The last generation is as it was.
    """


class UncertainCommitError(Fielded, StorageError):
    """The last write of a commit failed: whether it counts is known when the set is opened again.

    Either `generation`, the new one, or the one before it is whole. Its `__cause__` is the error.
    """

    template = (
        "the commit of generation {generation} failed in its last write: open the drives again to "
        "see whether it counts"
    )
    generation: int


class InterruptedWriteError(Fielded, StorageError):
    """A write that was interrupted, as by Ctrl-C, before it was begun."""

    template = "the write of {tensor!r} was interrupted"
    tensor: str


class ClosedStoreError(Fielded, StorageError):
    """A drive or store that was used after it was closed, or in a child of its process."""

    template = "cannot {action}: {what} is {reason}"
    what: str
    action: str
    reason: str = "closed"


class DamagedSuperblockWarning(Fielded, UserWarning):
    """A superblock that differs from what was written, as where a sector is rotten: no power cut
    does that.

    Attributes
    ----------
    path : of the drive.
    slot : the superblock.
    whole : generations that there are.
    lost : whether the generation that it spoke of, before or after these, is lost. Else its other
        copy is whole, and nothing is.
    """

    template = (
        "drive {path}: superblock {slot} is damaged, {reason}; {outcome}: there is generation "
        "{there}"
    )
    path: str
    slot: int
    reason: str
    whole: Sequence[int]
    lost: bool

    @property
    def there(self) -> str:
        return " and ".join(map(str, self.whole)) or "none"

    @property
    def outcome(self) -> str:
        if not self.lost:
            return "the other copy is whole, and nothing is lost"
        if self.whole:
            return f"what it was of is lost, perhaps generation {self.whole[-1] + 1}"
        return "the generation that it was of is lost"


class UnknownTensorError(Fielded, ArgumentError, KeyError):
    """A tensor that a generation has not, or has already."""

    template = "tensor {name!r}: {reason}"
    name: str
    reason: str

    def __str__(self) -> str:
        return str(self.args[0])


def _beginnings(expected: bytes, others: Mapping[str, bytes]) -> str:
    """List files that begin with other bytes than a drive, for a message."""
    if not others:
        return ""
    named = [f"{path} with {begin!r}" for path, begin in list(others.items())[:MOST_OTHERS]]
    if len(others) > MOST_OTHERS:
        named.append(f"and {len(others) - MOST_OTHERS} more files")
    return f"; a drive begins with {expected!r}, but {', '.join(named)}"
