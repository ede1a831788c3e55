"""`golden:coarse` at its registers: what a driver, and the RTL, can be held against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nearstep.backends.emulated import Injection
from nearstep.coarse import CoarsePool
from nearstep.coarse.device import CoarseDevice
from nearstep.coarse.errors import MemoryResponseError
from nearstep.coarse.rings import Pending
from nearstep.coarse.split import Part
from nearstep.device import open_device
from nearstep.errors import (
    ArgumentError,
    BusError,
    ClosedDeviceError,
    OutOfBoundsError,
    WaitTimeoutError,
)
from nearstep.registers import RefusedWriteError
from nearstep_sim.bench.operands import SPECIALS
from nearstep_sim.coarse import golden
from nearstep_sim.coarse.golden import GoldenPool
from nearstep_sim.golden import coarse_cpp
from nearstep_sim.golden.coarse import ring_all_reduce
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import ErrorCause, ReduceOp, Stream, Wire

DEVICES = 4
MEMORY = 64 << 10
URL = f"golden:coarse?devices={DEVICES}&groups=2&entry_phits=8&queue_jobs=2&memory_bytes=64KiB"

SOURCE, DESTINATION = 0x1000, 0x4000
"""Local addresses of jobs."""


class Bench:
    """Four devices, set up through registers alone."""

    def __init__(self, device: CoarseDevice) -> None:
        self.device = device
        self.nodes = device.nodes
        assert isinstance(device.backend, GoldenPool)
        self.backend = device.backend
        for number, node in enumerate(self.nodes):
            node.pool.link.set(device=number, epoch=1, used=3)
            node.pool.control.abort = 1
            node.pool.window_limit.value = MEMORY
            node.sync0.ring.set(members=DEVICES, position=number, send_port=1, receive_port=0)
            place = (DEVICES - number) % DEVICES
            node.sync1.ring.set(members=DEVICES, position=place, send_port=0, receive_port=1)
            self.backend.claim(number * MEMORY, MEMORY)
            data = np.full(2048, number + 1, np.float32).view(np.uint8)
            self.backend.write_memory(number * MEMORY + SOURCE, data)

    def push(self, device: int, group: int = 0, **changes: Any) -> None:
        """A job of 512 elements, START included."""
        core = self.nodes[device][f"sync{group}"]
        job = {"source": SOURCE, "destination": DESTINATION, "elements": 512, "tag": 7}
        job |= {"scale": 1.0} | changes
        core.source.value = job["source"]
        core.destination.value = job["destination"]
        core.elements.value = job["elements"]
        core.scale.value = job["scale"]
        core.job.set(operation=job.get("operation", 0), wire=job.get("wire", 0), tag=job["tag"])
        core.start.go = 1

    def run(self, steps: int = 100) -> None:
        """Let time pass until nothing happens."""
        poll = self.nodes[0].pool.id.poll(value=0)
        with pytest.raises(WaitTimeoutError):
            self.backend.wait([poll], steps)

    def results(self, device: int, address: int = DESTINATION) -> np.ndarray:
        out = np.empty(2048, np.uint8)
        self.backend.read_memory(device * MEMORY + address, out)
        return out.view(np.float32)

    def causes(self) -> list[str]:
        return [node.pool.error.cause.name for node in self.nodes]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with open_device(URL, CoarseDevice) as device:
        yield Bench(device)


def test_a_job_runs_when_all_devices_have_it(bench) -> None:
    for device in range(DEVICES):
        assert bench.nodes[device].sync0.status.busy == 0
        bench.push(device)
        bench.run()
        done = device == DEVICES - 1
        for node in bench.nodes[: device + 1]:
            assert (node.sync0.status.busy, node.sync0.status.done) == (not done, done)
            assert (node.pool.status.busy, node.pool.status.done) == (not done, done)
            assert node.sync0.completed.value == done
            assert node.sync0.jobs.tag == 7
    for device in range(DEVICES):
        np.testing.assert_array_equal(bench.results(device), np.full(512, 10, np.float32))
        np.testing.assert_array_equal(bench.results(device, SOURCE), np.full(512, device + 1))


def test_an_average_has_the_scale_of_its_job(bench) -> None:
    third = np.float32(1 / 3)
    for device in range(DEVICES):
        bench.push(device, operation=1, scale=third)
    bench.run()
    for device in range(DEVICES):
        np.testing.assert_array_equal(bench.results(device), np.full(512, 10 * third))


def test_groups_work_by_themselves(bench) -> None:
    for device in range(DEVICES):
        bench.push(device, 0)
        bench.push(device, 1, destination=0x8000, operation=2)
        if device < 3:
            bench.run()
    bench.run()
    assert [node.sync1.completed.value for node in bench.nodes] == [1] * 4
    np.testing.assert_array_equal(bench.results(2, 0x8000), np.full(512, 4, np.float32))


def test_the_queue_counts_and_drops(bench) -> None:
    for tag in range(5):
        bench.push(0, tag=tag, destination=0x4000 + 0x1000 * tag)
        bench.run()
    jobs = bench.nodes[0].sync0.jobs
    assert (jobs.waiting, jobs.overflow, jobs.tag) == (2, 1, 0)
    for tag in range(3):
        for device in range(1, DEVICES):
            bench.push(device, tag=tag, destination=0x4000 + 0x1000 * tag)
        bench.run()
    assert [node.sync0.completed.value for node in bench.nodes] == [3] * 4
    assert (jobs.waiting, jobs.overflow) == (0, 1)
    bench.nodes[0].pool.control.abort = 1
    assert (jobs.overflow, bench.nodes[0].sync0.completed.value) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "cause", "stream", "address"),
    [
        ({"source": 0x1010}, ErrorCause.ALIGNMENT, Stream.SOURCE, 0x1010),
        ({"destination": 0x4020}, ErrorCause.ALIGNMENT, Stream.DESTINATION, 0x4020),
        ({"source": MEMORY - 64}, ErrorCause.WINDOW, Stream.SOURCE, MEMORY - 64),
        ({"destination": MEMORY}, ErrorCause.WINDOW, Stream.DESTINATION, MEMORY),
        ({"destination": 1 << 40}, ErrorCause.WINDOW, Stream.DESTINATION, 1 << 40),
        ({"destination": SOURCE + 64}, ErrorCause.OVERLAP, Stream.DESTINATION, SOURCE + 64),
        ({"destination": SOURCE}, ErrorCause.OVERLAP, Stream.DESTINATION, SOURCE),
        ({"operation": 3}, ErrorCause.UNSUPPORTED, Stream.NONE, 0),
        ({"wire": 3}, ErrorCause.UNSUPPORTED, Stream.NONE, 0),
    ],
)
def test_a_job_that_cannot_be_run(bench, changes, cause, stream, address) -> None:
    for device in range(DEVICES):
        bench.push(device, **(changes if device == 1 else {}))
    bench.run()
    assert bench.causes() == ["PEER", cause.name, "PEER", "PEER"]
    for block in (bench.nodes[1].pool, bench.nodes[1].sync0):
        assert (block.error.cause, block.error.stream) == (cause, stream)
        assert block.error_address.value == address
        assert (block.status.busy, block.status.error, block.status.done) == (0, 1, 0)
    for node in bench.nodes:
        link = node.pool.error_link
        assert (link.cause, link.device, link.port) == (cause, 1, 0)
        assert node.sync0.completed.value == 0
    assert not bench.results(0).any()


@pytest.mark.parametrize("ring", [{"members": 1}, {"position": 4}])
def test_a_ring_that_cannot_be(bench, ring) -> None:
    bench.nodes[2].sync0.ring.set(**ring)
    bench.push(2)
    bench.run()
    assert bench.causes() == ["PEER", "PEER", "UNSUPPORTED", "PEER"]


@pytest.mark.parametrize("changes", [{"elements": 511}, {"tag": 8}, {"operation": 1}, {"wire": 1}])
def test_another_job_is_seen_by_the_next_device_and_by_the_one_that_has_it(bench, changes) -> None:
    for device in range(DEVICES):
        bench.push(device, **(changes if device == 1 else {}))
    bench.run()
    assert bench.causes() == ["PEER", "MISMATCH", "MISMATCH", "PEER"]


def test_two_devices_are_enough_to_see_a_mismatch(bench) -> None:
    bench.push(0)
    bench.push(1, tag=8)
    bench.run()
    assert bench.causes() == ["PEER", "MISMATCH", "PEER", "PEER"]


def test_after_an_error_only_an_abort_helps(bench) -> None:
    bench.push(0)
    bench.push(1, tag=8)
    bench.run()
    for device in range(DEVICES):
        bench.push(device)
    bench.run()
    assert [node.sync0.completed.value for node in bench.nodes] == [0] * 4
    for node in bench.nodes:
        node.pool.link.epoch = 2
        node.pool.control.abort = 1
    assert bench.causes() == ["NONE"] * 4
    for device in range(DEVICES):
        bench.push(device)
    bench.run()
    assert [node.sync0.completed.value for node in bench.nodes] == [1] * 4


def test_dead_devices_are_silent_only_to_jobs(bench) -> None:
    bench.backend.kill(2)
    bench.run()
    assert bench.causes() == ["NONE"] * 4
    bench.push(0)
    bench.run()
    assert bench.causes() == ["NONE"] * 4, "its links are alive"
    bench.push(1)
    bench.run()
    assert bench.causes() == ["PEER", "SILENT", "NONE", "PEER"]
    assert bench.nodes[1].pool.error.stream == Stream.LINK1
    link = bench.nodes[3].pool.error_link
    assert (link.cause, link.device, link.port) == (ErrorCause.SILENT, 1, 1)


def test_another_epoch_is_silence(bench) -> None:
    bench.nodes[3].pool.link.epoch = 2
    for device in range(DEVICES):
        bench.push(device)
    bench.run()
    assert bench.causes() == ["NONE"] * 4, "it is taken at an abort"
    bench.nodes[3].pool.control.abort = 1
    bench.push(0)
    bench.run()
    assert bench.causes() == ["SILENT", "PEER", "PEER", "NONE"]


def test_no_limit_no_silence(bench) -> None:
    for node in bench.nodes:
        node.pool.silence_limit.value = 0
    bench.backend.kill(1)
    for device in range(DEVICES):
        bench.push(device)
    bench.run()
    assert bench.causes() == ["NONE"] * 4


def test_an_abort_of_a_core_ends_all(bench) -> None:
    bench.push(0)
    bench.nodes[0].sync1.control.abort = 1
    assert bench.causes() == ["ABORTED", "PEER", "PEER", "PEER"]


def test_memory_that_refuses_and_memory_that_swallows(bench) -> None:
    bench.backend.inject(Injection(kind="decerr", write=True, base=MEMORY, limit=2 * MEMORY))
    for device in range(DEVICES):
        bench.push(device)
    bench.run()
    assert bench.causes() == ["PEER", "WRITE_RESPONSE", "PEER", "PEER"]
    assert bench.nodes[1].pool.error.response == 3
    with pytest.raises(ArgumentError):
        bench.backend.inject(Injection(kind="slverr", write=True, host=True))


def test_locked_registers_refuse_while_a_job_is_there(bench) -> None:
    bench.push(0)
    with pytest.raises(RefusedWriteError):
        bench.nodes[0].pool.window_base.value = 0
    with pytest.raises(RefusedWriteError):
        bench.nodes[0].sync0.ring.members = 3
    bench.nodes[0].sync1.ring.members = 3
    bench.nodes[1].pool.window_base.value = 64


def test_a_snapshot_copies_a_page_once_before_it_changes(bench) -> None:
    pool = bench.nodes[1].pool
    pool.snapshot_base.value = DESTINATION
    pool.snapshot_area.value = 0x8000
    pool.snapshot_pages.value = 2
    assert pool.snapshot.open == 0
    pool.start.go = 1
    assert (pool.snapshot.open, pool.snapshot_copied.value) == (1, 0)
    for device in range(DEVICES):
        bench.push(device)
    bench.run()
    assert pool.snapshot_copied.value == 1
    assert not bench.results(1, 0x8000).any()
    ones = np.ones(1, np.uint8)
    bench.backend.write_memory(MEMORY + DESTINATION + 4095, np.ones(2, np.uint8))
    bench.backend.write_memory(MEMORY + DESTINATION + 8192, ones)
    assert pool.snapshot_copied.value == 3
    assert not bench.results(1, 0x9000).any()
    pool.page.number = 1
    assert pool.snapshot_copied.value == 0
    pool.control.abort = 1
    assert pool.snapshot.open == 1, "an abort leaves it"
    pool.control.latch = 1
    assert pool.snapshot_pages_copied.value == 2
    pool.snapshot_control.close = 1
    assert pool.snapshot.open == 0


@pytest.mark.parametrize(
    ("base", "area", "pages"),
    [
        (0x1010, 0x8000, 1),
        (0x1000, 0x8040, 1),
        (0x1000, 0x2000, 2),
        (0x1000, 0x8000, 0),
        (0x1000, 0xF000, 2),
        (0x1000, 0x8000, 1 << 20),
    ],
)
def test_a_snapshot_that_cannot_be(bench, base, area, pages) -> None:
    pool = bench.nodes[0].pool
    pool.snapshot_base.value = base
    pool.snapshot_area.value = area
    pool.snapshot_pages.value = pages
    pool.start.go = 1
    assert pool.snapshot.open == 0


def test_addresses_where_nobody_is(bench) -> None:
    for address in (0x3000, 0x10000, 0xF000):
        with pytest.raises(BusError):
            bench.backend.read_register(address)
        with pytest.raises(BusError):
            bench.backend.write_register(address, 0)
    with pytest.raises(OutOfBoundsError):
        bench.backend.read_memory(MEMORY - 4, np.empty(8, np.uint8))
    with pytest.raises(ArgumentError):
        bench.backend.kill(4)


def test_a_reset_is_a_power_up(bench) -> None:
    bench.push(0)
    bench.backend.reset()
    assert bench.nodes[0].pool.status.busy == 0
    assert bench.nodes[0].sync0.ring.members == 2
    assert bench.results(1, SOURCE)[0] == 2
    bench.device.close()
    with pytest.raises(ClosedDeviceError):
        bench.backend.reset()


class TestSums:
    """Those in fp32 are made as they are written, by C++, in memory or in what stands in its
    place; the bits are the model's."""

    ELEMENTS = 3 * 4096 + 77  # of several steps, the last one short
    SOURCE, DESTINATION = 0, 0x20000
    URL = (
        f"golden:coarse?devices={DEVICES}&groups=2&entry_phits=256&queue_jobs=2&memory_bytes=512KiB"
    )

    @pytest.fixture
    def pool(self) -> Iterator[CoarsePool]:
        with CoarsePool.open(self.URL) as opened:
            yield opened

    def drawn(self, seed: int) -> list[np.ndarray]:
        """Any bits, special ones among them."""
        print(f"seed {seed}")
        rng = np.random.default_rng(seed)
        data = rng.integers(0, 1 << 32, (DEVICES, self.ELEMENTS), np.uint32)
        special = rng.random(data.shape) < 0.3
        data[special] = rng.choice(SPECIALS, int(special.sum()))
        return list(data.view(np.float32))

    def expected(self, pool: CoarsePool, arrays: list[np.ndarray], group: int) -> np.ndarray:
        with np.errstate(all="ignore"):
            return ring_all_reduce(
                arrays,
                operation="average",
                wire="fp32",
                config=pool.device.config,
                reverse=bool(group),
                scale=np.float32(0.3),
            ).view(np.uint32)

    def submitted(self, pool: CoarsePool, group: int) -> Pending:
        size = pool.device.config.memory_bytes
        job = pool.rings.make_job(
            Part(group=group, start=0, stop=self.ELEMENTS),
            ReduceOp.AVERAGE,
            Wire.FP32,
            sources=[d * size + self.SOURCE for d in range(DEVICES)],
            destinations=[d * size + self.DESTINATION for d in range(DEVICES)],
            scale=np.float32(0.3),
        )
        pending = Pending(pool.rings, [job])
        pool.rings.submit(pending)
        return pending

    def put(self, pool: CoarsePool, arrays: list[np.ndarray]) -> GoldenPool:
        backend = pool.device.backend
        assert isinstance(backend, GoldenPool)
        for device, each in enumerate(arrays):
            base = device * pool.device.config.memory_bytes
            backend.claim(base, pool.device.config.memory_bytes)
            backend.write_memory(base + self.SOURCE, each.view(np.uint8))
        return backend

    def check(self, pool: CoarsePool, wanted: np.ndarray) -> int:
        for device in range(DEVICES):
            out = np.empty(4 * self.ELEMENTS, np.uint8)
            base = device * pool.device.config.memory_bytes
            pool.device.backend.read_memory(base + self.DESTINATION, out)
            np.testing.assert_array_equal(out.view(np.uint32), wanted)
        return DEVICES * self.ELEMENTS

    @pytest.mark.parametrize("group", [0, 1])
    @pytest.mark.parametrize("offset", [0, 4, 32])
    def test_go_to_lent_memory_and_come_from_there(self, pool, group, offset) -> None:
        """Lent whole or in part, at any address of the host; the rest of it stays as it was."""
        arrays = self.drawn(offset)
        backend, size = self.put(pool, arrays), pool.device.config.memory_bytes
        nbytes, checks = 4 * self.ELEMENTS, 0
        room = np.full(2 * nbytes + 256, 0xA5, np.uint8)
        skip = -room.ctypes.data % 64 + offset
        whole, part = room[skip:][:nbytes], room[skip + nbytes :][: nbytes // 2]
        given = np.zeros(nbytes + 64, np.uint8)[offset:][:nbytes]
        given[:] = arrays[2].view(np.uint8)
        assert backend.lend_memory(0 * size + self.DESTINATION, whole, writes=True)
        assert backend.lend_memory(1 * size + self.DESTINATION + 4096, part, writes=True)
        assert backend.lend_memory(2 * size + self.SOURCE, given, writes=False)
        self.submitted(pool, group).wait()
        wanted = self.expected(pool, arrays, group)
        checks += self.check(pool, wanted)
        np.testing.assert_array_equal(whole, wanted.view(np.uint8))
        np.testing.assert_array_equal(part, wanted.view(np.uint8)[4096:][: part.size])
        np.testing.assert_array_equal(given, arrays[2].view(np.uint8))
        assert (room[:skip] == 0xA5).all()
        assert (room[skip + nbytes + part.size :] == 0xA5).all()
        assert checks == DEVICES * self.ELEMENTS

    def test_a_step_that_ctrl_c_ended_is_made_again(self, pool, monkeypatch) -> None:
        arrays = self.drawn(7)
        self.put(pool, arrays)
        pending, steps = self.submitted(pool, 0), []
        step = pool.device.backend._put_results

        def interrupted(*args: Any) -> None:
            step(*args)
            steps.append(args)
            if len(steps) in (1, 3):
                raise KeyboardInterrupt

        monkeypatch.setattr(golden, "WAIT_BYTES", golden.STEP_BYTES)  # four steps
        monkeypatch.setattr(pool.device.backend, "_put_results", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                pending.wait()
        pending.wait()
        assert len(steps) == 4 + 2
        wanted = self.expected(pool, arrays, 0)
        assert self.check(pool, wanted) == DEVICES * self.ELEMENTS

    def test_a_memory_that_refuses_in_the_middle_ends_them(self, pool) -> None:
        arrays = self.drawn(8)
        backend, size = self.put(pool, arrays), pool.device.config.memory_bytes
        before = np.full(4 * self.ELEMENTS, 0x5A, np.uint8)
        for device in range(DEVICES):
            backend.write_memory(device * size + self.DESTINATION, before)
        bad = 2 * size + self.DESTINATION + 2 * 16384
        backend.inject(Injection(kind="slverr", write=True, base=bad, limit=bad + 64))
        with pytest.raises(MemoryResponseError) as found:
            self.submitted(pool, 1).wait()
        assert found.value.device == 2
        wanted, out = self.expected(pool, arrays, 1).view(np.uint8), np.empty_like(before)
        for device in range(DEVICES):  # whole steps are there, and nothing of the next one
            backend.read_memory(device * size + self.DESTINATION, out)
            np.testing.assert_array_equal(out[: 2 * 16384], wanted[: 2 * 16384])
            assert (out[2 * 16384 :] == 0x5A).all()
        backend.heal()
        pool.reset()
        self.submitted(pool, 1).wait()
        assert self.check(pool, wanted.view(np.uint32)) == DEVICES * self.ELEMENTS

    def test_of_large_entries_and_unaligned_places_are_the_models(self) -> None:
        """Parts of several of the blocks in which it adds, and places between lines."""
        config, checks = CoarseConfig(entry_phits=256), 0
        entry = config.entry_elements("fp32")
        assert entry == 1024
        print("seed 9")
        rng = np.random.default_rng(9)
        for members, size in ((2, 5 * entry + 3), (3, 9001), (5, 3 * entry - 1)):
            data = rng.integers(0, 1 << 32, (members, size + 8), np.uint32).view(np.float32)
            tensors = [data[member, member : member + size] for member in range(members)]
            with np.errstate(all="ignore"):
                wanted = ring_all_reduce(tensors, operation="sum", wire="fp32", config=config)
            for first in (0, 1, 500, entry - 1):
                outs = [np.zeros(size + 8, np.float32)[skip:][: size - first] for skip in range(5)]
                coarse_cpp.ring_sum(tensors, outs, first=first, entry_elements=entry)
                for each in outs:
                    np.testing.assert_array_equal(
                        each.view(np.uint32), wanted[first:].view(np.uint32)
                    )
                    checks += 1
        assert checks == 3 * 4 * 5

    def test_any_number_of_threads_makes_the_same_bits(self, monkeypatch) -> None:
        monkeypatch.setattr(coarse_cpp, "LEAST_SHARE", 100)
        config, size, checks = CoarseConfig(entry_phits=8), 20_011, 0
        print("seed 10")
        rng = np.random.default_rng(10)
        tensors = list(rng.integers(0, 1 << 32, (3, size), np.uint32).view(np.float32))
        with np.errstate(all="ignore"):
            wanted = ring_all_reduce(tensors, operation="average", wire="fp32", config=config)
        for first, last in ((0, size), (77, size - 5), (100, 600), (3, 3)):
            for threads in (1, 2, 3, 8, 64):
                room = np.full(size + 2, 7, np.float32)
                coarse_cpp.ring_sum(
                    tensors,
                    [room[1 : 1 + last - first]],
                    first=first,
                    entry_elements=config.entry_elements("fp32"),
                    scale=np.float32(1 / 3),
                    threads=threads,
                )
                found = room[1 : 1 + last - first].view(np.uint32)
                np.testing.assert_array_equal(found, wanted[first:last].view(np.uint32))
                assert room[0] == room[1 + last - first] == 7
                checks += 1
        assert checks == 4 * 5
