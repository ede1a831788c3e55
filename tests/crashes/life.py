"""Drives that live through faults: what a store, a training and a rank have in common."""

from __future__ import annotations

import random
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest import mock
from uuid import UUID

from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_errors import (
    DamagedSuperblockWarning,
    NotADriveError,
    StorageError,
    TornExtentError,
    TornIndexError,
)
from nearstep_sim.models.drive import Event, Journal, MemoryBlocks, Write, after_cut

from ..host.storage.drives import memory_set
from .media import Lie, power_cut, rot, superblocks_on
from .turns import Turns

LIES = {
    "lost": "a write was acknowledged and lost",
    "misdirected": "a write went to another block",
    "unflushed": "flushes were acknowledged and not done",
}
PROFILES = (*["honest"] * 6, *["errors"] * 2, *["rot"] * 3, *LIES, "lost", "misdirected")
ENDS = [at * BLOCK_BYTES for at in (1, 2, -1, -2)]
"""Where superblocks are."""

DEEPEST = 4
"""Cuts of a seed, at most: what follows the first one is a recovery, or a life after it."""


class WrongError(AssertionError):
    """What is on the drives is neither a generation that is guaranteed nor a typed error."""


@dataclass
class Tally:
    """What a seed met.

    Attributes
    ----------
    faults, outcomes : numbers of each kind.
    digest : CRC-32 of all that was on the drives after each fault: equal seeds have equal ones.
    """

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    digest: int = 0

    def see(self, images: Sequence[bytes]) -> None:
        for image in images:
            self.digest = zlib.crc32(image, self.digest)


@cache
def new_set(drives: int, blocks: int) -> Sequence[bytes]:
    """Images of new drives; equal sizes have equal images."""
    with mock.patch("uuid.uuid4", return_value=UUID(int=drives << 64 | blocks)):
        return memory_set(drives, blocks)


@contextmanager
def heard() -> Iterator[list[warnings.WarningMessage]]:
    """Warnings, each as often as it is given."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


class Life:
    """One set of drives, and the process that has them open.

    Attributes
    ----------
    images, events : what is on the drives, and what was written since and may not be flushed yet.
    journal, places : of the life that goes on.
    before, ready : events when it began, and when it had recovered.
    cut : event at which the life before ended.
    doubtful : it ended with an error whose effect is unknown.
    lied : a drive has done other than it said.
    rotten, fresh : blocks whose bits have flipped, by drive, and those since the last life.
    warned : a warning told of damage by an error.
    """

    def __init__(self, rng: random.Random, tally: Tally, images: Sequence[bytes]) -> None:
        self.rng, self.tally, self.images = rng, tally, list(images)
        self.profile = rng.choice(PROFILES)
        self.turns = Turns(rng)
        self.events: list[Event] = []
        self.cut = self.before = self.ready = 0
        self.lied = self.warned = self.doubtful = False
        self.rotten: set[tuple[int, int]] = set()
        self.fresh: set[tuple[int, int]] = set()

    @property
    def is_honest(self) -> bool:
        """Whether nothing but power and errors that were said have failed so far."""
        return not self.lied and not self.rotten

    @property
    def has_to_recover(self) -> bool:
        """Whether nothing that is guaranteed can be lost: one block is rotten at most."""
        return not self.lied and len(self.rotten) < 2

    def begin(self) -> list[bytes]:
        """The power is on: what the drives hold."""
        self.turns.power_off()
        self.now = applied(self.images, self.events)
        self.tally.see(self.now)
        self.before = len(self.events)
        self.journal = Journal(list(self.events))
        self.doubtful = False
        return self.now

    def plug(self, images: Sequence[bytes]) -> list[MemoryBlocks]:
        """Drives with these contents, in any order."""
        self.places = [MemoryBlocks(each, at, self.journal) for at, each in enumerate(images)]
        return self.rng.sample(self.places, len(self.places))

    def arm(self, faulty: str) -> None:
        """Some drives will lie."""
        rng = self.rng
        most = 4 if faulty == "unflushed" else 12
        for place in [rng.choice(self.places), self.places[0]][: 1 + (faulty == "unflushed")]:
            place.lie = Lie(faulty, rng.randrange(most), rng.randrange(place.count))
            place.caches = rng.random() < 0.6

    def end(self, faulty: str, depth: int) -> None:
        """The process ends at some event of its life, and mostly the power with it."""
        rng, events = self.rng, self.journal.events
        at = rng.randint(self.before, len(events))
        if rng.random() < 0.3:  # while it recovers
            at = min(at, self.before + rng.randrange(8))
        self.end_at(len(events) if self.doubtful else at, faulty, depth)

    def end_at(self, at: int, faulty: str, depth: int) -> None:
        rng, faults, events = self.rng, self.tally.faults, self.journal.events[:at]
        faults["cuts or kills during recovery"] += at < self.ready
        faults["cuts or kills after another"] += depth > 0
        self.turns.power_off()
        self.cut, self.fresh = at, set()
        if rng.random() < 0.15 and not self.doubtful:
            faults["kills"] += 1
            self.events = events  # the power stays
        else:
            self.images, self.events = power_cut(self.images, events, rng, faults), []
        if faulty == "rot":
            written = [
                (each.drive, each.block + block)
                for each in events
                if isinstance(each, Write)
                for block in range(len(each.data) // BLOCK_BYTES)
            ]
            self.images, self.rotten = rot(applied(self.images, self.events), rng, written)
            self.events, self.fresh = [], self.rotten
            faults["rotten blocks"] += len(self.rotten)
        for place in self.places:
            if isinstance(place.lie, Lie) and place.lie.told:
                self.lied = True
                faults[f"lies: {LIES[place.lie.kind]}"] += 1

    def hear(self, said: Sequence[warnings.WarningMessage]) -> None:
        """Opening warns of what no power cut explains, and of nothing else."""
        for each in said:
            if not isinstance(each.message, DamagedSuperblockWarning):
                raise WrongError(f"it warned: {each.message}")
            if self.is_honest and not self.warned:
                raise WrongError(f"a power cut was called damage: {each.message}")

    def outcome(self, number: int, last: bool, least: int, most: int, *, said: bool) -> None:
        """Judge the generation that was found.

        Parameters
        ----------
        number : of it.
        last : whether it is one of those that are guaranteed, numbers `least` to `most`.
        said : the store has warned, or noted damage.
        """
        there = superblocks_on(self.now[0])
        is_there = any(each >= least for each in there.values())
        if last:
            kind = "the generation in progress" if number == most > least else "the last generation"
        elif self.is_honest or (self.has_to_recover and is_there):
            raise WrongError(f"the last generation is {number}, not one from {least} to {most}")
        elif said:
            kind = "an older generation, and said so"
        elif is_there:
            raise WrongError(f"generation {number} without a word, and {least} is on the drive")
        else:
            kind = "an older generation: no superblock of the last one is on the drive"
        self.tally.outcomes[kind] += 1
        first, second = ({each: there.get(side * each, -1) for each in (1, 2)} for side in (1, -1))
        lost = [each for each in (1, 2) if 0 <= first[each] < second[each]]
        twice = max(first[1], second[1]) == max(first[2], second[2]) >= 0
        rotten = {(0, at % len(self.now[0]) // BLOCK_BYTES) for at in ENDS} & self.fresh
        if (lost or twice or rotten) and not said:
            raise WrongError(f"superblocks {there}, {rotten} rotten, without a word")

    def index_blocks(self, number: int) -> set[tuple[int, int]] | None:
        """Blocks, by drive, of the indices that generations of this number have had; None: they are
        not known."""
        return None

    def check_error(self, error: StorageError) -> None:
        """It names what is damaged."""
        self.tally.outcomes[f"typed error: {type(error).__name__}"] += 1
        if self.is_honest:
            raise WrongError(f"after a power cut: {error!r}")
        if type(error) is StorageError:
            raise WrongError(f"nothing is named: {error!r}")
        if self.lied:
            return
        if isinstance(error, NotADriveError):
            drive = int(error.path.removeprefix("memory"))
            if (drive, 0) not in self.rotten:
                raise WrongError(f"not in {self.rotten}: {error!r}")
        if isinstance(error, TornExtentError):
            drive = int(error.path.removeprefix("memory"))
            named = {(drive, error.block + each) for each in range(error.blocks)}
            if not named & self.rotten:
                raise WrongError(f"not in {self.rotten}: {error!r}")
        if isinstance(error, TornIndexError):
            own = self.index_blocks(error.generation)
            if own is not None and not own & self.rotten:
                raise WrongError(f"index {own}, and {self.rotten} rotten: {error!r}")


def applied(images: Sequence[bytes], events: Sequence[Event]) -> list[bytes]:
    """Return what drives hold while the power is on."""
    every = {at: range(64) for at in range(len(events))}
    return after_cut(images, events, every) if events else list(images)
