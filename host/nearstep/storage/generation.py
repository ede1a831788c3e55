"""Generations: atomically committed states of all tensors."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion
from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES, Blocks
from nearstep.storage.checksum import crc32
from nearstep.storage.drive import Drive
from nearstep.storage.drive_errors import (
    DamagedSuperblockWarning,
    DriveIOError,
    NoGenerationError,
    ShortTransferError,
    StorageError,
    TornIndexError,
)
from nearstep.storage.extents import Run, Tensor, overlap, parts_of, rows_of
from nearstep.storage.header import Header
from nearstep.storage.index import IndexFormatError, Names, unpack_index
from nearstep.storage.superblock import SLOTS, Superblock, Unreadable, copies, unpack


@dataclass(frozen=True)
class Generation:
    """A committed state of all tensors.

    Attributes
    ----------
    slot : of its superblock.
    meta : the owner's, such as the step.
    tensors : by name.
    superblock : content of the slot.
    name : under which later generations keep this one; empty: they do not.
    kept : earlier generations by name.
    damage : reason why the index of a kept generation cannot be read; then it has no tensors.
    """

    slot: int
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    superblock: Superblock
    name: str = ""
    kept: Mapping[str, Generation] = field(default_factory=dict)
    damage: str = ""

    @property
    def number(self) -> int:
        return self.superblock.generation

    @property
    def index_runs(self) -> Sequence[Run]:
        """Return the blocks of the index."""
        return self.superblock.runs

    def extents(self) -> NDArray[Any]:
        """Return the extents of the index and of the tensors, and those of kept generations.

        Those of a damaged one are unknown, so its blocks are free. A later generation that has them
        has CRCs of its own.
        """
        kept = (each.extents() for each in self.kept.values())
        tables = (each.table.rows for each in self.tensors.values())
        return np.concatenate([rows_of(self.index_runs), *tables, *kept])


Submit = Callable[[Generation, str, Any, int], Completion]
"""Begin to read a tensor of a generation into an array, from a byte offset on."""


class GenerationView:
    """A read-only view of a generation; the next commit invalidates a view of an earlier one.

    Parameters
    ----------
    submit : begins a read of the store.

    Attributes
    ----------
    tensors : by name.
    """

    def __init__(self, generation: Generation, submit: Submit) -> None:
        self._generation = generation
        self._submit = submit
        self.number = generation.number
        self.meta = generation.meta
        self.tensors = generation.tensors

    def submit_read(self, name: str, out: Any, offset: int = 0) -> Completion:
        """Begin to read a tensor, as `Store.submit_read`.

        Raises
        ------
        NoGenerationError : a commit has replaced the generation.
        """
        return self._submit(self._generation, name, out, offset)

    def read(self, name: str, out: Any, offset: int = 0) -> None:
        """Read a tensor: `submit_read`, then wait."""
        self.submit_read(name, out, offset).wait()


@dataclass(frozen=True)
class Slot:
    """Content of both copies of a superblock.

    Attributes
    ----------
    copies : by block, the superblock or the reason why it is invalid: empty if unwritten.
    """

    number: int
    copies: Mapping[int, Superblock | str]

    @property
    def superblock(self) -> Superblock | None:
        """Return the newest valid copy, if any."""
        found = [each for each in self.copies.values() if isinstance(each, Superblock)]
        return max(found, key=lambda each: each.generation, default=None)

    @property
    def stale(self) -> Mapping[int, str]:
        """Return the first copy, with the reason, if it is older than the second one, which is
        written after the first is flushed: the drive has lost that write."""
        (at, first), (_, second) = self.copies.items()
        if isinstance(first, Superblock) and isinstance(second, Superblock):
            if first.generation < second.generation:
                return {at: f"it is of generation {first.generation}, and its second copy newer"}
        return {}

    @property
    def lost(self) -> bool:
        """Return whether both copies are damaged."""
        return self.superblock is None and len(self.damage) == len(self.copies)

    @property
    def damage(self) -> Mapping[int, str]:
        """Return the reasons why copies are damaged, by block."""
        return {k: v for k, v in self.copies.items() if isinstance(v, str) and v}

    def was_cut_off(self, newest: int) -> bool:
        """Return whether a power cut explains the damage: a cut tears the first copy before the
        second one is written, or the second copy of `newest`, the last generation."""
        first, second = self.copies.values()
        if len(self.damage) != 1 or any(isinstance(each, Unreadable) for each in (first, second)):
            return False
        if isinstance(first, Superblock):
            return first.generation == newest
        return not isinstance(second, Superblock) or second.generation < newest


def read_slots(blocks: Blocks, header: Header) -> list[Slot]:
    """Read the superblocks of a set from its first drive."""
    return [
        Slot(
            each, {at: _read_copy(blocks, at, header.set_id) for at in copies(each, header.blocks)}
        )
        for each in SLOTS
    ]


def _read_copy(blocks: Blocks, at: int, set_id: uuid.UUID) -> Superblock | str:
    block = aligned_bytes(BLOCK_BYTES)
    try:
        blocks.read(at, block)
    except (DriveIOError, ShortTransferError) as error:
        return Unreadable(error)
    return unpack(block, set_id)


def load(drives: Sequence[Drive], slot: Slot) -> Generation:
    """Load the generation of a slot with a superblock, and those that it keeps: with `damage` if
    their own index is damaged.

    Raises
    ------
    TornIndexError : the generation's index is damaged.
    """
    assert slot.superblock is not None
    found, names = _load(drives, slot.number, slot.superblock)
    kept: dict[str, Generation] = {}
    for name, each in names.kept.items():
        index = Superblock(slot.superblock.set_id, *each)
        try:
            kept[name] = _load(drives, slot.number, index)[0]
        except TornIndexError as error:
            kept[name] = Generation(slot.number, {}, {}, index, name, damage=error.reason)
    return replace(found, kept=kept)


def _load(drives: Sequence[Drive], slot: int, superblock: Superblock) -> tuple[Generation, Names]:
    number, sizes = superblock.generation, [drive.header.blocks for drive in drives]
    data = aligned_bytes(BLOCK_BYTES * sum(run.blocks for run in superblock.runs))
    if any(r.drive >= len(drives) or r.block + r.blocks > sizes[r.drive] for r in superblock.runs):
        raise TornIndexError(number, "its superblock names blocks that are on no drive")
    parts = parts_of(data, superblock.runs)
    try:
        for transfer in [drives[run.drive].read(run.block, part) for run, part in parts]:
            transfer.wait()
    except (DriveIOError, ShortTransferError) as error:
        raise TornIndexError(number, f"its index cannot be read: {error}") from error
    data = data[: superblock.index_bytes]
    actual = crc32(data)
    if actual != superblock.index_crc:
        expected = superblock.index_crc
        reason = f"CRC-32 of its index must be {expected:#010x}, not {actual:#010x}"
        raise TornIndexError(number, reason)
    try:
        tensors, meta, names = unpack_index(data.tobytes(), number, sizes, superblock.runs)
    except IndexFormatError as error:
        raise TornIndexError(number, f"its index: {error}") from None
    return Generation(slot, meta, tensors, superblock, names.own), names


@dataclass(frozen=True)
class Recovered:
    """Generations that were found on a set.

    Attributes
    ----------
    current : the generation to start from.
    other : the other generation, if it is intact.
    last : the highest number found.
    slots : content of the superblocks.
    notes : damage that the opened generation does not have.
    warnings : damage of superblocks that no power cut explains.
    """

    current: Generation
    other: Generation | None
    last: int
    slots: Sequence[Slot]
    notes: list[str]
    warnings: list[DamagedSuperblockWarning] = field(default_factory=list)


def find(drives: Sequence[Drive], wanted: int | None) -> Recovered:
    """Find the generations of a set.

    Parameters
    ----------
    wanted : number of the generation to start from; None for the last.

    Raises
    ------
    NoGenerationError : the set has no generation, or not this one.
    TornIndexError : the index is damaged.
    """
    first = drives[0]
    slots = read_slots(first.blocks, first.header)
    notes, warnings = damage(first.name, slots)
    found = {each.superblock.generation: each for each in slots if each.superblock is not None}
    number = max(found, default=None) if wanted is None else wanted
    if number is None or number not in found:
        details = "".join(f"; {each}" for each in [*notes, *warnings])
        raise NoGenerationError(wanted, sorted(found), details)
    other: Generation | None = None
    for each in found.keys() - {number}:
        try:
            other = load(drives, found[each])
        except TornIndexError as error:
            notes.append(str(error))
    try:
        current = load(drives, found[number])
    except TornIndexError as error:
        whole = [] if other is None else [other.number]
        raise TornIndexError(number, error.reason, whole=whole) from None
    current, apart = _apart(current, other)
    if other is not None and apart is None:
        reason = f"generation {number} has blocks of it: its superblock should be overwritten"
        notes.append(str(TornIndexError(other.number, reason, whole=[number])))
    kept = (each for by in (current, apart) if by is not None for each in by.kept.values())
    torn = {each.number: each.damage for each in kept if each.damage}
    notes += [str(TornIndexError(each, torn[each], whole=[number])) for each in torn]
    return Recovered(current, apart, max(found), slots, notes, warnings)


def _apart(current: Generation, other: Generation | None) -> tuple[Generation, Generation | None]:
    """Return both generations, without blocks that a later one has: of an other one that was
    overwritten, None; of a kept one, whose blocks are free while its index cannot be read,
    `damage`."""
    held = [current] if other is None else [current, other]
    try:
        check_apart(held)
    except StorageError:
        pass
    else:
        return current, other
    own = [replace(each, kept={}) for each in held]
    apart, kept = own[:1], [dict[str, Generation]() for _ in held]
    every = [("", 1, each) for each in own[1:]]
    every += [(name, at, e) for at, each in enumerate(held) for name, e in each.kept.items()]
    for name, at, each in sorted(every, key=lambda found: -found[2].number):
        try:
            check_apart([*apart, each])
        except StorageError:
            if not name:
                other = None
                continue
            each = replace(each, tensors={}, damage="a later generation has blocks of it")
        if at == 0 or other is not None:
            apart += [] if each.damage else [each]
            kept[at][name] = each
    current = replace(current, kept=kept[0])
    return current, other and replace(other, kept={k: v for k, v in kept[1].items() if k})


def damage(path: str, slots: Sequence[Slot]) -> tuple[list[str], list[DamagedSuperblockWarning]]:
    """Sort a drive's damaged superblocks into notes, where a power cut explains the damage, and
    warnings."""
    whole = sorted(each.superblock.generation for each in slots if each.superblock is not None)
    notes, warnings = [], []
    for slot in slots:
        damaged = slot.damage or slot.stale
        named = ", ".join(f"block {at}: {reason}" for at, reason in damaged.items())
        if named and slot.was_cut_off(max(whole, default=0)):
            notes.append(f"superblock {slot.number} of {path}, {named}")
        elif named:
            warnings.append(DamagedSuperblockWarning(path, slot.number, named, whole, slot.lost))
    if len(set(whole)) < len(whole):
        notes.append(f"superblocks {SLOTS} of {path} both have generation {whole[0]}")
    return notes, warnings


def check_apart(generations: Iterable[Generation]) -> None:
    """Raise `StorageError` if generations have different extents at one block."""
    if overlap(np.concatenate([each.extents() for each in generations]), shared=True):
        raise StorageError("two generations have different extents at the same block")
