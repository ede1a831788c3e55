"""Commands of the host other than accesses and refreshes: carried out, deferred, or flagged.

The DDR4 model judges the distances of everything that reaches it.
"""

import numpy as np
import pytest

from nearstep_hw.axdimm.host_access import HostAccess
from nearstep_hw.axdimm.host_front_end import (
    HOST_READ_LATENCY,
    HOST_WRITE_LATENCY,
    HostFrontEnd,
)
from nearstep_hw.axdimm.host_modes import HostModes
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_sim.axdimm.memory_channel import ChannelBench, Kernel, Mode
from nearstep_spec.axdimm.registers import Block, arbiter_map
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.command import Command, Pins, encode
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.latency import HOST_COMMAND_DELAY
from nearstep_spec.dram.timing import dram_timing

from ..simulate import simulate

MODE, CONTROL = 1, 2  # lines of the arbiter
CLEAR, KERNEL_RESET = 1, 2
CALIBRATIONS = (Command.ZQCS, Command.ZQCL)
RESERVED = Pins(cs_n=0, address=0b011 << 14)
TURNS = 120
REFRESH_2X = 1 << 6  # of MR3


def mode_register(number: int, bits: int) -> Pins:
    return encode(Command.MRS, bank_group=number >> 2, bank=number & 3, row=bits)


class Channel:
    """A bench with a driver's verbs."""

    def __init__(self, seed: int, **host: object) -> None:
        print("seed", seed)
        self.bench = ChannelBench(seed=seed, **host)
        self.map = arbiter_map(
            self.bench.mapping, read_latency=HOST_READ_LATENCY, write_latency=HOST_WRITE_LATENCY
        )

    def request(self, mode: Mode) -> None:
        self.bench.write_line(Block.ARBITER, MODE, {0: int(mode is Mode.ACCELERATION)})
        self.bench.host.fence()

    def control(self, word: int) -> None:
        self.bench.write_line(Block.ARBITER, CONTROL, {0: word})
        self.bench.host.fence()

    def reach(self, mode: Mode) -> None:
        self.request(mode)
        for _ in range(400):
            self.bench.run(20)
            if self.bench.mode is mode and self.bench.host.idle:
                return
        raise AssertionError(f"expected {mode!r}, found {self.bench.mode!r}")

    def get(self, path: str) -> int:
        return self.bench.field(self.map, path)

    def give(self, pins: Pins) -> None:
        """And until it is on the pins of the DRAM, should it get there."""
        self.bench.host.give(pins)
        self.bench.run(2000, until_idle=True)
        self.bench.run(HOST_COMMAND_DELAY + 1)

    def count(self, command: Command) -> int:
        return self.bench.device.counts[command]


@pytest.fixture
def channel() -> Channel:
    return Channel(3)


@pytest.mark.parametrize(
    ("host", "turns"),
    [
        ({}, 40),
        pytest.param({}, 120, marks=pytest.mark.deep),
        pytest.param({"postpone": 8, "scheduler": "in-order"}, 120, marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_a_calibration_is_carried_out_once_whenever_the_host_gives_it(
    host: dict[str, object], turns: int
) -> None:
    seed = 41
    channel = Channel(seed, **host)
    bench, rng = channel.bench, np.random.default_rng(seed)
    when = dict.fromkeys(Mode, 0)
    bench.kernel(Kernel.BUSY)
    for _ in range(turns):
        n = int(rng.integers(0, 60))
        bench.host.submit(np.zeros(n, bool), rng.integers(0, 1 << 16, n) * 64)
        command = CALIBRATIONS[int(rng.random() < 0.3)]
        before = {each: channel.count(each) for each in CALIBRATIONS}
        channel.request(Mode.ACCELERATION)
        early = rng.random() < 0.5
        bench.run(int(rng.integers(0, 900 if early else 300)))
        if not early:
            channel.request(Mode.NORMAL)
            bench.run(int(rng.integers(0, 250)))
        when[bench.mode] += 1
        bench.host.give(encode(command))
        bench.run(int(rng.choice([0, 30, 300, 2500])))
        channel.reach(Mode.NORMAL)
        bench.run(20_000, until_idle=True)
        bench.run(300)  # it may have been given in normal mode
        after = {each: channel.count(each) - before[each] for each in CALIBRATIONS}
        assert after == {each: int(each is command) for each in CALIBRATIONS}
        bench.host.completed()
    print("given in", when, bench.device.counts)
    assert channel.get("status.missing_data") == 0
    assert min(when.values()) >= 3
    assert channel.get("status.lost_command") == 0


@pytest.mark.deep
@pytest.mark.parametrize("seed", [51, 52, 53])
def test_a_command_in_any_cycle_of_a_change_of_mode_is_carried_out_or_counted(seed: int) -> None:
    """With traffic beside it that may be refused, while the channel is taken, left, or reset when
    the host refreshes; and by a host that never rests.
    """
    channel = Channel(seed, stall=0.1 * (seed % 2), auto_precharge=0.25)
    bench, rng = channel.bench, np.random.default_rng(seed)
    interval = FabricTiming(bench.device.timing).refresh_interval
    while not channel.count(Command.REF):
        bench.run(1)
    refreshed, checked = bench.host.cycle, 0
    for turn in range(TURNS):
        bench.kernel(Kernel.BUSY if turn % 3 else Kernel.QUIET)
        scenario = ("take", "leave", "reset", "reset", "never rests")[turn % 5]
        command = (Command.MRS, *CALIBRATIONS)[int(rng.integers(3))]
        channel.control(CLEAR)
        before = {each: channel.count(each) for each in (Command.MRS, *CALIBRATIONS)}
        owed = None
        if scenario != "take":
            channel.reach(Mode.ACCELERATION)
            if scenario == "never rests" and command is not Command.ZQCL:
                owed = Command.ZQCL  # it holds the channel longer
                bench.host.give(encode(owed))
                bench.run(100)
            if turn % 2:
                bench.run(-(bench.host.cycle - refreshed) % interval + interval)
                bench.run(interval - int(rng.integers(60)))
        n = int(rng.integers(2) * rng.integers(60)) if scenario != "never rests" else 1200
        data = rng.integers(0, 256, (n, 64), dtype=np.uint8)
        bench.host.submit(rng.random(n) < 0.5, rng.integers(0, 1 << 16, n) * 64, data=data)
        if scenario == "reset":
            channel.control(KERNEL_RESET)
        channel.request(Mode.ACCELERATION if scenario == "take" else Mode.NORMAL)
        bench.run(int(rng.integers(0, rng.choice([16, 100]))))
        if scenario == "never rests":
            while bench.mode is not Mode.NORMAL and rng.random() > 0.01:
                bench.run(1)
        bench.host.give(
            mode_register(1, 0b1_0000_0011) if command is Command.MRS else encode(command)
        )
        bench.run(int(rng.choice([0, 30, 300, 2500])))
        channel.reach(Mode.NORMAL)
        bench.run(20_000, until_idle=True)
        bench.run(300)  # it may have been given in normal mode
        after = {each: channel.count(each) - count for each, count in before.items()}
        after[Command.MRS] += channel.get("lost_count.value")
        assert after == {each: int(each in (command, owed)) for each in after}, (turn, scenario)
        bench.host.completed()
        checked += 1
    assert checked == TURNS


@pytest.mark.deep
def test_the_kernel_need_not_leave_for_a_calibration(channel: Channel) -> None:
    bench = channel.bench
    bench.kernel(Kernel.BUSY)
    channel.reach(Mode.ACCELERATION)
    channel.give(encode(Command.ZQCS))
    bench.run(8 * 1560 + 500)  # the controller postpones seven refreshes
    assert bench.mode is Mode.ACCELERATION
    assert channel.count(Command.ZQCS) == 1
    channel.give(encode(Command.ZQCL))
    bench.run(8 * 1560 + 500)
    assert channel.count(Command.ZQCL) == 0  # longer than the host's own refresh would wait
    channel.reach(Mode.NORMAL)
    assert (channel.count(Command.ZQCS), channel.count(Command.ZQCL)) == (1, 1)


@pytest.mark.deep
def test_a_kernel_that_is_reset_does_not_cost_the_calibration(channel: Channel) -> None:
    bench = channel.bench
    bench.kernel(Kernel.BUSY)
    channel.reach(Mode.ACCELERATION)
    channel.give(encode(Command.ZQCS))
    channel.request(Mode.NORMAL)
    channel.control(KERNEL_RESET)
    bench.run(2000)
    assert bench.mode is Mode.NORMAL
    assert channel.count(Command.ZQCS) == 1


@pytest.mark.deep
def test_what_cannot_be_carried_out_is_lost_counted_and_shown(channel: Channel) -> None:
    bench = channel.bench
    channel.give(mode_register(1, 0b1_0000_0011))  # normal mode: the host's own
    assert channel.count(Command.MRS) == 1
    assert channel.get("status.lost_command") == 0
    channel.reach(Mode.ACCELERATION)
    channel.give(mode_register(6, 0x1234))
    channel.give(RESERVED)
    channel.give(mode_register(0, 1 << 4))
    assert channel.count(Command.MRS) == 1
    assert channel.get("status.lost_command") == 1
    assert channel.get("lost_count.value") == 3
    assert channel.get("lost_command.pins") == 0x1234
    assert channel.get("lost_command.bank") == 6
    assert channel.get("status.unsupported_mode") == 0
    channel.reach(Mode.NORMAL)
    assert channel.count(Command.MRS) == 1
    assert channel.get("lost_count.value") == 3
    channel.control(CLEAR)
    assert channel.get("status.lost_command") == 0
    assert channel.get("lost_count.value") == 0
    channel.give(mode_register(7, 0))  # of a registering clock driver
    assert channel.get("lost_count.value") == 1
    assert channel.get("lost_command.bank") == 7
    assert bench.statistics.refused_writes == 0


@pytest.mark.deep
def test_a_mode_that_the_kernel_cannot_use_keeps_the_channel(channel: Channel) -> None:
    """And the change of mode that follows at once waits tMOD, or the model would say so."""
    bench = channel.bench
    channel.give(mode_register(3, REFRESH_2X))
    channel.request(Mode.ACCELERATION)
    bench.run(400)  # before the DRAM's next refresh, which the model would not take
    assert bench.mode is Mode.NORMAL
    assert channel.get("status.unsupported_mode") == 1
    assert channel.get("mode_registers.unsupported") == 1 << 3
    bench.host.give(mode_register(3, 0))
    bench.run(400)
    assert bench.mode is Mode.ACCELERATION
    assert channel.get("status.unsupported_mode") == 0


def test_mode_registers_are_judged_by_their_last_setting() -> None:
    dut = HostModes(dram_timing(), DramGeometry())
    steps = [  # register, bits, passes: unsupported after it
        (0, 1 << 4, 1, 0),  # CL 11, bursts of eight
        (0, 1 << 4 | 1, 1, 1 << 0),  # chop on the fly
        (5, 1 << 10, 1, 1 << 0),
        (5, 0, 0, 1 << 0),  # lost
        (5, 0, 1, 1 << 0 | 1 << 5),  # no data mask
        (0, 1 << 4, 1, 1 << 5),
        (7, 0x3FFF, 1, 1 << 5),
        (5, 1 << 10, 1, 0),
        (2, 1 << 3, 1, 1 << 2),  # CWL 10
        (2, 0, 1, 0),
    ]

    async def bench(ctx) -> None:
        for number, (register, bits, passes, unsupported) in enumerate(steps):
            slot, other = dut.i_slot[number & 1], dut.i_slot[~number & 1]
            ctx.set(other.set_mode, 0)
            ctx.set(slot, {"set_mode": 1, "address": bits, "ba": register & 3, "bg": register >> 2})
            ctx.set(dut.i_pass, passes)
            lost = not passes or register == 7
            assert ctx.get(dut.o_lost) == lost
            if lost:
                assert ctx.get(dut.o_command) == bits | register << 18
            await ctx.tick()
            assert ctx.get(dut.o_unsupported) == unsupported, number
        ctx.set(dut.i_slot[1].set_mode, 0)
        ctx.set(dut.i_slot[0], {"reserved": 1})
        assert not ctx.get(dut.o_lost)
        ctx.set(dut.i_pass, 0)
        assert ctx.get(dut.o_lost)

    simulate(dut, bench)


def test_a_burst_of_the_window_in_another_order_is_noticed() -> None:
    dut = HostAccess(AddressMapping())
    found = []

    async def bench(ctx) -> None:
        for column in range(16):
            pins = encode(Command.RD, bank_group=2, bank=1, column=column)
            ctx.set(dut.i_slot[1], {"read": 1, "address": pins.address, "bg": 2, "ba": 1})
            found.append(ctx.get(dut.o_turned))
            assert ctx.get(dut.o_command) == pins.address | 1 << 18 | 2 << 20
            await ctx.delay(1e-9)

    simulate(dut, bench)
    assert found == [column % 8 != 0 for column in range(16)]


@pytest.mark.parametrize("late", [0, 1, -1])
def test_write_data_that_come_at_another_time_are_noticed(late: int) -> None:
    dut = HostFrontEnd(DramGeometry())
    found = []

    async def bench(ctx) -> None:
        for cycle in range(12):
            pins = encode(Command.WR if cycle in (2, 4) else Command.NOP)
            for name, value in pins._asdict().items():
                ctx.set(getattr(dut.host.p1, name), value)
            first = HOST_WRITE_LATENCY + late
            ctx.set(dut.host.wrdata_en, cycle - first in (2, 3, 4, 5))
            found.append(ctx.get(dut.o_missing_data))
            await ctx.tick()

    simulate(dut, bench)
    assert sum(found) == abs(late)
