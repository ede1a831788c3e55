"""An exception at any bytecode of a step: one generation or the next, and further steps work."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from nearstep.storage.blocks import BLOCK_BYTES, Bytes
from nearstep.storage.drive_errors import FailedGenerationError
from nearstep.storage.extents import HOLE
from nearstep.storage.store import Store
from nearstep_sim.models.drive import MemoryBlocks

from ...interrupts import Interrupts
from .drives import EXTENT, OWNER, State, contents, memory_set, random_bytes

P_BYTES, Q_BYTES = 4 * EXTENT + 500, 30
BEFORE = 2
"""Steps that are not interrupted, before the one that is."""


class GuardedBlocks(MemoryBlocks):
    """A drive that is told whenever it is written."""

    guard: Guard

    def write(self, block: int, data: Bytes) -> None:
        self.guard.check(self._drive, block, data.nbytes // BLOCK_BYTES)
        super().write(block, data)


class Guard:
    """Compares what is written with what the index on the drives says: no extent of a generation
    that is there is ever written."""

    def __init__(self, places: Sequence[GuardedBlocks]) -> None:
        self.checked = 0
        self.wrong: list[str] = []
        self._places = places
        self._seen: dict[bytes, list[tuple[int, int, int, int]]] = {}
        for each in places:
            each.guard = self

    def check(self, drive: int, block: int, blocks: int) -> None:
        self.checked += 1
        for generation, there, start, count in self._live():
            if there == drive and start < block + blocks and block < start + count:
                self.wrong.append(f"block {block} of drive {drive}: of generation {generation}")

    def _live(self) -> list[tuple[int, int, int, int]]:
        image = self._places[0].image
        key = bytes(image[BLOCK_BYTES : 3 * BLOCK_BYTES] + image[-2 * BLOCK_BYTES :])
        if key not in self._seen:
            with read_only(self._places) as store:
                self._seen[key] = [
                    (generation.number, int(row["drive"]), int(row["block"]), int(row["blocks"]))
                    for generation in store._held
                    for row in generation.extents()
                    if row["drive"] != HOLE
                ]
        return self._seen[key]


def read_only(places: Sequence[MemoryBlocks]) -> Store:
    """The drives as they are now, as another process sees them."""
    copies = [MemoryBlocks(bytes(each.image), at) for at, each in enumerate(places)]
    return Store.open(copies, owner=OWNER, read_only=True, queue_depth=1)


def step(store: Store, state: State, number: int) -> State:
    """Write whole and in part, add and remove, give up and commit: the state that this leads to."""
    rng = np.random.default_rng(number)
    new = {**state, "p": random_bytes(rng, P_BYTES)}
    store.submit_write("p", new["p"])
    part = random_bytes(rng, 10)
    store.write("q", part, 7)
    new["q"] = state["q"][:7] + part + state["q"][17:]
    if number % 2:
        store.remove("r")
    name = "rs"[number % 2]
    store.add(name, EXTENT)
    del new["sr"[number % 2]]
    new[name] = random_bytes(rng, EXTENT)
    store.write(name, new[name])
    store.write("p", part, 100)
    new["p"] = new["p"][:100] + part + new["p"][110:]
    if number % 2 == 0:
        store.remove("s")
    if number % 4 == 3:
        store.drop_other()
    assert store.commit({"step": number})
    return new


def begun() -> tuple[Store, list[GuardedBlocks], Guard, State]:
    """A store that has made some steps."""
    images = memory_set(2, 48)
    places = [GuardedBlocks(image, at) for at, image in enumerate(images)]
    guard = Guard(places)
    store = Store.open(places, owner=OWNER, queue_depth=2)
    state = {"p": bytes(P_BYTES), "q": bytes(Q_BYTES), "s": bytes(5)}
    for name, data in state.items():
        store.add(name, len(data))
    for number in range(BEFORE):
        state = step(store, state, number)
    return store, places, guard, state


def step_state(state: State, number: int) -> State:
    """What a step leads to."""
    store = Store.open(
        [MemoryBlocks(each) for each in memory_set(1, 64)], owner=OWNER, queue_depth=1
    )
    for name, data in state.items():
        store.add(name, len(data))
        store.write(name, data)
    with store:
        return step(store, state, number)


class Life:
    """A store whose steps are interrupted."""

    def __init__(self) -> None:
        self.store, self.places, self.guard, self.state = begun()
        self.number = BEFORE

    def attempt(self, at: int) -> str | None:
        """A step that is interrupted at a bytecode; where, or None if it was made."""
        interrupts = Interrupts(at)
        new = step_state(self.state, self.number)
        try:
            with interrupts.armed():
                assert step(self.store, self.state, self.number) == new
        except KeyboardInterrupt:
            found = self.look([self.state, new])
            if found is new and self.store.meta.get("step") == self.number:
                self.state, self.number = new, self.number + 1  # the commit had ended
            return interrupts.where
        self.state, self.number = new, self.number + 1
        return None

    def look(self, expected: Sequence[State]) -> State:
        """What another process finds, which is one of these, and nothing that is half of one."""
        with read_only(self.places) as other:
            found = contents(other)
            assert found in expected
            for generation in other.generations:
                contents(other, generation)  # whole
        return next(each for each in expected if each == found)

    def abort(self, rng: random.Random) -> None:
        """Go back, at times interrupted as well."""
        if rng.random() < 0.3:
            try:
                with Interrupts(rng.randrange(1, 600)).armed():
                    self.store.abort()
            except KeyboardInterrupt:
                self.look([self.state, step_state(self.state, self.number)])
        self.store.abort()
        assert contents(self.store) == self.state
        self.look([self.state])

    def go_on(self, steps: int) -> None:
        """Further steps work."""
        for _ in range(steps):
            before, generation = self.state, self.store.generation
            self.state = step(self.store, self.state, self.number)
            dropped = self.number % 4 == 3
            self.number += 1
            assert contents(self.store) == self.state
            if not dropped:
                assert contents(self.store, generation) == before
            assert self.look([self.state]) == self.state
        assert self.guard.wrong == []

    def commit(self, rng: random.Random) -> None:
        """Commit what there is of a step that was interrupted."""
        number = self.store.generation
        try:
            assert self.store.commit({"step": "half"}) > number
        except FailedGenerationError:
            self.abort(rng)
            return
        found = contents(self.store)
        self.look([found])
        for name in found:
            self.store.remove(name)
        for name, data in self.state.items():
            self.store.add(name, len(data))
            self.store.write(name, data)
        self.store.commit({"step": self.number - 1})

    def restart(self) -> None:
        """Another process takes over."""
        images = [bytes(each.image) for each in self.places]
        self.store.close()
        self.places = [GuardedBlocks(image, each) for each, image in enumerate(images)]
        wrong, self.guard = self.guard.wrong, Guard(self.places)
        assert wrong == []
        self.store = Store.open(self.places, owner=OWNER, queue_depth=2)
        self.state = self.look([self.state, step_state(self.state, self.number)])
        self.number += self.store.meta["step"] == self.number


def interrupted(at: int, rng: random.Random) -> bool:
    """A step is interrupted at a bytecode, and the next one perhaps as well; whether it was."""
    life = Life()
    where = []
    try:
        for again in (at, rng.randrange(1, 8_000)):
            where.append(life.attempt(again))
            rng.choice([life.abort, life.commit, lambda _: life.restart()])(rng)
            life.go_on(rng.randrange(3))
        life.go_on(3)
        life.restart()
        life.go_on(1)
    except BaseException as error:
        error.add_note(f"interrupted at {at}, {where}")
        raise
    finally:
        life.store.close()
    assert life.guard.checked > 0
    return where[0] is not None


def bytecodes() -> int:
    """Of a step."""
    store, _, _, state = begun()
    interrupts = Interrupts()
    with interrupts.armed():
        step(store, state, BEFORE)
    store.close()
    return interrupts.count


def test_a_step_that_is_interrupted_at_some_bytecodes_leaves_one_generation() -> None:
    print("seed 14")
    rng = random.Random(14)
    places = rng.sample(range(1, bytecodes()), 40)
    assert sum(interrupted(at, rng) for at in places) > 30


@pytest.mark.deep
@pytest.mark.parametrize("part", range(8))
def test_a_step_interrupted_at_every_third_bytecode_leaves_one_generation(
    part: int,
) -> None:
    print(f"seed {part}")
    rng, count = random.Random(part), bytecodes()
    places = range(1 + part, count, 24)  # every third bytecode, in eight parts
    assert sum(interrupted(at, rng) for at in places) > 0.95 * len(places)
