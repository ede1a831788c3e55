"""Beats of two ranks through the scheduler, on the pins, judged by the models of ranks and bus.

The beats of one rank go on while the other is refreshed; the beats keep their order.
"""

import random
from collections import Counter
from dataclasses import replace

from nearstep_hw.dram.column_stage import Slot
from nearstep_hw.dram.dfi import PHASES
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.scheduler import CommandScheduler
from nearstep_sim.models.dram.device import Ddr4Device
from nearstep_sim.models.dram.shared_bus import SharedBus
from nearstep_sim.models.dram.trace import TraceCommand
from nearstep_spec.dram.command import Command, Pins, encode
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import dram_timing

from ..simulate import simulate

GEOMETRY = DramGeometry("4Gb", "x16", 2)
# Refreshes that are short and frequent, so that a short run has many.
TIMING = replace(dram_timing(density="4Gb", width="x16"), t_rfc=60, t_refi=800)
RANKS, RUN = GEOMETRY.ranks, 128  # beats of a rank before those of the other
COMMANDS = {encode(command).address: command for command in (Command.RD, Command.WR)}


def test_a_rank_is_refreshed_while_the_other_moves_data() -> None:
    dut = CommandScheduler(
        FabricTiming(TIMING), GEOMETRY, id_width=1, lookahead=32, few_beats=8, postponed=8
    )
    devices = [Ddr4Device(TIMING, DramGeometry("4Gb", "x16"), rank=rank) for rank in range(RANKS)]
    bus = SharedBus(TIMING)
    seed = 5
    print(f"seed {seed}")
    source = random.Random(seed)
    beats = []
    for number in range(2048):
        rank = number // RUN % RANKS
        write = number // (4 * RUN) % 2
        bank = rank << 3 | source.randrange(8) if source.random() < 0.1 else rank << 3 | number % 8
        row, column = number // 512, number % 128
        beats.append((write, bank, row, column))
    slots: Counter[str] = Counter()
    columns, refreshes = [], []  # cycle and coordinates; cycle and rank

    async def bench(ctx: object) -> None:
        ctx.set(dut.i_enable, 1)
        ctx.set(dut.i_space, 1)
        sent = 0
        for cycle in range(8000):
            if len(columns) == len(beats):
                break
            ctx.set(dut.i.valid, sent < len(beats))
            if sent < len(beats):
                write, bank, row, column = beats[sent]
                ctx.set(
                    dut.i.payload,
                    {"write": write, "bank": bank, "row": row, "column": column}
                    | {"id": 0, "last": 0, "opens": 0},
                )
                # What a controller knows of the bursts behind this beat.
                left = RUN - sent % RUN
                now = sent // RUN % RANKS
                ahead = sum(1 << rank for rank in range(RANKS) if rank != now and left > 32)
                ctx.set(dut.i_ahead, ahead)
                ctx.set(dut.i_waiting, 3)
            slots[Slot(ctx.get(dut.o_slot)).name] += 1
            watch(ctx, cycle)
            sent += ctx.get(dut.i.ready)
            await ctx.tick()

    def watch(ctx: object, cycle: int) -> None:
        for phase in range(PHASES):
            pins = getattr(dut, f"p{phase}")
            selected = ~ctx.get(pins.cs_n) & 3
            if not selected:
                continue
            given = Pins(0, *(ctx.get(getattr(pins, n)) for n in ("act_n", "address", "bg", "ba")))
            for rank in range(RANKS):
                if not selected >> rank & 1:
                    continue
                clock = PHASES * cycle + phase
                devices[rank].command(clock, given)
                judge(clock, rank, given)

    def judge(clock: int, rank: int, given: Pins) -> None:
        kind = COMMANDS.get(given.address & ~0x3FF) if given.act_n else Command.ACT
        if given.act_n and given.address == encode(Command.REF).address:
            refreshes.append((clock, rank))
            kind = Command.REF
        if kind in (Command.RD, Command.WR):
            row = devices[rank].open_row(given.bg, given.ba)
            bank = (rank << 1 | given.bg) << 2 | given.ba
            columns.append(
                (clock, int(kind is Command.WR), bank, row, (given.address & 0x3FF) >> 3)
            )
            assert bus.play([TraceCommand(clock, kind, rank, given.bg, given.ba)]) is None

    simulate(dut, bench)
    assert [tuple(each[1:]) for each in columns] == beats
    # Every refresh that was due was given, and most while data moved.
    last = columns[-1][0]
    for device in devices:
        assert device.refresh_debt(last) <= 8
        device.check()
    assert {rank for _, rank in refreshes} == {0, 1}
    busy = [
        sum(clock < each[0] < clock + TIMING.t_rfc for each in columns) for clock, _ in refreshes
    ]
    hidden = sum(each > 4 for each in busy)
    print(f"{len(refreshes)} refreshes, {hidden} with data of the other rank, {last} clocks")
    assert len(refreshes) >= 2 * (last // TIMING.t_refi - 2)
    assert hidden >= 0.8 * len(refreshes) > 10
    assert (len(refreshes), hidden, last) == (31, 31, 14_028)  # the schedule is known
    assert slots == {
        "READ": 1024,
        "WRITE": 1024,
        "BANK_GROUP": 1434,
        "TURNAROUND": 14,
        "ROW": 6,
        "REFRESH": 5,
        "EMPTY": 1,
    }
