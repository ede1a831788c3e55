"""Snapshots in the RTL of a pool: what is frozen stays as it was, whoever writes, and whenever."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep.coarse import CoarsePool
from nearstep.coarse.frozen import Frozen
from nearstep_sim.coarse.pool_values import Floats, compare, draw, reduced
from nearstep_spec.coarse.config import PAGE_BYTES

from .small_pool import DEVICES, MEMORY, URL, backend, opened, random

pytestmark = pytest.mark.usefixtures("top")

Bytes = NDArray[np.uint8]


@pytest.fixture
def pool() -> Iterator[CoarsePool]:
    with opened(link_latency=10) as each:
        yield each


def same(frozen: Frozen, number: int, arrays: list[Floats]) -> int:
    """Compare one frozen tensor on all devices; the number of elements."""
    for device, want in enumerate(arrays):
        got = frozen.read(number, device)
        np.testing.assert_array_equal(got.view("u4"), want.view("u4"), err_msg=f"{device}")
    return sum(each.size for each in arrays)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("memory", "stall"),
    [("ideal", 0.3), pytest.param("halfduplex", 0, marks=pytest.mark.deep)],
)
def test_of_one_version_under_heavy_traffic(memory, stall) -> None:
    """Jobs write frozen pages while the host writes others of them, from any cycle on."""
    compared = 0
    with opened(link_latency=10, memory=memory, stall=stall, seed=5) as pool:
        rng = random(13)
        summed, written = draw(pool, 5000, rng), draw(pool, 4100, rng)
        tensors = [pool.tensor(summed), pool.tensor(written)]

        def step() -> list[Floats]:
            return [reduced(pool, summed, "average")] * DEVICES

        for _ in range(2):
            event = pool.submit(tensors[0], "average")
            backend(pool).run(int(rng.integers(0, 9000)))
            with pool.freeze(tensors) as frozen:
                old = np.array_equal(frozen.read(0, 0), summed[0])
                then = [summed if old else step(), list(written)]
                for _ in range(3):
                    for device in range(DEVICES):
                        backend(pool).run(int(rng.integers(0, 800)))
                        written[device] = rng.standard_normal(4100).astype(np.float32)
                        tensors[1].write(device, written[device])
                    number = int(rng.integers(2))
                    compared += same(frozen, number, then[number])
                    event.wait()
                    summed = step()
                    event = pool.submit(tensors[0], "average")
                event.wait()
                summed = step()
                compared += same(frozen, 0, then[0]) + same(frozen, 1, then[1])
                for device in pool.counters().devices:
                    assert device.pages_copied >= 10
            compared += compare(tensors[0], summed) + compare(tensors[1], written)
    assert compared >= 2 * (3 * 16400 + 2 * 36400)


@pytest.mark.deep
def test_closed_and_opened_again_and_again() -> None:
    """Also while a page is on its way, whose place is then used for something else."""
    with opened(link_latency=10, latency=100, seed=6) as pool:
        rng = random(14)
        arrays = draw(pool, 3000, rng)
        tensor = pool.tensor(arrays)
        free = pool.device.free_bytes
        copied = 0
        for _ in range(12):
            event = pool.submit(tensor)
            with pool.freeze([tensor]) as frozen:
                if rng.random() < 0.5:
                    event.wait()
                    tensor.write(0, arrays[0])
                    event = pool.submit(tensor)
                backend(pool).run(int(rng.integers(0, 3000)))
                if rng.random() < 0.5:
                    frozen.read(0, int(rng.integers(DEVICES)))
                copied += sum(each.pages_copied for each in pool.counters().devices)
            assert not any(node.pool.snapshot.open for node in pool.device.nodes)
            area = pool.device.alloc(8 * PAGE_BYTES, np.uint8, channel=1)
            content = rng.integers(0, 256, area.nbytes, np.uint8)
            area.write(content)
            event.wait()
            np.testing.assert_array_equal(area.read(), content)
            area.free()
            for device, values in enumerate(arrays):
                tensor.write(device, values)
        assert pool.device.free_bytes == free
        assert copied > 12
        pool.all_reduce(tensor)
        assert compare(tensor, reduced(pool, arrays)) == 12000


@pytest.mark.deep
def test_closed_and_opened_in_the_midst_of_a_copy() -> None:
    """Through the registers, without a wait between the two, while a job writes the pages."""
    changed = compared = 0
    with opened(link_latency=10, latency=60) as pool:
        arrays = draw(pool, 6000, random(15))
        tensor = pool.tensor(arrays)
        node, data = pool.device.nodes[0].pool, backend(pool)._memory.data
        base, pages = tensor.back(0).address // PAGE_BYTES * PAGE_BYTES, 7
        place = pool.device.alloc(pages * PAGE_BYTES, np.uint8, channel=0, align=PAGE_BYTES)
        area = place.address

        def view() -> Bytes:
            """What is frozen: pages first, then which of them are copied, then the copies."""
            found = data[base:][: pages * PAGE_BYTES].copy()
            copied = node.snapshot_copied.value
            while (state := node.snapshot.get())["written"] != state["taken"]:
                pass
            for page in range(pages):
                if copied >> page & 1:
                    span = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
                    found[span] = data[area:][span]
            return found

        node.snapshot_base.value, node.snapshot_area.value = base, area
        node.snapshot_pages.value = pages
        for cycles in range(400, 8000, 331):
            backend(pool).write_memory(tensor.back(0).address, np.zeros(24000, np.uint8))
            node.start.go = 1
            backend(pool).wait([node.snapshot.poll(open=1)], 5000)
            first = view()
            event = pool.submit(tensor)
            backend(pool).run(cycles)
            np.testing.assert_array_equal(view(), first)
            node.snapshot_control.close = 1
            node.start.go = 1
            while not node.snapshot.open:  # it is, until the one before has closed
                backend(pool).run(1)
            backend(pool).run(800)
            second = view()
            changed += int((second != first).any())
            event.wait()
            np.testing.assert_array_equal(view(), second)
            compared += 2 * second.size
            node.snapshot_control.close = 1
            backend(pool).wait([node.snapshot.poll(open=0)], 5000)
            for device, values in enumerate(arrays):
                tensor.write(device, values)
            base = tensor.back(0).address // PAGE_BYTES * PAGE_BYTES
            node.snapshot_base.value = base
        assert changed > 10
    assert compared == 23 * 2 * 7 * PAGE_BYTES


def test_a_copy_is_read_when_it_is_whole() -> None:
    """Its page is marked, and changes, while a slow memory still takes the copy."""
    on_their_way = compared = 0
    with opened(window="direct", memory="ideal", stall=0.8, seed=7) as pool:
        arrays = draw(pool, 3000, random(18))
        tensor = pool.tensor(arrays)
        with pool.freeze([tensor]) as frozen:
            pool.all_reduce(tensor)
            event = pool.submit(tensor)  # into the buffer that is frozen
            while not event.ended:
                backend(pool).run(50)
                for device, node in enumerate(pool.device.nodes):
                    state = node.pool.snapshot.get()
                    if state["written"] != state["taken"]:
                        on_their_way += 1
                        found = frozen.read(0, device)
                        np.testing.assert_array_equal(found.view("u4"), arrays[device].view("u4"))
                        compared += found.size
    assert on_their_way >= 4
    assert compared == 3000 * on_their_way


@pytest.mark.parametrize("device", ["golden", "sim"])
def test_that_cannot_be_is_not_opened(device) -> None:
    url = URL if device == "sim" else URL.replace("sim:", "golden:")
    page, half = PAGE_BYTES, MEMORY // 2
    bad = {
        "no page of the base": (64, half, 1),
        "no page of the area": (0, half + 2048, 1),
        "no pages": (0, half, 0),
        "too many pages": (0, half, 65),
        "base beyond memory": (MEMORY - page, half, 2),
        "area beyond memory": (0, MEMORY - page, 2),
        "base far beyond": (1 << 40, half, 1),
        "area far beyond": (0, (1 << 63) + half, 1),
        "overlap": (0, 3 * page, 4),
        "the same": (half, half, 1),
    }
    good = [(0, half, 64), (half, 0, 64), (0, 4 * page, 4), (MEMORY - page, 0, 1)]
    with CoarsePool.open(url) as pool:
        node = pool.device.nodes[1].pool
        for base, area, pages in [*bad.values(), *good]:
            node.snapshot_base.value, node.snapshot_area.value = base, area
            node.snapshot_pages.value = pages
            node.start.go = 1
            for _ in range(20):  # register accesses: the time of opening
                opened = node.snapshot.open
            assert opened == ((base, area, pages) in good), (base, area, pages)
            node.snapshot_control.close = 1
            pool.device.backend.wait([node.snapshot.poll(open=0)], 5000)


def test_ranges_in_the_registers_may_change_while_one_is_open(pool) -> None:
    arrays = draw(pool, 3000, random(16))
    tensor = pool.tensor(arrays)
    with pool.freeze([tensor]) as frozen:
        for node in pool.device.nodes:
            node.pool.snapshot_base.value = 1 << 19
            node.pool.snapshot_area.value = 0
            node.pool.snapshot_pages.value = 1
        for _ in range(2):
            pool.all_reduce(tensor)
        assert same(frozen, 0, arrays) == 12000
