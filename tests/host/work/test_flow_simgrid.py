"""Transfers that share links take the time that SimGrid gives them, where SimGrid is installed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from nearstep.plan.ranks import Cluster
from nearstep.work.executor import execute
from nearstep.work.operation import Transfer
from nearstep_spec.platform.load import load

from ..plan.machines import copies
from .platforms import Flow, graph_of, lanes_of, random_flows, random_platform

PROGRAM = Path(__file__).with_name("simgrid_flows.py")
PLATFORMS = 60


def by_simgrid(task: dict[str, object]) -> list[float]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[float] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def simgrid() -> None:
    code = "import simgrid; print(simgrid.simgrid_version)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        pytest.skip(f"SimGrid is not installed (Debian: python3-simgrid): {last}")


@pytest.mark.usefixtures("simgrid")
def test_random_platforms_take_the_time_of_simgrid():
    checks = 0
    for seed in range(PLATFORMS):
        rng = random.Random(1000 + seed)
        flows = random_flows(rng, random_platform(rng))
        graph, numbers = graph_of(flows)
        at = {entry.operation.index: entry.end for entry in execute(graph).entries}
        found = by_simgrid(
            {
                "links": lanes_of(flows),
                "flows": [
                    (each.begins, each.transfer.nbytes, [h.lane for h in each.transfer.route])
                    for each in flows
                ],
            }
        )
        assert len(found) == len(flows)
        for number, expected in zip(numbers, found, strict=True):
            assert at[number] * 1e-12 == pytest.approx(expected, rel=1e-5, abs=1e-8), seed
            checks += 1
    assert checks >= 4 * PLATFORMS, checks
    print(f"SimGrid agrees on {checks} flows on {PLATFORMS} platforms")


@pytest.mark.usefixtures("simgrid")
def test_rings_of_whole_clusters_take_the_time_of_one_machine():
    """SimGrid has every rank of every machine, `Cluster` one machine that stands for all."""
    machine, nbytes, checks = load("coarse-p3"), 1 << 26, 0
    for ranks in (8, 16, 64, 1024):
        cluster = Cluster(machine=machine, ranks=ranks)
        flows = [Flow(0.0, Transfer(nbytes=nbytes, route=route)) for route in cluster.ring()]
        graph, numbers = graph_of(flows)
        at = {entry.operation.index: entry.end for entry in execute(graph).entries}
        count, local = cluster.machines, cluster.local
        every = copies(machine, count)
        gpus = [f"m{k}.{gpu}" for k in range(count) for gpu in local]
        pairs = zip(gpus, [*gpus[1:], gpus[0]], strict=True)
        whole = [Flow(0.0, Transfer.between(every, *pair, nbytes)) for pair in pairs]
        found = by_simgrid(
            {
                "links": lanes_of(whole),
                "flows": [(0.0, nbytes, [hop.lane for hop in f.transfer.route]) for f in whole],
            }
        )
        for i, seconds in enumerate(found):
            expected = at[numbers[i % len(local)]] * 1e-12
            assert seconds == pytest.approx(expected, rel=1e-5, abs=1e-8), (ranks, i)
            checks += 1
    assert checks == 8 + 16 + 64 + 1024
    print(f"SimGrid agrees on {checks} ranks")
