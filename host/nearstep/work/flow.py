"""Transfers that share links: a fluid model with max-min fair shares.

A transfer waits for its latency, then its bytes flow at one rate over all links of its route. Rates
are max-min fair: none can rise except at the cost of one that is not higher. Rates change when a
transfer begins or ends, and are constant in between. Packets, windows and routing are not modelled.
A lane that both directions share may have a rate for each: they share its time.

*Numerics*: rates and bytes are exact fractions, so the result does not depend on the machine or the
order of the transfers. Events are at whole cycles: a transfer ends at the first cycle by which all
of its bytes have been moved, and its share is free from then on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil

from nearstep.errors import ArgumentError
from nearstep.work.clock import Clock
from nearstep.work.operation import Transfer


def max_min(
    rates: Mapping[str, Fraction], uses: Sequence[Mapping[str, int | Fraction]]
) -> Sequence[Fraction]:
    """Compute the max-min fair rate of each flow, by progressive filling.

    All rates rise together; when a link is full, the rates of its flows are fixed, and the others
    continue.

    Parameters
    ----------
    rates : of each link, above 0.
    uses : by flow and link, multiples of its rate that the flow uses; at least one.
    """
    left = dict(rates)
    flows: dict[str, list[int]] = {}
    weights: dict[str, int | Fraction] = {}
    for flow, use in enumerate(uses):
        for link, times in use.items():
            flows.setdefault(link, []).append(flow)
            weights[link] = weights.get(link, 0) + times
    found: list[Fraction | None] = [None] * len(uses)
    while weights:
        full = min(weights, key=lambda link: (left[link] / weights[link], link))
        rate = left[full] / weights[full]
        for flow in flows[full]:
            if found[flow] is None:
                found[flow] = rate
                for link, times in uses[flow].items():
                    left[link] -= times * rate
                    weights[link] -= times
                    if not weights[link]:
                        del weights[link]
    return [rate for rate in found if rate is not None]


class Flows:
    """Transfers in flight, and their ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[tuple[str, int], float] = {}
        """Bytes a second of each lane and direction."""
        self._first: dict[str, float] = {}
        """Of each lane, in the direction that was announced first."""
        self._rates: dict[str, Fraction] = {}
        """The same in bytes a cycle."""
        self._waiting: list[tuple[int, int]] = []  # cycle at which it begins to flow, and number
        self._uses: dict[int, dict[str, int | Fraction]] = {}
        self._at = 0
        """Cycle of the last event."""
        self._left: dict[int, Fraction] = {}  # bytes of those that flow, at that cycle
        self._shares: dict[int, Fraction] = {}  # bytes a cycle of these, from there
        self._ends: dict[int, int] = {}  # and where they end by that

    def announce(self, transfers: Iterable[Transfer]) -> None:
        """Announce transfers.

        Raises
        ------
        ArgumentError : the clock has no frequency, or a link has two rates in one direction;
            nothing was announced.
        """
        known, first = dict(self._known), dict(self._first)
        for transfer in transfers:
            self._clock.cycles(transfer.latency_s)  # raises if it cannot
            for hop in transfer.route:
                rate = known.setdefault((hop.lane, hop.direction), hop.bytes_per_s)
                first.setdefault(hop.lane, rate)
                if rate != hop.bytes_per_s:
                    raise ArgumentError(
                        f"{hop.lane}: bytes_per_s must be {float(rate)}, as before, "
                        f"not {hop.bytes_per_s}"
                    )
        hertz = Fraction(self._clock.hertz or 1)
        self._known, self._first = known, first
        self._rates = {lane: Fraction(rate) / hertz for lane, rate in first.items()}

    def start(self, number: int, transfer: Transfer, cycle: int) -> None:
        """Start a transfer, which first waits for its latency.

        Parameters
        ----------
        number : unique.
        transfer : an announced one.
        cycle : not before the current time.
        """
        uses: dict[str, int | Fraction] = {}
        for hop in transfer.route:
            first = self._first[hop.lane]
            times = 1 if first == hop.bytes_per_s else Fraction(first) / Fraction(hop.bytes_per_s)
            uses[hop.lane] = uses.get(hop.lane, 0) + times
        self._uses[number] = uses
        self._left[number] = Fraction(int(transfer.nbytes))
        begins = cycle + self._clock.cycles(transfer.latency_s)
        heapq.heappush(self._waiting, (begins, number))

    @property
    def next(self) -> int | None:
        """Cycle at which the next transfer begins to flow or ends."""
        begins = [self._waiting[0][0]] if self._waiting else []
        return min([*begins, *self._ends.values()], default=None)

    def advance(self, cycle: int) -> list[tuple[int, int]]:
        """Advance time to a cycle.

        Returns
        -------
        list[tuple[int, int]] : number and last cycle of each ended transfer, in order.
        """
        ended: list[tuple[int, int]] = []
        while (event := self.next) is not None and event <= cycle:
            ended += [(number, event) for number in self._pass(event)]
        return ended

    def _pass(self, cycle: int) -> list[int]:
        """Move bytes until an event, and recompute the rates.

        Returns
        -------
        list[int] : ended transfers.
        """
        for number, share in self._shares.items():
            self._left[number] -= share * (cycle - self._at)
        self._at = cycle
        flowing = list(self._shares)
        while self._waiting and self._waiting[0][0] <= cycle:
            flowing.append(heapq.heappop(self._waiting)[1])
        ended = sorted(number for number in flowing if self._left[number] <= 0)
        for number in ended:
            del self._left[number], self._uses[number]
        flowing = [number for number in flowing if number in self._left]
        found = max_min(self._rates, [self._uses[number] for number in flowing])
        self._shares = dict(zip(flowing, found, strict=True))
        self._ends = {n: cycle + ceil(self._left[n] / share) for n, share in self._shares.items()}
        return ended
