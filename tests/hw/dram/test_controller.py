"""The DDR4 controller against the rank model: efficiency, data, refused bursts, hand-overs."""

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import pytest

from nearstep_hw.dram.controller import DramController
from nearstep_sim.models.dram.bench import (
    Channel,
    ChannelBenchError,
    bases_of,
    run_kernel,
    run_random,
    run_traffic,
)
from nearstep_sim.models.dram.replay import replay
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import DramTiming, dram_timing

CHANNEL = Channel()
MILLION = 1_000_000
GOAL = {"8Gb": 0.940, "16Gb": 0.915}


def check(run, goal):
    bound = run.channel.timing.refresh_bound
    print(f"{run.efficiency:.4f} of peak, refresh bound {bound:.4f}, {run.cycles} cycles")
    if run.channel.ranks > 1:
        bound = 1.0
    assert goal <= run.settled_efficiency
    assert goal <= run.efficiency <= bound + 8 * run.channel.timing.t_rfc / 4 / run.cycles
    booked = run.start + sum(run.slots.values()) + run.drain
    print(f"{run.start} cycles before the first column command, {run.drain} after the last")
    assert booked == run.cycles
    assert min(run.start, run.drain) > 0
    # Refreshes that are due at the end were not left out to look good: they are counted.
    due = run.cycles * 4 // run.channel.timing.t_refi
    assert run.commands[Command.REF] + run.debt >= run.channel.ranks * due
    assert max(run.debts) <= 8


def test_kernel_traffic_comes_near_the_refresh_bound_in_known_cycles() -> None:
    run = run_traffic(CHANNEL, count=MILLION // 4)
    assert run.checks == run.beats
    check(run, GOAL["8Gb"])
    assert (run.cycles, run.start, run.drain) == (114_601, 6, 1)
    assert {slot.name: count for slot, count in run.slots.items() if count} == {
        "READ": 62_500,
        "WRITE": 46_875,
        "ROW": 48,
        "BANK_GROUP": 2,
        "TURNAROUND": 60,
        "REFRESH": 5_109,
    }


@pytest.mark.parametrize(
    ("block_bytes", "functional_units"),
    [
        (4096, 4),
        *(
            pytest.param(*each, marks=pytest.mark.deep)
            for each in [(4096, 16), (16384, 4), (16384, 16), (65536, 4), (65536, 16)]
        ),
    ],
)
def test_four_units_and_any_block_size_do(block_bytes: int, functional_units: int) -> None:
    run = run_traffic(
        CHANNEL, count=MILLION // 4, block_bytes=block_bytes, functional_units=functional_units
    )
    check(run, GOAL["8Gb"])


@pytest.mark.parametrize(
    "skew_bytes", [1024, *(pytest.param(n, marks=pytest.mark.deep) for n in (256, 8192))]
)
def test_arrays_in_other_banks_do(skew_bytes: int) -> None:
    count = MILLION // 4
    run = run_traffic(CHANNEL, count=count, bases=bases_of(CHANNEL, count, skew_bytes))
    check(run, GOAL["8Gb"])


def test_refreshes_due_at_the_start_are_taken_over() -> None:
    run = run_traffic(CHANNEL, count=20_000, debt=8)
    intervals = run.cycles * 4 // run.channel.timing.t_refi
    assert run.commands[Command.REF] >= 8 + intervals - run.debt
    assert (run.cycles, run.start, run.debt) == (9_378, 562, 6)
    given = {command.name: count for command, count in run.commands.items() if count}
    assert given == {"ACT": 560, "RD": 5000, "WR": 3750, "PRE": 544, "PREA": 1, "REF": 8}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stall": 0.3},
        {"stall": 0.9},
        {"refused": 0.1, "stall": 0.2},
        {"pages": 4},
        {"hand_over": 1 / 3000, "longest_gap": 8 * 1560},
        {"hand_over": 1 / 500, "longest_gap": 200, "stall": 0.5, "refused": 0.05},
    ],
    ids=str,
)
def test_random_bursts_keep_their_data(options: dict[str, float], seed: int) -> None:
    print(f"seed {seed}")
    run = run_random(CHANNEL, seed=seed, bursts=10_000, **options)
    print(run)
    assert run.read_beats > 10_000
    assert run.write_beats > 2_000  # where W stalls most, reads get further
    assert bool(run.refused) == bool(options.get("refused"))
    assert bool(run.hand_overs) == bool(options.get("hand_over"))
    # One more than eight only where the channel was taken with nine due.
    assert run.highest_debt <= 8 + bool(options.get("hand_over"))
    assert run.longest_hand_over <= 1500
    assert run.calibrations >= 5  # one asked for in 4096 cycles, given with the next refreshes


def test_the_bench_notices_a_rank_that_is_slower_than_the_controller_thinks() -> None:
    with pytest.raises(ChannelBenchError, match="tRFC"):
        run_random(CHANNEL, seed=1, bursts=10_000, rank=Channel(density="16Gb"))


def test_the_bench_notices_data_in_the_wrong_place() -> None:
    rank = Channel(mapping="row-bank-column-bankgroup")
    with pytest.raises(ChannelBenchError, match="read data"):
        run_random(CHANNEL, seed=1, bursts=1000, rank=rank)


def test_timing_and_geometry_of_different_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="8Gb x8"):
        DramController(dram_timing(density="8Gb"), AddressMapping(DramGeometry("16Gb", "x8")))


@pytest.mark.deep
@pytest.mark.parametrize("functional_units", [4, 16])
@pytest.mark.parametrize("density", ["8Gb", "16Gb"])
def test_kernel_in_rtl_reaches_the_goal(density: str, functional_units: int) -> None:
    run = run_kernel(Channel(density=density), count=MILLION, functional_units=functional_units)
    assert run.checks == 4 * (MILLION // 16 + 8)
    check(run, GOAL[density])


@pytest.mark.deep
@pytest.mark.parametrize(
    "channel",
    [
        Channel(density="16Gb"),
        Channel(width="x16"),
        Channel(density="4Gb"),
        Channel(mapping="row-bankgroup-bank-column"),
        Channel(mapping="bankgroup-bank-row-column"),
        Channel(postponed=1, batch_beats=64),
    ],
    ids=str,
)
def test_other_channels_keep_every_rule_and_every_byte(channel: Channel) -> None:
    for seed in range(5):
        print(f"seed {seed}")
        run = run_random(
            channel,
            seed=seed,
            bursts=20_000,
            stall=0.2,
            refused=0.0,
            hand_over=1 / 4000,
            longest_gap=5000,
        )
        assert run.hand_overs > 10
    assert run_traffic(channel, count=100_000).efficiency > 0.4


TWO_RANKS = {("8Gb", "x8"): 0.985, ("16Gb", "x8"): 0.980, ("32Gb", "x16"): 0.980}


@pytest.mark.deep
@pytest.mark.parametrize("functional_units", [4, 16])
@pytest.mark.parametrize("part", TWO_RANKS)
def test_one_rank_streams_while_the_other_is_refreshed(
    part: tuple[str, str], functional_units: int, tmp_path: Path
) -> None:
    path = tmp_path / "commands"
    channel = Channel(density=part[0], width=part[1], ranks=2)
    run = run_kernel(channel, count=MILLION // 4, functional_units=functional_units, commands=path)
    assert run.checks == 4 * (MILLION // 64 + 8)
    check(run, TWO_RANKS[part])
    found = replay(path)
    assert found.violation is None, found.violation
    assert found.ranks == (0, 1)
    assert found.commands == {kind: n for kind, n in run.commands.items() if n}


@pytest.mark.deep
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stall": 0.5},
        {"refused": 0.1, "stall": 0.2},
        {"hand_over": 1 / 3000, "longest_gap": 8 * 1560},
        {"hand_over": 1 / 500, "longest_gap": 200, "stall": 0.5, "refused": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "channel",
    [
        Channel(ranks=2),
        Channel(ranks=2, interleave=4096, density="16Gb", width="x16"),
        Channel(ranks=2, interleave=8 << 30, mapping="row-bankgroup-bank-column"),
        Channel(ranks=2, postponed=1, batch_beats=64),
    ],
    ids=str,
)
def test_random_bursts_of_two_ranks_keep_their_data(
    channel: Channel, options: dict[str, float], tmp_path: Path
) -> None:
    path = tmp_path / "commands"
    for seed in range(2):
        print(f"seed {seed}")
        run = run_random(channel, seed=seed, bursts=10_000, commands=path, **options)
        print(run)
        assert min(run.read_beats, run.write_beats) > 2_000
        assert bool(run.refused) == bool(options.get("refused"))
        assert bool(run.hand_overs) == bool(options.get("hand_over"))
        assert run.highest_debt <= 8 + bool(options.get("hand_over"))
        assert run.calibrations >= 5
        found = replay(path)
        assert found.violation is None, found.violation
        assert found.ranks == (0, 1)


@pytest.mark.deep
@pytest.mark.parametrize(
    "skew_bytes", [64, 1024, 4096, 8192, 12288, 16384, 16384 + 1024, 100 << 10]
)
def test_arrays_split_over_the_ranks_anywhere_keep_their_data(skew_bytes: int) -> None:
    """And no array's place costs more than refreshes that nobody hides."""
    channel, count = Channel(ranks=2), MILLION // 8
    run = run_traffic(channel, count=count, bases=bases_of(channel, count, skew_bytes))
    assert run.checks == run.beats
    check(run, 0.94)


@pytest.mark.deep
def test_a_rank_that_nobody_uses_is_refreshed_and_the_other_as_if_alone() -> None:
    channel = Channel(ranks=2, interleave=8 << 30)
    run = run_traffic(channel, count=MILLION // 4)
    check(run, GOAL["8Gb"])


class HastyTiming(DramTiming):
    """Leaves no time between the data of two ranks."""

    column_to_column_other_rank = 4


@dataclass(frozen=True, kw_only=True)
class HastyChannel(Channel):
    """A controller with that timing."""

    @cached_property
    def timing(self) -> DramTiming:
        whole = Channel(density=self.density, width=self.width).timing
        return HastyTiming(**{f.name: getattr(whole, f.name) for f in fields(DramTiming)})


@pytest.mark.deep
def test_the_bench_notices_ranks_whose_data_follow_too_closely() -> None:
    with pytest.raises(ChannelBenchError, match=r"tRTRS: RD of rank \d at"):
        run_random(HastyChannel(ranks=2), seed=1, bursts=2_000)
