"""Reductions over all devices, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import QueueFullError
from nearstep.errors import BusyError, FreedBufferError
from nearstep_sim.coarse.pool_values import SMALL, compare, reduced

from .conftest import deep_on_rtl, random_arrays

SIZES = [0, 1, 3, 15, 16, 17, 63, 64, 127, 128, 129, 255, 256, 257, 1000, 2049, 5000]
"""Below the number of devices, a beat, an entry (32 elements), a chunk (128), and one less or more.
"""


@pytest.mark.parametrize("elements", SIZES)
def test_sum_of_any_size_is_that_of_the_ring(pool, elements) -> None:
    arrays = random_arrays(pool, elements, seed=elements)
    tensor = pool.tensor(arrays)
    assert pool.all_reduce(tensor) is tensor
    assert compare(tensor, reduced(pool, arrays)) == elements * pool.devices


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("op", ["sum", "average", "max"])
def test_every_operation_on_every_wire(pool, op, wire) -> None:
    arrays = random_arrays(pool, 777, seed=5, special=True)
    tensor = pool.tensor(arrays)
    with np.errstate(all="ignore"):
        pool.all_reduce(tensor, op, wire)
        assert compare(tensor, reduced(pool, arrays, op, wire)) == 777 * pool.devices


@pytest.mark.parametrize("group", [0, 1])
def test_one_group_does_it_alone(pool, group) -> None:
    arrays = random_arrays(pool, 1000, seed=group)
    tensor = pool.tensor(arrays)
    pool.all_reduce(tensor, group=group)
    assert compare(tensor, reduced(pool, arrays, group=group)) == 4000


def test_sum_is_that_of_a_loop_in_the_order_of_the_ring(pool) -> None:
    """Written down once more, element by element, without the golden model."""
    elements, devices, entry = 300, pool.devices, pool.device.config.entry_elements("fp32")
    arrays = random_arrays(pool, elements, seed=8)
    tensor = pool.tensor(arrays)
    pool.all_reduce(tensor, group=0)
    expected = np.empty(elements, np.float32)
    tail = elements // (devices * entry) * devices * entry
    beats = -(-(elements - tail) // 16)
    share = 16 * -(-beats // devices)
    for element in range(elements):
        if element < tail:
            first = element % (devices * entry) // entry
        else:
            first = (element - tail) // share
        total = arrays[first][element]
        for hop in range(1, devices):
            total = np.float32(total + arrays[(first + hop) % devices][element])
        expected[element] = total
    assert compare(tensor, expected) == elements * devices


def test_the_two_groups_add_in_other_orders(pool) -> None:
    arrays = random_arrays(pool, 1000, seed=3)
    results = []
    for group in (0, 1):
        tensor = pool.tensor(arrays)
        pool.all_reduce(tensor, group=group)
        results.append(tensor.read(0))
    assert (results[0] != results[1]).any(), "the split would not matter"


def test_a_tensor_alone_is_split_over_all_rings_on_entries(pool) -> None:
    entry = pool.device.config.entry_elements("fp32")
    parts = pool.split(5 * entry + 1)
    assert [(part.group, part.start, part.stop) for part in parts] == [
        (0, 0, 3 * entry),
        (1, 3 * entry, 5 * entry + 1),
    ]
    assert [part.reverse for part in parts] == [False, True]
    assert len(pool.split(entry)) == 1
    assert pool.split(0)[0].elements == 0
    arrays = random_arrays(pool, 5 * entry + 1, seed=2)
    tensor = pool.tensor(arrays)
    event = pool.submit(tensor)
    assert event.parts == parts
    event.wait()
    counted = pool.counters().devices[1]
    assert counted.links[0].payload_phits > 0, "nothing went the other way"
    assert counted.links[1].payload_phits > 0


def test_several_tensors_are_in_flight(pool) -> None:
    sizes = [100, 2000, 1, 0, 700, 300, 128]
    arrays = [random_arrays(pool, size, seed=size) for size in sizes]
    tensors = [pool.tensor(each) for each in arrays]
    assert pool.all_reduce(tensors) == tuple(tensors)
    compared = 0
    for number, (tensor, each) in enumerate(zip(tensors, arrays, strict=True)):
        compared += compare(tensor, reduced(pool, each, group=number % pool.groups))
    assert compared == sum(sizes) * pool.devices


def test_event_tells_when_it_has_ended(pool) -> None:
    arrays = random_arrays(pool, 4000, seed=1)
    tensor = pool.tensor(arrays)
    event = pool.submit(tensor)
    assert tensor.event is event
    assert event.result() is tensor
    assert event.done
    assert event.error is None
    assert tensor.event is None
    assert event.wait() is event, "waiting twice"


def test_a_tensor_has_its_old_values_until_the_end(pool) -> None:
    arrays = random_arrays(pool, 20000, seed=1)
    tensor = pool.tensor(arrays)
    event = pool.submit(tensor)
    assert compare(tensor, arrays) == 80000
    for action in (tensor.free, lambda: tensor.write(0, arrays[0]), lambda: pool.submit(tensor)):
        with pytest.raises(BusyError):
            action()
    event.wait()
    assert compare(tensor, reduced(pool, arrays)) == 80000


def test_reduced_again_and_again(pool) -> None:
    expected = random_arrays(pool, 500, seed=4)
    tensor = pool.tensor(expected)
    for _ in range(3):
        pool.all_reduce(tensor, "average")
        expected = [reduced(pool, expected, "average")] * pool.devices
        assert compare(tensor, expected) == 2000


def test_shapes_are_kept(pool) -> None:
    arrays = random_arrays(pool, (7, 5, 3), seed=4)
    tensor = pool.tensor(arrays)
    pool.all_reduce(tensor)
    assert tensor.shape == (7, 5, 3)
    assert compare(tensor, reduced(pool, arrays)) == 420


@deep_on_rtl
def test_freed_memory_can_be_had_again(pool) -> None:
    free = pool.device.free_bytes
    size = 30000
    assert 8 * 2 * 4 * size > pool.device.config.memory_bytes
    for _ in range(8):
        tensor = pool.tensor(size)
        tensor.free()
    assert pool.device.free_bytes == free
    with pytest.raises(FreedBufferError):
        tensor.read(0)


def test_a_full_queue_takes_nothing_on_any_device(pool) -> None:
    """One in work, two that wait; all on one group."""
    arrays = random_arrays(pool, 8000, seed=6)
    tensors = [pool.tensor(arrays) for _ in range(4)]
    events = []

    def fill() -> None:
        for tensor in tensors:
            events.append(pool.submit(tensor, group=1))

    with pytest.raises(QueueFullError) as found:
        fill()
    assert 2 <= len(events) <= 3
    assert (found.value.group, found.value.capacity) == (1, 2)
    assert tensors[len(events)].event is None
    for event in events:
        event.wait()
    assert all(node.sync1.completed.value == len(events) for node in pool.device.nodes)
    assert not any(node.sync1.jobs.overflow for node in pool.device.nodes)
    compared = sum(compare(each.tensor, reduced(pool, arrays, group=1)) for each in events)
    compared += compare(tensors[len(events)], arrays)
    assert compared == (len(events) + 1) * 32000


@pytest.mark.parametrize("devices", [2, 3, 5, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_any_number_of_devices_and_groups(devices, groups) -> None:
    shape = SMALL.replace("devices=4", f"devices={devices}").replace("groups=2", f"groups={groups}")
    with CoarsePool.open(f"golden:coarse?{shape}&memory_bytes=256KiB") as pool:
        arrays = random_arrays(pool, 3001, seed=devices)
        tensor = pool.tensor(arrays)
        pool.all_reduce(tensor, "average")
        assert compare(tensor, reduced(pool, arrays, "average")) == 3001 * devices


def test_counters_count_what_was_sent(pool) -> None:
    """12 entries of one chunk are 4 phits each; beside them a description of a phit."""
    tensor = pool.tensor(4 * 16)
    before = pool.counters()
    pool.all_reduce(tensor, group=0)
    counted = pool.counters() - before
    for device in counted.devices:
        assert device.links[1].payload_phits == 1 + 6 * 4
        assert device.links[1].sent_phits >= 1 + 6 * 4 + 2 * 7
        assert device.links[0].received_entries == 7
        assert device.links[0].payload_phits == 0
        assert sum(link.replays + link.bad_frames for link in device.links) == 0
    if counted.cycles is not None:
        link = counted.devices[0].links[1]
        assert 0 < link.payload_phits < link.sent_phits <= counted.cycles


def test_the_check_of_all_devices_sees_one_wrong_bit(pool) -> None:
    arrays = random_arrays(pool, 100, seed=9)
    tensor = pool.tensor(arrays)
    assert compare(tensor, arrays) == 400
    wrong = arrays[3].copy()
    wrong.view(np.uint32)[99] ^= 1
    tensor.write(3, wrong)
    with pytest.raises(AssertionError, match="device 3"):
        compare(tensor, arrays)
