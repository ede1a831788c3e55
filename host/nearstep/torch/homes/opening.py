"""Drives for the parameters of an optimizer, and how these share memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_errors import NotADriveError, OwnerError, StorageError
from nearstep.storage.drive_set import create_set, drives_in
from nearstep.storage.generation import GenerationView
from nearstep.storage.store import Store
from nearstep.storage.unfinished import unfinished
from nearstep.torch import convert
from nearstep.torch.budget import budget_bytes
from nearstep.torch.dtensor import chunk, is_dtensor
from nearstep.torch.homes import resume
from nearstep.torch.homes.errors import NothingToResumeError, ResumeError
from nearstep.torch.homes.ranks import Ranks
from nearstep.torch.homes.resume import Made, moved_from, remove
from nearstep.torch.homes.segments import HELD_BACK
from nearstep.torch.settings import COMMON, Drives, Overflow

GENERATIONS = 3
"""That are on the drives at once: the last one, the one before, and the one that is written."""

SPARE_BYTES = 16 << 20
"""Of each drive, for indices."""


class OpenStore:
    """The drives of an optimizer that is being made.

    Parameters
    ----------
    moments : arrays of state that a parameter can have besides itself.
    extent_bytes : of a new store.
    residual : it can have what error feedback holds back, too.
    block : bytes of an array by which one drive may have more of it than another.
    cards : the drives are those of cards.
    ranks : processes that share the parameters.

    Attributes
    ----------
    source : another that has the step to go on from, or None.
    restored : a kept generation that the store goes back to, or None.
    replaces : whether the other is removed once the step has been copied.
    owns : it was opened here.
    """

    def __init__(
        self,
        options: Overflow,
        title: str,
        groups: Sequence[Any],
        moments: int,
        *,
        extent_bytes: int,
        residual: bool = False,
        block: int = 0,
        cards: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        assert options.drives is not None  # `Overflow.on`
        self._parameters = tensors_of(groups)
        self._options = options
        self._resumes = options.resume is not False
        self._made: list[str] = []
        self._folder: Path | None = None
        self._cards = cards
        self.ranks = Ranks() if ranks is None else ranks
        self._is_shared = ranks is not None
        is_flat = not all(isinstance(each, Mapping) for each in groups)
        self._shards = shards([groups] if is_flat else groups)
        owner = describe(title, map(tensors_of, groups))
        drives = options.drives
        self.owns = not isinstance(drives, Store)
        self.source: Store | None = None
        self.restored: GenerationView | None = None
        self._left: Sequence[Path] = ()
        chosen = options.generation is not None and ranks is None
        self._is_agreed = options.resume is False or chosen
        try:
            moves = cards and self._resumes and not self._is_shared  # ranks would not move at once
            if moves and not options.others and not isinstance(drives, Store):
                self._left = moved_from([str(each) for each in drives], owner)
            others = drives_of(options.others) if options.others else self._left
            if others:
                self.source = self._at_agreed(
                    lambda number: _opened(others, owner, number, read_only=True)
                )
            there = () if self.source is None else self.source.tensors
            kept = moments + (residual or any(HELD_BACK in name for name in there))
            self.store = self._open(drives, owner, kept, block, extent_bytes)
        except BaseException:
            self._close_source()
            self._remove_made()
            if not self._is_agreed:
                self.ranks.failed()
            raise

    def _at_agreed(self, at: Callable[[int | None], Store]) -> Store:
        """Open drives to go on from, at the generation that was asked for, or, if none was, at one
        that all ranks agree on.

        Parameters
        ----------
        at : opens them; None: at the last generation.
        """
        store = at(self._options.generation)
        try:
            check_shards(store.meta, self._shards)
            if self._is_agreed:
                return store
            chosen, last = self._options.generation is not None, store.generation
            common = not chosen and (self._is_shared or self._options.resume == COMMON)
            self._is_agreed = True
            try:
                number = resume.agree(
                    store.generations, last, common=common, exchange=self.ranks.exchange
                )
            except BaseException:
                self.ranks.end()
                raise
        except BaseException:
            if store is not self._options.drives:
                store.close()
            raise
        if number == last:
            return store
        if store is not self._options.drives:
            store.close()
        return at(number)

    def _open(
        self, drives: Drives, owner: str, moments: int, block: int, extent_bytes: int
    ) -> Store:
        if isinstance(drives, Store):
            self._check(drives, owner)
            if self._resumes and self.source is None:
                self._restore(self._at_agreed(lambda number: _given_at(drives, number)))
            return drives
        if self._resumes and self.source is None:
            left = unfinished(drives)
            if left:
                raise NothingToResumeError(f"a step of {owner}", left)
            store = self._at_agreed(lambda number: _opened(drives, owner, number, read_only=False))
            if self._options.generation is None and store.generation < max(store.generations):
                store.drop_other()  # others do not have it
            try:
                self._restore(store)
            except BaseException:
                store.close()
                raise
            return store
        arrays = (1 + moments) * len(self._parameters)
        state = 4 * (1 + moments) * self._elements + BLOCK_BYTES * arrays
        share = GENERATIONS * (state // len(drives) + block * (1 + moments)) + SPARE_BYTES
        made = [str(each) for each in drives if not os.path.lexists(each)]
        if self._cards:
            self._make_folder(Path(drives[0]).parent)
        nbytes = -(-share // BLOCK_BYTES) * BLOCK_BYTES
        try:
            create_set(drives, drive_bytes=nbytes, owner=owner, extent_bytes=extent_bytes)
        except NotADriveError as error:
            error.add_note("resume=True goes on with the step that is there")
            raise
        self._made = made
        return Store.open(drives, owner=owner)

    def _restore(self, store: Store) -> None:
        """Go back to the generation that was asked for by its name, on all ranks."""
        name = self._options.kept
        if not name:
            return
        self._is_agreed = False
        if name not in store.kept:
            named = ", ".join(map(repr, store.kept)) or "none"
            raise ResumeError(f"a generation named {name!r}", named)
        view = store.at(store.kept[name])
        check_shards(view.meta, self._shards)
        self._is_agreed = True
        try:
            here = {view.number: view.meta}
            resume.agree(here, view.number, common=False, exchange=self.ranks.exchange)
        except BaseException:
            self.ranks.end()
            raise
        self.restored = store.restore(name)

    def _make_folder(self, folder: Path) -> None:
        """Have the folder of the cards' drives; one that cannot be is said by the drives."""
        if not folder.exists():
            with contextlib.suppress(OSError):
                folder.mkdir()
                self._folder = folder

    def _remove_made(self) -> None:
        """Remove the drives that were made here, and their folder."""
        for path in self._made:
            Path(path).unlink(missing_ok=True)
        if self._folder is not None:
            with contextlib.suppress(OSError):  # others use it
                self._folder.rmdir()

    @property
    def replaces(self) -> bool:
        return bool(self._left)

    def discard_source(self) -> None:
        """The optimizer has been made: what it was copied from is not needed any more, and of cards
        in the same directory removed.
        """
        self._close_source()
        if self._left:
            remove(self._left)

    def _close_source(self) -> None:
        if self.source is not None:
            self.source.close()

    def _check(self, store: Store, owner: str) -> None:
        found = store.meta.get("owner")
        if self._resumes and self.source is None:
            if found is None and not store.tensors:
                raise NothingToResumeError(f"a step of {owner}", ())
            if found is None:
                raise ResumeError(f"a step of {owner}", "none")
            if found != owner:
                raise OwnerError(store.drives[0].name, owner, str(found))
        elif store.tensors:
            raise ResumeError("no tensors, or be resumed from", f"{len(store.tensors)} of {found}")

    @property
    def _elements(self) -> int:
        return sum(0 if is_lazy(p) else convert.size(p) for p in self._parameters)

    def memory(self, moments: int) -> int:
        """Bytes of memory that were asked for, where state has that many moments."""
        assert self._options.memory is not None  # `Overflow.on`
        return budget_bytes(self._options.memory, 4 * (2 + moments) * self._elements, "memory")

    def give_up(self) -> None:
        """Leave everything as it was before."""
        self._close_source()
        if self.owns:
            self.store.close()
        else:
            with contextlib.suppress(StorageError):  # what is the matter has been said
                self.store.abort()
        self._remove_made()


def drives_of(given: Sequence[str | Path]) -> Sequence[Path]:
    """Drives by their paths, or all of a folder."""
    paths = map(Path, given)
    return [one for each in paths for one in (drives_in(each) if each.is_dir() else [each])]


def _given_at(store: Store, generation: int | None) -> Store:
    """A store that the caller opened, which has to be at a generation."""
    if generation not in (None, store.generation):
        expected = f"a Store that was opened with generation={generation}"
        raise ResumeError(expected, f"one at {store.generation}")
    return store


def _opened(
    places: Sequence[str | Path], owner: str, generation: int | None, *, read_only: bool
) -> Store:
    """Drives with a step to go on from; of a later owner than they were made for, if the optimizer
    has had other parameters since."""
    store = Store.open(places, owner=None, generation=generation, read_only=read_only)
    found = store.meta.get("owner")
    if found == owner:
        return store
    store.close()
    if found is not None:
        raise OwnerError(str(places[0]), owner, str(found))
    store.drives[0].header.check_owner(str(places[0]), owner)
    raise ResumeError(f"a step of {owner}", "none")


def given_groups(params: ParamsT) -> Any:
    """The parameters of an optimizer, so that they can be looked at twice."""
    if isinstance(params, Tensor):
        return params  # torch says what is wrong
    return [
        {**each, "params": list(each["params"])}
        if isinstance(each, dict) and "params" in each and not isinstance(each["params"], Tensor)
        else each
        for each in params
    ]


def tensors_of(groups: Any) -> list[Tensor]:
    """Every tensor of what `given_groups` returns; torch says what is wrong with the rest."""
    if isinstance(groups, Tensor):
        return [groups]
    parts = groups.get("params", ()) if isinstance(groups, Mapping) else groups
    if isinstance(parts, Tensor) or not isinstance(parts, list | tuple):
        return [parts] if isinstance(parts, Tensor) else []
    return [found for each in parts for found in tensors_of(each)]


def has_step(drives: Drives, ranks: Ranks) -> bool:
    """Return whether drives of any rank have a step; otherwise remove drives without one.

    Drives with the constructor's parameters alone have none, beside those of a rank that has not
    begun: a first commit that was cut off.
    """
    own = _made(drives)
    found = list(ranks.exchange([own]).values())
    # A rank that did not answer is named when the drives are opened.
    made = [] if None in found else [each[0] for each in found]
    if None not in made or not all(each in (None, [0, 0]) for each in made):
        return True
    if not isinstance(drives, Store):
        places = list(map(Path, drives))
        with ranks.together():
            remove(places if own else places[::-1])
    return False


def _made(drives: Drives) -> Sequence[int] | None:
    """Return how far the last generation of drives is; None: they have none."""
    if isinstance(drives, Store):
        return list(Made.of(drives.meta, 0)[:2]) if drives.meta else None
    if not any(map(os.path.lexists, drives)):
        return None
    try:
        if unfinished(drives):
            return None
        with Store.open(drives, owner=None, read_only=True) as store:
            return list(Made.of(store.meta, store.generation)[:2])
    except StorageError:
        return [1, 0]  # what is wrong is said when they are opened


def describe(title: str, groups: Iterable[Iterable[Tensor]]) -> str:
    """Name of an optimizer and its parameters: others have another one."""
    shapes = [
        [str(p.dtype), None if is_lazy(p) else list(p.shape)] for group in groups for p in group
    ]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
    return f"{title} of {len(shapes)} parameters, {digest}"


def shards(groups: Iterable[Any]) -> dict[str, Any]:
    """Which part of each parameter this process has, for a generation's meta data.

    Parameters
    ----------
    groups : as of `given_groups`.
    """
    found = [tensors_of(each) for each in groups]
    is_shared = any(map(is_dtensor, chain(*found)))
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_shared else (0, 1)
    parts = [[None if is_lazy(p) else chunk(p) for p in group] for group in found]
    return {"rank": rank, "ranks": ranks, "parts": json.loads(json.dumps(parts))}


def check_shards(meta: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `ResumeError` if a generation has other shards; one of a release without shards has
    whole parameters."""
    found = meta.get("shards")
    if found is None or found == own:
        if found is None and own["ranks"] > 1 and meta:
            raise ResumeError(f"shards of rank {own['rank']}", "those of a process alone")
        return
    names = [f"the shards of rank {each['rank']} of {each['ranks']}" for each in (own, found)]
    if names[0] == names[1]:
        names[1] += " in other placements"
    hint = ": nearstep.torch.checkpoint.GenerationReader loads them elsewhere"
    raise ResumeError(names[0], names[1] + hint)


def places(groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, tuple[int, int]]:
    """Group of each parameter, and place in it."""
    return {
        parameter: (index, position)
        for index, group in enumerate(groups)
        for position, parameter in enumerate(group["params"])
    }
