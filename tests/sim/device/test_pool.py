"""``sim:coarse``: the RTL of a pool on bad links, slow memories, and while snapshots are open."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep.backends.emulated import Injection
from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import SilentLinkError
from nearstep.coarse.frozen import Frozen
from nearstep.errors import BusError, GuardError
from nearstep_hw.coarse.config import PAGE_BYTES
from nearstep_hw.coarse.registers import register_bytes
from nearstep_hw.csr.model import BLOCK_BYTES
from nearstep_sim.bench.pool_values import Floats, compare, draw, reduced
from nearstep_sim.device.pool import PoolBackend
from nearstep_sim.link.faults import LinkFault

SHAPE = "devices=4&groups=2&entry_phits=8&buffer_entries=4&chunks_ahead=2&queue_jobs=2"
URL = f"sim:coarse?{SHAPE}&memory_bytes=1MiB&snapshot_pages=64"
"""The configuration of tests/host/coarse, so that one library serves both."""

Bytes = NDArray[np.uint8]

DEVICES = 4
MEMORY = 1 << 20
ENDS = [(link, direction) for link in range(DEVICES) for direction in (0, 1)]
BAD = ("replays", "bad_frames", "gaps", "duplicates")
SEEN = {"drop": "gaps", "duplicate": "duplicates", "reorder": "gaps", "corrupt": "bad_frames"}
"""What a receiver counts when a fault has hit frames enough."""


def opened(silence_cycles: int = 1 << 16, **options: object) -> CoarsePool:
    """A pool with these options; links are quick to try again."""
    text = "".join(f"&{name}={value}" for name, value in options.items())
    url = URL
    for name in ("chunks_ahead", "buffer_entries"):
        if name in options:
            url = re.sub(f"&{name}=\\d+", "", url)
    pool = CoarsePool.open(url + text, silence_cycles=silence_cycles)
    for node in pool.device.nodes:
        node.pool.retry.value = 512
        node.pool.keepalive.value = 128
    return pool


@pytest.fixture
def pool() -> Iterator[CoarsePool]:
    with opened(link_latency=10) as each:
        yield each


def backend(pool: CoarsePool) -> PoolBackend:
    assert isinstance(pool.device.backend, PoolBackend)
    return pool.device.backend


def links(pool: CoarsePool) -> Counter[str]:
    """Counters of all links of all devices together."""
    found: Counter[str] = Counter()
    for device in pool.counters().devices:
        for link in device.links:
            found.update({name: getattr(link, name) for name in (*BAD, "received_entries")})
    return found


def hits(pool: CoarsePool) -> Counter[str]:
    """Frames that each kind of fault has hit, on all links."""
    found: Counter[str] = Counter()
    for end in ENDS:
        found.update(backend(pool).link_statistics(*end))
    return found


def random(seed: int) -> np.random.Generator:
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def reduce_all(pool: CoarsePool, rng: np.random.Generator, sizes: tuple[int, ...]) -> int:
    """Every operation and wire in turn; the number of elements compared."""
    compared = 0
    kinds = [("sum", "fp32"), ("average", "fp16"), ("max", "bf16"), ("sum", "bf16")]
    for number, size in enumerate(sizes):
        op, wire = kinds[number % len(kinds)]
        arrays = draw(pool, size, rng)
        tensor = pool.tensor(arrays)
        pool.all_reduce(tensor, op, wire)
        compared += compare(tensor, reduced(pool, arrays, op, wire))
        tensor.free()
    return compared


class TestFaultsOfLinks:
    """Frames that get lost, doubled, late or changed cost time and nothing else."""

    RATES: ClassVar = {
        "drop": {"drop": 0.03},
        "duplicate": {"duplicate": 0.05},
        "reorder": {"reorder": 0.03},
        "corrupt": {"corrupt": 0.05},
        "all": {"drop": 0.02, "duplicate": 0.02, "reorder": 0.02, "corrupt": 0.02},
        "rare": {"drop": 0.01, "duplicate": 0.01, "reorder": 0.01, "corrupt": 0.01},
    }

    @pytest.mark.parametrize("rates", RATES)
    def test_at_random_leave_every_bit(self, rates) -> None:
        chances = self.RATES[rates]
        with opened(link_latency=10, seed=7, **chances) as pool:
            assert reduce_all(pool, random(1), (2000, 1500, 999, 64, 3000)) == 4 * 7563
            happened, counted = hits(pool), links(pool)
        for kind in chances:
            assert happened[kind] > 10, f"{kind} hit {happened[kind]} frames"
            assert counted[SEEN[kind]]
        assert counted["replays"] or rates == "duplicate"

    def test_are_not_seen_where_there_are_none(self, pool) -> None:
        assert reduce_all(pool, random(2), (2000, 1500, 64, 0, 1)) == 4 * 3565
        counted, happened = links(pool), hits(pool)
        assert [counted[name] for name in BAD] == [0] * len(BAD)
        assert [happened[kind] for kind in SEEN] == [0] * len(SEEN)
        assert counted["received_entries"] > 500

    @pytest.mark.parametrize("kind", SEEN)
    @pytest.mark.parametrize("frame", ["entry", pytest.param("control", marks=pytest.mark.deep)])
    def test_once_on_any_link_at_any_frame(self, pool, kind, frame) -> None:
        """The first frame of a job, the second, one in the middle, and the last."""
        rng = random(3)
        arrays = draw(pool, 300, rng)
        expected = reduced(pool, arrays)

        def job() -> int:
            tensor = pool.tensor(arrays)
            pool.all_reduce(tensor)
            compared = compare(tensor, expected)
            tensor.free()
            return compared

        def frames(end: tuple[int, int]) -> int:
            """Of this kind in a job, on this link."""
            before = backend(pool).link_statistics(*end)["frames"]
            entries = links(pool)["received_entries"]
            job()
            entries = (links(pool)["received_entries"] - entries) // len(ENDS)
            total = backend(pool).link_statistics(*end)["frames"] - before
            return entries if frame == "entry" else total - entries

        compared = made = 0
        replays = links(pool)["replays"]
        assert not replays
        for end in ENDS:
            count = frames(end)
            assert count > 8
            for nth in (0, 1, count // 2, count - 1):
                link, direction = end
                before = backend(pool).link_statistics(*end)[kind]
                fault = LinkFault(kind=kind, link=link, direction=direction, frame=frame, nth=nth)
                backend(pool).inject_link(fault)
                compared += job()
                made += backend(pool).link_statistics(*end)[kind] - before
                backend(pool).heal()
        assert compared == 4 * len(ENDS) * 4 * 300
        assert made >= 3 * len(ENDS), f"{made} faults happened"
        counted = links(pool)
        if frame == "entry":
            # A change of what no CRC covers does nothing, nor may a frame that is late.
            least = {"drop": made, "corrupt": made * 3 // 4, "reorder": made // 2, "duplicate": 0}
            assert counted["replays"] >= least[kind]
            assert counted[SEEN[kind]] > 0

    def test_sequence_numbers_go_round(self) -> None:
        """Hundreds of entries of a job on each link, of which numbers tell 64 apart."""
        with opened(link_latency=3, seed=3, drop=0.01, duplicate=0.02) as pool:
            rng = random(4)
            for group in (0, 1):
                arrays = draw(pool, 9000, rng)
                tensor = pool.tensor(arrays)
                pool.all_reduce(tensor, group=group)
                assert compare(tensor, reduced(pool, arrays, group=group)) == 36000
            for device in pool.counters().devices:
                for link in device.links:
                    assert link.received_entries > 6 * 64
                    assert link.duplicates


class TestPeers:
    """A neighbour that is silent: waited for up to a limit, and named from there on."""

    LIMIT = 2500

    def stall(self, pool: CoarsePool, link: int, direction: int, cycles: int) -> None:
        fault = LinkFault(kind="stall", link=link, direction=direction, cycles=cycles)
        backend(pool).inject_link(fault)

    @pytest.mark.parametrize("end", ENDS)
    def test_that_comes_back_in_time(self, end) -> None:
        with opened(self.LIMIT, link_latency=10) as pool:
            arrays = draw(pool, 3000, random(5))
            tensor = pool.tensor(arrays)
            event = pool.submit(tensor)
            start = pool.device.cycles
            self.stall(pool, *end, self.LIMIT - 300)
            event.wait()
            assert pool.device.cycles - start > self.LIMIT - 300, "it was waited for"
            assert compare(tensor, reduced(pool, arrays)) == 12000

    @pytest.mark.parametrize("end", ENDS)
    @pytest.mark.parametrize(
        "late",
        [pytest.param(False, marks=pytest.mark.deep), True],
        ids=["reset-in-stall", "reset-after-stall"],
    )
    def test_that_comes_back_too_late(self, end, late) -> None:
        """What the stall held back comes after the reset, and is of another epoch."""
        link, direction = end
        with opened(self.LIMIT, link_latency=10) as pool:
            arrays = draw(pool, 3000, random(6))
            tensor = pool.tensor(arrays)
            event = pool.submit(tensor)
            self.stall(pool, link, direction, 2 * self.LIMIT)
            with pytest.raises(SilentLinkError) as found:
                event.wait()
            deaf = (link + 1) % DEVICES if direction == 0 else link
            quiet = link if direction == 0 else (link + 1) % DEVICES
            assert (found.value.device, found.value.peer) == (deaf, quiet)
            assert found.value.port == int(direction == 1)
            causes = dict(found.value.causes)
            assert causes.pop(deaf) == "SILENT"
            assert set(causes.values()) == {"PEER"}
            assert compare(tensor, arrays) == 12000
            if late:
                backend(pool).run(3 * self.LIMIT)
                pool.reset()
            else:
                pool.reset()
                backend(pool).run(3 * self.LIMIT)
            pool.all_reduce(tensor)
            assert compare(tensor, reduced(pool, arrays)) == 12000

    def deaths(self, every: int, elements: int) -> Counter[str]:
        """A job for every so many cycles after which a device dies."""
        seen: Counter[str] = Counter()
        with opened(self.LIMIT, link_latency=10) as pool:
            arrays = draw(pool, elements, random(7))
            expected = reduced(pool, arrays)
            tensor = pool.tensor(arrays)
            start = pool.device.cycles
            pool.all_reduce(tensor)
            whole = pool.device.cycles - start
            for number, cycles in enumerate(range(0, whole + every, every)):
                for device, values in enumerate(arrays):
                    tensor.write(device, values)
                event = pool.submit(tensor)
                backend(pool).run(cycles)
                dead = number % DEVICES
                backend(pool).kill(dead)
                with contextlib.suppress(SilentLinkError):
                    event.wait()
                error = event.error
                if error is None:
                    assert compare(tensor, expected) == DEVICES * elements
                    seen["ended"] += 1
                else:
                    assert isinstance(error, SilentLinkError)
                    assert dead in (error.peer, error.device)
                    assert compare(tensor, arrays) == DEVICES * elements
                    seen["silent"] += 1
                backend(pool).revive(dead)
                pool.reset()
                pool.all_reduce(tensor, "max")
                seen["again"] += 1
        print(seen)
        return seen

    def test_that_dies_in_any_phase_of_a_job(self) -> None:
        seen = self.deaths(every=31, elements=1000)
        assert seen["silent"] > 10
        assert seen["ended"]
        assert seen["again"] == seen["silent"] + seen["ended"]

    @pytest.mark.deep
    def test_that_dies_in_any_cycle_of_a_job(self) -> None:
        seen = self.deaths(every=3, elements=300)
        assert seen["silent"] > 100
        assert seen["ended"]


class TestMemories:
    """Timing of memory changes no bit, and nothing else is written."""

    @pytest.mark.parametrize("memory", ["ideal", "halfduplex"])
    @pytest.mark.parametrize(("latency", "stall"), [(1, 0), (200, 0), (40, 0.3)])
    def test_of_any_speed_give_the_same_bits(self, memory, latency, stall) -> None:
        with opened(link_latency=10, memory=memory, latency=latency, stall=stall, seed=9) as pool:
            assert reduce_all(pool, random(8), (2000, 77, 1300, 513)) == 4 * 3890
            assert links(pool)["replays"] == 0

    def test_that_answer_late_are_waited_for(self, pool) -> None:
        """The others are not taken for dead, and nothing is sent again."""
        self.late(pool)
        assert pool.device.nodes[3].sync0.stall_receive.value > 4000

    @pytest.mark.deep
    def test_that_answer_late_use_up_the_credits(self) -> None:
        """More chunks take turns than there are places for: the one before waits for space."""
        with opened(link_latency=10, chunks_ahead=6, buffer_entries=4) as pool:
            self.late(pool)
            assert pool.device.nodes[1].sync0.stall_send.value > 1000, "credits never ran out"

    def late(self, pool: CoarsePool) -> None:
        arrays = draw(pool, 3000, random(9))
        tensor = pool.tensor(arrays)
        front = tensor.front(2)
        late = {"kind": "late", "write": False, "delay": 6000, "times": 4}
        limit = front.address + front.nbytes
        backend(pool).inject(Injection(base=front.address, limit=limit, **late))
        pool.all_reduce(tensor, group=0)
        assert compare(tensor, reduced(pool, arrays, group=0)) == 12000
        assert pool.device.nodes[2].sync0.stall_local.value > 4000
        assert links(pool)["replays"] == 0

    @pytest.mark.parametrize("elements", [1, 17, 300, 1001])
    def test_only_the_result_is_written(self, elements) -> None:
        """All else is a guard, and is compared."""
        with opened(link_latency=10, window="direct") as pool:
            self.only_the_result(pool, elements)

    def only_the_result(self, pool: CoarsePool, elements: int) -> None:
        arrays = draw(pool, elements, random(elements))
        tensor = pool.tensor(arrays)
        whole = [np.empty(MEMORY, np.uint8) for _ in range(DEVICES)]
        for device, before in enumerate(whole):
            backend(pool).read_memory(device * MEMORY, before)
        for device in range(DEVICES):
            back = tensor.back(device).address
            first, last = back // 64 * 64, -(-(back + 4 * elements) // 64) * 64
            front = tensor.front(device)
            ends = sorted([(first, last), (front.address, front.address + front.nbytes)])
            at = device * MEMORY
            for begin, end in [*ends, ((device + 1) * MEMORY, 0)]:
                begin = begin // 64 * 64
                if begin > at:
                    backend(pool).protect(at, begin - at)
                at = -(-end // 64) * 64
        pool.all_reduce(tensor)
        expected = reduced(pool, arrays).view(np.uint8)
        changed = 0
        for device, before in enumerate(whole):
            after = np.empty(MEMORY, np.uint8)
            backend(pool).read_memory(device * MEMORY, after)
            at = tensor.front(device).address - device * MEMORY
            np.testing.assert_array_equal(after[at:][: 4 * elements], expected)
            changed += elements
            line = slice(at // 64 * 64, -(-(at + 4 * elements) // 64) * 64)
            after[line] = before[line]  # the rest of the last line is poison
            np.testing.assert_array_equal(after, before)
        assert changed == DEVICES * elements

    def test_a_guard_is_a_fault_and_a_hard_reset_ends_it(self, pool) -> None:
        arrays = draw(pool, 1000, random(10))
        tensor = pool.tensor(arrays)
        guard = tensor.back(2).address + 1024
        backend(pool).protect(guard, 64)
        with pytest.raises(GuardError) as found:
            pool.all_reduce(tensor)
        assert found.value.address == guard - 2 * MEMORY
        with pytest.raises(GuardError):
            _ = pool.device.nodes[0].pool.status.busy
        backend(pool).claim(guard, 64)
        pool.device.reset()
        pool.reset()
        assert compare(tensor, arrays) == 4000
        pool.all_reduce(tensor)
        assert compare(tensor, reduced(pool, arrays)) == 4000

    @pytest.mark.parametrize("group", [0, 1])
    def test_slow_to_answer_writes_while_the_next_job_arrives(self, group) -> None:
        """A device still waits for its last results when the one before it is a job ahead."""
        with opened(link_latency=1, memory="ideal", latency=1) as pool:
            rng = random(17)
            late = {"kind": "late", "write": True, "delay": 1500, "times": 100}
            base = group * MEMORY  # the receiver of one ring, the sender of the other
            backend(pool).inject(Injection(base=base, limit=base + MEMORY, **late))
            arrays = [draw(pool, size, rng) for size in (100, 300, 128)]
            tensors = [pool.tensor(each) for each in arrays]
            kinds = [("sum", "bf16"), ("max", "fp32"), ("average", "fp16")]
            for _ in range(2):
                events = []
                for tensor, (op, wire) in zip(tensors[:2], kinds, strict=False):
                    events.append(pool.submit(tensor, op, wire, group=group))
                pool.submit(tensors[2], *kinds[2], group=group).wait()
                assert all(event.done for event in events)
                for number, (op, wire) in enumerate(kinds):
                    values = reduced(pool, arrays[number], op, wire, group)
                    assert compare(tensors[number], values) == DEVICES * values.size
                    arrays[number] = [values] * DEVICES


class TestHost:
    """Loads, stores and registers while jobs run."""

    def test_loads_and_stores_of_any_place_and_size(self) -> None:
        with opened(link_latency=10, memory="ideal", stall=0.2, seed=4) as pool:
            rng = random(11)
            arrays = draw(pool, 6000, rng)
            tensor = pool.tensor(arrays)
            areas = [pool.device.alloc(1 << 14, np.uint8, channel=d) for d in range(DEVICES)]
            mirrors = [rng.integers(0, 256, 1 << 14, np.uint8) for _ in range(DEVICES)]
            for area, mirror in zip(areas, mirrors, strict=True):
                area.write(mirror)
            event = pool.submit(tensor)
            during = accesses = 0
            while accesses < 300:
                busy = any(node.pool.status.busy for node in pool.device.nodes)
                device = int(rng.integers(DEVICES))
                size = int(rng.choice([1, 3, 4, 63, 64, 65, 4096, int(rng.integers(1, 6000))]))
                at = int(rng.integers(0, (1 << 14) - size + 1))
                if rng.random() < 0.5:
                    data = rng.integers(0, 256, size, np.uint8)
                    mirrors[device][at : at + size] = data
                    backend(pool).write_memory(areas[device].address + at, data)
                else:
                    out = np.empty(size, np.uint8)
                    backend(pool).read_memory(areas[device].address + at, out)
                    np.testing.assert_array_equal(out, mirrors[device][at : at + size])
                accesses += 1
                during += busy
                if not busy and not event.ended:
                    event.wait()
            event.wait()
            assert during > 20, f"{during} accesses were made while a job ran"
            assert compare(tensor, reduced(pool, arrays)) == 24000
            for area, mirror in zip(areas, mirrors, strict=True):
                np.testing.assert_array_equal(area.read(), mirror)

    def test_an_access_over_the_end_of_a_device_is_cut_there(self, pool) -> None:
        data = random(12).integers(0, 256, 9000, np.uint8)
        backend(pool).write_memory(2 * MEMORY - 5000, data)
        out = np.empty(9000, np.uint8)
        backend(pool).read_memory(2 * MEMORY - 5000, out)
        np.testing.assert_array_equal(out, data)

    @pytest.mark.parametrize("device", range(DEVICES))
    def test_registers_that_are_not_there(self, pool, device) -> None:
        space = register_bytes(pool.device.config)
        bad = [3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 8, space - 4, BLOCK_BYTES - 4, 1, 2, 3, 0x82]
        for offset in bad:
            with pytest.raises(BusError):
                backend(pool).read_register(device * space + offset)
            with pytest.raises(BusError):
                backend(pool).write_register(device * space + offset, 0)
        for address in (-4, DEVICES * space):
            with pytest.raises(BusError):
                backend(pool).read_register(address)
        assert pool.device.nodes[device].pool.link.device == device


class TestSnapshots:
    """What is frozen stays as it was, whoever writes, and whenever."""

    def same(self, frozen: Frozen, number: int, arrays: list[Floats]) -> int:
        """Compare one frozen tensor on all devices; the number of elements."""
        for device, want in enumerate(arrays):
            got = frozen.read(number, device)
            np.testing.assert_array_equal(got.view("u4"), want.view("u4"), err_msg=f"{device}")
        return sum(each.size for each in arrays)

    @pytest.mark.parametrize(
        ("memory", "stall"),
        [("ideal", 0.3), pytest.param("halfduplex", 0, marks=pytest.mark.deep)],
    )
    def test_of_one_version_under_heavy_traffic(self, memory, stall) -> None:
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
                        compared += self.same(frozen, number, then[number])
                        event.wait()
                        summed = step()
                        event = pool.submit(tensors[0], "average")
                    event.wait()
                    summed = step()
                    compared += self.same(frozen, 0, then[0]) + self.same(frozen, 1, then[1])
                    for device in pool.counters().devices:
                        assert device.pages_copied >= 10
                compared += compare(tensors[0], summed) + compare(tensors[1], written)
        assert compared >= 2 * (3 * 16400 + 2 * 36400)

    def test_closed_and_opened_again_and_again(self) -> None:
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
    def test_closed_and_opened_in_the_midst_of_a_copy(self) -> None:
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

    @pytest.mark.parametrize("device", ["golden", "sim"])
    def test_that_cannot_be_is_not_opened(self, device) -> None:
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

    def test_ranges_in_the_registers_may_change_while_one_is_open(self, pool) -> None:
        arrays = draw(pool, 3000, random(16))
        tensor = pool.tensor(arrays)
        with pool.freeze([tensor]) as frozen:
            for node in pool.device.nodes:
                node.pool.snapshot_base.value = 1 << 19
                node.pool.snapshot_area.value = 0
                node.pool.snapshot_pages.value = 1
            for _ in range(2):
                pool.all_reduce(tensor)
            assert self.same(frozen, 0, arrays) == 12000
