"""An optimizer whose state lies on drives: what is resumed is a step, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from nearstep.storage.drive_errors import StorageError
from nearstep.storage.store import Store
from nearstep_sim.models.drive import Flush

from ..host.overflow.jobs import Job, everything
from ..host.storage.drives import NEVER
from .life import LIES, Life, Tally, WrongError, heard, new_set

HOST = "host:"
JOBS = (
    Job(((4, 3), (3,))), Job(((40, 3), (90,)), "momentum"), Job(((5,), (7,)), "sgd"),
)  # fmt: skip
MOST = 12
"""Steps of a job."""


@cache
def steps(job: Job) -> Sequence[dict[str, bytes]]:
    """All bits after each number of steps, of an optimizer without drives."""
    parameters, optimizer = job.trained(HOST)
    states = [everything(parameters, optimizer)]
    for step in range(MOST):
        job.step(optimizer, parameters, step)
        states.append(everything(parameters, optimizer))
    return states


class Training(Life):
    """Lives of an optimizer on one set of drives."""

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        super().__init__(rng, tally, new_set(rng.randint(1, 2), 48))
        self.job = rng.choice(JOBS)
        self.ended = {0: 0}
        """Events when each step had been committed; those before the first are of step 0."""

    def run(self) -> None:
        deepest = self.rng.randint(1, 3)
        chosen = self.rng.randrange(deepest)
        with self.turns.installed():
            for depth in range(deepest + 1):
                begun = self.resume(depth)
                if begun is None or depth == deepest:
                    return
                faulty = self.profile if depth == chosen else "honest"
                if faulty in LIES:
                    self.arm(faulty)
                self.train(*begun, faulty)
                self.end(faulty, depth)

    def resume(self, depth: int) -> tuple[int, list[Any], Any] | None:
        """The optimizer after a step that is guaranteed; None: an error says what is damaged."""
        order = self.plug(self.begin())
        memory = self.rng.choice((1 << 11, 1 << 14))
        least = max(step for step, ended in self.ended.items() if ended <= self.cut)
        most = max(step for step in self.ended if step <= least + 1)
        try:
            with heard() as said:
                store = Store.open(order, owner=None, queue_depth=2)
                damage = bool(said or store.notes)
                if depth:
                    given = self.job.resumed(HOST, drives=store, memory=memory)
                else:
                    given = self.job.trained(HOST, drives=store, memory=memory)
                found = everything(*given)
        except StorageError as error:
            self.check_error(error)
            return None
        self.hear(said)
        if not depth:
            self.before = len(self.journal.events)  # what was begun anew is not cut
        self.ready = len(self.journal.events)
        step = store.generation - 1
        if not 0 <= step <= MOST or found != steps(self.job)[step]:
            raise WrongError(f"wrong bits after step {step}, without a word")
        self.outcome(store.generation, least <= step <= most, least + 1, most + 1, said=damage)
        self.tally.outcomes["trainings resumed, bit by bit"] += 1
        later = range(self.before, len(self.journal.events)) if self.events else ()
        flush = next((at for at in later if self.journal.events[at] == Flush(0)), self.before - 1)
        self.ended = {step: flush + 1, min(step, least): self.before}
        return step, *given

    def train(self, step: int, parameters: list[Any], optimizer: Any, faulty: str) -> None:
        for number in range(step, min(step + self.rng.randrange(4), MOST)):
            self.ended[number + 1] = NEVER
            try:
                self.job.step(optimizer, parameters, number)
            except StorageError:
                if faulty not in LIES and self.is_honest:
                    raise
                break
            self.ended[number + 1] = len(self.journal.events)
