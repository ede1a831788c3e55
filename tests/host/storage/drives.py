"""Stores on drives in memory, and what they should hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_errors import UncertainCommitError
from nearstep.storage.drive_set import create_set
from nearstep.storage.store import Store
from nearstep_sim.models.drive import FailAt, Flush, Journal, MemoryBlocks

OWNER = "a test"
EXTENT = 2 * BLOCK_BYTES

State = dict[str, bytes]
"""Bytes of each tensor."""


def memory_set(drives: int = 2, blocks: int = 64, extent_bytes: int = EXTENT) -> list[bytes]:
    """Images of new drives."""
    places = [MemoryBlocks(bytes(blocks * BLOCK_BYTES), each) for each in range(drives)]
    create_set(places, drive_bytes=blocks * BLOCK_BYTES, owner=OWNER, extent_bytes=extent_bytes)
    return images_of(places)


def open_images(
    images: Sequence[bytes], journal: Journal | None = None, **options: Any
) -> tuple[Store, list[MemoryBlocks]]:
    """A store on drives with these contents."""
    places = [MemoryBlocks(image, at, journal) for at, image in enumerate(images)]
    return Store.open(places, owner=OWNER, **options), places


def images_of(holder: Store | Sequence[MemoryBlocks]) -> list[bytes]:
    """What the drives of a store, or those given, hold."""
    places = [each.blocks for each in holder.drives] if isinstance(holder, Store) else holder
    return [bytes(place.image) for place in places]


def reopened(holder: Store | Sequence[MemoryBlocks], **options: Any) -> Store:
    """A store on what these drives hold."""
    return open_images(images_of(holder), **options)[0]


def contents(store: Store, generation: int | None = None) -> State:
    """All that a generation holds, or all that was written last."""
    source = store if generation is None else store.at(generation)
    state = {}
    for name, tensor in source.tensors.items():
        out = bytearray(tensor.nbytes)
        source.read(name, out)
        state[name] = bytes(out)
    return state


NEVER = 1 << 60


@dataclass
class Commit:
    """A commit as a journal has it.

    Attributes
    ----------
    begun : events before its superblock was written, flushed, and written a second time.
    ended : events when it returned.
    """

    state: State
    meta: dict[str, Any]
    begun: int
    ended: int


@dataclass
class Recorded:
    """A store with a journal, and a plain model of what it should hold.

    Attributes
    ----------
    gone : events when a generation was given up before its time, by number.
    """

    images: list[bytes]
    journal: Journal = field(default_factory=Journal)
    commits: dict[int, Commit] = field(default_factory=dict)
    gone: dict[int, int] = field(default_factory=dict)
    state: State = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store, self.places = open_images(self.images, self.journal, queue_depth=2)
        self.commits[0] = Commit({}, {}, 0, 0)

    def add(self, name: str, nbytes: int) -> None:
        self.store.add(name, nbytes)
        self.state[name] = bytes(nbytes)

    def remove(self, name: str) -> None:
        self.store.remove(name)
        del self.state[name]

    def write(self, name: str, data: bytes, offset: int = 0) -> None:
        self.store.write(name, data, offset)
        old = self.state[name]
        self.state[name] = old[:offset] + data + old[offset + len(data) :]

    def commit(self, **meta: Any) -> None:
        number = self.store.commit(meta)
        ended = len(self.journal.events)
        self.commits[number] = Commit(dict(self.state), meta, ended - 3, ended)

    def commit_in_doubt(self, **meta: Any) -> None:
        """The last flush fails, and the process with it; the power stays.

        The superblock is there for the next process, and lasts from the next flush on.
        """
        number = self.store.generation + 1
        self.places[0].fault = FailAt("flush", 1)
        with pytest.raises(UncertainCommitError):
            self.store.commit(meta)
        begun = len(self.journal.events) - 1
        self.commits[number] = Commit(dict(self.state), meta, begun, NEVER)
        self.store.close()
        self.store, self.places = open_images(images_of(self.places), self.journal, queue_depth=2)
        assert self.store.generation == number

    def finish(self) -> None:
        """Close the store, and see when what was in doubt was flushed."""
        self.store.close()
        for each in self.commits.values():
            if each.ended == NEVER:
                later = self.journal.events[each.begun :]
                each.ended = each.begun + later.index(Flush(0)) + 1

    def abort(self) -> None:
        self.store.abort()
        self.state = dict(self.commits[self.store.generation].state)

    def drop_other(self) -> None:
        before = set(self.store.generations)
        begun = len(self.journal.events)
        self.store.drop_other()
        for number in before - set(self.store.generations):
            self.gone[number] = begun


def random_bytes(rng: np.random.Generator, nbytes: int) -> bytes:
    return rng.integers(0, 256, nbytes, np.uint8).tobytes()
