"""Graphs over several devices, and over a pool's reductions."""

from __future__ import annotations

import numpy as np
import pytest

import nearstep
from nearstep.backends.base import Completion
from nearstep.coarse import CoarsePool
from nearstep.threads import VARIABLE
from nearstep.work.clock import QUANTUM_CYCLES, Clock
from nearstep.work.errors import WorkError
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Range

from ..coarse.conftest import URLS as POOLS
from ..coarse.conftest import random_arrays
from ..driver.conftest import DIMMS
from .test_dimm import chunks, plan


def two_dimms(threads, monkeypatch, prepare=lambda number, dimm, work: None):
    """What a graph on two DIMMs does with so many threads: its timeline or error, bits, cycles."""
    monkeypatch.setenv(VARIABLE, str(threads))
    with nearstep.open(DIMMS["sim-dimm"]) as one, nearstep.open(DIMMS["sim-dimm"]) as other:
        other.regs.adam0.status.get()  # their counters differ
        graph, work = Graph(), []
        for number, dimm in enumerate((one, other)):
            work.append(chunks(dimm, 2, 4096))
            prepare(number, dimm, work[-1])
            for each in plan(work[-1]):
                holds = (f"{resource} {number}" for resource in each.holds)
                ranges = {"reads": each.reads, "writes": each.writes}
                graph.add(f"{each.name} of {number}", *holds, action=each.action, **ranges)
        found: list[object] = []
        try:
            timeline = execute(graph, Clock([one.backend, other.backend]))
            found += [(str(e.operation), e.start, e.end, e.cycles) for e in timeline.entries]
        except WorkError as error:
            found += [list(error.failed), *map(str, error.failed.values())]
            for dimm in (one, other):
                found.append(int(dimm.backend._lib.dimm_cycle(dimm.backend._dimm)))
                dimm.reset()
        bits = [each.bits() for pieces in work for each in pieces]
        return found, [dimm.cycles for dimm in (one, other)], bits


def test_two_dimms_work_at_the_same_time_on_one_clock(monkeypatch):
    """What one of them does alone takes as long beside the other, but for how far they are apart
    and the commands that the host, one after the other, gives to the other one."""
    with nearstep.open(DIMMS["sim-dimm"]) as alone:
        single = chunks(alone, 2, 4096)
        cycles = execute(plan(single), Clock([alone.backend])).makespan
        expected = [each.bits() for each in single]
    entries, _, found = two_dimms(2, monkeypatch)
    for bits, wanted in zip(found, 2 * expected, strict=True):
        np.testing.assert_array_equal(bits, wanted)
    makespan = max(end for _, _, end, _ in entries)
    print("alone", cycles, "both", makespan)
    assert cycles <= makespan <= 1.25 * cycles + QUANTUM_CYCLES * len(entries)
    assert makespan < 1.7 * cycles


@pytest.mark.parametrize("broken", [(), (0,), (0, 1)], ids=["none", "one", "both"])
def test_nothing_of_two_devices_depends_on_the_number_of_threads(broken, monkeypatch):
    def prepare(number, dimm, work):
        if number in broken:  # nobody has written the momentum
            buffer = work[0].buffers["m"]
            dimm.backend.claim(buffer.address, buffer.nbytes)

    results = [two_dimms(threads, monkeypatch, prepare) for threads in (1, 2, 4)]
    for found, cycles, bits in results[1:]:
        assert (found, cycles) == results[0][:2]
        np.testing.assert_array_equal(np.concatenate(bits), np.concatenate(results[0][2]))
    assert sum(each.size for each in results[0][2]) == 2 * 4 * 5 * 4096
    assert len(results[0][0]) >= 4


def test_a_copy_from_one_device_to_another_is_two_operations():
    data = np.arange(1024, dtype=np.float32)
    landing = np.zeros_like(data)
    host = Range("host", 0, data.nbytes)
    with nearstep.open(DIMMS["sim-dimm"]) as source, nearstep.open(DIMMS["golden-dimm"]) as target:
        first, last = source.alloc(1024), target.alloc(1024, channel=1)
        first.write(data)
        graph = Graph()
        reads = {"reads": [Range.of(first)], "writes": [host]}
        writes = {"reads": [host], "writes": [Range.of(last)]}
        graph.add("write", "b", action=lambda: last.submit_write(landing), **writes)
        graph.add("read", "a", action=lambda: first.submit_read(landing), **reads)
        graph.add("write", "b", action=lambda: last.submit_write(landing), **writes)
        timeline = execute(graph, Clock([source.backend, target.backend]))
        assert [each.operation.index for each in timeline.entries] == [0, 1, 2]
        np.testing.assert_array_equal(last.read(), data)


@pytest.mark.parametrize("url", POOLS.values(), ids=POOLS)
def test_reductions_of_a_pool_are_operations(url):
    with CoarsePool.open(url) as pool:
        arrays = [random_arrays(pool, 512, seed) for seed in (1, 2)]
        tensors = [pool.tensor(each) for each in arrays]
        assert isinstance(event := pool.submit(tensors[0], group=0), Completion)
        assert event.wait().done
        graph = Graph()
        for number, tensor in enumerate(tensors):
            for _ in range(2):
                graph.add(
                    f"reduce {number}",
                    f"ring {number}",
                    reads=[Range(tensor, 0, 1)],
                    writes=[Range(tensor, 0, 1)],
                    action=lambda t=tensor, n=number: pool.submit(t, group=n),
                )
        timeline = execute(graph, Clock([pool.device.backend]))
        assert [each.operation.index for each in timeline.entries] == [0, 2, 1, 3]
        for number, tensor in enumerate(tensors):
            compared = pool.tensor(arrays[number])
            for _ in range(2 + (number == 0)):
                pool.all_reduce(compared, group=number)
            result, other = tensor.read(0), compared.read(0)
            np.testing.assert_array_equal(result.view(np.uint32), other.view(np.uint32))
        if timeline.unit == "cycles":
            lasts = [(each.duration, each.cycles) for each in timeline.entries]
            print("cycles of reductions", lasts)
            assert all(0 < cycles <= duration for duration, cycles in lasts)
            assert timeline.makespan < sum(duration for duration, _ in lasts)
