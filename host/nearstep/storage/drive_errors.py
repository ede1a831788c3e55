"""What can go wrong with drives, sets of drives and what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nearstep.errors import ArgumentError, NearstepError

MOST_OTHERS = 8
"""Files that a message names; it says how many more there are."""


class StorageError(NearstepError):
    """A drive, or a set of drives, could not do what it was asked."""


class NoDriveError(StorageError):
    """A folder without a file that begins as a drive does.

    Attributes
    ----------
    folder
    expected : bytes that a drive begins with.
    others : files that are there, with the bytes that they begin with.
    """

    def __init__(self, folder: str, expected: bytes, others: Mapping[str, bytes]) -> None:
        self.folder = folder
        self.expected = expected
        self.others = dict(others)
        super().__init__(f"there is no drive in {folder}{_beginnings(expected, others)}")


class DriveError(StorageError):
    """Something is the matter with one drive.

    Attributes
    ----------
    path : of the drive.
    """

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        super().__init__(f"drive {path}: {reason}")


class NotADriveError(DriveError):
    """A file or block device that holds no drive of this format, or that is in the place of a new
    one.

    Nothing was written to it.
    """


class FormatVersionError(DriveError):
    """A drive of a format that this release does not read.

    Attributes
    ----------
    expected, actual : versions.
    """

    def __init__(self, path: str, expected: int, actual: int) -> None:
        self.expected = expected
        self.actual = actual
        hint = (
            "save what it holds (optimizer.state_dict()) with the release of nearstep that wrote "
            "it, and load that on new drives"
            if actual < expected
            else "a newer release of nearstep reads it"
        )
        super().__init__(path, f"version of the format must be {expected}, not {actual}: {hint}")


class OwnerError(DriveError):
    """A drive that belongs to another model or job.

    Attributes
    ----------
    expected, actual : names of the owners.
    """

    def __init__(self, path: str, expected: str, actual: str) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(path, f"its owner must be {expected!r}, not {actual!r}")


class ForeignDriveError(DriveError):
    """A drive of another set than its neighbours.

    Attributes
    ----------
    expected, actual : UUIDs of the sets.
    """

    def __init__(self, path: str, expected: object, actual: object) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(path, f"it must be of the set {expected}, not of {actual}")


class IncompleteSetError(StorageError):
    """Some of the drives of a set were not named, or one was named twice.

    Attributes
    ----------
    expected : number of drives in the set.
    actual : index of each that was named.
    others : files beside them that begin with other bytes than `magic`, and those bytes: a drive
        whose header is damaged may be among them.
    """

    def __init__(
        self,
        expected: int,
        actual: Sequence[int],
        magic: bytes = b"",
        others: Mapping[str, bytes] | None = None,
    ) -> None:
        self.expected = expected
        self.actual = tuple(actual)
        self.others = dict(others or {})
        super().__init__(
            f"the set has {expected} drives, 0 to {expected - 1}: each must be named once, "
            f"not {sorted(self.actual)}{_beginnings(magic, self.others)}"
        )


class DriveSizeError(DriveError):
    """A drive that is smaller than its header says, or too small to be made.

    Attributes
    ----------
    expected, actual : bytes.
    """

    def __init__(self, path: str, expected: int, actual: int) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(path, f"it must have at least {expected} bytes, not {actual}")


class DriveLockedError(DriveError):
    """A drive that another process, or this one, has open.

    Attributes
    ----------
    holder : process that has it, None where the system does not tell.
    """

    def __init__(self, path: str, holder: int | None, name: str = "") -> None:
        self.holder = holder
        who = "another process" if holder is None else f"process {holder}"
        super().__init__(path, f"it is in use by {who}{name and f' ({name})'}")


class DirectIOError(DriveError):
    """A file on which O_DIRECT does not work: its data would go through the page cache."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, f"{reason}; direct=False goes through the page cache")


class DriveAccessError(DriveError):
    """A drive that may not be opened, or not be written.

    Attributes
    ----------
    errno : of the system's error, or None.
    """

    def __init__(self, path: str, reason: str, errno: int | None = None) -> None:
        self.errno = errno
        super().__init__(path, reason)


class DriveVanishedError(DriveError):
    """A drive that is gone: unlinked, replaced or pulled out."""


class DriveFullError(StorageError):
    """There is less free space than is needed. Nothing was changed.

    Attributes
    ----------
    expected, actual : bytes that are needed, and that are free.
    """

    def __init__(self, expected: int, actual: int, detail: str = "") -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(f"{expected} bytes are needed, and {actual} are free{detail}")


class DriveIOError(DriveError):
    """A read, write or flush that the drive answered with an error.

    Attributes
    ----------
    action : `read`, `write` or `flush`.
    block : the first of it.
    errno : of the system's error, such as `EIO`.
    """

    def __init__(self, path: str, action: str, block: int, error: OSError) -> None:
        self.action = action
        self.block = block
        self.errno = error.errno
        super().__init__(path, f"{action} at block {block}: {error.strerror or error}")


class ShortTransferError(DriveError):
    """A read or write that moved less than it should, and would not go on.

    Attributes
    ----------
    action : `read` or `write`.
    block : the first of it.
    expected, actual : bytes.
    """

    def __init__(self, path: str, action: str, block: int, expected: int, actual: int) -> None:
        self.action = action
        self.block = block
        self.expected = expected
        self.actual = actual
        super().__init__(
            path, f"{action} at block {block} must move {expected} bytes, not {actual}"
        )


class DriveTimeoutError(StorageError):
    """Nothing that was waited for ended in time. It goes on.

    Attributes
    ----------
    waited_for
    seconds : without any progress.
    """

    def __init__(self, waited_for: str, seconds: float) -> None:
        self.waited_for = waited_for
        self.seconds = seconds
        super().__init__(f"waited {seconds:g} s for {waited_for}, and nothing ended")


class TornError(StorageError):
    """Something on a drive is not what was written there.

    Attributes
    ----------
    reason
    generation : that it belongs to.
    whole : other generations that can be opened; what they hold has not been looked at.
    """

    def __init__(self, reason: str, generation: int, whole: Iterable[int] = ()) -> None:
        self.reason = reason
        self.generation = generation
        self.whole = tuple(whole)
        others = ", ".join(map(str, self.whole))
        hint = f"; there is generation {others}" if others else "; there is no other generation"
        super().__init__(f"generation {generation}: {reason}{hint}")


class TornExtentError(TornError):
    """Blocks of a tensor that are not what was written.

    Attributes
    ----------
    tensor
    extent : its number within the tensor.
    path, block, blocks : where it lies.
    expected, actual : CRC-32.
    """

    def __init__(
        self,
        tensor: str,
        extent: int,
        path: str,
        block: int,
        blocks: int,
        *,
        expected: int,
        actual: int,
        generation: int,
        whole: Iterable[int] = (),
    ) -> None:
        self.tensor = tensor
        self.extent = extent
        self.path = path
        self.block = block
        self.blocks = blocks
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"extent {extent} of {tensor!r} ({blocks} blocks at {block} of {path}): CRC-32 must be "
            f"{expected:#010x}, not {actual:#010x}",
            generation,
            whole,
        )


class TornIndexError(TornError):
    """The index of a generation that is not what was written."""

    def beside(self, whole: Iterable[int]) -> TornIndexError:
        """This error, with the other generations that can be opened."""
        return type(self)(self.reason, self.generation, whole)


class NoGenerationError(StorageError):
    """A generation that is not on the drives.

    Attributes
    ----------
    expected : the one that was asked for; None for any.
    actual : those that there are.
    """

    def __init__(self, expected: int | None, actual: Iterable[int], detail: str = "") -> None:
        self.expected = expected
        self.actual = tuple(actual)
        what = "a generation" if expected is None else f"generation {expected}"
        there = ", ".join(map(str, self.actual)) or "none"
        super().__init__(f"{what} is not on the drives; there is {there}{detail}")


class FailedGenerationError(StorageError):
    """A write of this generation failed: it cannot be committed, only aborted.

    Its `__cause__` is the error of the write. The last generation is as it was.
    """


class UncertainCommitError(StorageError):
    """A commit failed in its last write: whether it counts is known when the set is opened again.

    Either generation is whole. Its `__cause__` is the error.

    Attributes
    ----------
    generation : the new one.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        super().__init__(
            f"the commit of generation {generation} failed in its last write: open the drives "
            "again to see whether it counts"
        )


class InterruptedWriteError(StorageError):
    """A write that was interrupted, as by Ctrl-C, before it was begun.

    Attributes
    ----------
    tensor
    """

    def __init__(self, tensor: str) -> None:
        self.tensor = tensor
        super().__init__(f"the write of {tensor!r} was interrupted")


class ClosedStoreError(StorageError):
    """A drive or store that was used after it was closed, or in a child of its process."""

    def __init__(self, what: str, action: str, reason: str = "closed") -> None:
        super().__init__(f"cannot {action}: {what} is {reason}")


class DamagedSuperblockWarning(UserWarning):
    """A superblock that is not what was written, as where a sector is rotten: no power cut does
    that.

    Attributes
    ----------
    path : of the drive.
    slot : the superblock.
    whole : generations that there are.
    lost : whether the generation that it spoke of, before or after these, is lost. Else its other
        copy is whole, and nothing is.
    """

    def __init__(self, path: str, slot: int, reason: str, whole: Sequence[int], lost: bool) -> None:
        self.path = path
        self.slot = slot
        self.whole = tuple(whole)
        self.lost = lost
        there = " and ".join(map(str, whole)) or "none"
        if not lost:
            what = "the other copy is whole, and nothing is lost"
        elif whole:
            what = f"what it was of is lost, perhaps generation {whole[-1] + 1}"
        else:
            what = "the generation that it was of is lost"
        super().__init__(
            f"drive {path}: superblock {slot} is damaged, {reason}; {what}: there is generation "
            f"{there}"
        )


class UnknownTensorError(ArgumentError, KeyError):
    """A tensor that a generation has not, or has already."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        ArgumentError.__init__(self, f"tensor {name!r}: {reason}")

    def __str__(self) -> str:
        return str(self.args[0])


def _beginnings(expected: bytes, others: Mapping[str, bytes]) -> str:
    """That files begin with other bytes than a drive, for a message."""
    if not others:
        return ""
    named = [f"{path} with {begin!r}" for path, begin in list(others.items())[:MOST_OTHERS]]
    if len(others) > MOST_OTHERS:
        named.append(f"and {len(others) - MOST_OTHERS} more files")
    return f"; a drive begins with {expected!r}, but {', '.join(named)}"
