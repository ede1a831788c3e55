"""Host and kernel take turns on one channel; the DDR4 model judges every command, a second memory
every read, and the host model the time of its data."""

import numpy as np
import pytest

from nearstep_hw.axdimm.host_front_end import HOST_READ_LATENCY, HOST_WRITE_LATENCY
from nearstep_hw.axdimm.refresh_debt import POSTPONED
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_sim.axdimm.memory_channel import ChannelBench, ChannelError, Kernel, Mode
from nearstep_sim.models.dram.host import BareDram
from nearstep_spec.axdimm.hand_over import (
    HAND_OVER_CYCLES,
    longest_to_acceleration,
    longest_to_normal,
)
from nearstep_spec.axdimm.registers import WINDOW_BYTES, Block, arbiter_map
from nearstep_spec.csr.model import LINE_BYTES, RegisterMap
from nearstep_spec.dram.command import Command

MODE, CONTROL = 1, 2  # lines of the arbiter
CLEAR, KERNEL_RESET = 1, 2
START = 1  # line of the kernel
ONES = (1 << 8 * LINE_BYTES) - 1


def registers(bench: ChannelBench) -> RegisterMap:
    return arbiter_map(
        bench.mapping, read_latency=HOST_READ_LATENCY, write_latency=HOST_WRITE_LATENCY
    )


class Driver:
    """What a driver does, and random host traffic beside it."""

    def __init__(self, bench: ChannelBench, seed: int) -> None:
        self.bench = bench
        self.map = registers(bench)
        self.rng = np.random.default_rng(seed)
        size = bench.kernel_base
        self.hot = self.rng.integers(0, size // LINE_BYTES, 40) * LINE_BYTES

    def request(self, mode: Mode) -> None:
        self.bench.write_line(Block.ARBITER, MODE, {0: int(mode is Mode.ACCELERATION)})
        self.bench.host.fence()

    def reset_kernel(self) -> None:
        self.bench.write_line(Block.ARBITER, CONTROL, {0: KERNEL_RESET})
        self.bench.host.fence()

    def get(self, path: str) -> int:
        return self.bench.field(self.map, path)

    def reach(self, mode: Mode, most: int = 20_000) -> int:
        """Request a mode and wait. Cycles that the hand-over took, by the arbiter's count."""
        self.request(mode)
        for _ in range(most // 50):
            self.bench.run(50)
            if self.bench.mode is mode and self.bench.host.idle:
                name = "to_normal" if mode is Mode.NORMAL else "to_acceleration"
                return self.get(f"{name}_last.value")
        raise AssertionError(f"expected {mode!r} within {most} cycles, found {self.bench.mode!r}")

    def traffic(self, n: int) -> None:
        """Random accesses: far and near, of hot rows, of the kernel's region, of registers."""
        rng = self.rng
        kind = rng.integers(0, 16, n)
        anywhere = rng.integers(0, self.bench.kernel_base // LINE_BYTES, n) * LINE_BYTES
        hot = rng.choice(self.hot, n) + rng.integers(0, 4, n) * LINE_BYTES
        near = (self.hot[0] + (np.arange(n) % 512) * LINE_BYTES) % self.bench.kernel_base
        kernel = self.bench.kernel_base + rng.integers(0, 32 * 64, n) * LINE_BYTES
        line = self.bench.window + rng.integers(0, WINDOW_BYTES // LINE_BYTES, n) * LINE_BYTES
        addresses = np.select(
            [kind < 3, kind < 9, kind < 13, kind < 14], [anywhere, hot, near, kernel], line
        )
        is_store = rng.random(n) < rng.choice([0.1, 0.5, 0.9])
        is_store &= kind < 13
        masks = np.where(
            rng.random(n) < 0.2, rng.integers(0, 1 << 63, n, dtype=np.uint64), np.uint64(0)
        )
        data = rng.integers(0, 256, (n, LINE_BYTES), dtype=np.uint8)
        self.bench.host.submit(is_store, addresses, data=data, masks=masks)


def switch_at_random(bench: ChannelBench, seed: int, cycles: int) -> int:
    """Random traffic, modes, kernel, resets, for some cycles. How often the kernel was reset."""
    print("seed", seed)
    driver, rng = Driver(bench, seed), np.random.default_rng(seed + 1)
    resets = 0
    while bench.statistics.cycles < cycles:
        choice = rng.integers(0, 100)
        if choice < 40:
            driver.traffic(int(rng.integers(1, 150)))
        elif choice < 60:
            driver.request(Mode.ACCELERATION)
        elif choice < 80:
            driver.request(Mode.NORMAL)
        elif choice < 95:
            bench.kernel(Kernel.BUSY if rng.random() < 0.7 else Kernel.QUIET)
        elif choice < 97:
            bench.write_line(Block.ARBITER, CONTROL, {0: CLEAR})
        elif choice < 98 and resets < 12:
            driver.reset_kernel()
            resets += 1
        bench.run(int(rng.choice([3, 40, 400, 2000], p=[0.3, 0.35, 0.33, 0.02])))
        bench.host.completed()
    bench.kernel(Kernel.BUSY)
    driver.reach(Mode.ACCELERATION)
    bench.kernel(Kernel.QUIET)
    bench.run(20_000)
    assert bench.kernel_idle
    driver.reach(Mode.NORMAL)
    driver.traffic(300)
    bench.run(20_000, until_idle=True)
    assert bench.host.idle
    return resets


CONFIGS: dict[str, dict[str, object]] = {
    "default": {},
    "in order": {"scheduler": "in-order"},
    "postponing 8": {"postpone": 8, "stall": 0.2},
    "x16": {"width": "x16", "density": "4Gb", "postpone": 4},
    "bank group on top": {"mapping": "bankgroup-row-column-bank", "density": "16Gb"},
    "closing banks": {"auto_precharge": 0.3},
    "another refresh phase": {"refresh_offset": 1234, "scheduler": "in-order"},
    "another refresh phase, postponing 8": {"refresh_offset": 2900, "postpone": 8, "stall": 0.1},
}
TWO_RANKS: dict[str, dict[str, object]] = {
    "two ranks": {"ranks": 2},
    "two ranks by pages": {"ranks": 2, "interleave": 4096, "stall": 0.2, "refresh_offset": 2900},
    "two ranks, one above the other": {"ranks": 2, "interleave": 1 << 33, "postpone": 8},
    "one of two ranks in debt": {"ranks": 2, "late_rank": 0},
    "the other of two ranks in debt": {"ranks": 2, "late_rank": 1, "scheduler": "in-order"},
}


@pytest.mark.parametrize(
    "name", ["default", "closing banks", "postponing 8", "another refresh phase, postponing 8"]
)
def test_random_mode_switching_under_random_traffic(name: str) -> None:
    bench = ChannelBench(seed=31, **CONFIGS[name])
    resets = switch_at_random(bench, 31, 100_000)
    found = bench.statistics
    print(found, bench.device.counts)
    assert found.kernel_resets == resets
    assert found.dram_reads > 1000
    assert found.refused_reads > 300
    assert found.window_reads > 300
    assert found.kernel_beats_read > 3000
    assert found.mode_changes > 20


@pytest.mark.deep
@pytest.mark.parametrize("name", TWO_RANKS)
def test_random_mode_switching_with_two_ranks(name: str) -> None:
    bench = ChannelBench(seed=32, **TWO_RANKS[name])
    resets = switch_at_random(bench, 32, 100_000)
    found = bench.statistics
    print(found, *(device.counts for device in bench.devices))
    assert found.kernel_resets == resets
    assert found.dram_reads > 1000
    assert found.refused_reads > 300
    assert found.window_reads > 300
    assert found.kernel_beats_read > 3000
    assert found.mode_changes > 20
    for device in bench.devices:
        assert device.counts[Command.REF] > 50
        if bench.mapping.interleave < bench.kernel_base:
            assert device.counts[Command.RD] > 3000
            assert found.split_columns > 20  # the host had one rank before it had the other


@pytest.mark.deep
@pytest.mark.parametrize("name", [*CONFIGS, *TWO_RANKS])
def test_random_mode_switching_for_long(name: str) -> None:
    bench = ChannelBench(seed=77, **(CONFIGS | TWO_RANKS)[name])
    switch_at_random(bench, 77, 1_000_000)
    found = bench.statistics
    print(found, bench.device.counts)
    assert found.dram_reads > 10_000
    assert found.refused_reads > 5_000
    assert found.mode_changes > 400


def change_at_any_phase(bench: ChannelBench, seed: int, cycles: int) -> dict[Mode, int]:
    """Hand-overs one after the other, by a host that is silent or never rests meanwhile; runs and
    pauses are of any length, many of a few cycles.

    The longest ways, in cycles.
    """
    driver, rng = Driver(bench, seed), np.random.default_rng(seed + 1)
    worst = dict.fromkeys((Mode.NORMAL, Mode.ACCELERATION), 0)
    silent = rng.choice([0.0, 0.5, 1.0])
    most = FabricTiming(bench.device.timing).refresh_interval
    while bench.statistics.cycles < cycles:
        mode = Mode.ACCELERATION if bench.mode is Mode.NORMAL else Mode.NORMAL
        driver.request(mode)
        bench.run(2000, until_idle=True)
        bench.kernel(Kernel.BUSY if rng.random() < 0.5 else Kernel.QUIET)
        busy = rng.random() >= silent
        start = bench.statistics.cycles
        while bench.mode is not mode:
            if busy and bench.host.waiting < 100:
                n = 200
                bench.host.submit(np.zeros(n, bool), rng.integers(0, 1 << 22, n) * LINE_BYTES)
            bench.run(10)
            assert bench.statistics.cycles - start <= HAND_OVER_CYCLES
        worst[mode] = max(worst[mode], bench.statistics.cycles - start)
        bench.run(40_000, until_idle=True)
        bench.host.completed()
        bench.run(
            int(rng.integers(1, rng.choice([40, 400, most, 9 * most], p=[0.5, 0.3, 0.1, 0.1])))
        )
    return worst


def check_refreshes(bench: ChannelBench, worst: dict[Mode, int]) -> None:
    """Every command was judged by its rank; what it came to lies within the limits."""
    timing = bench.device.timing
    for device in bench.devices:
        found = device.refresh_extremes
        refreshes = device.counts[Command.REF]
        print(
            f"{timing.density} {timing.width}: {bench.statistics.mode_changes} changes of mode, "
            f"{refreshes} REF, gap {found.longest_gap / timing.t_refi:.4f} tREFI, 17 in "
            f"{found.shortest_seventeen / timing.t_refi:.4f}, debt {found.lowest_debt} to "
            f"{found.highest_debt}; longest ways {worst}"
        )
        assert found.longest_gap <= 9 * timing.t_refi
        assert found.shortest_seventeen >= 2 * timing.t_refi
        assert found.highest_debt <= 8
    assert worst[Mode.NORMAL] <= longest_to_normal(timing)
    assert worst[Mode.ACCELERATION] <= longest_to_acceleration(timing, ranks=len(bench.devices))


WHIMS: dict[str, dict[str, object]] = {
    "postpones and pulls in": {"postpone": 8, "pull_in": 8, "refresh_offset": 1777},
    "postpones": {"postpone": 8, "refresh_offset": 2900, "stall": 0.1},
    "in order": {"postpone": 4, "pull_in": 8, "scheduler": "in-order"},
}


def test_gap_and_rate_of_the_dram_are_kept_for_any_host() -> None:
    print("seed 3")
    bench = ChannelBench(seed=3, whim=True, **WHIMS["postpones and pulls in"])
    worst = change_at_any_phase(bench, 3, 60_000)
    check_refreshes(bench, worst)
    assert bench.statistics.mode_changes > 20


@pytest.mark.deep
@pytest.mark.parametrize("host", WHIMS)
@pytest.mark.parametrize("density", ["4Gb", "8Gb", "16Gb"])
def test_gap_and_rate_of_the_dram_are_kept_for_long(density: str, host: str) -> None:
    changes = 0
    for seed in range(10):
        print("seed", seed)
        bench = ChannelBench(seed=seed, density=density, whim=True, **WHIMS[host])
        worst = change_at_any_phase(bench, seed, 200_000)
        check_refreshes(bench, worst)
        changes += bench.statistics.mode_changes
    assert changes > 500


@pytest.mark.deep
@pytest.mark.parametrize("host", [*WHIMS, "late"])
@pytest.mark.parametrize("rank", [0, 1])
def test_gap_and_rate_are_kept_for_each_of_two_ranks(host: str, rank: int) -> None:
    """At whim each rank has a debt of its own.

    A `late` one is up to eight behind, the other no more than the kernel leaves due.
    """
    changes = 0
    for seed in range(4):
        print("seed", seed)
        whims = {"late_rank": rank} if host == "late" else {"whim": True, **WHIMS[host]}
        bench = ChannelBench(seed=seed + 10 * rank, ranks=2, **whims)
        worst = change_at_any_phase(bench, seed, 100_000)
        check_refreshes(bench, worst)
        if host == "late":
            most = [device.refresh_extremes.highest_debt for device in bench.devices]
            assert most[rank] >= 7 > POSTPONED >= most[1 - rank]
        changes += bench.statistics.mode_changes
    assert changes > 100


def test_the_bench_notices_a_refresh_that_comes_too_late() -> None:
    bench = ChannelBench(seed=3)
    bench.device.refresh_offset(9 * bench.device.timing.t_refi)
    with pytest.raises(ChannelError, match="9 owed, limit 8"):
        bench.run(3000)


@pytest.fixture
def channel() -> tuple[ChannelBench, Driver]:
    bench = ChannelBench(seed=5)
    return bench, Driver(bench, 5)


@pytest.mark.parametrize(
    "shape",
    [{}, pytest.param({"ranks": 2, "interleave": 4096}, marks=pytest.mark.deep)],
    ids=["one rank", "two ranks"],
)
def test_the_host_sees_bare_dram_in_normal_mode(shape: dict[str, int]) -> None:
    bench = ChannelBench(seed=5, **shape)
    Driver(bench, 5).traffic(1)  # the window is memory for bare DRAM
    bench.run(1000, until_idle=True)
    rng = np.random.default_rng(8)
    n = 4000
    addresses = rng.integers(0, 1 << 14, n) * LINE_BYTES
    stores = rng.random(n) < 0.4
    data = rng.integers(0, 256, (n, LINE_BYTES), dtype=np.uint8)
    bare = BareDram(bench.host.config)
    bare.run(bench.host.cycle, until_idle=False)
    for host in (bench.host, bare.host):
        host.completed()
        host.submit(stores, addresses, tags=np.arange(n), data=data)
    took = bench.run(100_000, until_idle=True)
    took_bare = bare.run(100_000)
    loads, bare_loads = bench.host.completed(), bare.host.completed()
    print(f"{took} cycles, {took_bare} on bare DRAM, {len(loads.tags)} loads")
    if not shape:  # of two ranks the first accesses meet rows that differ
        assert np.array_equal(loads.tags, bare_loads.tags)
    order, bare_order = np.argsort(loads.tags), np.argsort(bare_loads.tags)
    assert np.array_equal(loads.tags[order], bare_loads.tags[bare_order])
    assert np.array_equal(loads.data[order], bare_loads.data[bare_order])
    assert abs(took - took_bare) <= 0.01 * took_bare


def test_hand_overs_are_short_and_counted(channel: tuple[ChannelBench, Driver]) -> None:
    bench, driver = channel
    refresh = FabricTiming(bench.device.timing).refresh_cycle
    seen: dict[Mode, list[int]] = {Mode.ACCELERATION: [], Mode.NORMAL: []}
    for _ in range(30):
        driver.traffic(40)
        seen[Mode.ACCELERATION].append(driver.reach(Mode.ACCELERATION))
        bench.kernel(Kernel.BUSY)
        bench.run(int(driver.rng.integers(1, 3000)))
        seen[Mode.NORMAL].append(driver.reach(Mode.NORMAL))
        bench.kernel(Kernel.QUIET)
    worst = {mode: max(cycles) for mode, cycles in seen.items()}
    print("worst", worst, "refresh", refresh)
    assert driver.get("to_acceleration_longest.value") == worst[Mode.ACCELERATION]
    assert driver.get("to_normal_longest.value") == worst[Mode.NORMAL]
    assert worst[Mode.ACCELERATION] <= refresh + 128 + 40
    assert worst[Mode.NORMAL] <= 9 * refresh + 1000


@pytest.mark.parametrize("scheduler", ["in-order", "fr-fcfs"])
def test_a_host_that_never_rests_gets_the_channel_back(scheduler: str) -> None:
    bench = ChannelBench(seed=6, scheduler=scheduler)
    driver, rng = Driver(bench, 6), np.random.default_rng(6)
    interval = FabricTiming(bench.device.timing).refresh_interval
    bench.kernel(Kernel.BUSY)
    waits = []
    for _ in range(40):
        driver.reach(Mode.ACCELERATION)
        driver.request(Mode.NORMAL)
        n = 1200  # refused, one row after the other, for longer than the hand-over may take
        bench.host.submit(np.zeros(n, bool), rng.integers(0, 1 << 22, n) * LINE_BYTES)
        start = bench.host.cycle
        while bench.mode is not Mode.NORMAL:
            bench.run(1)
        waits.append(bench.host.cycle - start)
        assert not bench.host.idle
        bench.run(20_000, until_idle=True)
        bench.host.completed()
    print(f"{scheduler}: median {np.median(waits):.0f}, longest {max(waits)} cycles")
    assert max(waits) <= 2 * interval < longest_to_normal(bench.device.timing)


def test_host_access_in_acceleration_mode_is_answered_flagged_and_harmless(
    channel: tuple[ChannelBench, Driver],
) -> None:
    bench, driver = channel
    address = 0x12340 * LINE_BYTES
    bench.host.store(address, b"\x5a" * LINE_BYTES)
    driver.reach(Mode.ACCELERATION)
    bench.host.completed()
    writes = bench.device.counts[Command.WR]
    bench.host.store(address, b"\xff" * LINE_BYTES)
    bench.host.fence()
    bench.host.load(address)
    bench.host.load(address + LINE_BYTES)
    bench.run(1000, until_idle=True)
    loads = bench.host.completed()
    assert loads.data.shape == (2, LINE_BYTES)
    assert not loads.data.any()
    assert bench.device.counts[Command.WR] == writes
    assert driver.get("status.refused_access") == 1
    assert driver.get("refused_count.value") == 3
    assert driver.get("refused_access.write") == 1
    assert driver.get("refused_address.value") == address
    driver.reach(Mode.NORMAL)
    assert driver.get("status.refused_access") == 1
    bench.write_line(Block.ARBITER, CONTROL, {0: CLEAR})
    bench.host.fence()
    assert driver.get("status.refused_access") == 0
    assert driver.get("refused_count.value") == 0
    bench.host.completed()
    bench.host.load(address)
    bench.run(1000, until_idle=True)
    assert (bench.host.completed().data == 0x5A).all()


def test_start_is_refused_and_flagged_in_normal_mode(channel: tuple[ChannelBench, Driver]) -> None:
    bench, driver = channel
    bench.write_line(Block.KERNEL, START, {0: 1})
    bench.write_line(Block.KERNEL, START + 4, {0: 0x1234, 15: 0x5678})
    bench.run(1000, until_idle=True)
    bench.run(10)
    assert not bench.kernel_line(START).any()
    assert bench.kernel_line(START + 4).view(np.uint32)[[0, 15]].tolist() == [0x1234, 0x5678]
    assert bench.read_line(Block.KERNEL, START + 4)[[0, 15]].tolist() == [0x1234, 0x5678]
    assert driver.get("status.refused_start") == 1
    driver.reach(Mode.ACCELERATION)
    bench.write_line(Block.ARBITER, CONTROL, {0: CLEAR})
    bench.write_line(Block.KERNEL, START, {0: 1})
    bench.run(1000, until_idle=True)
    bench.run(10)
    assert bench.kernel_line(START)[0] == 1
    assert driver.get("status.refused_start") == 0


def test_a_store_to_the_window_keeps_what_it_masks(channel: tuple[ChannelBench, Driver]) -> None:
    bench, driver = channel
    keeps = (1 << LINE_BYTES) - 1  # a bit for each byte
    line = bench.line_address(Block.KERNEL, START + 4)
    bench.write_line(Block.KERNEL, START + 4, {k: 0x1000 + k for k in range(LINE_BYTES // 4)})
    bench.host.store(line, b"\xff" * LINE_BYTES, 0xF << 4 * 7)
    bench.host.store(line, b"\xee" * LINE_BYTES, keeps ^ 0xF << 4 * 3)
    bench.host.store(bench.line_address(Block.ARBITER, MODE), b"\x01" * LINE_BYTES, keeps)
    bench.host.store(bench.line_address(Block.KERNEL, START), b"\x01" * LINE_BYTES, 0xF)
    words = [0xFFFFFFFF] * (LINE_BYTES // 4)
    words[7], words[3] = 0x1007, 0xEEEEEEEE
    assert bench.read_line(Block.KERNEL, START + 4).tolist() == words
    assert driver.get("mode.acceleration") == 0
    assert driver.get("status.refused_start") == 0
    assert bench.mode is Mode.NORMAL


def test_start_is_refused_while_the_mode_changes() -> None:
    bench = ChannelBench(seed=5, scheduler="in-order")
    driver = Driver(bench, 5)
    driver.reach(Mode.ACCELERATION)
    driver.request(Mode.NORMAL)
    bench.write_line(Block.KERNEL, START, {0: 1})
    bench.run(1000, until_idle=True)
    bench.run(10)
    assert not bench.kernel_line(START).any()
    assert driver.get("status.refused_start") == 1
    assert driver.reach(Mode.ACCELERATION) > 0
    assert not bench.kernel_line(START).any()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_switch_among_requests_in_flight_divides_them(seed: int) -> None:
    """Nothing waits for anything: loads, the request, loads, the request back, loads."""
    print("seed", seed)
    bench = ChannelBench(seed=seed, scheduler="in-order", stall=0.1 * (seed - 1))
    driver, rng = Driver(bench, seed), np.random.default_rng(seed)
    n = 60
    addresses = rng.permutation(1 << 16)[:n] * LINE_BYTES
    data = rng.integers(1, 256, (n, LINE_BYTES), dtype=np.uint8)
    bench.host.submit(np.ones(n, bool), addresses, data=data)
    bench.host.fence()
    bench.kernel(Kernel.BUSY)
    for part, mode in enumerate((Mode.ACCELERATION, Mode.NORMAL, None)):
        bench.host.submit(np.zeros(n, bool), addresses, tags=np.arange(n) + n * part)
        if mode is not None:
            bench.write_line(Block.ARBITER, MODE, {0: int(mode is Mode.ACCELERATION)})
    bench.run(50_000, until_idle=True)
    loads = bench.host.completed()
    assert np.array_equal(loads.tags, np.arange(3 * n))
    right = (loads.data == data[loads.tags % n]).all(axis=1)
    refused = ~loads.data.any(axis=1)
    assert (right ^ refused).all()
    assert right[:n].all()
    assert refused.sum() > 10
    assert driver.get("refused_count.value") == refused.sum()
    driver.reach(Mode.NORMAL)
    bench.host.completed()
    bench.host.submit(np.zeros(n, bool), addresses)
    bench.run(10_000, until_idle=True)
    assert (bench.host.completed().data == data).all()


def test_a_mode_requested_twice_in_a_row_changes_nothing(
    channel: tuple[ChannelBench, Driver],
) -> None:
    bench, driver = channel
    for mode in (Mode.ACCELERATION, Mode.NORMAL):
        driver.reach(mode)
        changes = bench.statistics.mode_changes
        for _ in range(3):
            driver.request(mode)
            for _ in range(300):
                bench.run(1)
                assert bench.mode is mode
        assert bench.statistics.mode_changes == changes


def test_a_request_during_a_hand_over_counts_after_it(
    channel: tuple[ChannelBench, Driver],
) -> None:
    bench, driver = channel
    bench.kernel(Kernel.BUSY)
    driver.reach(Mode.ACCELERATION)
    for wait in (1, 5, 17, 40, 100):
        driver.request(Mode.NORMAL)
        driver.request(Mode.ACCELERATION)
        bench.run(wait)
        driver.request(Mode.NORMAL)
        bench.run(wait)
        assert driver.reach(Mode.ACCELERATION) < 500
    bench.run(3000)
    assert bench.statistics.kernel_beats_read > 100


def test_a_kernel_that_is_paused_goes_on(channel: tuple[ChannelBench, Driver]) -> None:
    bench, driver = channel
    driver.reach(Mode.ACCELERATION)
    bench.kernel(Kernel.BUSY)
    bench.run(2000)
    driver.reach(Mode.NORMAL)
    before = bench.statistics
    driver.traffic(300)
    bench.run(10_000)
    paused = bench.statistics
    assert paused.dram_reads > before.dram_reads
    assert paused.kernel_beats_read == before.kernel_beats_read
    assert not bench.kernel_idle
    bench.kernel(Kernel.QUIET)
    driver.reach(Mode.ACCELERATION)
    bench.run(5000)
    assert bench.kernel_idle


@pytest.mark.parametrize("requested", [Mode.ACCELERATION, Mode.NORMAL])
def test_a_deaf_kernel_loses_the_channel_by_reset(
    channel: tuple[ChannelBench, Driver], requested: Mode
) -> None:
    bench, driver = channel
    driver.traffic(300)
    bench.run(10_000, until_idle=True)
    driver.reach(Mode.ACCELERATION)
    bench.kernel(Kernel.BUSY)
    bench.run(1000)
    bench.kernel(Kernel.DEAF)
    bench.run(3000)
    driver.request(requested)
    bench.run(500)
    bench.kernel(Kernel.QUIET)
    driver.reset_kernel()
    driver.request(Mode.NORMAL)
    bench.run(2000)
    assert bench.mode is Mode.NORMAL
    assert bench.statistics.kernel_resets == 1
    driver.traffic(500)  # everything that the host wrote is there, or this raises
    bench.run(20_000, until_idle=True)
    driver.reach(Mode.ACCELERATION)
    bench.kernel(Kernel.BUSY)
    before = bench.statistics.kernel_beats_read
    bench.run(3000)
    assert bench.statistics.kernel_beats_read > before + 500


@pytest.mark.parametrize("postpone", [1, 8])
def test_refreshes_are_neither_lost_nor_given_twice(postpone: int) -> None:
    bench = ChannelBench(seed=9, postpone=postpone)
    driver = Driver(bench, 9)
    for _ in range(60):
        mode = Mode.ACCELERATION if bench.mode is Mode.NORMAL else Mode.NORMAL
        driver.reach(mode)
        if bench.mode is Mode.NORMAL and postpone == 1:
            debt = bench.device.refresh_debt(4 * bench.statistics.cycles)
            assert 0 <= debt <= 1
        driver.traffic(int(driver.rng.integers(1, 600)))
        bench.run(int(driver.rng.integers(1, 3000)))
    intervals = 4 * bench.statistics.cycles // bench.device.timing.t_refi
    given = bench.device.counts[Command.REF]
    print(f"{given} refreshes in {intervals} intervals")
    assert abs(given - intervals) <= 9
    assert driver.get("status.refresh_overdue") == 0


def test_the_bench_notices_wrong_data(channel: tuple[ChannelBench, Driver]) -> None:
    bench, _ = channel
    bench.host.store(0, b"\x11" * LINE_BYTES)
    bench.run(100)
    bench.device.write(bench.mapping, 0, np.zeros(LINE_BYTES, np.uint8))
    bench.host.load(0)
    with pytest.raises(ChannelError, match="host read data differ"):
        bench.run(1000, until_idle=True)
