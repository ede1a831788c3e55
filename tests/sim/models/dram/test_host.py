"""Host memory controller on bare DRAM: legal commands, and every load gets the last store."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from nearstep_sim.models.dram.host import (
    BareDram,
    HostConfig,
    HostController,
    HostDataError,
    without_a_module,
)
from nearstep_sim.models.dram.trace import TraceCommand, read_trace
from nearstep_spec.dram.address import MAPPINGS, DramAddress
from nearstep_spec.dram.command import Command


class Traffic:
    """Random loads and stores over a few hot places, and what every load must return."""

    def __init__(self, bare: BareDram, seed: int) -> None:
        self.bare = bare
        self.rng = np.random.default_rng(seed)
        self.contents: dict[int, bytes] = {}
        self.expected: list[bytes] = []
        self.received: dict[int, bytes] = {}

    def _initial(self, address: int) -> bytes:
        size = self.bare.config.geometry.capacity_bytes
        rank, inside = divmod(address, size)
        device = self.bare.devices[rank]
        return device.read(self.bare.config.address_mapping, inside, 64).tobytes()

    def addresses(self, n: int) -> np.ndarray:
        """Beats: half from eight rows' worth of conflicts, a quarter hot, a quarter streaming."""
        rng, size = self.rng, self.bare.host.capacity_bytes // 64
        kind = rng.integers(0, 4, n)
        far = rng.integers(0, size, n)
        hot = rng.integers(0, 24, n) * (size // 24)
        stream = (rng.integers(0, size) + np.arange(n)) % size
        return np.choose(kind, [far, rng.integers(0, 4096, n), hot, stream]) * 64

    def submit(self, n: int) -> None:
        """Contents of beats in flight are not known past the pins: ask only for new ones, and only
        while nothing is under way."""
        assert self.bare.host.idle
        addresses = self.addresses(n)
        is_store = self.rng.random(n) < self.rng.choice([0.1, 0.5, 0.9])
        data = self.rng.integers(0, 256, (n, 64), dtype=np.uint8)
        masks = np.where(
            self.rng.random(n) < 0.2,
            self.rng.integers(0, 1 << 64, n, dtype=np.uint64),
            np.uint64(0),
        )
        tags = np.zeros(n, np.uint64)
        for i in range(n):
            at = int(addresses[i])
            old = self.contents.get(at)
            if old is None:
                old = self._initial(at)
            if is_store[i]:
                keep = np.unpackbits(masks[i : i + 1].view(np.uint8), bitorder="little") != 0
                new = np.where(keep, np.frombuffer(old, np.uint8), data[i])
                self.contents[at] = new.tobytes()
            else:
                tags[i] = len(self.expected)
                self.expected.append(old)
                self.contents[at] = old
        self.bare.host.submit(is_store, addresses, tags=tags, data=data, masks=masks)

    def collect(self) -> None:
        loads = self.bare.host.completed(1 << 18)
        for tag, data in zip(loads.tags.tolist(), loads.data, strict=True):
            assert tag not in self.received
            self.received[tag] = data.tobytes()

    def check(self) -> int:
        self.collect()
        assert len(self.received) == len(self.expected)
        wrong = [t for t, data in self.received.items() if data != self.expected[t]]
        assert not wrong
        return len(self.received)


CONFIGS = {
    "default": {},
    "in order": {"scheduler": "in-order"},
    "stalls": {"stall": 0.4},
    "two ranks": {"ranks": 2},
    "two ranks in order": {"ranks": 2, "scheduler": "in-order", "stall": 0.1},
    "postponing 8": {"postpone": 8, "density": "16Gb"},
    "x16": {"width": "x16", "density": "4Gb"},
    "two dies": {"width": "x16", "density": "32Gb"},
    "chips alone": {"read_latency": 3, "write_latency": 3, "cl": 6, "cwl": 5},
    "columns in slot 0": {"column_slot": 0},
    "columns in slot 1": {"column_slot": 1, "ranks": 2},
    "long latencies": {"read_latency": 20, "write_latency": 9},
    "short latencies": {"read_latency": 3, "write_latency": 3},
    "closing banks": {"auto_precharge": 0.3},
    "closing every bank": {"auto_precharge": 1.0, "ranks": 2, "scheduler": "in-order"},
    "window of one": {"window": 1},
    "wide window": {"window": 64, "overtake": 4},
    **{order: {"mapping": order} for order in MAPPINGS[1:]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_load_returns_the_last_store(name: str) -> None:
    seed = 4711
    print("seed", seed)
    bare = BareDram(HostConfig(seed=seed, **CONFIGS[name]))
    traffic = Traffic(bare, seed)
    for n in (1, 2, 300, 700):
        traffic.submit(n)
        bare.run(10**6)
        bare.run(int(traffic.rng.integers(0, 3000)), until_idle=False)
    checked = traffic.check()
    statistics = bare.host.statistics
    print(checked, "loads checked;", statistics)
    assert checked == statistics.loads > 90
    assert statistics.loads + statistics.stores == 1003
    hits = statistics.row_hits + statistics.row_misses + statistics.row_conflicts
    assert hits == 1003
    counts = [device.counts for device in bare.devices]
    assert sum(c[Command.RD] + c[Command.RDA] for c in counts) == statistics.loads
    assert sum(c[Command.WR] + c[Command.WRA] for c in counts) == statistics.stores
    closed = sum(c[Command.RDA] + c[Command.WRA] for c in counts)
    share = CONFIGS[name].get("auto_precharge", 0)
    assert closed == share * 1003 if share in (0, 1) else 200 < closed < 400


@pytest.mark.deep
@pytest.mark.parametrize("name", CONFIGS)
def test_every_load_returns_the_last_store_for_long(name: str) -> None:
    seed = 815
    print("seed", seed)
    bare = BareDram(HostConfig(seed=seed, **CONFIGS[name]))
    traffic = Traffic(bare, seed)
    while bare.host.cycle < 300_000:
        traffic.submit(int(traffic.rng.integers(1, 4000)))
        bare.run(10**7)
        bare.run(int(traffic.rng.integers(0, 20_000)), until_idle=False)
    checked = traffic.check()
    print(checked, "loads checked in", bare.host.cycle, "cycles")
    assert checked > 1000


def test_data_take_the_fixed_latency() -> None:
    bare = BareDram(HostConfig(read_latency=10, scheduler="in-order"))
    for tag in range(3):
        bare.host.load(0, tag)
        bare.run(1000)
        bare.run(50, until_idle=False)
    loads = bare.host.completed()
    latency = (loads.completed - loads.submitted).tolist()
    # The row is open after the first: column command at once, data after 10 cycles, two halves.
    assert latency[1:] == [11, 11]
    assert latency[0] == 11 + 6 // 2  # tRCD is six host clocks


def stream(config: HostConfig, n: int, stores: bool) -> BareDram:
    bare = BareDram(config)
    data = np.zeros((n, 64), np.uint8) if stores else None
    bare.host.submit([stores] * n, np.arange(n) * 64, data=data)
    bare.run(10**7)
    return bare


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("scheduler", ["in-order", "fr-fcfs"])
def test_a_stream_comes_near_the_refresh_bound(scheduler: str, stores: bool) -> None:
    config = HostConfig(scheduler=scheduler)
    bare = stream(config, 40_000, stores)
    share = bare.host.statistics.throughput / 32
    bound = config.timing.refresh_bound
    print(f"{100 * share:.2f} % of the bus, refresh bound {100 * bound:.2f} %")
    assert 0.985 * bound < share <= bound
    assert bare.host.statistics.row_hits > 0.95 * 40_000


def test_fr_fcfs_is_faster_than_order_on_random_rows() -> None:
    cycles = {}
    for scheduler in ("in-order", "fr-fcfs"):
        bare = BareDram(HostConfig(scheduler=scheduler))
        rng = np.random.default_rng(1)
        n = 4000
        bare.host.submit(
            rng.random(n) < 0.3, rng.integers(0, 1 << 27, n) * 64, data=np.zeros((n, 64), np.uint8)
        )
        cycles[scheduler] = bare.run(10**7)
    print(cycles)
    assert cycles["fr-fcfs"] < 0.7 * cycles["in-order"]


def test_fr_fcfs_overtakes_no_more_than_it_may() -> None:
    """A lone conflict among endless hits of the same bank is served after `overtake` columns."""
    config = HostConfig(overtake=8)
    bare = BareDram(config)
    row = 128 * 1024  # bytes to the next row of a bank in the default mapping
    column = 1024  # bytes to the next column of the same bank
    # the first opens row 0, the second wants row 1, hundreds more hit row 0
    addresses = [0, row, *(column * (1 + i % 127) for i in range(400))]
    bare.host.submit([False] * len(addresses), addresses, tags=np.arange(len(addresses)))
    bare.run(10**6)
    loads = bare.host.completed()
    place = loads.tags.tolist().index(1)
    assert 2 < place <= 1 + 8
    assert loads.completed[place] < 100  # and not only because a refresh closed the row


def test_a_store_waits_for_no_more_than_the_allowed_loads(tmp_path: Path) -> None:
    bare = BareDram(HostConfig(overtake=8))
    bare.devices[0].trace_to(tmp_path / "trace.txt")
    is_store = np.arange(400) == 3
    bare.host.submit(is_store, np.arange(400) * 64, data=np.zeros((400, 64), np.uint8))
    bare.run(10**6)
    bare.devices[0].trace_close()
    columns = [
        c.command
        for c in read_trace(tmp_path / "trace.txt")
        if c.command in (Command.RD, Command.WR)
    ]
    assert len(columns) == 400
    assert 3 < columns.index(Command.WR) <= 3 + 8


@pytest.mark.parametrize("postpone", [1, 4, 8])
def test_refreshes_are_gathered_and_none_is_lost(postpone: int) -> None:
    config = HostConfig(postpone=postpone)
    bare = BareDram(config)
    n = 30_000
    bare.host.submit([False] * n, np.arange(n) * 64)
    bare.run(10**7)
    device, clock = bare.devices[0], 2 * bare.host.cycle
    due = clock // config.timing.t_refi
    debt = device.refresh_debt(clock)
    assert due > 15
    assert device.counts[Command.REF] == due - debt
    assert 0 <= debt < postpone
    assert device.counts[Command.PREA] <= -(-due // postpone)
    bare.run(2000, until_idle=False)  # idle: what is owed is paid
    assert device.refresh_debt(2 * bare.host.cycle) == 0


def test_refreshes_at_whim_come_to_every_limit_and_keep_it() -> None:
    """The rank judges by the intervals of the host, wherever they begin."""
    gaps, windows, debts = [], [], []
    for offset in (0, 1, 2000, 3119):
        print("seed", offset)
        config = HostConfig(whim=True, postpone=8, pull_in=8, refresh_offset=offset, seed=offset)
        bare = BareDram(config)
        device, refi = bare.devices[0], config.timing.t_refi
        device.refresh_offset(offset)
        bare.run(400 * refi, until_idle=False)
        found = device.refresh_extremes
        print(device.counts[Command.REF], "REF,", found)
        assert abs(device.counts[Command.REF] - 800) <= 9
        gaps.append(found.longest_gap)
        windows.append(found.shortest_seventeen)
        debts += [found.lowest_debt, found.highest_debt]
    assert 9 * refi - 100 < max(gaps) <= 9 * refi
    assert 2 * refi <= min(windows) < 3 * refi
    assert (min(debts), max(debts)) == (-7, 8)  # before a REF


@pytest.mark.parametrize("order", MAPPINGS)
def test_commands_go_where_the_mapping_says(order: str, tmp_path: Path) -> None:
    config = HostConfig(mapping=order, width="x16", scheduler="in-order", ranks=2)
    bare = BareDram(config)
    paths = [tmp_path / f"{rank}.txt" for rank in range(2)]
    for device, path in zip(bare.devices, paths, strict=True):
        device.trace_to(path)
    size = config.geometry.capacity_bytes
    addresses = np.random.default_rng(6).integers(0, 2 * size // 64, 200) * 64
    bare.host.submit([False] * 200, addresses)
    bare.run(10**6)
    reads = []
    for device, path in zip(bare.devices, paths, strict=True):
        device.trace_close()
        reads += [c for c in read_trace(path) if c.command is Command.RD]
    reads.sort(key=lambda c: c.clock)
    found = [(c.rank, DramAddress(c.bank_group, c.bank, c.row, c.column)) for c in reads]
    mapping = config.address_mapping
    assert found == [(int(a) // size, mapping.decode(int(a) % size)) for a in addresses]


def reads_of(bare: BareDram, folder: Path, addresses: np.ndarray) -> list[TraceCommand]:
    """The read commands of loads, in the order of time."""
    paths = [folder / f"{rank}.txt" for rank in range(bare.config.ranks)]
    for device, path in zip(bare.devices, paths, strict=True):
        device.trace_to(path)
    bare.host.submit([False] * len(addresses), addresses)
    bare.run(10**6)
    reads = []
    for device, path in zip(bare.devices, paths, strict=True):
        device.trace_close()
        reads += [c for c in read_trace(path) if c.command is Command.RD]
    return sorted(reads, key=lambda c: c.clock)


@pytest.mark.parametrize("interleave", [4096, 16384, 1 << 32])
def test_ranks_of_a_channel_take_turns_and_channels_lie_one_above_the_other(
    interleave: int, tmp_path: Path
) -> None:
    config = HostConfig(
        ranks=4, channel_ranks=2, interleave=interleave, scheduler="in-order", density="4Gb"
    )
    mapping = config.address_mapping
    channel = mapping.geometry.capacity_bytes
    addresses = np.random.default_rng(7).integers(0, 2 * channel // 64, 200) * 64
    found = [
        (c.rank, c.bank_group, c.bank, c.row, c.column)
        for c in reads_of(BareDram(config), tmp_path, addresses)
    ]
    places = [mapping.decode(int(a) % channel) for a in addresses]
    assert found == [
        (2 * (int(a) // channel) + p.rank, p.bank_group, p.bank, p.row, p.column)
        for a, p in zip(addresses, places, strict=True)
    ]
    assert {rank for rank, *_ in found} == {0, 1, 2, 3}


@pytest.mark.parametrize("least", [1, 2, 5])
def test_a_read_of_the_other_rank_comes_no_sooner_after_a_write(least: int, tmp_path: Path) -> None:
    """Within a channel; a rank of another channel need not wait."""
    module = {"read_latency": 9, "write_latency": 3, "scheduler": "in-order"}
    config = HostConfig(ranks=4, channel_ranks=2, write_to_read=least, **module)
    bare = BareDram(config)
    rng = np.random.default_rng(3)
    n = 4000
    for rank, device in enumerate(bare.devices):
        device.trace_to(tmp_path / f"{rank}.txt")
    where = rng.integers(0, 2, n) * bare.host.capacity_bytes // 2 + rng.integers(0, 1024, n) * 64
    bare.host.submit(rng.random(n) < 0.5, where, data=np.zeros((n, 64), np.uint8))
    bare.run(10**6)
    columns = []
    for rank, device in enumerate(bare.devices):
        device.trace_close()
        columns += [
            c for c in read_trace(tmp_path / f"{rank}.txt") if c.command in (Command.RD, Command.WR)
        ]
    columns.sort(key=lambda c: c.clock)
    apart: dict[bool, list[int]] = {True: [], False: []}
    for first, second in pairwise(columns):
        if (first.command, second.command) == (Command.WR, Command.RD):
            if first.rank != second.rank:
                apart[first.rank // 2 == second.rank // 2].append(second.clock - first.clock)
    print(least, {near: (min(each), len(each)) for near, each in apart.items()})
    assert min(map(len, apart.values())) > 100
    assert min(apart[True]) == least
    assert min(apart[False]) == 1


def test_a_late_rank_is_refreshed_when_eight_are_due_and_the_other_at_once() -> None:
    bare = BareDram(HostConfig(ranks=2, late_rank=1))
    bare.run(20 * bare.config.timing.t_refi, until_idle=False)
    most = [device.refresh_extremes.highest_debt for device in bare.devices]
    assert most == [1, 8]


@pytest.mark.parametrize("scheduler", ["in-order", "fr-fcfs"])
def test_two_ranks_never_meet_on_the_data_bus(scheduler: str, tmp_path: Path) -> None:
    """Bursts of one rank do not overlap; between ranks two clocks stay free."""
    seed = 12
    print("seed", seed)
    config = HostConfig(ranks=2, scheduler=scheduler, seed=seed)
    bare = BareDram(config)
    commands = []
    rng = np.random.default_rng(seed)
    for rank in range(2):
        bare.devices[rank].trace_to(tmp_path / f"{rank}.txt")
    n = 4000
    far = config.geometry.capacity_bytes * rng.integers(0, 2, n)
    bare.host.submit(
        rng.random(n) < 0.5, far + 64 * rng.integers(0, 4096, n), data=np.zeros((n, 64), np.uint8)
    )
    bare.run(10**6)
    for rank in range(2):
        bare.devices[rank].trace_close()
        commands += list(read_trace(tmp_path / f"{rank}.txt"))
    latency = {Command.RD: 2 * config.read_latency, Command.WR: 2 * config.write_latency}
    bursts = sorted(
        (c.clock + latency[c.command], c.rank) for c in commands if c.command in latency
    )
    assert len(bursts) == n
    switches = 0
    for (start, rank), (following, other) in pairwise(bursts):
        assert following - start >= 4 + 2 * (rank != other)
        switches += rank != other
    clocks = [c.clock for c in commands]
    assert len(set(clocks)) == len(clocks)  # one command a slot of the shared bus
    print(switches, "rank switches")
    assert switches > 100


def test_parts_of_a_bare_dram_outlive_it() -> None:
    host = BareDram(HostConfig()).host
    host.load(0)
    assert not host.idle


def test_a_refresh_waits_for_the_precharge_of_a_single_bank() -> None:
    bare = BareDram(HostConfig(window=1, stall=0.1, seed=8))
    n = 4000
    bare.host.submit([False] * n, (np.arange(n) % 2) * 128 * 1024)  # two rows of one bank
    bare.run(10**6)
    assert bare.host.idle
    refreshed = bare.devices[0].counts
    assert refreshed[Command.REF] > 20
    assert refreshed[Command.PREA] < refreshed[Command.REF]  # some rows were closed already


def test_an_idle_host_refreshes() -> None:
    bare = BareDram(HostConfig())
    bare.run(100_000, until_idle=False)
    assert bare.devices[0].counts[Command.REF] == 2 * 100_000 // 3120
    assert bare.host.statistics.busy_cycles == 0


def test_a_fence_orders_different_places() -> None:
    """Without it the hit overtakes the conflict; with it the conflict is done first."""
    order = {}
    for fenced in (False, True):
        bare = BareDram(HostConfig())
        bare.host.load(0, 0)
        bare.run(1000)
        bare.host.load(128 * 1024, 1)  # another row of the same bank
        if fenced:
            bare.host.fence()
        bare.host.load(64, 2)  # another bank group, closed
        bare.host.load(1024, 3)  # a hit of the open row
        bare.run(1000)
        order[fenced] = bare.host.completed().tags.tolist()
    assert order[False].index(3) < order[False].index(1)
    assert order[True][:2] == [0, 1]


def test_stalls_are_seeded() -> None:
    runs = []
    for seed in (1, 1, 2):
        bare = BareDram(HostConfig(stall=0.5, seed=seed))
        bare.host.submit([False] * 500, np.arange(500) * 64)
        runs.append(bare.run(10**6))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0] > 1300  # 1000 without stalls


def test_missing_and_surplus_read_data_are_errors() -> None:
    host = HostController(HostConfig())
    with pytest.raises(HostDataError, match="read data of no command in fabric cycle 0"):
        host.tick(bytes(32))
    host = HostController(HostConfig(read_latency=10))
    host.load(0)
    for _ in range(13):
        host.tick()
    with pytest.raises(HostDataError, match="no read data in fabric cycle 13"):
        host.tick()


def test_bad_requests_are_refused() -> None:
    host = HostController(HostConfig())
    for address in (32, host.capacity_bytes, -64):
        with pytest.raises(ValueError, match="multiples of 64 below"):
            host.load(address)
    with pytest.raises(ValueError, match="32 bytes"):
        host.tick(bytes(31))
    with pytest.raises(ValueError, match="64 bytes"):
        host.store(0, b"short")
    with pytest.raises(ValueError, match="stores need data"):
        host.submit([True], [0])
    with pytest.raises(ValueError, match="expected 2 accesses"):
        host.submit([True, False], [0, 64], data=np.zeros((1, 64), np.uint8))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"scheduler": "fcfs"}, "scheduler"),
        ({"stall": 1.0}, "stall"),
        ({"auto_precharge": 1.5}, "auto_precharge"),
        ({"column_slot": 2}, "column_slot"),
        ({"postpone": 9}, "postpone"),
        ({"whim": True, "pull_in": 9}, "pull_in"),
        ({"pull_in": 1}, "pull_in"),
        ({"window": 0}, "window"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": 3, "channel_ranks": 2}, "ranks must be a multiple of channel_ranks, 2, not 3"),
        ({"ranks": 4, "channel_ranks": 4}, "ranks must be one of"),
        ({"ranks": 2, "channel_ranks": 2, "interleave": 100}, "interleave must be a power of two"),
        ({"ranks": 2, "late_rank": 2}, "late_rank must be a rank of 2, not 2"),
        ({"density": "1Gb"}, "density"),
    ],
)
def test_configurations_that_cannot_be_are_refused(options: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        BareDram(HostConfig(**options))


@pytest.mark.parametrize("scheduler", ["in-order", "fr-fcfs"])
def test_a_module_costs_a_host_that_reads_and_writes_what_its_latency_is(scheduler: str) -> None:
    """Against chips alone, whose turnarounds are shorter; streams hardly notice."""
    n, late = 4000, HostConfig(scheduler=scheduler, seed=3)
    early = without_a_module(late)
    assert (early.timing.cl, early.timing.cwl, early.timing.read_to_write) == (6, 5, 7)
    assert (late.timing.cl, late.timing.cwl, late.timing.read_to_write) == (20, 6, 20)
    rng = np.random.default_rng(3)
    addresses, mixed = rng.integers(0, 1 << 20, n) * 64, rng.random(n) < 1 / 3
    cases = {"stream": (np.zeros(n, bool), np.arange(n) * 64), "mixed": (mixed, addresses)}
    shares = {}
    for name, (is_store, where) in cases.items():
        took = []
        for config in (early, late):
            bare = BareDram(config)
            bare.host.submit(is_store, where, data=np.zeros((n, 64), np.uint8))
            took.append(bare.run(100 * n))
            assert bare.host.idle
        shares[name] = took[0] / took[1]
    print(scheduler, shares)
    assert shares["stream"] > 0.99
    assert shares["mixed"] < 0.9


def test_one_load_is_answered_after_the_latency_of_the_chips() -> None:
    taken = []
    for config in (HostConfig(), without_a_module(HostConfig())):
        bare = BareDram(config)
        bare.host.load(0)
        bare.run(1000)
        loads = bare.host.completed()
        taken.append(int(loads.completed[0] - loads.submitted[0]))
    assert taken[0] - taken[1] == 10 - 3
