"""Sums over many devices, compared with the RTL's cycles and with flows between all devices.

The flow simulation shares no code with ours: it has every device, every entry is a flow over the
links that it uses, and rates are max-min fair.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest

from nearstep.coarse.scale import (
    CORE_LATENCY,
    LINK_LATENCY,
    MEMORY_LATENCY,
    Fabric,
    all_reduce_cycles,
)
from nearstep.errors import ArgumentError
from nearstep_spec.coarse.config import MAX_DEVICES

MIB = 1 << 20
RTL = {(2, 1): 67_079, (4, 1): 50_551, (8, 1): 58_887, (8, 4): 233_607}
"""Cycles by devices and MiB, measured by `bench/bench_coarse.py` (docs/benchmarks.md)."""


@dataclass
class Flow:
    """Phits over links, one a cycle each, when others have ended and cycles have passed since."""

    phits: int
    links: tuple[str, ...]
    after: tuple[tuple[int, int], ...]


def flow_cycles(flows: Sequence[Flow]) -> list[Fraction]:
    """When each flow ends, by max-min fair shares."""
    users: list[list[tuple[int, int]]] = [[] for _ in flows]
    missing = [len(flow.after) for flow in flows]
    begins = [Fraction(0)] * len(flows)
    for number, flow in enumerate(flows):
        for other, delay in flow.after:
            users[other].append((number, delay))
    waiting = [(Fraction(0), number) for number, count in enumerate(missing) if not count]
    heapq.heapify(waiting)
    left: dict[int, Fraction] = {}
    ends = [Fraction(-1)] * len(flows)
    now = Fraction(0)
    while waiting or left:
        rates = shares([flows[number].links for number in left])
        left_over = dict(zip(left, rates, strict=True))
        steps = [left[number] / rate for number, rate in left_over.items()]
        step = min([*steps, *([waiting[0][0] - now] if waiting else [])])
        now += step
        for number, rate in left_over.items():
            left[number] -= rate * step
            if not left[number]:
                del left[number]
                ends[number] = now
                for user, delay in users[number]:
                    begins[user] = max(begins[user], now + delay)
                    missing[user] -= 1
                    if not missing[user]:
                        heapq.heappush(waiting, (begins[user], user))
        while waiting and waiting[0][0] <= now:
            number = heapq.heappop(waiting)[1]
            left[number] = Fraction(flows[number].phits)
    return ends


def shares(routes: Sequence[tuple[str, ...]]) -> list[Fraction]:
    """Max-min fair rates on links of one phit a cycle."""
    rates: dict[int, Fraction] = {}
    room = dict.fromkeys({link for route in routes for link in route}, Fraction(1))
    while len(rates) < len(routes):
        rest = [i for i in range(len(routes)) if i not in rates]
        using = Counter(link for i in rest for link in routes[i])
        level = min(room[link] / count for link, count in using.items())
        full = {link for link, count in using.items() if room[link] / count == level}
        for i in rest:
            if full & set(routes[i]):
                rates[i] = level
                for link in routes[i]:
                    room[link] -= level
    return [rates[i] for i in range(len(routes))]


def rings_of_rings(fabric: Fabric, entries: int, phits: int) -> list[Flow]:
    """The sum of one direction's chunk: in a rack, between racks, and in the rack again.

    Parameters
    ----------
    fabric
    entries : that go one after the other where `Fabric` has one, as one message.
    phits : of one.
    """
    flows: list[Flow] = []
    places = [(rack, device) for rack in range(fabric.racks) for device in range(fabric.devices)]
    arrived: dict[tuple[int, int], list[int]] = {place: [] for place in places}
    mine: dict[tuple[int, int], list[int]] = {place: [] for place in places}
    delay = 0
    steps = [False] * (fabric.devices - 1)
    steps += [True] * (2 * (fabric.racks - 1)) + [False] * (fabric.devices - 1)
    for between in steps:
        coming: dict[tuple[int, int], list[int]] = {}
        for rack, device in places:
            before = arrived[rack, device]
            count = 1 if between else fabric.racks
            sent = mine[rack, device]
            for entry in range(count):
                needs = [before[entry]] if len(before) == count else before
                after = [(each, delay) for each in needs]
                after += [(each, 0) for each in sent[-1:]]  # a device sends one at a time
                link = f"uplink {rack}" if between else f"link {rack} {device}"
                flows.append(Flow(entries * phits, (link,), tuple(after)))
                sent.append(len(flows) - 1)
            if between:
                coming[(rack + 1) % fabric.racks, device] = sent[-count:]
            else:
                coming[rack, (device + 1) % fabric.devices] = sent[-count:]
        arrived = coming
        delay = fabric.core_latency
        delay += fabric.uplink_latency if between else fabric.link_latency
    last = [each for place in arrived.values() for each in place]
    flows.append(Flow(1, ("end",), tuple((each, delay - 1) for each in last)))
    return flows


@pytest.mark.parametrize(("devices", "mib"), RTL)
def test_a_ring_takes_the_cycles_of_the_rtl(devices: int, mib: int) -> None:
    found = all_reduce_cycles(Fabric(devices=devices), mib * MIB)
    assert found == pytest.approx(RTL[devices, mib], rel=0.002)


def test_a_chunk_alone_takes_the_cycles_of_the_rtl() -> None:
    """Measured on `sim:coarse?devices=4` and 8, of one ring."""
    for devices, measured in ((4, 2670), (8, 5832)):
        fabric = Fabric(devices=devices)
        found = all_reduce_cycles(fabric, 2 * fabric.chunk_bytes)
        assert found == pytest.approx(measured, abs=4)


SHAPES = [(4, 1), (16, 1), (64, 1), (4, 4), (8, 8), (3, 5)]


@pytest.mark.parametrize(("devices", "racks"), SHAPES)
def test_a_chunk_takes_the_time_of_flows_between_all_devices(devices: int, racks: int) -> None:
    fabric = Fabric(devices=devices, racks=racks)
    found = all_reduce_cycles(fabric, 2 * fabric.chunk_bytes) - MEMORY_LATENCY
    flows = rings_of_rings(fabric, 1, fabric.frame)
    assert len(flows) > fabric.members
    assert found == max(flow_cycles(flows))


@pytest.mark.parametrize(("devices", "racks"), [(8, 1), (64, 1), (8, 4)])
def test_large_tensors_take_no_longer_than_flows_of_whole_messages(devices, racks) -> None:
    """Where nothing goes on before a message has come as a whole, so latencies are not hidden."""
    fabric = Fabric(devices=devices, racks=racks)
    chunks = 24
    found = all_reduce_cycles(fabric, 2 * chunks * fabric.chunk_bytes) - MEMORY_LATENCY
    flows = max(flow_cycles(rings_of_rings(fabric, chunks, fabric.frame)))
    frames = fabric.bound(2 * chunks * fabric.chunk_bytes) * fabric.frame / (fabric.frame - 2)
    assert frames < found < flows
    if racks == 1:
        hidden = (2 * (devices - 1) - 1) * (LINK_LATENCY + CORE_LATENCY)  # all hops' but one
        assert found == flows - hidden
        assert found == pytest.approx(frames, rel=0.01)
    else:  # chunks on their way between racks go on beside those within
        assert found < 0.75 * flows


def test_a_rack_of_all_devices_costs_what_links_do() -> None:
    cost = {
        devices: all_reduce_cycles(Fabric(devices=devices), 2 * MIB) / (2 * MIB)
        for devices in (4, 16, MAX_DEVICES)
    }
    for devices, each in cost.items():
        least = (devices - 1) / devices / 16
        assert 0.95 < least / each < 1, (devices, each)


def test_more_uplinks_make_racks_faster_until_links_within_bound() -> None:
    def cycles(uplinks: int) -> int:
        return all_reduce_cycles(Fabric(devices=4, racks=3, uplinks=uplinks), MIB)

    assert cycles(1) > cycles(2) > MIB / 16 * 3 / 4
    slow = all_reduce_cycles(Fabric(devices=4, racks=3, uplink_latency=100_000), MIB)
    assert slow > cycles(1) + 4 * 99_000


def test_bad_numbers_are_refused() -> None:
    for change in ({"devices": 0}, {"racks": 1.5}, {"uplinks": 0}, {"uplink_latency": -1}):
        with pytest.raises(ArgumentError, match="must be an integer from"):
            Fabric(**{"devices": 2, **change})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="devices must be two or more, not 1"):
        all_reduce_cycles(Fabric(devices=1), 1)
    with pytest.raises(ArgumentError, match="nbytes must be an integer from 1, not 0"):
        all_reduce_cycles(Fabric(devices=2), 0)
    assert LINK_LATENCY + CORE_LATENCY + Fabric(devices=2).frame == 395
