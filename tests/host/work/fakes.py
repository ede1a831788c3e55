"""Graphs for tests, and a device that does nothing but take time."""

from __future__ import annotations

import random
from collections.abc import Sequence

from nearstep.backends.base import Completion
from nearstep.errors import DeviceError
from nearstep.run import check_bound
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Range

SPACES = ("dram", "drive")
RESOURCES = ("bus", "kernel", "link")


def random_graph(seed: int, count: int, span: int = 40) -> Graph:
    """Operations with ranges that often overlap, on few resources; some named needs."""
    rng = random.Random(seed)
    graph = Graph()

    def ranges() -> list[Range]:
        found = []
        for _ in range(rng.randrange(3)):
            start = rng.randrange(span)
            found.append(Range(rng.choice(SPACES), start, start + rng.randrange(span // 4)))
        return found

    for index in range(count):
        graph.add(
            f"operation {index}",
            *rng.sample(RESOURCES, rng.randint(1, 2)),
            reads=ranges(),
            writes=ranges(),
            after=rng.sample(list(graph), min(len(graph), rng.choice((0, 0, 0, 1, 2)))),
            seconds=rng.randrange(5) * 1e-12,
            priority=rng.randrange(3),
        )
    return graph


def conflict(one: Operation, other: Operation) -> bool:
    """Whether two operations touch the same bytes, one of them as a writer: compared pairwise."""

    def overlap(left: Sequence[Range], right: Sequence[Range]) -> bool:
        return any(
            a.space == b.space and max(a.start, b.start) < min(a.stop, b.stop)
            for a in left
            for b in right
        )

    return (
        overlap(one.writes, other.reads)
        or overlap(one.reads, other.writes)
        or overlap(one.writes, other.writes)
    )


class FakeBackend:
    """A device whose work ends after a number of cycles, with a log of what happens to it."""

    def __init__(self, cycles: int = 0) -> None:
        self.cycles: int | None = cycles
        self.work: list[FakeWork] = []
        self.log: list[str] = []
        self.raises: BaseException | None = None

    def advance(self, max_cycles: int, polls: Sequence[object] = ()) -> None:
        assert self.cycles is not None
        if self.raises is not None:
            raise self.raises
        ends = [each.end for each in self.work if each.end > self.cycles]
        self.cycles = min([self.cycles + max_cycles, *ends])


class FakeWork(Completion):
    """Work of a fake device; the host needs some cycles for the command."""

    def __init__(
        self,
        backend: FakeBackend,
        name: str,
        lasts: int,
        *,
        error: Exception | None = None,
        bound: int | None = None,
        command_cycles: int = 0,
    ) -> None:
        self.backend = backend
        self.name = name
        backend.cycles += command_cycles
        self.begun = backend.cycles
        self.end = backend.cycles + lasts
        self.aborted = False
        self._error, self._bound = error, bound
        backend.work.append(self)
        backend.log.append(f"start {name} at {self.begun}")

    @property
    def ended(self) -> bool:
        return self.aborted or self.backend.cycles >= self.end

    @property
    def error(self) -> Exception | None:
        return self._error if self.ended else None

    @property
    def cycles(self) -> int | None:
        return self.end - self.begun if self.ended else None

    @property
    def bound(self) -> int | None:
        return self._bound

    def wait(self, max_cycles: int | None = None) -> FakeWork:
        check_bound(max_cycles)
        if not self.ended and max_cycles == 0:
            raise DeviceError(f"{self.name} did not end")
        self.backend.cycles = max(self.backend.cycles, self.end)
        self.backend.log.append(f"end {self.name} at {self.backend.cycles}")
        if self.error is not None:
            raise self.error
        return self

    def abort(self, max_cycles: int | None = None) -> None:
        self.aborted = True
        self.backend.log.append(f"abort {self.name} at {self.backend.cycles}")
