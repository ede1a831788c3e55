"""Power is cut at every write and flush: the drives hold one generation or the next, whole."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_errors import ForeignDriveError, NotADriveError, StorageError
from nearstep.storage.drive_set import create_set
from nearstep_sim.models.drive import Journal, MemoryBlocks, Write, after_cut, every_cut, unflushed

from .drives import (
    EXTENT,
    OWNER,
    Recorded,
    contents,
    images_of,
    memory_set,
    open_images,
    random_bytes,
    reopened,
)
from .mistakes import (
    both_copies_at_once,
    over_the_last_generation,
    over_the_last_superblock,
    without_a_flush_when_it_is_opened,
    without_flush_of_the_payload,
    without_flushes,
)


def small(drives: int, *, doubt: bool = True) -> Recorded:
    """A short life: writes whole and in part, twice, tensors that come and go, what is given up
    and what is thrown away."""
    rng = np.random.default_rng(5)
    life = Recorded(memory_set(drives, 24))
    life.add("p", 20_000)
    life.add("q", 5)
    life.write("p", random_bytes(rng, 20_000))
    life.write("q", b"first")
    life.commit(step=1)
    life.write("p", random_bytes(rng, 9_000), 3_000)
    life.commit(step=2)
    life.remove("q")
    life.write("p", random_bytes(rng, 100), 19_000)
    life.write("p", random_bytes(rng, 100), 19_050)
    life.commit(step=3)
    life.write("p", random_bytes(rng, 10), 9_000)
    if doubt:
        life.commit_in_doubt(step=4)
    else:
        life.commit(step=4)
    rest = min(life.store.free_bytes, 10 * BLOCK_BYTES)
    life.add("r", rest)
    life.write("r", random_bytes(rng, rest))
    life.abort()
    life.drop_other()
    life.add("q", 4_096)
    life.write("q", random_bytes(rng, 4_096))
    life.write("p", random_bytes(rng, 20_000))
    life.commit(step=5)
    life.finish()
    return life


def large(seed: int) -> Recorded:
    """A long life at random."""
    rng = np.random.default_rng(seed)
    life = Recorded(memory_set(int(rng.integers(1, 4)), 160))
    for step in range(12):
        for _ in range(int(rng.integers(1, 9))):
            name = f"t{rng.integers(0, 6)}"
            if name not in life.state:
                life.add(name, int(rng.integers(0, 40_000)))
            elif rng.random() < 0.1:
                life.remove(name)
                continue
            nbytes = len(life.state[name])
            first, last = sorted(int(each) for each in rng.integers(0, nbytes + 1, 2))
            if rng.random() < 0.3:
                first, last = 0, nbytes
            life.write(name, random_bytes(rng, last - first), first)
        chance = rng.random()
        if chance > 0.9:
            life.commit_in_doubt(step=step)
        elif chance < 0.1:
            life.abort()
        elif chance < 0.2:
            life.drop_other()
        else:
            life.commit(step=step)
    life.finish()
    return life


def allowed(life: Recorded, cut: int) -> tuple[set[int], set[int]]:
    """Generations that may be the last after a cut behind so many events, and those that must be
    there beside it or as it."""
    done = max(number for number, each in life.commits.items() if each.ended <= cut)
    begun = {number for number, each in life.commits.items() if each.begun < cut < each.ended}
    must = {done}
    before = max((number for number in life.commits if number < done), default=None)
    if before is not None and not begun and not life.gone.get(before, cut) < cut:
        must.add(before)
    return {done, *begun}, must


def check(life: Recorded, cut: int, images: list[bytes], *, go_on: bool) -> int:
    """Open the drives, see that all is of one generation, and that one can go on."""
    store, _ = open_images(images, queue_depth=1)
    last, must = allowed(life, cut)
    assert store.generation in last, (cut, store.generation, last)
    assert must <= set(store.generations), (cut, store.generations, must)
    looked = 0
    for number, meta in store.generations.items():
        assert meta == life.commits[number].meta
        assert contents(store, number) == life.commits[number].state, (cut, number)
        looked += 1
    if go_on:
        number, before = store.generation, contents(store)
        store.drop_other()
        data = random_bytes(np.random.default_rng(cut), 6_000)
        store.add("later", 6_000)
        store.write("later", data)
        store.commit({"step": "later"})
        store.close()
        store = reopened(store)
        assert contents(store) == {**before, "later": data}
        assert contents(store, number) == before
        looked += 2
    store.close()
    return looked


def cut_everywhere(life: Recorded, most: int, every: int, go_on: int, seed: int = 1) -> int:
    """Cut behind each event (of `every` so many one), in every way. Go on after one of `go_on`."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    cuts, looked = 0, 0
    for cut in range(rng.randrange(every), len(life.journal.events) + 1, every):
        events = life.journal.events[:cut]
        for kept in every_cut(events, most, rng):
            images = after_cut(life.images, events, kept)
            looked += check(life, cut, images, go_on=cuts % go_on == 0)
            cuts += 1
    assert looked >= cuts > len(life.journal.events) // every
    return cuts


EVERY = 1 << 12
"""More than the subsets of what is ever not flushed in a short life."""


@pytest.mark.deep
@pytest.mark.parametrize("drives", [1, 2])
def test_every_subset_of_what_was_not_flushed_leaves_one_generation(drives: int) -> None:
    life = small(drives)
    events = life.journal.events
    assert sum(isinstance(event, Write) for event in events) > 20
    assert max(1 << len(unflushed(events[:cut])) for cut in range(len(events))) <= EVERY
    assert cut_everywhere(life, most=EVERY, every=1, go_on=32) > 1_500


def test_a_cut_behind_every_write_of_two_drives_leaves_one_generation() -> None:
    assert cut_everywhere(small(2), most=4, every=1, go_on=16) > 250


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_cut_while_an_older_generation_goes_on_is_not_called_damage(gives_up: bool) -> None:
    before = Recorded(memory_set(1, 24))
    before.add("p", 5_000)
    for number in (1, 2):
        before.write("p", bytes([number]) * 5_000)
        before.commit()
    images, journal = images_of(before.store), Journal()
    store, _ = open_images(images, journal, generation=1, queue_depth=1)
    if gives_up:
        store.drop_other()
    store.write("p", b"\3" * 5_000)
    store.commit()
    store.close()
    found, rng = set(), random.Random(4)
    for cut in range(len(journal.events) + 1):
        events = journal.events[:cut]
        for kept in every_cut(events, 64, rng):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                store, _ = open_images(after_cut(images, events, kept), queue_depth=1)
            found.add((store.generation, contents(store)["p"][0]))
            store.close()
    assert found == {(1, 1), (2, 2), (3, 3)}


@pytest.mark.parametrize("drives", [1, 2])
def test_a_cut_while_drives_are_made_leaves_them_new_or_none(drives: int) -> None:
    """On drives that had another set before: of that nothing is to be seen again."""
    life = small(drives)
    before = images_of(life.store)
    journal = Journal()
    places = [MemoryBlocks(image, at, journal) for at, image in enumerate(before)]
    create_set(places, drive_bytes=24 * BLOCK_BYTES, owner=OWNER, extent_bytes=EXTENT)
    rng, counts = random.Random(2), {"new": 0, "none": 0, "old": 0}
    for cut in range(len(journal.events) + 1):
        for kept in every_cut(journal.events[:cut], 64, rng):
            images = after_cut(before, journal.events[:cut], kept)
            try:
                store, _ = open_images(images, queue_depth=1)
            except (NotADriveError, ForeignDriveError):
                counts["none"] += 1
                continue
            if store.generation:  # nothing was written yet
                assert images == before
                counts["old"] += 1
            else:
                assert (dict(store.generations), contents(store)) == ({0: {}}, {})
                counts["new"] += 1
            store.close()
    assert min(counts.values()) >= 1
    assert counts["none"] > 50


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(5))
def test_cuts_of_long_lives(seed: int) -> None:
    assert cut_everywhere(large(seed), most=6, every=2, go_on=8, seed=seed) > 200


def test_cuts_of_a_long_life() -> None:
    assert cut_everywhere(large(3), most=2, every=20, go_on=8) > 20


@pytest.mark.parametrize(
    "mistake",
    [
        without_flushes, without_flush_of_the_payload, without_a_flush_when_it_is_opened,
        over_the_last_superblock, both_copies_at_once, over_the_last_generation,
    ],
)  # fmt: skip
def test_a_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these is an error that cuts must bring to light."""
    mistake(monkeypatch)
    life = small(1, doubt=mistake is without_a_flush_when_it_is_opened)
    with pytest.raises((AssertionError, StorageError)):
        # Every subset: in what order the threads of a drive write is a matter of time.
        cut_everywhere(life, most=EVERY, every=1, go_on=1 << 30)
