"""Iterations on ranks: closed forms, whole clusters, and machines that do not fit."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise
from math import ceil

import pytest

from nearstep.errors import ArgumentError
from nearstep.memferry.profile import LayerProfile
from nearstep.plan.ranks import STATE_BYTES, Cluster, Iteration, with_network
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Transfer
from nearstep_spec.platform.load import load

from .machines import copies, star

NBYTES = 1 << 24


def layer(name: str, nbytes: int = NBYTES, forward_s: float = 1e-3) -> LayerProfile:
    return LayerProfile(
        name=name,
        parameter_bytes=nbytes,
        gradient_bytes=nbytes,
        load_s=0.0,
        send_s=0.0,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        forward_dha_s=None,
        backward_dha_s=None,
        backward_write_s=None,
        backward_dha_write_s=None,
    )


def ends_of(timeline: object, name: str) -> list[int]:
    return [e.end for e in timeline.entries if e.operation.name == name]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 1024])
def test_a_ring_takes_its_closed_form(ranks: int) -> None:
    """On equal links each rank sends (n-1)/n of the bytes, and so does the uplink."""
    iteration = Iteration([layer("block0.a")], Cluster(machine=star(4), ranks=ranks), 4)
    timeline = iteration.timeline()
    share = ceil(Fraction(NBYTES * (ranks - 1), ranks))
    assert iteration.elements == NBYTES // 4
    gathers = ends_of(timeline, "all-gather block0")
    if ranks == 1:
        assert not gathers
        return
    assert min(gathers) == share * 1000  # picoseconds at 1 GB/s
    assert timeline.traffic["l0", 0] == 3 * share + (NBYTES // 4 + ranks - 1) // ranks * 4
    assert timeline.traffic.get(("uplink", 0), 0) == (3 * share if ranks > 4 else 0)


def flows(cluster: Cluster, sizes: list[int], whole: bool) -> list[int]:
    """Return when transfers end that start together: those of the ring, of gradients, parameters
    and state; of one machine, or of all machines of a cluster."""
    local, count = cluster.local, cluster.machines if whole else 1
    where = copies(cluster.machine, count) if whole else cluster.machine
    graph, numbers = Graph(), []
    for k in range(count):

        def at(name: str, other: int = k) -> str:
            return f"m{other % count}.{name}" if whole else name

        last = where.route(at(local[-1]), at(local[0], k + 1)) if whole else cluster.ring()[-1]
        routes = [(where.route(at(a), at(b)), sizes[0]) for a, b in pairwise(local)]
        routes.append((last, sizes[0]))
        for rank, gpu in enumerate(local):
            for part, first in ((gpu, 1), *((drive, 3) for drive in cluster.drives(rank))):
                routes.append((where.route(at(part), at("cpu")), sizes[first]))
                routes.append((where.route(at("cpu"), at(part)), sizes[first + 1]))
        for route, nbytes in routes:
            transfer = Transfer(nbytes=nbytes, route=route)
            numbers.append(graph.add("transfer", transfer=transfer).index)
    found = {entry.operation.index: entry.end for entry in execute(graph).entries}
    return [found[number] for number in numbers]


@pytest.mark.parametrize("machines", [2, 3, 5])
def test_one_machine_has_the_times_of_the_whole_cluster(machines: int) -> None:
    checks = 0
    for seed in range(20):
        rng = random.Random(seed)
        machine = star(rng.randint(1, 3), rng.randint(1, 3), seed)
        gpus = len(machine.processors) - 1
        cluster = Cluster(machine=machine, ranks=machines * gpus, state="drives")
        sizes = [rng.randint(1, 1 << 22) for _ in range(5)]
        whole = flows(cluster, sizes, whole=True)
        assert whole == flows(cluster, sizes, whole=False) * machines, seed
        checks += len(whole)
    assert checks > 20 * machines * 4, checks


def test_state_on_drives_is_read_and_written_once() -> None:
    machine = star(2, drives=3)
    layers = [layer("embedding.word"), layer("block0.a"), layer("block1.a"), layer("head.b")]
    traffic = {
        state: Iteration(layers, Cluster(machine=machine, ranks=4, state=state), 4)  # type: ignore[arg-type]
        .timeline()
        .traffic
        for state in ("memory", "drives")
    }
    state = len(layers) * NBYTES // 4 * STATE_BYTES // 2  # of one machine
    for way in (0, 1):
        moved = sum(traffic["drives"][f"ssd{i}", way] for i in range(3))
        assert 0 <= moved - state < 64, way
        assert ("ssd0", way) not in traffic["memory"]
        assert traffic["drives"]["uplink", way] == traffic["memory"]["uplink", way] > 0


def test_more_ranks_send_more_and_update_less() -> None:
    layers = [layer(f"block{i}.a") for i in range(4)]
    found = []
    for ranks in (2, 8, 64, 1024):
        cluster = Cluster(machine=star(2), ranks=ranks, params_per_s=1e8)
        timeline = Iteration(layers, cluster, 4).timeline()
        found.append((timeline.busy("host"), -timeline.traffic["l0", 0]))
        assert timeline.busy("GPU") == 12 * 10**9
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "ranks must be an integer from 1, not 0"),
        ({"ranks": 9}, "at most 8 or a multiple of it"),
        ({"ranks": 2, "gpu": "gpu9"}, "has no processor 'gpu9'"),
        ({"ranks": 2, "params_per_s": 0.0}, "params_per_s must be above 0"),
        ({"ranks": 2, "state": "drives"}, "coarse-p3 has no drives"),
        ({"ranks": 2, "state": "tape"}, "memory or drives, not 'tape'"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Cluster(machine=load("coarse-p3"), **options)  # type: ignore[arg-type]


def test_machines_without_a_network_need_a_rate() -> None:
    machine = load("memferry-a100")
    with pytest.raises(ArgumentError, match="has no part 'network' for 16 ranks"):
        Cluster(machine=machine, ranks=16)
    assert Cluster(machine=with_network(machine, 1e9), ranks=16).machines == 2
    with pytest.raises(ArgumentError, match="has a network"):
        with_network(load("coarse-p3"), 1e9)


def test_drives_that_are_too_small_are_refused() -> None:
    large = [layer("block0.a", nbytes=1 << 32)]
    cluster = Cluster(machine=star(2, drives=1), ranks=2, state="drives")
    with pytest.raises(ArgumentError, match="state of 12884901888 bytes a machine"):
        Iteration(large, cluster, 4)
