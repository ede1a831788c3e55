"""Ranks that commit generations together, of which some die between messages.

Ranks run one after the other, each to its end: between two messages that all exchange nothing of
one depends on another. So a crash is a choice of an event of each rank that lies between the same
two messages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from nearstep.storage.drive_errors import DriveFullError, StorageError
from nearstep.storage.store import Store
from nearstep.torch.homes import resume
from nearstep.torch.homes.ranks import COMMIT, Ranks
from nearstep.torch.homes.resume import Made

from ..host.storage.drives import OWNER
from .life import Life, Tally, WrongError, heard, new_set

NBYTES = 9_000
MOST = 4
"""Steps of a life, at most."""


class Rank(Life):
    """One rank and its drives.

    Attributes
    ----------
    states : bytes of its tensor after each step that was made, by `Made`.
    messages : events when each message was sent that all wait for.
    ended : events when each step's commit had returned.
    """

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        super().__init__(rng, tally, new_set(rng.randint(1, 2), 24))
        self.states: dict[Made, bytes] = {Made(0, 0): bytes(NBYTES)}
        self.messages: list[int] = []
        self.ended: dict[Made, int] = {}

    def open(self, number: int | None = None, images: Sequence[bytes] | None = None) -> None:
        order = self.plug(self.begin() if images is None else images)
        with heard() as said:
            self.store = Store.open(order, owner=OWNER, generation=number, queue_depth=2)
        self.hear(said)

    def send(self) -> None:
        """A message that others wait for."""
        self.messages.append(len(self.journal.events))


class Group:
    """Ranks whose messages are those of one group of processes."""

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        self.rng, self.tally = rng, tally
        self.members = [Rank(rng, tally) for _ in range(rng.randint(2, 3))]
        self.lives = 0

    def run(self) -> None:
        for member in self.members:
            member.turns = self.members[0].turns
        least = Made(0, 0)
        deepest = self.rng.randint(1, 3)
        with self.members[0].turns.installed(), self.network():
            for depth in range(deepest + 1):
                made = self.agree(least)
                if depth == deepest:
                    return
                self.train(made, least)
                least = self.crash(made, depth)

    # -- messages ---------------------------------------------------------------------------------

    @contextmanager
    def network(self) -> Iterator[None]:
        """Every rank hears what it says itself, and of the one that fails that it does."""
        self.speaks = self.members[0]
        self.fails: Rank | None = None

        def gather(found: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
            self.speaks.send()
            for member, each in zip(self.members, found, strict=True):
                each.copy_(mine)
                if member is self.fails and int(mine[1]) == COMMIT:
                    each[0] = 1

        with (
            mock.patch.object(dist, "all_gather", gather),
            mock.patch.object(dist, "get_world_size", return_value=len(self.members)),
        ):
            yield

    # -- recovery ---------------------------------------------------------------------------------

    def agree(self, least: Made) -> Made:
        """All ranks go on from one step, bit by bit."""
        said: dict[int, Any] = {}

        def tell(own: Any) -> dict[int, Any]:
            rank = len(said)
            said[rank] = own
            return {rank: own}

        for member in self.members:
            member.open()
            member.messages.clear()
            member.send()
            here = member.store.generations, member.store.generation
            resume.agree(*here, common=False, exchange=tell)
        found = set()
        for rank, member in enumerate(self.members):
            store = member.store
            here = store.generations, store.generation
            number = resume.agree(*here, common=True, exchange=lambda own: said)
            if number < store.generation:
                images = [bytes(each.image) for each in member.places]
                store.close()
                self.tally.outcomes["ranks that gave up a step which others had not"] += 1
                member.open(number, images)
                member.store.drop_other()
            member.ready = len(member.journal.events)
            made = Made.of(member.store.meta, 0)
            found.add(made)
            data = bytearray(NBYTES)
            if made.steps:
                member.store.read("p", data)
            if data != member.states[made]:
                raise WrongError(f"wrong bits of rank {rank} after {made}, without a word")
        if len(found) != 1:
            raise WrongError(f"ranks go on from {found}")
        (made,) = found
        if made.steps < least.steps:
            raise WrongError(f"all had {least}, and go on from {made}")
        self.tally.outcomes["ranks went on from one step"] += 1
        return made

    # -- life -------------------------------------------------------------------------------------

    def train(self, made: Made, least: Made) -> None:
        """Steps, some of which fail on one rank, are rolled back on all, and made again."""
        self.lives += 1
        wanted = self.rng.randrange(MOST + 1)
        script = [self.rng.choice([None] * 5 + self.members) for _ in range(wanted)]
        for member in self.members:
            self.speaks, at = member, made
            member.ended = {made: member.messages[0], least: 0}
            ranks = Ranks(f"life {self.lives}", group=self)
            if not made.steps and "p" not in member.store.tensors:
                member.store.add("p", NBYTES)
            for self.fails in script:
                after = Made(at.steps + 1, 0, ranks.life)
                try:
                    with ranks.together():
                        self.step(member, ranks, at, after)
                except StorageError:
                    if self.fails is None:
                        raise
                    member.store.abort()
                    if not made.steps and "p" not in member.store.tensors:
                        member.store.add("p", NBYTES)
                    continue
                if self.fails is not None:
                    raise WrongError("a rank made a step that failed on another")
                member.ended[after] = len(member.journal.events)
                at = after
        self.fails = None

    def step(self, member: Rank, ranks: Ranks, at: Made, made: Made) -> None:
        ranks.any(at, flag=False)
        old = member.states[at]
        first = self.rng.randrange(NBYTES) if self.rng.random() < 0.5 else 0
        data = self.rng.randbytes(NBYTES - first)
        member.store.submit_write("p", data, first)
        if self.fails is member:
            raise DriveFullError(NBYTES, 0)
        member.states[made] = old[:first] + data
        member.store.commit({"made": list(made)}, decide=lambda: ranks.prepared(made))

    def crash(self, made: Made, depth: int) -> Made:
        """Every rank dies between the same two messages; return the last step that all had."""
        counts = {len(member.messages) for member in self.members}
        if len(counts) != 1:
            raise WrongError(f"ranks have sent {counts} messages")
        sent = self.rng.randrange(-1, counts.pop())
        all_had = []
        for member in self.members:
            marks = [member.before, *member.messages, len(member.journal.events)]
            cut = self.rng.randint(marks[sent + 1], marks[sent + 2])
            member.end_at(cut, "honest", depth)
            had = [each for each, ended in member.ended.items() if ended <= cut]
            all_had.append(max(had, key=lambda each: each.steps))
        self.tally.faults["crashes of ranks between two messages"] += 1
        return min(all_had, key=lambda each: each.steps)
