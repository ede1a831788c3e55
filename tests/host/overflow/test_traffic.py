"""Bytes over the drives: counted, and as the plan says."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from itertools import pairwise

import pytest

from nearstep.plan.overflow import Array, Eviction, OverflowPlan
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.store import Store
from nearstep.torch import in_backward
from nearstep.torch.homes.drive import DriveHome
from nearstep.torch.homes.segments import StripedSegment

from .jobs import DIMM, EARLY, URL, Job, drives, everything

SHAPES = [(64, 32), (32, 32), (64, 48), (32, 64), (64, 16), (32, 96)]
"""Whole blocks, and whole stripes of both channels."""

STEPS = 5


def planned(memory: int, channels: int, eviction: Eviction) -> list[tuple[int, int]]:
    """Bytes read and written in each step, from the plan alone."""
    order = [*SHAPES[::3], *(shape for i, shape in enumerate(SHAPES) if i % 3)]  # as Job groups
    units: list[list[int]] = []
    for group in (order[:2], order[2:]):
        most = max(map(math.prod, group))
        room = 0
        for shape in group:
            if math.prod(shape) > room:
                units.append([])
                room = most
            units[-1].append(math.prod(shape))
            room -= math.prod(shape)
    plan = OverflowPlan(memory // channels, eviction)
    plan.units = len(units)
    found = []
    for _ in range(STEPS):
        read = written = 0
        for unit, sizes in enumerate(units):
            nbytes = 4 * sum(sizes) // channels
            own = {name: Array(unit, name, nbytes, name == "g") for name in ("p", "m", "v", "g")}
            for move in plan.update(list(own.values()), [own["p"], own["g"]]):
                read += move.array.nbytes if move.kind == "load" else 0
                written += move.array.nbytes if move.kind == "evict" else 0
        written += sum(each.nbytes for each in plan.written())
        found.append((read * channels, written * channels))
    return found


@pytest.mark.parametrize("eviction", ["updated_first", "belady"])
@pytest.mark.parametrize(("url", "channels"), [(URL, 1), (DIMM, 2)])
def test_bytes_over_the_drives_are_those_of_the_plan(
    url: str, channels: int, eviction: Eviction
) -> None:
    job = Job(SHAPES)
    total = sum(map(math.prod, SHAPES))
    reads = []
    for share in (27, 60, 100):
        memory = 16 * total * share // 100
        with drives() as on:
            options = {"memory": memory, "eviction": eviction}
            parameters, optimizer = job.trained(url, drives=on.store, **options)
            assert optimizer.traffic.to_drives == 4 * total
            found = []
            for step in range(STEPS):
                before = optimizer.traffic.as_dict()
                on_drives = [(d.bytes_read, d.bytes_written) for d in on.store.drives]
                job.step(optimizer, parameters, step)
                after = optimizer.traffic.as_dict()
                read, written = (after[k] - before[k] for k in ("from_drives", "to_drives"))
                found.append((read, written))
                assert written == 12 * total
                moved = [
                    (d.bytes_read - r, d.bytes_written - w)
                    for d, (r, w) in zip(on.store.drives, on_drives, strict=True)
                ]
                beside = 3 * BLOCK_BYTES  # index, superblock twice
                assert sum(w for _, w in moved) == written + beside
                if step:  # before, moments are zeros that lie nowhere
                    assert sum(r for r, _ in moved) == read
                assert min(w for _, w in moved) > written / 3, "both drives work"
            assert found == planned(memory, channels, eviction)
            assert optimizer.traffic.gradients_down == 4 * total * STEPS
            reads.append(found[-1][0])
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] == 0 < reads[1] < reads[0] <= 8 * total


def test_small_parameters_of_the_processor_are_updated_together_as_memory_allows() -> None:
    job, found = Job([(32, 32)] * 12), []
    for memory in (17_000, 64 << 10, 1 << 20):
        with drives() as on:
            parameters, optimizer = job.trained("host:", 2, drives=on.store, memory=memory)
            found.append(optimizer.traffic.launches)
            assert optimizer.memory_peak <= memory
            expected = job.after("host:", 2)
            assert everything(parameters, optimizer) == expected
    assert found == [24, 12, 4], "each alone, two together, each group"


def test_a_step_goes_on_while_what_it_evicted_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writes of a step end once a unit was updated while an evicted one was being written."""
    job, memory = Job([(128, 128)] * 9), 6 * 8 << 14  # of six units, half of it for what is written
    later, late = threading.Event(), list[int]()
    update = DriveHome.updated

    def held(action: str, block: int) -> None:
        if action == "write" and not late and not later.wait(20):
            late.append(block)

    def updated(home: DriveHome, segment: StripedSegment, arrays: Mapping[str, float]) -> None:
        update(home, segment, arrays)
        if home._evicted:
            later.set()

    with drives(blocks=2000) as on, Store.open(on.places, owner=None, queue_depth=64) as store:
        parameters, optimizer = job.trained("host:", 1, drives=store, memory=memory)
        monkeypatch.setattr(DriveHome, "updated", updated)
        on.places[0].fault = on.places[1].fault = held
        job.go_on(parameters, optimizer, range(1, 4))
        assert later.is_set()
        assert late == []
        assert optimizer.memory_peak <= memory
        assert everything(parameters, optimizer) == job.after("host:", 4)


def test_belady_knows_the_order_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_backward, "TOGETHER", 1)
    job, reads = Job([(40, 32)] * 6, early=True), {}
    for eviction in ("updated_first", "belady"):
        with drives() as on:
            options = {"memory": 65_536, "eviction": eviction, **EARLY}
            parameters, optimizer = job.trained(URL, 2, drives=on.store, **options)
            before = optimizer.traffic.from_drives
            job.go_on(parameters, optimizer, range(2, 4))
            reads[eviction] = optimizer.traffic.from_drives - before
    assert 0 < reads["belady"] < reads["updated_first"]


@pytest.mark.parametrize("early", [False, True])
def test_the_timeline_is_that_of_a_whole_step(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_backward, "TOGETHER", 1)
    job, options = Job([(16, 32)] * 4, early=early), EARLY if early else {}
    url = "sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB"
    with drives() as on:
        parameters, optimizer = job.trained(url, 1, drives=on.store, memory=65_536, **options)
        before = optimizer.traffic.as_dict()
        job.go_on(parameters, optimizer, range(1, 2))
        passed = {key: value - before[key] for key, value in optimizer.traffic.as_dict().items()}
        assert passed["steps"] == 1
        runs = [e for e in optimizer.timeline.entries if e.operation.name.startswith("run ")]
        assert len(runs) == passed["launches"] >= 2
        graphs = optimizer.table.executor.timelines
        assert sum(each.makespan for each in graphs) == passed["step_cycles"]
        assert all(a.end <= b.start for a, b in pairwise(runs)), "on one clock"
        assert optimizer.timeline.limit <= passed["step_cycles"] <= optimizer.timeline.makespan
