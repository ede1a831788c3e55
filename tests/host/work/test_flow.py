"""Transfers that share links, held against closed forms, a reference, and the theorem of max-min
fairness."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from nearstep.backends.base import Ended
from nearstep.errors import ArgumentError, DeviceError
from nearstep.work.clock import Clock
from nearstep.work.errors import WorkError
from nearstep.work.executor import execute
from nearstep.work.flow import max_min
from nearstep.work.graph import Graph
from nearstep.work.operation import Transfer
from nearstep.work.timeline import Timeline
from nearstep.work.trace import picture, rows, trace
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import Hop

from .fakes import FakeBackend, FakeWork
from .platforms import graph_of, lanes_of, random_flows, random_platform, reference_ends

PS = 1e-12
PLATFORMS = 60


def hop(lane: str, rate: float = 1e12, latency: float = 0.0) -> Hop:
    """By default a byte each picosecond, which is a cycle."""
    return Hop(link=lane, direction=0, lane=lane, bytes_per_s=rate, latency_s=latency)


def transfer(nbytes: int, *lanes: str | Hop) -> Transfer:
    route = tuple(each if isinstance(each, Hop) else hop(each) for each in lanes)
    return Transfer(nbytes=nbytes, route=route)


def ends(graph: Graph) -> dict[str, int]:
    return {entry.operation.name: entry.end for entry in execute(graph).entries}


@pytest.mark.parametrize("seed", range(20))
def test_one_link_is_shared_as_a_processor_is(seed):
    """Of sizes s_1 <= s_2 <= ..., the k-th ends when (s_1 + ... + s_k + (n - k) s_k) bytes went."""
    rng = random.Random(seed)
    sizes = sorted(rng.sample(range(1, 10**6), rng.randint(1, 9)))
    graph = Graph()
    for i, size in enumerate(sizes):
        graph.add(str(i), transfer=transfer(size, "link"))
    found = ends(graph)
    for k, size in enumerate(sizes):
        exact = sum(sizes[: k + 1]) + (len(sizes) - k - 1) * size
        assert 0 <= found[str(k)] - exact <= k + 1, (seed, k)  # each end is rounded up to a cycle


@pytest.mark.parametrize("seed", range(20))
def test_a_flow_over_a_chain_has_the_share_of_the_fullest_link(seed):
    """On link i are the long flow and m_i short ones, of endless size beside it."""
    rng = random.Random(seed)
    counts = [rng.randint(0, 4) for _ in range(rng.randint(1, 6))]
    rates = {f"l{i}": Fraction(12) for i in range(len(counts))}
    uses = [dict.fromkeys(rates, 1)]
    uses += [{f"l{i}": 1} for i, count in enumerate(counts) for _ in range(count)]
    found = max_min(rates, uses)
    long = Fraction(12, 1 + max(counts))
    assert found[0] == long
    expected = [(12 - long) / count for count in counts for _ in range(count)]
    assert list(found[1:]) == expected


@pytest.mark.parametrize("seed", range(20))
def test_on_a_star_a_flow_of_its_own_ports_has_the_slower_one(seed):
    rng = random.Random(seed)
    count = rng.randint(2, 8)
    up, down = ([rng.randint(1, 50) for _ in range(count)] for _ in range(2))
    to = rng.sample(range(count), count)
    rates = {f"up{i}": Fraction(r) for i, r in enumerate(up)}
    rates |= {f"down{i}": Fraction(r) for i, r in enumerate(down)}
    found = max_min(rates, [{f"up{i}": 1, f"down{to[i]}": 1} for i in range(count)])
    assert list(found) == [min(up[i], down[to[i]]) for i in range(count)]


@pytest.mark.parametrize("seed", range(PLATFORMS))
def test_every_flow_has_a_bottleneck(seed):
    """The theorem of Bertsekas and Gallager: feasible rates are max-min fair if and only if each
    flow has a full link on which no other is faster."""
    rng = random.Random(seed)
    flows = random_flows(rng, random_platform(rng))
    rates = {lane: Fraction(rate) for lane, rate in lanes_of(flows).items()}
    uses = [Counter(each.lane for each in flow.transfer.route) for flow in flows]
    found = max_min(rates, uses)
    load_of = {
        lane: sum(rate * use[lane] for rate, use in zip(found, uses, strict=True)) for lane in rates
    }
    assert all(load_of[lane] <= rates[lane] for lane in rates)
    for rate, use in zip(found, uses, strict=True):
        full = [lane for lane in use if load_of[lane] == rates[lane]]
        fastest = {
            lane: max(r for r, u in zip(found, uses, strict=True) if u[lane]) for lane in full
        }
        assert any(fastest[lane] == rate for lane in full), seed


def test_random_platforms_take_the_time_of_the_reference():
    checks = 0
    for seed in range(PLATFORMS):
        rng = random.Random(1000 + seed)
        flows = random_flows(rng, random_platform(rng))
        graph, numbers = graph_of(flows)
        timeline = execute(graph)
        at = {entry.operation.index: entry.end for entry in timeline.entries}
        for number, expected in zip(numbers, reference_ends(flows), strict=True):
            assert at[number] * PS == pytest.approx(expected, rel=1e-6, abs=1e-9), seed
            checks += 1
        assert timeline.makespan >= timeline.limit
    assert checks >= 4 * PLATFORMS, checks


def test_the_order_of_a_program_changes_no_time():
    rng = random.Random(5)
    flows = random_flows(rng, random_platform(rng))
    graph, numbers = graph_of(flows)
    there = [{e.operation.index: e.end for e in execute(graph).entries}[n] for n in numbers]
    graph, numbers = graph_of(flows[::-1])
    back = [{e.operation.index: e.end for e in execute(graph).entries}[n] for n in numbers]
    assert there == back[::-1]


def test_latency_comes_before_the_bytes_and_takes_no_share():
    graph = Graph()
    graph.add("late", transfer=transfer(100, hop("a", latency=30 * PS), hop("b", latency=20 * PS)))
    graph.add("first", transfer=transfer(50, "a"))
    graph.add("empty", transfer=transfer(0, hop("a", latency=7 * PS)))
    assert ends(graph) == {"late": 150, "first": 50, "empty": 7}


def test_both_ways_of_half_duplex_share_and_of_full_duplex_do_not():
    platform = load("axdimm")
    graph = Graph()
    graph.add("read", transfer=Transfer.between(platform, "axdimm.0", "gpu", 6400))
    graph.add("write", transfer=Transfer.between(platform, "gpu", "axdimm.1", 6400))
    assert set(ends(graph).values()) == {2_000_000}  # 12800 bytes over 6.4 GB/s
    timeline = execute(graph)
    assert timeline.traffic["ddr", 0] == timeline.traffic["ddr", 1] == 6400
    assert timeline.traffic["axdimm.0", 0] == timeline.traffic["axdimm.1", 1] == 6400
    assert ("axdimm.0", 1) not in timeline.traffic
    graph = Graph()
    graph.add("read", transfer=Transfer.between(platform, "ssd0", "gpu", 3_938_461_538))
    graph.add("write", transfer=Transfer.between(platform, "gpu", "ssd0", 3_938_461_538))
    assert set(ends(graph).values()) == {10**12}


def test_a_route_may_take_a_link_twice():
    graph = Graph()
    graph.add("there and back", transfer=transfer(100, "bus", "bus"))
    timeline = execute(graph)
    assert (timeline.makespan, timeline.limit, timeline.traffic) == (200, 200, {("bus", 0): 200})


def test_transfers_run_beside_operations_that_hold_things():
    """A gradient leaves while the next is computed; the update needs it and the channel."""
    graph = Graph()
    computed = [graph.add(f"compute {i}", "gpu", seconds=100 * PS) for i in range(3)]
    sent = [
        graph.add(f"send {i}", after=[each], transfer=transfer(150, "link"))
        for i, each in enumerate(computed)
    ]
    for i, each in enumerate(sent):
        graph.add(f"update {i}", "channel", after=[each], seconds=40 * PS)
    at = ends(graph)
    # from 200 two share: 100 bytes of the first are through, its 50 take 100
    assert [at[f"compute {i}"] for i in range(3)] == [100, 200, 300]
    assert [at[f"send {i}"] for i in range(3)] == [300, 500, 550]
    assert [at[f"update {i}"] for i in range(3)] == [340, 540, 590]


def test_a_transfer_may_hold_a_resource_and_then_waits_for_it():
    graph = Graph()
    for i in range(3):
        graph.add(str(i), "queue", transfer=transfer(10, "link"))
    assert ends(graph) == {"0": 10, "1": 20, "2": 30}


def test_the_action_of_a_transfer_is_done_and_the_time_is_the_links():
    copied = []
    graph = Graph()

    def action() -> Ended:
        copied.append(True)
        return Ended()

    graph.add("copy", transfer=transfer(1000, "link"), action=action)
    assert ends(graph) == {"copy": 1000}
    assert copied == [True]


def test_what_is_under_way_ends_where_an_operation_fails():
    graph = Graph()

    def fail() -> None:
        raise DeviceError("no such thing")

    graph.add("under way", transfer=transfer(1000, "link"))
    graph.add("fails", transfer=transfer(1000, "link"), action=fail)
    graph.add("not run", transfer=transfer(10, "link"))
    with pytest.raises(WorkError) as caught:
        execute(graph)
    assert caught.value.operation == "1: fails"
    assert caught.value.done == ("0: under way",)
    assert caught.value.not_run == ("2: not run",)


def test_a_device_and_transfers_advance_on_one_clock():
    backend = FakeBackend(cycles=40)
    graph = Graph()
    run = graph.add("run", "kernel", action=lambda: FakeWork(backend, "run", 70))
    graph.add("beside", transfer=transfer(100, "link"))
    graph.add("then", after=[run], transfer=transfer(60, "link"))
    timeline = execute(graph, Clock([backend], hertz=1e12))
    at = {entry.operation.name: (entry.start, entry.end) for entry in timeline.entries}
    # at 70 the first has 30 bytes left, which take 60 beside the other, of which 30 then take 30
    assert at == {"run": (0, 70), "beside": (0, 130), "then": (70, 160)}


def test_a_clock_without_a_frequency_is_refused_before_anything_starts():
    backend = FakeBackend()
    graph = Graph()
    graph.add("run", "kernel", action=lambda: FakeWork(backend, "run", 5))
    graph.add("copy", transfer=transfer(5, "link"))
    with pytest.raises(ArgumentError, match="hertz must be given"):
        execute(graph, Clock([backend]))
    assert backend.log == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_directions_with_rates_of_their_own_share_the_time_of_a_lane(order):
    """8 and 4 bytes a cycle: each has r with r / 8 + r / 4 = 1; alone each has its own rate."""
    both = [hop("drive", 8e12), replace(hop("drive", 4e12), direction=1)]
    graph = Graph()
    for direction in order:
        last = [graph.add(str(direction), transfer=transfer(800, both[direction]))]
    graph.add("then", after=last, transfer=transfer(800, both[0]))
    assert ends(graph) == {"0": 300, "1": 300, "then": 400}
    assert execute(graph).least == {"drive": 400}


def test_a_link_has_one_rate():
    graph = Graph()
    graph.add("one", transfer=transfer(1, hop("link", 5.0)))
    graph.add("other", transfer=transfer(1, hop("link", 6.0)))
    with pytest.raises(ArgumentError, match=r"link: bytes_per_s must be 5\.0, as before, not 6\.0"):
        execute(graph)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nbytes": -1, "route": (hop("a"),)}, "nbytes must be an integer from 0, not -1"),
        ({"nbytes": 1.5, "route": (hop("a"),)}, "nbytes must be an integer from 0, not 1.5"),
        ({"nbytes": 1, "route": ()}, "route must have a hop"),
        ({"nbytes": 1, "route": (hop("a", 0.0),)}, "bytes_per_s must be above 0"),
        ({"nbytes": 1, "route": (hop("a", 1.0, -1.0),)}, "latency_s must be from 0"),
    ],
)
def test_a_transfer_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        Transfer(**arguments)


def test_a_duration_and_a_transfer_are_refused_together():
    graph = Graph()
    with pytest.raises(ArgumentError, match="seconds and transfer must not both be given"):
        graph.add("copy", seconds=1.0, transfer=transfer(1, "link"))
    with pytest.raises(ArgumentError, match="action, seconds or transfer must be given"):
        graph.add("nothing", "link")
    assert len(graph) == 0


def test_numpy_sizes_do_not_overflow():
    graph = Graph()
    graph.add("large", transfer=transfer(np.int64(2**62), "link"))
    assert ends(graph) == {"large": 2**62}


def test_a_trace_has_rows_without_overlap():
    rng = random.Random(9)
    flows = random_flows(rng, random_platform(rng))
    timeline = execute(graph_of(flows)[0])
    found = rows(timeline)
    assert any(len(each) > 1 for each in timeline.links.values())
    for entries in found.values():
        for one, other in itertools.pairwise(entries):
            assert one.end <= other.start
    events = [e for e in trace(timeline)["traceEvents"] if e["ph"] == "X"]
    shown = Counter(event["args"]["operation"] for event in events)
    for entry in timeline.entries:
        flow = entry.operation.transfer
        lanes = len({each.lane for each in flow.route}) if flow else 0
        assert shown[entry.operation.index] == lanes + len(entry.operation.holds)


def test_a_link_with_the_transfers_of_a_resource_has_no_row_of_its_own():
    graph = Graph()
    graph.add("a", "channel 0", "bus", transfer=transfer(8, "dimm.0", "pcie"))
    graph.add("b", "channel 1", "bus", transfer=transfer(8, "dimm.1", "pcie"))
    graph.add("c", "channel 1", seconds=1e-9)
    graph.add("d", transfer=transfer(8, "drive"))
    timeline = execute(graph)
    assert set(timeline.links) == {"dimm.0", "pcie", "dimm.1", "drive"}
    assert set(rows(timeline)) == {"channel 0", "bus", "channel 1", "drive"}


def test_a_picture_has_the_rows_of_the_links(tmp_path: Path):
    graph = Graph()
    for i in range(2):
        graph.add(f"copy {i}", "queue" if i else "engine", transfer=transfer(10, "cable"))
    file = tmp_path / "picture.svg"
    picture(execute(graph), file)
    drawn = re.findall(r"<!-- (.*?) -->", file.read_text())
    expected = ["engine", "queue", "cable", "cable (2)"]
    assert [each for each in drawn if each in expected] == expected


def test_joined_timelines_count_the_bytes_of_all():
    parts = []
    for nbytes in (10, 25):
        graph = Graph()
        graph.add("copy", transfer=transfer(nbytes, "link"))
        parts.append(execute(graph))
    assert Timeline.joined(parts).traffic == {("link", 0): 35}


def test_many_transfers_in_a_pipeline_are_exact():
    """No rounding gathers: as many bytes as the link has cycles, each end within a cycle of it."""
    graph = Graph()
    last = None
    for i in range(300):
        last = graph.add(
            f"fetch {i}",
            after=[last] if last and i % 3 else [],
            transfer=transfer(1000 + i, hop("link", 0.7e12)),
        )
    timeline = execute(graph)
    total = sum(1000 + i for i in range(300))
    assert timeline.limit == ceil(total * 10 / Fraction(7))
    assert timeline.limit <= timeline.makespan <= timeline.limit + 300


def test_a_picture_shows_what_is_short_and_says_how_long_it_is(tmp_path: Path):
    graph = Graph()
    long = graph.add("long", "engine", seconds=1e-3)
    graph.add("short", "queue", seconds=1e-9, after=[long])
    file = tmp_path / "picture.svg"
    picture(execute(graph), file)
    drawn = file.read_text()
    assert "<!-- 0.001 s, modelled -->" in drawn
    assert "<!-- time, modelled -->" in drawn
    colours = re.findall(r'style="fill: (#\w+); stroke: (#\w+); stroke-width: 0.5"/>', drawn)
    assert colours == [("#1f77b4", "#ffffff"), ("#ff7f0e", "#ff7f0e")]
