"""Where a step to go on from is: drives of cards in one directory, and processes of one job."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES, BlockFile, sync_folder
from nearstep.storage.drive_errors import (
    DriveAccessError,
    DriveSizeError,
    ForeignDriveError,
    IncompleteSetError,
    NoGenerationError,
    NotADriveError,
    StorageError,
)
from nearstep.storage.generation import read_slots
from nearstep.storage.header import HEADER_BLOCK, read_header
from nearstep.storage.store import Store
from nearstep.torch.homes.errors import RanksDifferError, ResumeError

NAME = re.compile(r"card[0-9]+of([0-9]+)\.nearstep")
"""Files in the place of drives, of so many cards."""

REPLACES = "replaces"
"""In meta data: the set that all was copied from, which is given up."""


class Step(NamedTuple):
    """That a set of drives has one.

    Attributes
    ----------
    replaces : another set; empty: none.
    """

    places: Sequence[Path]
    set_id: str
    replaces: str


def moved_from(places: Sequence[str], owner: str) -> Sequence[Path]:
    """Drives in the directory of these with the step to go on from; none: these have it, or nobody.

    What a move that was interrupted has left over is removed: drives without a step beside some
    that have it, and drives whose step others have taken over.

    Parameters
    ----------
    places : drives of the cards, one each.

    Raises
    ------
    ResumeError : it is not clear which ones.
    StorageError
    """
    own = [Path(each) for each in places]
    here = _step(own, owner)
    if here is not None and here.replaces:
        remove([each for each in _files(own) if _set_of(each) == here.replaces])
    others = [found for each in _siblings(own) if (found := _step(each, owner)) is not None]
    stale = {each.replaces for each in others}
    for each in [each for each in others if each.set_id in stale]:
        others.remove(each)
        remove(each.places)
    if not others:
        return ()
    if here is not None and here.set_id not in stale:
        return ()
    if here is None and not _is_left_over(own, stale):
        return ()  # what is the matter is said when they are opened
    if len(others) > 1:
        counts = " and of ".join(str(len(each.places)) for each in others)
        raise ResumeError(f"a step of {owner} on one set", f"on those of {counts} cards")
    remove(own[::-1] if here is None else own)
    return others[0].places


def remove(places: Sequence[Path]) -> None:
    """Remove drives of a set, the first one before all others.

    Of a set with generations that is the one that has them: what is left then is none.

    Raises
    ------
    DriveAccessError
    """
    for at in (0, 1) if places else ():
        try:
            for path in places[at:]:
                path.unlink(missing_ok=True)
                if not at:
                    break
            sync_folder(places[0].parent)
        except OSError as error:
            name = str(places[0].parent)
            raise DriveAccessError(name, f"cannot remove drives: {error}", error.errno) from error


def _files(own: Sequence[Path]) -> list[Path]:
    """Other files in the directory that are called as drives of cards, the first of each set before
    its others."""
    folder = own[0].parent
    found = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [folder / each for each in found if NAME.fullmatch(each) and folder / each not in own]


def _siblings(own: Sequence[Path]) -> list[list[Path]]:
    """Other sets of drives of which all files are there."""
    folder = own[0].parent
    found = (NAME.fullmatch(each.name) for each in _files(own))
    counts = {int(each[1]) for each in found if each is not None} - {len(own)}
    sets = [[folder / f"card{i}of{count}.nearstep" for i in range(count)] for count in counts]
    return [each for each in sorted(sets, key=len) if each and all(map(os.path.lexists, each))]


def _step(places: Sequence[Path], owner: str) -> Step | None:
    """The last step of a set; None: it is none, or another optimizer's, or has none."""
    if not all(map(os.path.lexists, places)):
        return None
    try:
        store = Store.open(places, owner=None, read_only=True)
    except (NotADriveError, ForeignDriveError, IncompleteSetError, NoGenerationError):
        return None
    with store:
        if store.meta.get("owner") != owner:
            return None
        set_id = str(store.drives[0].header.set_id)
        return Step(places, set_id, str(store.meta.get(REPLACES, "")))


def _is_left_over(own: Sequence[Path], replaced: Container[str]) -> bool:
    """Whether nothing was ever committed to drives, or others have replaced them; that there are
    none counts as well."""
    if not os.path.lexists(own[0]):
        left = [each for each in own if os.path.lexists(each)]
        return all(_set_of(each) in replaced for each in left)
    with _opened(own[0]) as blocks:
        try:
            slots = read_slots(blocks, read_header(blocks))
        except StorageError:
            return _is_blank(blocks)
    found = [each.superblock.generation for each in slots if each.superblock is not None]
    return not any(found) and not any(slot.lost for slot in slots)


def _set_of(path: Path) -> str | None:
    """The set that a drive is of; None: it is no drive."""
    with _opened(path) as blocks:
        try:
            return str(read_header(blocks).set_id)
        except (NotADriveError, DriveSizeError):
            return None


def _is_blank(blocks: BlockFile) -> bool:
    """Whether a drive has no header yet."""
    block = aligned_bytes(BLOCK_BYTES)
    if blocks.count:
        blocks.read(HEADER_BLOCK, block)
    return not block.any()


@contextmanager
def _opened(path: Path) -> Iterator[BlockFile]:
    blocks = BlockFile(path, direct=False, read_only=True)
    try:
        yield blocks
    finally:
        blocks.close()


TIMEOUT_S = 120.0
"""Seconds after which a rank that does not resume is named."""

_calls = itertools.count()


class Made(NamedTuple):
    """How far a generation is.

    Attributes
    ----------
    steps : and checkpoints that were loaded.
    changes : generations since, of what the host changed between steps.
    life : of the ranks that made it (`nearstep.torch.homes.ranks.Ranks`); empty: of one process.
    """

    steps: int
    changes: int
    life: str = ""

    @classmethod
    def of(cls, meta: Mapping[str, Any], generation: int) -> Made:
        """What the meta data of a generation says; of one that does not, its number."""
        return cls(*meta.get("made", (generation if meta else 0, 0)))


def agree(
    generations: Mapping[int, Mapping[str, Any]],
    last: int,
    *,
    common: bool,
    exchange: Callable[[Any], dict[int, Any]],
) -> int:
    """Find the generation that this process goes on from.

    All processes of the default group of `torch.distributed`, if there is one, say what they have.

    Parameters
    ----------
    generations : meta data of those that this process has, by number.
    last : the one that it goes on from unless `common`.
    common : go on from the last step that all have.
    exchange : tells all ranks what this one has, and returns what each has.

    Raises
    ------
    RanksDifferError : the last steps differ, or no step is `common`; or a process does not resume.
    """
    own = {number: Made.of(meta, number) for number, meta in generations.items()}
    said = exchange(list({last: own[last], **own}.items()))
    ranks = {
        rank: {number: Made(*made) for number, made in each or ()} for rank, each in said.items()
    }
    shared = newest(list(ranks.values()))
    if common:
        if shared is None:
            raise RanksDifferError(steps_of(ranks), None)
        return max(number for number, made in own.items() if made == shared)
    if len({next(iter(each.values()), None) for each in ranks.values()}) > 1:
        raise RanksDifferError(steps_of(ranks), shared.steps if shared else None)
    return last


def newest(ranks: Sequence[Mapping[int, Made]]) -> Made | None:
    """Return the last generation that all ranks have; None: there is none.

    The order is that of commits to the first one's drives: a generation that was restored follows
    those that had more steps.
    """
    shared = set.intersection(*(set(each.values()) for each in ranks))
    return max((pair for pair in ranks[0].items() if pair[1] in shared), default=(0, None))[1]


def failed() -> None:
    """Say that this process cannot resume, so that others need not wait for it."""
    if not is_alone():
        _tell([])


def exchange(own: Any) -> dict[int, Any]:
    """Gather a value in JSON from each rank through the store of the default group; None of a rank
    that writes none within `TIMEOUT_S`."""
    if is_alone():
        return {0: own}
    store, call = _tell(own)
    keys = [f"{call}/{rank}" for rank in range(dist.get_world_size())]
    found: dict[int, Any] = {}
    end = time.monotonic() + TIMEOUT_S
    for rank, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=max(1.0, end - time.monotonic())))
        except RuntimeError:  # torch's own, of a time that is over
            found[rank] = None
            continue
        found[rank] = json.loads(store.get(key))
    return found


def _tell(own: Any) -> tuple[Any, int]:
    """Say what this process has; the store that all use, and which exchange it is."""
    from torch._C._distributed_c10d import PrefixStore  # some builds of torch have none

    call = next(_calls)
    group = dist.distributed_c10d._get_default_group()
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store
    store = PrefixStore(f"nearstep/resume/{life}", dist.distributed_c10d._world.pg_map[group][1])
    store.set(f"{call}/{dist.get_rank()}", json.dumps(own))
    return store, call


def is_alone() -> bool:
    """Whether there are no other processes in the default group."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def steps_of(ranks: Mapping[int, Mapping[int, Made]]) -> dict[int, dict[int, int]]:
    """Return how many steps each generation of each rank has."""
    return {
        rank: {number: made.steps for number, made in each.items()} for rank, each in ranks.items()
    }
