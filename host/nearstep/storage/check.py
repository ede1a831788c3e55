"""A check of drives that reads every superblock, index and extent."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from nearstep.storage.blocks import BLOCK_BYTES, BlockFile
from nearstep.storage.bounces import Bounces
from nearstep.storage.drive import QUEUE_DEPTH, Drive, DriveTransfer, Job
from nearstep.storage.drive_errors import IncompleteSetError, StorageError, TornExtentError
from nearstep.storage.drive_set import DriveLike, beginnings, drives_in, open_set
from nearstep.storage.extent_jobs import Source
from nearstep.storage.extents import ExtentRow, Run
from nearstep.storage.generation import Generation, check_apart, damage, load, read_slots
from nearstep.storage.header import MAGIC, Header, read_header

BATCH = 1024
"""Extents read by one transfer."""

Progress = Callable[[int], None]
"""Called with the bytes read since the last call."""


@dataclass
class GenerationReport:
    """Result of the check of a generation.

    Attributes
    ----------
    extents : number, without holes.
    nbytes : of whole blocks, without holes.
    problems : of the index and the extents.
    """

    number: int
    tensors: int = 0
    extents: int = 0
    nbytes: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass
class SetReport:
    """Result of the check of a set of drives.

    Attributes
    ----------
    generations : newest first.
    notes : traces of an interrupted commit, without loss of data.
    problems : of the set.
    """

    set_id: str
    owner: str
    drives: list[str]
    generations: list[GenerationReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Return whether all data is intact."""
        return not self.problems and not any(each.problems for each in self.generations)


def sets_of(paths: Sequence[str | Path]) -> dict[uuid.UUID, list[Path]]:
    """Group drives by their set.

    A folder stands for all drives in it; a drive that is named twice counts once.

    Raises
    ------
    IncompleteSetError : drives of a set are missing.
    """
    folders = [each for each in paths if Path(each).is_dir()]
    named = [e for p in paths for e in (drives_in(p) if p in folders else [Path(p)])]
    found: dict[uuid.UUID, list[Path]] = {}
    headers: dict[uuid.UUID, list[Header]] = {}
    for path in {each.resolve(): each for each in reversed(named)}.values():
        blocks = BlockFile(path, direct=False, read_only=True)
        try:
            header = read_header(blocks)
        finally:
            blocks.close()
        found.setdefault(header.set_id, []).insert(0, path)
        headers.setdefault(header.set_id, []).insert(0, header)
    for each in headers.values():
        indices = [header.index for header in each]
        if sorted(indices) != list(range(each[0].drives)):
            raise IncompleteSetError(each[0].drives, indices, MAGIC, _no_drives(folders))
    return found


def _no_drives(folders: Sequence[str | Path]) -> dict[str, bytes]:
    """Return the files in folders that begin with other bytes than a drive, with those bytes."""
    begun = (each for folder in folders for each in beginnings(folder).items())
    return {str(path): begin for path, begin in begun if begin != MAGIC}


def check_drives(
    places: Sequence[DriveLike],
    *,
    direct: bool = True,
    queue_depth: int = QUEUE_DEPTH,
    progress: Progress = lambda nbytes: None,
) -> SetReport:
    """Read all data of a set of drives without writing.

    Parameters
    ----------
    places : all drives of the set.
    direct, queue_depth : as `nearstep.storage.store.Store.open`.
    """
    drives = open_set(places, owner=None, direct=direct, queue_depth=queue_depth, read_only=True)
    try:
        return _check(drives, progress)
    finally:
        for drive in drives:
            drive.close()


def _check(drives: Sequence[Drive], progress: Progress) -> SetReport:
    header = drives[0].header
    report = SetReport(str(header.set_id), header.owner, [drive.name for drive in drives])
    whole: list[Generation] = []
    slots = read_slots(drives[0].blocks, header)
    report.notes, damaged = damage(drives[0].name, slots)
    report.problems += map(str, damaged)
    for slot in slots:
        if slot.superblock is not None:
            try:
                whole.append(load(drives, slot))
            except StorageError as error:
                torn = GenerationReport(slot.superblock.generation, problems=[str(error)])
                report.generations.append(torn)
    if not any(slot.superblock for slot in slots):
        report.problems.append("there is no superblock, and so no generation")
    known: dict[Run, str] = {}
    kept = {e.number: e for each in whole for e in each.kept.values()}
    whole += [kept[number] for number in kept.keys() - {each.number for each in whole}]
    for generation in sorted(whole, key=lambda each: -each.number):
        report.generations.append(_check_generation(drives, generation, known, progress))
    report.generations.sort(key=lambda each: -each.number)
    if whole:
        try:
            check_apart(whole)
        except StorageError as error:
            report.problems.append(str(error))
    return report


def _check_generation(
    drives: Sequence[Drive], generation: Generation, known: dict[Run, str], progress: Progress
) -> GenerationReport:
    """Read the extents that no earlier generation shares; `known` maps each extent to its
    problem."""
    report = GenerationReport(generation.number, len(generation.tensors), meta=generation.meta)
    if generation.damage:
        report.problems.append(f"generation {generation.number}: {generation.damage}")
    extents = _extents(drives, generation)
    while batch := list(islice(extents, BATCH)):
        new = [each for each in batch if each[1].run not in known]
        known.update((extent.run, "") for _, extent in new)
        if new:
            jobs = [(drives[e.drive], _job(source, e, known)) for source, e in new]
            DriveTransfer(f"check of generation {generation.number}", jobs).begin().wait()
            progress(sum(extent.blocks for _, extent in new) * BLOCK_BYTES)
        report.extents += len(batch)
        report.nbytes += sum(extent.blocks for _, extent in batch) * BLOCK_BYTES
        report.problems += [known[e.run] for _, e in batch if known[e.run]]
    return report


def _extents(drives: Sequence[Drive], generation: Generation) -> Iterator[tuple[Source, ExtentRow]]:
    for tensor in generation.tensors.values():
        source = Source(drives, tensor.name, tensor.nbytes, generation.number, ())
        for extent in tensor.table.extents():
            if not extent.is_hole:
                yield source, extent


def _job(source: Source, extent: ExtentRow, known: dict[Run, str]) -> Job:
    def job(bounces: Bounces) -> None:
        try:
            with bounces.lend(extent.blocks * BLOCK_BYTES) as blocks:
                source.read(extent, blocks)
        except StorageError as error:
            known[extent.run] = error.reason if isinstance(error, TornExtentError) else str(error)

    return job
