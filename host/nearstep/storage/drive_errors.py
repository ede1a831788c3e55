"""Errors of drives, of sets of drives and of their contents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, field

from nearstep.errors import ArgumentError, Fielded, NearstepError

MOST_OTHERS = 8
"""Most files named in a message; the rest are counted."""


class StorageError(NearstepError):
    """An operation on a drive or a set of drives failed."""


class NoDriveError(Fielded, StorageError):
    """A folder without a drive.

    Attributes
    ----------
    expected : first bytes of a drive.
    others : files in the folder, with their first bytes.
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
    """A file or block device that is no drive of this format, or is not empty where a new drive is
    to be created.

    Nothing was written to the file.
    """


class FormatVersionError(DriveError):
    """A drive in an unsupported format: `expected` and `actual` are versions."""

    template = "drive {path}: version of the format must be {expected}, not {actual}: {hint}"
    expected: int
    actual: int

    @property
    def hint(self) -> str:
        if self.actual > self.expected:
            return "a newer release of nearstep reads it"
        return (
            "save its state (optimizer.state_dict()) with the release of nearstep that wrote it, "
            "and load that on new drives"
        )


class OwnerError(DriveError):
    """A drive of another model or job: `expected` and `actual` are the owners."""

    template = "drive {path}: its owner must be {expected!r}, not {actual!r}"
    expected: str
    actual: str


class ForeignDriveError(DriveError):
    """A drive of another set than the first drive: `expected` and `actual` are UUIDs."""

    template = "drive {path}: it must be of the set {expected}, not of {actual}"
    expected: object
    actual: object


class IncompleteSetError(Fielded, StorageError):
    """A list of drives that misses some of a set, or names one twice.

    Attributes
    ----------
    expected : number of drives in the set.
    actual : index of each named drive.
    others : other files in the folders that do not begin with `magic`, with their first bytes: a
        drive with a damaged header may be among them.
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
    """A drive that is smaller than its header says, or too small to be created: sizes in bytes."""

    template = "drive {path}: it must have at least {expected} bytes, not {actual}"
    expected: int
    actual: int


class DriveLockedError(DriveError):
    """A drive that this or another process has open.

    Attributes
    ----------
    holder : process ID; None if the system does not tell.
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
    """A file without support for O_DIRECT: its data would be copied through the page cache."""

    template = "drive {path}: {reason}; direct=False uses the page cache"


class DriveAccessError(_ReasonError):
    """A drive that cannot be opened or written.

    Attributes
    ----------
    errno : of the system's error, or None.
    """

    errno: int | None = None


class DriveVanishedError(_ReasonError):
    """A drive that was unlinked, replaced or disconnected."""


class DriveFullError(Fielded, StorageError):
    """There is not enough free space: sizes in bytes. Nothing was changed."""

    template = "{expected} bytes are needed, and {actual} are free{detail}"
    expected: int
    actual: int
    detail: str = ""


class DriveIOError(DriveError):
    """A read, write or flush that failed on the drive.

    Attributes
    ----------
    action : `read`, `write` or `flush`.
    block : first block of the transfer.
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
    """A read or write from `block` on that transferred fewer bytes than requested."""

    template = "drive {path}: {action} at block {block} must move {expected} bytes, not {actual}"
    action: str
    block: int
    expected: int
    actual: int


class DriveTimeoutError(Fielded, StorageError):
    """No part of a transfer ended in time; the transfer continues.

    Attributes
    ----------
    seconds : time without progress.
    """

    template = "waited {seconds:g} s for {waited_for}, and nothing ended"
    waited_for: str
    seconds: float


class TornError(Fielded, StorageError):
    """Base: data on a drive that differ from the data written.

    Attributes
    ----------
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
    """Blocks of a tensor that differ from the data written.

    Attributes
    ----------
    extent : its number within the tensor.
    path, block, blocks : location of the extent.
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
    """An index of a generation that is damaged or cannot be read."""

    reason: str


class NoGenerationError(Fielded, StorageError):
    """A generation that is not on the drives.

    Attributes
    ----------
    expected : requested number; None for any.
    actual : numbers of the generations on the drives.
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
    """A write of this generation failed: the generation can be aborted, not committed.

    `__cause__` is the error of the write. The last generation is unchanged.
    """


class UncertainCommitError(Fielded, StorageError):
    """The last write of a commit failed: reopening the set shows whether the commit counts.

    Either `generation`, the new one, or the generation before is intact. `__cause__` is the error.
    """

    template = (
        "the commit of generation {generation} failed in its last write: open the drives again to "
        "see whether it counts"
    )
    generation: int


class InterruptedWriteError(Fielded, StorageError):
    """A write that was interrupted before its transfer began, as by Ctrl-C."""

    template = "the write of {tensor!r} was interrupted"
    tensor: str


class ClosedStoreError(Fielded, StorageError):
    """A drive or store used after it was closed, or in a child process."""

    template = "cannot {action}: {what} is {reason}"
    what: str
    action: str
    reason: str = "closed"


class DamagedSuperblockWarning(Fielded, UserWarning):
    """A damaged superblock that no power cut explains, as after a bad sector.

    Attributes
    ----------
    path : of the drive.
    slot : of the superblock.
    whole : generations on the drives.
    lost : whether the superblock's generation, before or after these, is lost; otherwise the other
        copy is intact and nothing is lost.
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
            return f"its generation is lost, perhaps {self.whole[-1] + 1}"
        return "its generation is lost"


class UnknownTensorError(Fielded, ArgumentError, KeyError):
    """A tensor that a generation does not have, or already has."""

    template = "tensor {name!r}: {reason}"
    name: str
    reason: str

    def __str__(self) -> str:
        return str(self.args[0])


def _beginnings(expected: bytes, others: Mapping[str, bytes]) -> str:
    """Describe the files that do not begin as a drive does, for a message."""
    if not others:
        return ""
    named = [f"{path} with {begin!r}" for path, begin in list(others.items())[:MOST_OTHERS]]
    if len(others) > MOST_OTHERS:
        named.append(f"and {len(others) - MOST_OTHERS} more files")
    return f"; a drive begins with {expected!r}, but {', '.join(named)}"
