"""Random machines with random transfers, and a flow simulation that shares no code with ours.

The reference finds max-min rates from their definition: the water level that all flows can have is
searched by bisection, those that can have no more are frozen there, and the search goes on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from nearstep.work.graph import Graph
from nearstep.work.operation import Transfer
from nearstep_spec.platform.machine import Drive, Figure, Link, Platform, Processor


def figure(value: float) -> Figure:
    return Figure(value=value, origin="measured", source="a test")


@dataclass(frozen=True)
class Flow:
    """A transfer that begins at a time, in seconds."""

    begins: float
    transfer: Transfer


def random_platform(rng: random.Random) -> Platform:
    """A tree of some nodes with some links more, full and half duplex, rates of 1 to 100 MB/s."""
    switches = tuple(f"s{i}" for i in range(rng.randint(1, 4)))
    processors = {
        f"p{i}": Processor(
            title="a processor",
            memory_bytes_per_s=figure(rng.randint(20, 200) * 1e6) if rng.random() < 0.5 else None,
        )
        for i in range(rng.randint(2, 4))
    }
    drives = {
        f"d{i}": Drive(
            title="a drive",
            capacity_bytes=figure(1e9),
            read_bytes_per_s=figure(rng.randint(1, 100) * 1e6),
            write_bytes_per_s=figure(rng.randint(1, 100) * 1e6),
        )
        for i in range(rng.randint(0, 3))
    }
    nodes = [*switches, *processors, *drives]
    ends = [(rng.choice(nodes[:i]), nodes[i]) for i in range(1, len(nodes))]
    ends += [tuple(rng.sample(nodes, 2)) for _ in range(rng.randint(0, 2))]
    return Platform(
        name="random",
        title="a random machine",
        processors=processors,
        drives=drives,
        switches=switches,
        links={
            f"l{i}": Link(
                ends=pair,
                bytes_per_s=figure(rng.randint(1, 100) * 1e6),
                duplex=rng.choice(("full", "half")),
            )
            for i, pair in enumerate(ends)
        },
    )


def random_flows(rng: random.Random, platform: Platform) -> list[Flow]:
    """Some that begin at once and some later, of 1 byte to 10 MB."""
    nodes = [*platform.processors, *platform.drives, *platform.switches]
    return [
        Flow(
            rng.choice((0.0, 0.0, rng.randrange(1000) * 1e-4)),
            Transfer.between(platform, *rng.sample(nodes, 2), rng.randint(1, 10**7)),
        )
        for _ in range(rng.randint(2, 12))
    ]


def graph_of(flows: Sequence[Flow]) -> tuple[Graph, list[int]]:
    """A graph in which each transfer waits for its time, and the numbers of the transfers."""
    graph = Graph()
    numbers = []
    for i, flow in enumerate(flows):
        wait = [graph.add("wait", f"timer {i}", seconds=flow.begins)] if flow.begins else []
        numbers.append(graph.add(f"flow {i}", transfer=flow.transfer, after=wait).index)
    return graph, numbers


def lanes_of(flows: Sequence[Flow]) -> dict[str, float]:
    """Bytes a second of all that the flows share."""
    return {hop.lane: hop.bytes_per_s for flow in flows for hop in flow.transfer.route}


def fair_rates(flows: Sequence[Flow], rates: dict[str, float]) -> list[float]:
    """Max-min fair rates by bisection, in bytes a second."""
    routes = [[hop.lane for hop in flow.transfer.route] for flow in flows]

    def fit(found: Sequence[float]) -> bool:
        loads = dict.fromkeys(rates, 0.0)
        for rate, route in zip(found, routes, strict=True):
            for lane in route:
                loads[lane] += rate
        return all(loads[lane] <= rates[lane] * (1 + 1e-12) for lane in rates)

    found = [0.0] * len(routes)
    rising = set(range(len(routes)))
    while rising:
        low, high = 0.0, max(rates.values())
        for _ in range(60):
            middle = (low + high) / 2
            fits = fit([middle if i in rising else rate for i, rate in enumerate(found)])
            low, high = (middle, high) if fits else (low, middle)
        found = [low if i in rising else rate for i, rate in enumerate(found)]
        for i in list(rising):
            more = low * (1 + 1e-6)
            if not fit([more if i == j else rate for j, rate in enumerate(found)]):
                rising.remove(i)
    return found


def reference_ends(flows: Sequence[Flow]) -> list[float]:
    """When each flow ends, in seconds of floating point."""
    rates = lanes_of(flows)
    left = [float(flow.transfer.nbytes) for flow in flows]
    ends: list[float | None] = [None] * len(flows)
    now = 0.0
    while None in ends:
        live = [i for i, end in enumerate(ends) if end is None and flows[i].begins <= now + 1e-15]
        later = [flow.begins for flow in flows if flow.begins > now + 1e-15]
        found = fair_rates([flows[i] for i in live], rates) if live else []
        steps = [left[i] / rate for i, rate in zip(live, found, strict=True)]
        step = min([*steps, *(begin - now for begin in later)])
        now += step
        for i, rate, own in zip(live, found, steps, strict=True):
            left[i] -= rate * step
            if own <= step * (1 + 1e-12):
                ends[i] = now
    return [end for end in ends if end is not None]
