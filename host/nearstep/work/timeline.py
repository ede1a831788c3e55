"""Times of the operations of a graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from nearstep.work.operation import Operation, Transfer
from nearstep_spec.platform.machine import Hop


@dataclass(frozen=True, slots=True)
class Entry:
    """An operation with its time, in cycles of the clock.

    Attributes
    ----------
    start, end : from before the host's commands that start it, to the detection of its end, when
        its dependents may start.
    cycles : counted by the device itself, if any.
    """

    operation: Operation
    start: int
    end: int
    cycles: int | None = None

    @property
    def duration(self) -> int:
        """Cycles in which it holds its resources."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The execution of a graph.

    Attributes
    ----------
    entries : in the order in which the operations were started.
    hertz : cycles in a second, if known.
    unit : `cycles`, or `steps` of a device without a clock.
    """

    entries: Sequence[Entry]
    hertz: float | None
    unit: str = "cycles"

    @property
    def makespan(self) -> int:
        """Cycles from the first start to the last end; 0 of no operations."""
        if not self.entries:
            return 0
        return max(e.end for e in self.entries) - min(e.start for e in self.entries)

    @property
    def seconds(self) -> float | None:
        """The makespan in seconds, if the clock has a frequency."""
        return None if self.hertz is None else self.makespan / self.hertz

    @property
    def lanes(self) -> dict[str, list[Entry]]:
        """Operations of each resource, in order; resources in the order of their first use."""
        lanes: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in self.entries:
            for resource in entry.operation.holds:
                lanes[resource].append(entry)
        return dict(lanes)

    def _hops(self) -> Iterator[tuple[Entry, Transfer, Hop]]:
        for entry in self.entries:
            if (transfer := entry.operation.transfer) is not None:
                yield from ((entry, transfer, hop) for hop in transfer.route)

    @property
    def links(self) -> dict[str, list[Entry]]:
        """Transfers on each link and direction, in order; links in the order of their first use."""
        links: defaultdict[str, dict[int, Entry]] = defaultdict(dict)
        for entry, _, hop in self._hops():
            links[hop.lane][entry.operation.index] = entry  # once, if the route has it twice
        return {lane: list(entries.values()) for lane, entries in links.items()}

    @property
    def traffic(self) -> Mapping[tuple[str, int], int]:
        """Bytes moved over each link, by name and direction, also of half-duplex links; and those
        read (0) and written (1) at the ends of the routes.
        """
        counted: Counter[tuple[str, int]] = Counter()
        for _, transfer, hop in self._hops():
            counted[hop.link, hop.direction] += int(transfer.nbytes)
        return dict(counted)

    @property
    def least(self) -> Mapping[str, int]:
        """Cycles that each link, as in `links`, needs for its bytes alone."""
        needed: defaultdict[str, Fraction] = defaultdict(Fraction)
        for _, transfer, hop in self._hops():
            needed[hop.lane] += Fraction(int(transfer.nbytes)) / Fraction(hop.bytes_per_s)
        hertz = Fraction(self.hertz or 0)
        return {lane: ceil(seconds * hertz) for lane, seconds in needed.items()}

    @property
    def limit(self) -> int:
        """Cycles of the busiest resource, or of the link with the most bytes: a lower bound of the
        makespan.
        """
        held = [sum(entry.duration for entry in each) for each in self.lanes.values()]
        return max([*held, *self.least.values()], default=0)

    def busy(self, resource: str) -> int:
        """Cycles in which a resource is held."""
        return sum(entry.duration for entry in self.lanes.get(resource, ()))

    @classmethod
    def joined(cls, timelines: Sequence[Timeline]) -> Timeline:
        """Concatenate timelines of consecutive graphs on one clock, at least one.

        Actions, and data that they refer to, are not kept.
        """
        entries: list[Entry] = []
        first = 0
        for each in timelines:
            for entry in each.entries:
                old = entry.operation
                new = replace(
                    old,
                    index=first + old.index,
                    needs=tuple(first + need for need in old.needs),
                    action=None,
                )
                entries.append(replace(entry, operation=new))
            first += len(each.entries)
        return cls(entries, timelines[0].hertz, timelines[0].unit)

    def critical_path(self) -> Sequence[Entry]:
        """Return the longest chain of dependent operations."""
        entries = sorted(self.entries, key=lambda entry: entry.operation.index)
        place = {entry.operation.index: i for i, entry in enumerate(entries)}
        longest: list[int] = []
        before: list[int] = []
        for entry in entries:
            needs = [place[each] for each in entry.operation.needs]
            last = max(needs, key=lambda i: longest[i], default=-1)
            before.append(last)
            longest.append(entry.duration + (longest[last] if last >= 0 else 0))
        path: list[Entry] = []
        i = max(range(len(entries)), key=lambda i: longest[i], default=-1)
        while i >= 0:
            path.append(entries[i])
            i = before[i]
        return path[::-1]
