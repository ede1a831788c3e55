"""`sim:coarse`: the RTL of a pool on bad links and slow memories, while the host looks on."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest

from nearstep.backends.emulated import Injection
from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import SilentLinkError
from nearstep.errors import BusError, GuardError
from nearstep.threads import VARIABLE
from nearstep_sim.coarse.pool_values import compare, draw, reduced
from nearstep_sim.models.link.faults import LinkFault
from nearstep_spec.coarse.registers import register_bytes
from nearstep_spec.csr.model import BLOCK_BYTES

from .small_pool import DEVICES, MEMORY, backend, opened, random

pytestmark = pytest.mark.usefixtures("top")

ENDS = [(link, direction) for link in range(DEVICES) for direction in (0, 1)]
BAD = ("replays", "bad_frames", "gaps", "duplicates")
SEEN = {"drop": "gaps", "duplicate": "duplicates", "reorder": "gaps", "corrupt": "bad_frames"}
"""What a receiver counts when a fault has hit frames enough."""


@pytest.fixture
def pool() -> Iterator[CoarsePool]:
    with opened(link_latency=10) as each:
        yield each


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

    @pytest.mark.parametrize("broken", [False, True], ids=["whole", "guarded"])
    def test_and_faults_of_memory_are_the_same_for_any_number_of_threads(
        self, broken, top, monkeypatch
    ) -> None:
        if top == "ring":
            pytest.skip("one object is simulated in one thread")

        def observed(threads: int) -> list[object]:
            monkeypatch.setenv(VARIABLE, str(threads))
            before = len(os.listdir("/proc/self/task"))
            with opened(link_latency=10, seed=7, stall=0.1, **self.RATES["all"]) as pool:
                log: list[object] = [reduce_all(pool, random(1), (2000, 999))]
                if broken:
                    tensor = pool.tensor(draw(pool, 1000, random(10)))
                    backend(pool).protect(tensor.back(2).address + 1024, 64)
                    with pytest.raises(GuardError) as found:
                        pool.all_reduce(tensor)
                    log += [str(found.value), found.value.transactions]
                assert len(os.listdir("/proc/self/task")) - before == min(threads, DEVICES) - 1
                return [*log, backend(pool).cycles, hits(pool)]

        one, two, many = (observed(threads) for threads in (1, 2, 9))
        assert len(one) >= 3
        assert one == two == many

    @pytest.mark.parametrize(
        "kind",
        ["drop"]
        + [
            pytest.param(kind, marks=pytest.mark.deep)
            for kind in ("corrupt", "duplicate", "reorder")
        ],
    )
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

    @pytest.mark.deep
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
