"""Push, sync and pull in shards: their order, their bits, and where the time of links goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from nearstep.backends.base import Backend
from nearstep.backends.emulated import Injection
from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import ResetNeededError, SilentLinkError
from nearstep.coarse.pipeline import QUEUED, LinkUse, Pipelined, push_sync_pull
from nearstep.coarse.routing import Shard
from nearstep.errors import (
    ArgumentError,
    BusyError,
    CompletionError,
    OutOfDeviceMemoryError,
    PostedWriteError,
)
from nearstep.work.errors import WorkError
from nearstep.work.graph import Graph
from nearstep.work.timeline import Entry, Timeline
from nearstep_sim.coarse.pool_values import SMALL, SMALL_MEMORY, Floats, reduced

from .conftest import emulated, random_arrays

LATENCY = 20
SIM = f"sim:coarse?{SMALL}&{SMALL_MEMORY}&link_latency=2&client_latency={LATENCY}&memory=ideal"
GOLDEN = f"golden:coarse?{SMALL}&{SMALL_MEMORY}"
ELEMENTS = 6 * 1024 + 5
SHARD = 4096
CLIENTS = 4
MEMORY_BYTES = 1 << 20


def pipelined(
    pool: CoarsePool, elements: int, shard: int | None, op: str = "sum"
) -> tuple[Pipelined, list[Floats], list[Floats]]:
    arrays = random_arrays(pool, elements, 18)
    results = [np.zeros(elements, np.float32) for _ in arrays]
    done = push_sync_pull(pool, arrays, results, shard_bytes=shard, op=op, hertz=250e6)
    return done, arrays, results


def compared(
    pool: CoarsePool, shards: Sequence[Shard], arrays: list[Floats], results: list[Floats], op: str
) -> int:
    """Elements of all clients, each shard's bits those of the golden rings."""
    count = 0
    for shard in shards:
        part = slice(shard.offset // 4, (shard.offset + shard.nbytes) // 4)
        expected = reduced(pool, [each[part] for each in arrays], op)
        for each in results:
            np.testing.assert_array_equal(each[part].view(np.uint32), expected.view(np.uint32))
            count += expected.size
    return count


def check_order(done: Pipelined) -> int:
    """Each shard is pushed by all, then summed, then pulled; lanes take one after the other."""
    checks = 0
    kinds: dict[tuple[str, int], list[Entry]] = {}
    for entry in done.timeline.entries:
        kind, number = entry.operation.name.split()
        kinds.setdefault((kind, int(number)), []).append(entry)
    for number in range(len(done.shards)):
        pushes, (sync,), pulls = (kinds[kind, number] for kind in ("push", "sync", "pull"))
        assert len(pushes) == len(pulls) == CLIENTS
        assert all(each.end <= sync.start for each in pushes)
        assert all(sync.end <= each.start for each in pulls)
        checks += 2 * CLIENTS
    for name, lane in done.timeline.lanes.items():
        numbers = [int(entry.operation.name.split()[1]) for entry in lane]
        step = QUEUED if name.startswith("rings") else 1
        assert numbers == list(range(numbers[0], len(done.shards), step))
        assert all(one.end <= two.start for one, two in pairwise(lane))
        checks += len(lane)
    return checks


@pytest.mark.parametrize("url", [GOLDEN, SIM], ids=["golden", "sim"])
def test_arrays_of_any_size_have_goldens_bits_in_place_too(url: str) -> None:
    checks = 0
    with CoarsePool.open(url) as pool:
        for elements, shard, count in ((1, 1, 1), (511, 4, 1), (513, 2048, 1), (1537, 2048, 3)):
            arrays = random_arrays(pool, elements, elements)
            given = [each.copy() for each in arrays]
            done = push_sync_pull(pool, arrays, arrays, shard_bytes=shard, op="max")
            assert len(done.shards) == count, (elements, shard)
            checks += compared(pool, done.shards, given, arrays, "max")
    assert checks == CLIENTS * (1 + 511 + 513 + 1537)


def overlap(entries: Sequence[Entry]) -> int:
    """Cycles in which all of these were under way."""
    return min(each.end for each in entries) - max(each.start for each in entries)


@pytest.mark.parametrize("url", [GOLDEN, SIM], ids=["golden", "sim"])
def test_shards_go_up_are_summed_and_come_down_in_order(url: str) -> None:
    with CoarsePool.open(url) as pool:
        done, arrays, results = pipelined(pool, ELEMENTS, SHARD, "average")
        assert len(done.shards) == 6
        assert check_order(done) >= 6 * (4 * CLIENTS + 1)
        assert compared(pool, done.shards, arrays, results, "average") == CLIENTS * ELEMENTS
        tensor = pool.tensor(80_000)  # the shards' places were given back
        tensor.free()
        if done.timeline.unit == "steps":
            return
        lanes, together = done.timeline.lanes, 0
        for number in range(1, len(done.shards) - 1):
            up, down = lanes["up 0"][number + 1], lanes["down 0"][number - 1]
            together += overlap([up, done.syncs[number]]) > 0
            together += overlap([done.syncs[number], down]) > 0
        assert together >= 6, together
        for way in ("up", "down"):
            for client in range(CLIENTS):
                use = done.uses(way, client, 1 / 16)
                assert use.cycles == done.timeline.makespan
                assert use.moving == round(4 * ELEMENTS / 16)
                assert use.busy == use.moving / done.timeline.makespan
                assert min(use.before, use.between, use.after) >= 0
                ways = 1 if way == "up" else 2  # a request up, and the answer down
                assert use.within >= ways * LATENCY * len(done.shards)
        assert done.uses("up", 0, 1 / 16).before == 0
        assert done.uses("down", 0, 1 / 16).after < 200  # what it takes to find the last end


def test_an_array_that_goes_whole_leaves_the_link_idle() -> None:
    with CoarsePool.open(SIM) as pool:
        whole, arrays, results = pipelined(pool, ELEMENTS, None)
        assert len(whole.shards) == 1
        assert compared(pool, whole.shards, arrays, results, "sum") == CLIENTS * ELEMENTS
        assert check_order(whole) == 2 * CLIENTS + 2 * CLIENTS + 1
        up, down = whole.timeline.lanes["up 0"][0], whole.timeline.lanes["down 0"][0]
        assert whole.uses("up", 0, 1 / 16).after >= down.duration + whole.syncs[0].duration
        assert whole.uses("down", 0, 1 / 16).before >= up.duration + whole.syncs[0].duration
        shards, _, _ = pipelined(pool, ELEMENTS, SHARD)
        assert shards.timeline.makespan < 0.8 * whole.timeline.makespan


def by_hand(*times: tuple[str, str, int, int]) -> Timeline:
    """Operations with these names, resources, starts and ends."""
    graph = Graph()
    entries = []
    for name, lane, start, end in times:
        entries.append(Entry(graph.add(name, lane, seconds=0.0), start, end))
    return Timeline(entries, None)


def test_what_a_link_loses_adds_up_to_the_makespan() -> None:
    timeline = by_hand(
        ("push 0", "up 0", 10, 30),
        ("push 1", "up 0", 33, 60),
        ("sync 0", "rings 0", 30, 50),
        ("pull 0", "down 0", 50, 75),
        ("sync 1", "rings 1", 60, 80),
        ("pull 1", "down 0", 80, 110),
    )
    done = Pipelined(timeline, [Shard(0, 160), Shard(160, 160)])
    up, down = (done.uses(way, 0, 1 / 16) for way in ("up", "down"))
    assert up == LinkUse(moving=20, before=0, between=3, within=27, after=50)
    assert down == LinkUse(moving=20, before=40, between=5, within=35, after=0)
    assert up.cycles == down.cycles == timeline.makespan == 100
    assert up.busy == 0.2
    for way, client in (("up", 1), ("across", 0)):
        with pytest.raises(ArgumentError, match="no link"):
            done.uses(way, client, 1 / 16)


def test_an_end_that_was_found_beside_another_is_not_waited_for() -> None:
    """A sum that has ended has no polls: they would hold at the next error, or never."""
    with CoarsePool.open(GOLDEN) as pool:
        events = [pool.submit(pool.tensor(4096), group=group) for group in (0, 1)]
        assert all(event.polls for event in events)
        events[1].wait()
        assert events[0].ended
        assert [event.polls for event in events] == [(), ()]


def test_what_a_transfer_uses_is_not_reduced() -> None:
    with CoarsePool.open(SIM) as pool:
        tensor = pool.tensor(2048)
        values = random_arrays(pool, 2048, 3)
        pushed = tensor.submit_write(1, values[1])
        for action in (
            lambda: pool.submit(tensor),
            lambda: tensor.write(1, values[1]),
            tensor.free,
        ):
            with pytest.raises(BusyError, match="has not ended"):
                action()
        pushed.wait()
        event = pool.submit(tensor)
        out = np.empty(2048, np.float32)
        for transfer in (
            lambda: tensor.submit_read(0, out),
            lambda: tensor.submit_write(0, values[0]),
        ):
            with pytest.raises(BusyError, match="a job that has not ended uses it"):
                transfer()
        event.wait()
        tensor.submit_read(0, out).wait()
        np.testing.assert_array_equal(out, values[1] + np.float32(0))


def test_arrays_that_do_not_fit_are_refused() -> None:
    with CoarsePool.open(GOLDEN) as pool:
        good = [np.zeros(64, np.float32) for _ in range(CLIENTS)]
        fixed = good[3].copy()
        fixed.flags.writeable = False
        cases = [
            (good[:3], good, "one for each of 4 devices, not 3"),
            (good, good[:3], "results must be one for each"),
            ([*good[:3], np.zeros(64)], good, "float64"),
            ([*good[:3], np.zeros(65, np.float32)], good, r"shape \(64,\), not float32 of \(65,\)"),
            ([*good[:3], np.zeros(128, np.float32)[::2]], good, "contiguous"),
            (good, [*good[:3], fixed], "writable, not that of client 3"),
        ]
        for arrays, results, text in cases:
            with pytest.raises(ArgumentError, match=text):
                push_sync_pull(pool, arrays, results, shard_bytes=64)
        with pytest.raises(ArgumentError, match="shard_bytes"):
            push_sync_pull(pool, good, good, shard_bytes=0)
        with pytest.raises(ArgumentError, match="op must be"):
            push_sync_pull(pool, good, good, shard_bytes=64, op="product")


def test_one_device_alone_has_no_rings_and_is_refused() -> None:
    with CoarsePool.open("golden:coarse?devices=1&rules=sgd") as pool:
        array = np.ones(64, np.float32)
        with pytest.raises(ArgumentError, match="reduce"):
            push_sync_pull(pool, [array], [array], shard_bytes=64)
        assert (array == 1).all()


def test_without_memory_for_all_shards_nothing_is_begun() -> None:
    with CoarsePool.open(SIM) as pool:
        arrays = [np.ones(140_000, np.float32) for _ in range(CLIENTS)]
        with pytest.raises(OutOfDeviceMemoryError):
            push_sync_pull(pool, arrays, arrays, shard_bytes=SHARD)
        assert all((each == 1).all() for each in arrays)
        pool.tensor(120_000).free()  # what there was is free again
        done, arrays, results = pipelined(pool, 20_000, None)
        assert compared(pool, done.shards, arrays, results, "sum") == CLIENTS * 20_000


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_transfer_that_fails_ends_the_work_and_leaves_the_pool_usable(kind: str) -> None:
    write = kind == "write"
    with CoarsePool.open(SIM) as pool:
        backend = emulated(pool)
        base = MEMORY_BYTES + 8192  # of the second device
        backend.inject(
            Injection(kind="slverr", write=write, host=True, base=base, limit=base + 8192)
        )
        with pytest.raises(WorkError) as caught:
            pipelined(pool, ELEMENTS, SHARD)
        error = PostedWriteError if write else CompletionError
        assert isinstance(caught.value.__cause__, error)
        assert base <= caught.value.__cause__.address < base + 8192
        assert ("push" if write else "pull") in caught.value.operation
        assert caught.value.not_run
        backend.heal()
        done, arrays, results = pipelined(pool, ELEMENTS, SHARD)
        assert compared(pool, done.shards, arrays, results, "sum") == CLIENTS * ELEMENTS


@pytest.mark.parametrize("url", [GOLDEN, SIM], ids=["golden", "sim"])
def test_a_device_that_dies_ends_the_work_and_after_a_reset_it_goes(url: str) -> None:
    with CoarsePool.open(url, silence_cycles=5000) as pool:
        backend = emulated(pool)
        backend.kill(2)
        with pytest.raises(WorkError) as caught:
            pipelined(pool, ELEMENTS, SHARD)
        assert isinstance(caught.value.__cause__, SilentLinkError)
        assert "sync 0" in caught.value.operation
        with pytest.raises(WorkError) as again:
            pipelined(pool, ELEMENTS, SHARD)
        assert isinstance(again.value.__cause__, ResetNeededError)
        backend.revive(2)
        pool.reset()
        done, arrays, results = pipelined(pool, ELEMENTS, SHARD)
        assert compared(pool, done.shards, arrays, results, "sum") == CLIENTS * ELEMENTS
        pool.tensor(80_000).free()


ACCESSES = (
    "read_register",
    "write_register",
    "read_memory",
    "write_memory",
    "submit_read",
    "submit_write",
    "advance",
    "wait",
)


class Interrupting:
    """Ctrl-C at a chosen access to the devices: before it, or behind it."""

    def __init__(self, pool: CoarsePool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.at, self.behind = 0, 0, False
        backend = pool.device.backend
        for name in ACCESSES:
            monkeypatch.setattr(backend, name, self._wrapped(getattr(backend, name)))
        one_by_one = partial(Backend.write_registers, backend)
        monkeypatch.setattr(backend, "write_registers", one_by_one)

    def _wrapped(self, access: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            self.made += 1
            now = self.made == self.at
            if now and not self.behind:
                raise KeyboardInterrupt
            found = access(*args, **options)
            if now:
                raise KeyboardInterrupt
            return found

        return call


@pytest.mark.parametrize(
    ("url", "step"),
    [
        (GOLDEN, 7),
        (SIM, 11),
        *(pytest.param(url, 1, marks=pytest.mark.deep) for url in (GOLDEN, SIM)),
    ],
    ids=["golden", "sim", "golden-every", "sim-every"],
)
def test_ctrl_c_at_any_access_gives_memory_back_and_a_reset_is_all_it_takes(
    url: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a job that some devices were given and others not reaches what is done next."""
    seen = Counter[str]()
    with CoarsePool.open(url) as pool:
        arrays = random_arrays(pool, 2000, 18)
        expected = [np.zeros(2000, np.float32) for _ in arrays]
        interrupting = Interrupting(pool, monkeypatch)
        push_sync_pull(pool, arrays, expected, shard_bytes=SHARD)
        accesses, free = interrupting.made, pool.device.free_bytes
        for number in range(1, accesses + 1, step):
            interrupting.made, interrupting.at = 0, number
            interrupting.behind = bool(number // step % 2)
            results = [np.zeros(2000, np.float32) for _ in arrays]
            try:
                push_sync_pull(pool, arrays, results, shard_bytes=SHARD)
            except KeyboardInterrupt:
                seen["interrupted"] += 1
            interrupting.at = 0
            try:
                push_sync_pull(pool, arrays, results, shard_bytes=SHARD)
                seen["went on"] += 1
            except WorkError as error:
                seen[type(error.__cause__).__name__] += 1
                pool.reset()
                push_sync_pull(pool, arrays, results, shard_bytes=SHARD)
            assert pool.device.free_bytes == free
            for each, wanted in zip(results, expected, strict=True):
                np.testing.assert_array_equal(each.view(np.uint32), wanted.view(np.uint32))
                seen["bits"] += 32 * each.size
    print(dict(seen))
    tries = len(range(1, accesses + 1, step))
    assert seen["went on"] + seen[ResetNeededError.__name__] == tries > 10
    assert seen["interrupted"] > 0.9 * tries, "a course may have a few accesses less than the first"
    assert seen["went on"]
    assert seen[ResetNeededError.__name__]
    assert seen["bits"] == tries * CLIENTS * 2000 * 32


@pytest.mark.deep
@pytest.mark.parametrize("memory", ["halfduplex", "ideal"])
def test_both_directions_of_a_clients_link_are_busy(memory: str) -> None:
    """16 MiB of the 64 of `bench/bench_coarse_pipeline.py`, in its shards."""
    nbytes = 16 << 20
    with CoarsePool.open(f"sim:coarse?devices=4&memory_bytes=64MiB&memory={memory}") as pool:
        done, arrays, results = pipelined(pool, nbytes // 4, 128 << 10)
        assert compared(pool, done.shards, arrays, results, "sum") == nbytes
        assert check_order(done) >= 128 * (4 * CLIENTS + 1)
        assert done.timeline.makespan <= 1.10 * nbytes / 16
        for way in ("up", "down"):
            busy = [done.uses(way, client, 1 / 16).busy for client in range(CLIENTS)]
            print(memory, way, busy)
            assert min(busy) >= 0.85
