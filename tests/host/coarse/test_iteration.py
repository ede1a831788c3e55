"""The pipeline of pushes, sums and pulls, and iterations with dual synchronization."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from nearstep.coarse.dual import DualInputs, best_split
from nearstep.coarse.iteration import DOWN, PROXIES, UP, WORKER, Block, Paths, iterate, pipeline
from nearstep.coarse.routing import partition
from nearstep.errors import ArgumentError
from nearstep.paper.coarse_case import BOTH_WAYS_BYTES_PER_S, Options, Work, pair_bytes_per_s

MIB = 1 << 20
SEED = 9
PICOSECOND = 1e-12
"""A cycle of a timeline without devices."""


def flow_shop(sizes: list[int], paths: Paths) -> float:
    """When the last pull ends, by the recurrence of a flow shop whose jobs keep their order."""
    ends = [0.0, 0.0, 0.0]
    for size in sizes:
        for _, nbytes in partition(size, paths.shard_bytes or max(1, size)):
            moving, summing = nbytes / paths.client_bytes_per_s, nbytes / paths.sync_bytes_per_s
            before = 0.0
            for stage, seconds in enumerate((moving, summing, moving)):
                before = ends[stage] = max(ends[stage], before) + seconds
    return ends[-1]


def test_a_pipeline_takes_the_time_of_a_flow_shop() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    checks = 0
    for _ in range(12):
        sizes = [rng.randint(0, 8 * MIB) for _ in range(rng.randint(1, 5))]
        shard = rng.choice((None, 64, MIB, 3 * MIB)) if sum(sizes) < 9 * MIB else 2 * MIB
        if shard == 64:
            sizes = [size >> 14 for size in sizes]
        paths = Paths(
            client_bytes_per_s=rng.uniform(1e9, 2e10),
            sync_bytes_per_s=rng.uniform(1e9, 2e10),
            shard_bytes=shard,
        )
        found = pipeline(sizes, paths)
        rounding = len(found.entries) * PICOSECOND
        assert found.seconds == pytest.approx(flow_shop(sizes, paths), abs=rounding)
        checks += len(found.entries)
    assert checks > 100, checks


def test_shards_keep_both_directions_of_a_link_busy() -> None:
    sizes = [4 * MIB, 40 * MIB, 2 * MIB, 18 * MIB]
    rates = {"client_bytes_per_s": 12.5e9, "sync_bytes_per_s": 12.5e9}
    whole = pipeline(sizes, Paths(**rates, shard_bytes=None))
    cut = pipeline(sizes, Paths(**rates, shard_bytes=MIB))
    bound = sum(sizes) / 12.5e9
    assert cut.seconds == pytest.approx(bound, rel=0.05)
    assert whole.seconds is not None
    assert whole.seconds > 1.7 * bound
    for way in (UP, DOWN):
        assert cut.busy(way) > 0.95 * cut.makespan
        assert whole.busy(way) < 0.6 * whole.makespan


@pytest.mark.parametrize(
    ("machine", "workers", "model"),
    [
        ("p3", 4, "bert-large"),
        ("sdsc", 2, "bert-large"),
        ("g4dn", 2, "bert-large"),
        ("g4dn", 4, "resnet50"),
    ],
)
def test_iterations_take_the_papers_estimate(machine, workers, model) -> None:
    work = Work(model, machine, options=Options(gpu=1.0))
    inputs = work.inputs(workers)
    m = best_split(inputs)
    link = max(pair_bytes_per_s(machine, local=each) for each in (True, False))
    found = iterate(work.blocks, inputs, m, client_bytes_per_s=link, shard=8 * MIB)
    ratio = found.seconds / float(inputs.train_s(m))
    print(f"{machine}, {workers} workers, {model}: {ratio:.4f} of T_train")
    assert 1 - 1e-6 <= ratio <= 1.05
    pushed = [e for e in found.timeline.lanes.get(UP, []) if e.operation.name.startswith("push")]
    assert sum(e.duration for e in pushed) * PICOSECOND == pytest.approx(3 * m / link, rel=1e-6)
    worker = 3 * (work.seconds + float(inputs.worker_s(inputs.nbytes - m)))
    assert found.timeline.busy(WORKER) * PICOSECOND == pytest.approx(worker, rel=1e-6)


def small(**changes: float) -> tuple[list[Block], DualInputs]:
    """Four layers, of which backward takes longest."""
    blocks = [Block(nbytes=8 * MIB, forward_s=1e-3, backward_s=2e-3) for _ in range(4)]
    values = {"proxy_bytes_per_s": 8e9, "worker_bytes_per_s": 8e9, **changes}
    inputs = DualInputs(
        workers=2, nbytes=32 * MIB, forward_s=4e-3, backward_s=8e-3, **values
    )  # c = 1
    return blocks, inputs


def test_what_backward_makes_last_is_needed_first() -> None:
    """If all goes to the devices an iteration is longer than T_train says, by that layer's way."""
    blocks, inputs = small()
    assert best_split(inputs) == inputs.nbytes
    assert inputs.train_s(inputs.nbytes) == pytest.approx(12e-3)
    found = iterate(blocks, inputs, inputs.nbytes, client_bytes_per_s=16e9, shard=MIB).seconds
    way = 8 * MIB / 8e9 + 2 * MIB / 16e9
    assert found == pytest.approx(12e-3 + way, rel=1e-3)
    fewer = iterate(blocks, inputs, 28 * MIB, client_bytes_per_s=16e9, shard=MIB).seconds
    assert fewer < found - 0.4 * way


def test_a_slow_link_is_not_hidden() -> None:
    blocks, inputs = small()
    found = iterate(blocks, inputs, inputs.nbytes, client_bytes_per_s=1e9, shard=MIB)
    assert found.seconds > 32 * MIB / 1e9 > 1.05 * float(inputs.train_s(inputs.nbytes))


def test_nothing_starts_before_what_it_needs() -> None:
    blocks, inputs = small(proxy_bytes_per_s=3e9)
    found = iterate(blocks, inputs, 20 * MIB + 64, client_bytes_per_s=5e9, shard=MIB)
    names = [entry.operation.name.split(".")[0] for entry in found.timeline.entries]
    ends: dict[str, int] = {}
    checks = 0
    for name, entry in zip(names, found.timeline.entries, strict=True):
        kind, layer = name.split()
        before = {
            "push": [f"backward {layer}"],
            "reduce": ["backward 0"],
            "backward": ["forward 3"] if layer == "3" else [f"backward {int(layer) + 1}"],
            "forward": [] if layer == "0" else [f"forward {int(layer) - 1}"],
        }.get(kind, [])
        if kind == "forward" and "backward 0" in ends:
            before += [f"pull {layer}"] if layer != "0" else []
            before += ["reduce 0"] if layer == "0" else []
            before += ["pull 1", "reduce 1"] if layer == "1" else []
        for each in before:
            assert ends[each] <= entry.start, (name, each)
            checks += 1
        ends[name] = max(entry.end, ends.get(name, 0))
    assert checks > 60, checks
    assert {"pull 1", "reduce 1", "reduce 0"} <= ends.keys()
    assert "pull 0" not in ends
    for lane in (UP, DOWN, PROXIES, WORKER):
        entries = found.timeline.lanes[lane]
        assert all(one.end <= two.start for one, two in pairwise(entries))


def test_numbers_that_contradict_each_other_are_refused() -> None:
    blocks, inputs = small()
    for given, m in (([], 0), (blocks[1:], 0)):
        with pytest.raises(ArgumentError, match=r"blocks must have n = 33554432 bytes, not"):
            iterate(given, inputs, m, client_bytes_per_s=1e9, shard=MIB)
    for m in (-1, 32 * MIB + 1, 0.5):
        with pytest.raises(ArgumentError, match="m must be an integer from 0 to 33554432, not"):
            iterate(blocks, inputs, m, client_bytes_per_s=1e9, shard=MIB)  # type: ignore[arg-type]
    for change in ({"client_bytes_per_s": 0.0}, {"sync_bytes_per_s": -1.0}, {"shard_bytes": 0}):
        values = {"client_bytes_per_s": 1.0, "sync_bytes_per_s": 1.0, "shard_bytes": None}
        with pytest.raises(ArgumentError, match="must be"):
            Paths(**{**values, **change})  # type: ignore[arg-type]
    assert BOTH_WAYS_BYTES_PER_S == 25e9
