"""Mistakes in the commit protocol, which a test has to find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from nearstep.storage import extent_jobs, generation, store, superblock
from nearstep.storage.blocks import Blocks
from nearstep.storage.drive import Drive
from nearstep.storage.extent_jobs import Source
from nearstep.storage.extents import EXTENT as EXTENTS
from nearstep.storage.extents import rows_of
from nearstep.storage.generation import Generation, Slot
from nearstep.storage.in_flight import InFlight
from nearstep.storage.store import Store
from nearstep.storage.superblock import SLOTS, Superblock
from nearstep.storage.transaction import Transaction

Mistake = Callable[[pytest.MonkeyPatch], None]


def without_flushes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drive, "flush_job", lambda drive, bounces: None)


def without_flush_of_the_payload(patch: pytest.MonkeyPatch) -> None:
    write = Store._write_index

    def not_flushed(store: Store, *arguments: object) -> None:
        with pytest.MonkeyPatch.context() as inner:
            without_flushes(inner)
            write(store, *arguments)

    patch.setattr(Store, "_write_index", not_flushed)


def without_a_flush_when_it_is_opened(patch: pytest.MonkeyPatch) -> None:
    make = Store.__init__

    def not_flushed(store: Store, *arguments: object, **options: object) -> None:
        with pytest.MonkeyPatch.context() as inner:
            without_flushes(inner)
            make(store, *arguments, **options)

    patch.setattr(Store, "__init__", not_flushed)


def over_the_last_superblock(patch: pytest.MonkeyPatch) -> None:
    write = Store._write_slot

    def written(store: Store, slot: int, *rest: object, **options: object) -> None:
        write(store, store._transaction.current.slot, *rest, **options)

    patch.setattr(Store, "_write_slot", written)


def both_copies_at_once(patch: pytest.MonkeyPatch) -> None:
    """Of a superblock: the second one before the first one is on the drive."""
    write = Store._write_slot

    def written(store: Store, slot: int, *rest: object, **options: object) -> None:
        with pytest.MonkeyPatch.context() as inner:
            without_flushes(inner)
            write(store, slot, *rest, **options)

    patch.setattr(Store, "_write_slot", written)


def over_the_last_generation(patch: pytest.MonkeyPatch) -> None:
    """Blocks are free as soon as the next generation does not need them."""

    def used(transaction: Transaction) -> list[object]:
        return [each.table.rows for each in transaction.tensors.values()] or [np.empty(0, EXTENTS)]

    patch.setattr(Transaction, "_used", used)


def over_the_generation_before(patch: pytest.MonkeyPatch) -> None:
    """Blocks of the other generation are free."""

    def used(transaction: Transaction) -> list[Any]:
        tables = (each.table.rows for each in transaction.tensors.values())
        return [*tables, transaction.current.extents()]

    patch.setattr(Transaction, "_used", used)


def over_kept_generations(patch: pytest.MonkeyPatch) -> None:
    """Blocks of kept generations are free."""
    extents = Generation.extents
    patch.setattr(Generation, "extents", lambda each: extents(replace(each, kept={})))


def over_indices(patch: pytest.MonkeyPatch) -> None:
    """Blocks of indices are free."""

    def extents(each: Generation) -> Any:
        tables = (tensor.table.rows for tensor in each.tensors.values())
        kept = (other.extents() for other in each.kept.values())
        return np.concatenate([rows_of([]), *tables, *kept])

    patch.setattr(Generation, "extents", extents)


def superblock_first(patch: pytest.MonkeyPatch) -> None:
    """The index is written, and all flushed, after the superblock."""
    index, slot, late = Store._write_index, Store._write_slot, []

    def write_slot(each: Store, *arguments: Any, **options: Any) -> None:
        slot(each, *arguments, **options)
        while late:
            index(each, *late.pop())

    patch.setattr(Store, "_write_index", lambda each, *arguments: late.append(arguments))
    patch.setattr(Store, "_write_slot", write_slot)


def without_flush_of_the_index(patch: pytest.MonkeyPatch) -> None:
    """All is flushed before the index is written."""
    write = Store._write_index

    def written(each: Store, *arguments: Any) -> None:
        each._in_flight.join_all()
        each._run("flush", store.flushes(each.drives))
        with pytest.MonkeyPatch.context() as inner:
            without_flushes(inner)
            write(each, *arguments)

    patch.setattr(Store, "_write_index", written)


def without_flush_of_other_drives(patch: pytest.MonkeyPatch) -> None:
    flushes = store.flushes
    patch.setattr(store, "flushes", lambda drives: flushes(drives[:1]))


def without_waiting_for_writes(patch: pytest.MonkeyPatch) -> None:
    """A commit does not wait for writes in flight."""
    patch.setattr(InFlight, "join_all", lambda each: None)


def without_second_copies(patch: pytest.MonkeyPatch) -> None:
    """A commit writes the first copy of its superblock only."""
    patch.setattr(store, "copies", lambda slot, blocks: (slot,))


def without_reading_second_copies(patch: pytest.MonkeyPatch) -> None:
    read = generation._read_copy

    def first(blocks: Blocks, at: int, set_id: UUID) -> Superblock | str:
        return read(blocks, at, set_id) if at in SLOTS else ""

    patch.setattr(generation, "_read_copy", first)


def without_repairs(patch: pytest.MonkeyPatch) -> None:
    """Opening leaves damaged copies of superblocks as they are."""
    patch.setattr(Store, "_repair", lambda each, slots: None)


def the_older_copy(patch: pytest.MonkeyPatch) -> None:
    """Of a superblock counts, and is written over the newer one."""

    def oldest(slot: Slot) -> Superblock | None:
        found = [each for each in slot.copies.values() if isinstance(each, Superblock)]
        return min(found, key=lambda each: each.generation, default=None)

    patch.setattr(Slot, "superblock", property(oldest))


def given_up_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    """`drop_other` leaves the superblock on the drive."""
    write = Store._write_slot

    def written(each: Store, *arguments: Any, commits: bool) -> None:
        if commits:
            write(each, *arguments, commits=commits)

    patch.setattr(Store, "_write_slot", written)


class _Equal(int):
    """A checksum that is right for everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def without_checksums_of_extents(patch: pytest.MonkeyPatch) -> None:
    read = Source.read

    def unchecked(source: Source, extent: Any, into: Any) -> None:
        read(source, extent._replace(crc=_Equal(extent.crc)), into)

    patch.setattr(Source, "read", unchecked)


def without_checksums_of_indices(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generation, "crc32", lambda data: _Equal(0))


def without_checksums_of_superblocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(superblock, "is_whole", lambda block: True)


def without_the_end_of_a_failed_generation(patch: pytest.MonkeyPatch) -> None:
    """A write that failed does not keep its generation from being committed."""
    patch.setattr(Transaction, "guarded", lambda each, job: job)


def without_the_rest(patch: pytest.MonkeyPatch) -> None:
    """What is written in part loses the rest of its extent."""
    patch.setattr(extent_jobs, "_fill", lambda *each: None)


MISTAKES: Sequence[Mistake] = (
    without_flushes, without_flush_of_the_payload, without_flush_of_the_index,
    without_flush_of_other_drives, without_a_flush_when_it_is_opened, without_waiting_for_writes,
    superblock_first, over_the_last_superblock, both_copies_at_once, without_second_copies,
    without_reading_second_copies, the_older_copy, without_repairs, given_up_in_memory_only,
    over_the_last_generation, over_the_generation_before, over_kept_generations, over_indices,
    without_checksums_of_extents, without_checksums_of_superblocks,
    without_the_end_of_a_failed_generation, without_the_rest,
)  # fmt: skip
