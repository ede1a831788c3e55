"""Proofs of the blocks of the DDR4 controller, for every stimulus."""

from dataclasses import replace

import pytest
from amaranth.hdl import Array, Assert, Assume, Cover, Module, Mux, Signal
from amaranth.lib import stream
from amaranth.lib.wiring import Component, In, connect, flipped

from nearstep_hw.dram.bank_use import BankUse
from nearstep_hw.dram.batch_arbiter import BatchArbiter
from nearstep_hw.dram.dfi import ACTIVATE_PHASE, COLUMN_PHASE, PHASES, PRECHARGE_PHASE
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.hold import HoldLine
from nearstep_hw.dram.read_return import ReadReturn
from nearstep_hw.dram.refresh_manager import RefreshManager
from nearstep_hw.dram.request import PAGE_BEATS, BeatLayout, BurstLayout
from nearstep_hw.dram.scheduler import CommandScheduler
from nearstep_hw.dram.write_supply import WriteSupply
from nearstep_sim.bench.formal import prove
from nearstep_spec.dram.command import ALL_BANKS, Command, encode
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import dram_timing

from .toolkit import held, refuted

pytestmark = [pytest.mark.formal, pytest.mark.deep]


class SmallGeometry(DramGeometry):
    """Two bank groups of two banks with four rows of two bursts."""

    bank_group_bits = 1
    bank_bits = 1
    row_bits = 2
    burst_column_bits = 1


# Every distance is there, as short as it can be and still differ from its neighbours.
SHORT = replace(
    dram_timing("DDR4-1600"),
    t_rcd=7,
    t_rp=7,
    t_ras=13,
    t_rc=20,
    t_rrd_s=4,
    t_rrd_l=5,
    t_faw=20,
    t_wr=1,
    t_wtr_s=1,
    t_wtr_l=3,
    t_rtp=6,
    cl=4,
    cwl=3,
    t_rfc=12,
    t_refi=64,
    t_zqcs=20,
    calibration_interval=64,
)

# Of the scheduler every distance is one that a bank can wait for, and refreshes are due early.
SCHEDULED = replace(SHORT, t_ras=21, t_rc=28, t_wr=5, t_rtp=7, t_refi=32)


HOLD_DISTANCES = {"near": 2, "far": 5}


class HoldProperties(Component):
    """A thing is held if, and only if, an event was less than its distance ago."""

    def __init__(self) -> None:
        super().__init__({"i_near": In(2), "i_far": In(2)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.line = line = HoldLine(2, HOLD_DISTANCES)
        m.d.comb += [line.i_near.eq(self.i_near), line.i_far.eq(self.i_far)]
        for thing in range(2):
            left = Signal(4, name=f"left{thing}")
            m.d.comb += Assert(line.o_held[thing] == (left != 0))
            with m.If(self.i_far[thing]):
                m.d.sync += left.eq(HOLD_DISTANCES["far"] - 1)
            with m.Elif(self.i_near[thing] & (left <= HOLD_DISTANCES["near"])):
                m.d.sync += left.eq(HOLD_DISTANCES["near"] - 1)
            with m.Elif(left != 0):
                m.d.sync += left.eq(left - 1)
        return m


class UseProperties(Component):
    """A bank is used while one of the beats inside is its own, for any one bank."""

    BANKS, BEATS = 2, 2

    def __init__(self) -> None:
        banks = range(self.BANKS)
        super().__init__(
            {"i_enter": In(1), "i_leave": In(1), "i_enter_bank": In(banks), "i_bank": In(banks)}
        )

    def use(self) -> BankUse:
        return BankUse(banks=self.BANKS, beats=self.BEATS)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.use = use = self.use()
        held(m, self.i_bank)
        banks = Array(Signal(2, name=f"bank{i}") for i in range(4))  # a queue of its own
        put, get, inside, mine = Signal(2), Signal(2), Signal(3), Signal(3)
        enters = self.i_enter & (self.i_enter_bank == self.i_bank)
        leaves = self.i_leave & (banks[get] == self.i_bank)
        m.d.comb += [
            Assume(~self.i_leave | (inside != 0)),
            Assume(~self.i_enter | (inside != self.BEATS)),
            use.i_enter.eq(self.i_enter),
            use.i_enter_bank.eq(self.i_enter_bank),
            use.i_leave.eq(self.i_leave),
            use.i_leave_bank.eq(banks[get]),
            Assert(use.o_beats == inside),
            Assert(use.o_used.bit_select(self.i_bank, 1) == (mine != 0)),
            Cover((mine == self.BEATS) & self.i_leave),
        ]
        m.d.sync += [
            inside.eq(inside + self.i_enter - self.i_leave),
            mine.eq(mine + enters - leaves),
        ]
        with m.If(self.i_enter):
            m.d.sync += [banks[put].eq(self.i_enter_bank), put.eq(put + 1)]
        with m.If(self.i_leave):
            m.d.sync += get.eq(get + 1)
        return m


class ArbiterProperties(Component):
    """Nothing is lost or made up, and a waiting direction waits for one batch at most."""

    BATCH = 4

    def __init__(self) -> None:
        burst = stream.Signature(BurstLayout(SmallGeometry(), id_width=1))
        super().__init__(
            {"i_read": In(burst), "i_write": In(burst), "i_few": In(1), "i_ready": In(1)}
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.arbiter = arbiter = BatchArbiter(
            SmallGeometry(), id_width=1, batch_beats=self.BATCH
        )
        connect(m, flipped(self.i_read), arbiter.i_read)
        connect(m, flipped(self.i_write), arbiter.i_write)
        m.d.comb += [arbiter.i_few.eq(self.i_few), arbiter.o.ready.eq(self.i_ready)]
        m.d.comb += [Assume(port.payload.last < PAGE_BEATS) for port in (self.i_read, self.i_write)]
        out = arbiter.o.valid & arbiter.o.ready
        read = arbiter.i_read.valid & arbiter.i_read.ready
        write = arbiter.i_write.valid & arbiter.i_write.ready
        m.d.comb += [Assert(out == (read | write)), Assert(~(read & write))]
        with m.If(out):
            m.d.comb += [
                Assert(arbiter.o.payload.write == write),
                Assert(
                    arbiter.o.payload.address
                    == Mux(write, self.i_write.payload.address, self.i_read.payload.address)
                ),
            ]
        for port, mine, theirs in ((self.i_read, read, write), (self.i_write, write, read)):
            waited = Signal(8)
            with m.If(mine | ~port.valid):
                m.d.sync += waited.eq(0)
            with m.Elif(theirs):
                m.d.sync += waited.eq(waited + 1)
            m.d.comb += Assert(waited <= self.BATCH)
        m.d.comb += Cover(write)
        return m


class RefreshProperties(Component):
    """Never more refreshes due than are postponed; tRP, tRFC and tZQCS are kept; handed back
    without.

    A calibration waits for no more than the next refreshes.
    """

    DRAIN = 4
    SLACK = 0  # refreshes beyond those postponed, in the time that another rank has the pins

    def __init__(self, *, flaw: int = 0, postponed: int = 2) -> None:
        self.flaw = flaw  # clocks by which tZQCS is too short
        self.postponed = postponed  # by the manager; 2 are right
        super().__init__({name: In(1) for name in self.inputs()})

    def inputs(self) -> tuple[str, ...]:
        return ("i_enable", "i_busy", "i_clear", "i_calibrate")

    def manager(self, m: Module, timing: FabricTiming) -> RefreshManager:
        return RefreshManager(timing, postponed=self.postponed, idle_cycles=3)

    def calibrations(self, refresh: RefreshManager) -> list[object]:
        return [Assert(~refresh.o_calibrate | (refresh.o_debt == 0))]

    def elaborate(self, platform: object) -> Module:
        m = Module()
        timing = FabricTiming(SHORT)
        built = FabricTiming(replace(SHORT, t_zqcs=SHORT.t_zqcs - self.flaw))
        m.submodules.refresh = refresh = self.manager(m, built)
        stopped = Signal(range(self.DRAIN + 1))
        since_refresh, since_precharge = Signal(4, init=15), Signal(4, init=15)
        since_calibration = Signal(4, init=15)
        m.d.comb += [
            refresh.i_enable.eq(self.i_enable),
            refresh.i_calibrate.eq(self.i_calibrate),
            refresh.i_busy.eq(self.i_busy),
            refresh.i_clear.eq(self.i_clear),
            # Beats inside are gone a while after they were stopped.
            Assume((stopped != self.DRAIN) | self.i_clear),
            Assert(refresh.o_debt <= 2 + self.SLACK),
            Assert(~refresh.o_idle | (refresh.o_debt == 0)),
            Assert(~(refresh.o_refresh & refresh.o_precharge)),
            Cover((since_refresh == timing.refresh_cycle) & refresh.o_refresh),
            Cover(refresh.o_idle & (since_refresh == timing.refresh_cycle + 1)),
            *self.calibrations(refresh),
            Cover(refresh.o_calibrate & self.i_calibrate),
            Cover(refresh.o_calibrate & ~self.i_calibrate),
        ]
        with m.If(~refresh.o_stop):
            m.d.sync += stopped.eq(0)
        with m.Elif(stopped != self.DRAIN):
            m.d.sync += stopped.eq(stopped + 1)
        for strobe, since in (
            (refresh.o_refresh, since_refresh),
            (refresh.o_precharge, since_precharge),
            (refresh.o_calibrate, since_calibration),
        ):
            with m.If(strobe):
                m.d.sync += since.eq(1)
            with m.Elif(since != 15):
                m.d.sync += since.eq(since + 1)
        with m.If(refresh.o_refresh | refresh.o_calibrate):
            m.d.comb += [
                Assert(since_refresh >= timing.refresh_cycle),
                Assert(since_calibration >= timing.calibration),
                Assert(since_precharge >= timing.precharge_to_refresh),
                Assert(refresh.o_no_activate),
                Assert(refresh.o_calibrate | (refresh.o_debt != 0)),
            ]
        with m.If(~refresh.o_no_activate | refresh.o_idle):
            m.d.comb += [
                Assert(since_refresh >= timing.refresh_cycle),
                Assert(since_calibration >= timing.calibration),
            ]
        return m


class SharedRefreshProperties(RefreshProperties):
    """The same of a rank with another beside it, which has the pins for a cycle at a time at most,
    and is there to be handed back in any cycle or not.

    What is due may wait behind a calibration, for the beats of the other rank.
    """

    def inputs(self) -> tuple[str, ...]:
        return (*super().inputs(), "i_free", "i_inside", "i_pins", "i_others")

    def manager(self, m: Module, timing: FabricTiming) -> RefreshManager:
        refresh = RefreshManager(timing, postponed=self.postponed, idle_cycles=3, shared=True)
        taken = Signal()  # in the cycle before
        m.d.sync += taken.eq(~self.i_pins)
        gives = refresh.o_precharge | refresh.o_refresh | refresh.o_calibrate
        m.d.comb += [
            refresh.i_free.eq(self.i_free),
            refresh.i_pins.eq(self.i_pins),
            refresh.i_inside.eq(self.i_inside),
            Assume(~(self.i_inside & self.i_clear)),
            Assert(~(refresh.o_done & self.i_inside)),
            refresh.i_done.eq(refresh.o_done & self.i_others),
            Assume(self.i_pins | ~taken),
            Assert(self.i_pins | ~gives),
            Cover(refresh.o_refresh & self.i_free & (refresh.o_debt == 1)),
        ]
        return refresh

    def calibrations(self, refresh: RefreshManager) -> list[object]:
        return []


class ReturnProperties(Component):
    """Read data always find a place and their tag, however long R is stalled."""

    PLACES = 2

    def __init__(self) -> None:
        super().__init__({"i_reserve": In(1), "i_issue": In(1), "i_valid": In(1), "i_ready": In(1)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.returns = returns = ReadReturn(id_width=1, places=self.PLACES)
        reserved, issued, inside = Signal(4), Signal(4), Signal(4)
        taken = returns.o_valid & self.i_ready
        m.d.comb += [
            returns.i_reserve.eq(self.i_reserve),
            returns.i_issue.eq(self.i_issue),
            returns.i_valid.eq(self.i_valid),
            returns.i_ready.eq(self.i_ready),
            Assume(~self.i_reserve | returns.o_space),
            Assume(~self.i_issue | (reserved != 0)),
            Assume(~self.i_valid | (issued != 0)),
            Assert(reserved + issued + inside <= self.PLACES),
            Assert(returns.o_space == (reserved + issued + inside != self.PLACES)),
            Assert(returns.o_idle == (issued == 0)),
            Assert(~returns.o_valid | (inside != 0)),
            Cover(taken & (inside == self.PLACES)),
        ]
        m.d.sync += [
            reserved.eq(reserved + self.i_reserve - self.i_issue),
            issued.eq(issued + self.i_issue - self.i_valid),
            inside.eq(inside + self.i_valid - taken),
        ]
        return m


class SupplyProperties(Component):
    """The PHY gets the data of every command, in order, if a burst enters only when it is whole.

    Followed for the `i_index`th beat; bursts have two. Of the beat `wrong` other data are expected.
    """

    PLACES = 4

    def __init__(self, wrong: int | None = None) -> None:
        self.wrong = wrong
        super().__init__(
            {
                "i_valid": In(1),
                "i_data": In(8),
                "i_enter": In(1),
                "i_issue": In(1),
                "i_index": In(3),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.supply = supply = WriteSupply(places=self.PLACES)
        held(m, self.i_index)
        arrived, entered, sent, item = Signal(4), Signal(4), Signal(4), Signal(8)
        put = self.i_valid & supply.o_ready
        m.d.comb += [
            supply.i_valid.eq(self.i_valid),
            supply.i_data.eq(self.i_data),
            supply.i_strobe.eq(self.i_data),
            supply.i_last.eq(arrived[0]),
            supply.i_enter.eq(self.i_enter),
            supply.i_issue.eq(self.i_issue),
            Assume(~self.i_enter | supply.o_whole),
            Assume(~self.i_issue | (entered != 0)),
            Cover(supply.o_enable & (sent == SUPPLIED - 1)),
        ]
        m.d.sync += [
            arrived.eq(arrived + put),
            entered.eq(entered + (self.i_enter << 1) - self.i_issue),
            sent.eq(sent + supply.o_enable),
        ]
        with m.If(put & (arrived == self.i_index)):
            wrong = 0 if self.wrong is None else self.i_index == self.wrong
            m.d.sync += item.eq(self.i_data ^ wrong)
        with m.If(supply.o_enable & (sent == self.i_index)):
            m.d.comb += [Assert(supply.o_data == item), Assert((~supply.o_mask)[:8] == item)]
        return m


class SchedulerProperties(Component):
    """On the pins: the beats in order, each in its row, and a bank's commands in turn and in time.

    The `i_index`th beat and the bank `i_bank`, of either rank, are any. Of the distances some may
    be `shorter` than they should be.
    """

    ranks = 1
    lookahead = 2

    def __init__(self, **shorter: int) -> None:
        self.built = type("Built", (FabricTiming,), shorter)(SCHEDULED)
        self.geometry = SmallGeometry(ranks=self.ranks)
        super().__init__(
            {
                "i": In(stream.Signature(BeatLayout(self.geometry, id_width=1))),
                "i_enable": In(1),
                "i_space": In(1),
                "i_ahead": In(self.ranks),
                "i_waiting": In(self.ranks),
                "i_debt": In(self.ranks),
                "i_calibrate": In(self.ranks),
                "i_index": In(3),
                "i_bank": In(range(self.geometry.all_banks)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        timing = FabricTiming(SCHEDULED)
        m.submodules.scheduler = scheduler = CommandScheduler(
            self.built,
            self.geometry,
            id_width=1,
            lookahead=self.lookahead,
            few_beats=0,
            postponed=1,
        )
        connect(m, flipped(self.i), scheduler.i)
        m.d.comb += [
            scheduler.i_enable.eq(self.i_enable),
            scheduler.i_space.eq(self.i_space),
            scheduler.i_waiting.eq(0 if self.ranks == 1 else self.i_waiting),
            scheduler.i_calibrate.eq(self.i_calibrate),
        ]
        width = len(scheduler.i_debt) // self.ranks
        for rank in range(self.ranks):
            m.d.comb += scheduler.i_debt.word_select(rank, width).eq(self.i_debt[rank])
        if self.ranks > 1:
            m.d.comb += scheduler.i_ahead.eq(self.i_ahead)
        held(m, self.i_index, self.i_bank)

        column = getattr(scheduler, f"p{COLUMN_PHASE}")
        row = getattr(scheduler, f"p{ACTIVATE_PHASE}")
        precharge = getattr(scheduler, f"p{PRECHARGE_PHASE}")
        bank = self.i_bank

        def selected(pins):
            """The rank of the bank that is looked at."""
            return ~pins.cs_n if self.ranks == 1 else ~pins.cs_n.bit_select(bank[2], 1)

        def here(pins):
            return selected(pins) & (pins.ba[0] == bank[0]) & (pins.bg[0] == bank[1])

        columns = ~column.cs_n.all()
        reads = (column.address & encode(Command.RD).address) == encode(Command.RD).address
        refreshes = selected(row) & row.act_n & (row.address == encode(Command.REF).address)
        calibrates = selected(row) & row.act_n & ~refreshes
        activates = ~row.act_n & here(row)
        everything = (precharge.address & ALL_BANKS) != 0
        precharges = selected(precharge) & (everything | here(precharge))

        is_open, open_row = Signal(), Signal(2)
        refreshed = Signal()  # or calibrated
        events = {
            "act": activates,
            "pre": precharges,
            "read": columns & here(column) & reads,
            "write": columns & here(column) & ~reads,
            "ref": refreshes,
            "zq": calibrates,
        }
        since = {name: Signal(4, init=15, name=f"since_{name}") for name in events}
        for name, event in events.items():
            with m.If(event):
                m.d.sync += since[name].eq(1)
            with m.Elif(since[name] != 15):
                m.d.sync += since[name].eq(since[name] + 1)
        with m.If(activates):
            m.d.sync += [is_open.eq(1), open_row.eq(row.address)]
            m.d.comb += [Assert(~is_open), Assert(since["pre"] >= timing.precharge_to_activate)]
        at_bank = events["read"] | events["write"]
        with m.If(at_bank):
            m.d.comb += [Assert(is_open), Assert(since["act"] >= timing.activate_to_column)]
        with m.If(precharges):
            m.d.sync += is_open.eq(0)
            with m.If(is_open):
                m.d.comb += [
                    Assert(since["act"] >= timing.activate_to_precharge),
                    Assert(since["read"] >= timing.read_to_precharge),
                    Assert(since["write"] >= timing.write_to_precharge),
                ]
        with m.If(refreshes | calibrates):
            m.d.sync += refreshed.eq(1)
            m.d.comb += [Assert(~is_open), Assert(since["pre"] >= timing.precharge_to_refresh)]
        with m.If(refreshes | calibrates | activates):
            m.d.comb += Assert(since["ref"] >= timing.refresh_cycle)
            m.d.comb += Assert(since["zq"] >= timing.calibration)
        with m.If(calibrates):
            m.d.comb += Assert(row.address == encode(Command.ZQCS).address)

        # The beat that is followed, from its entry to its command.
        entered, given = Signal(4), Signal(4)
        followed = Signal(self.i.payload.shape())
        m.d.sync += [entered.eq(entered + scheduler.o_enter), given.eq(given + columns)]
        with m.If(scheduler.o_enter & (entered == self.i_index)):
            m.d.sync += followed.eq(self.i.payload)
        mine = columns & (given == self.i_index)
        with m.If(mine & (followed.bank == bank)):
            m.d.comb += [Assert(here(column)), Assert(open_row == followed.row)]
        with m.If(mine):
            kind = Mux(followed.write, encode(Command.WR).address, encode(Command.RD).address)
            m.d.comb += Assert(column.address == (kind | (followed.column << 3)))
        m.d.comb += [
            Assert(given <= entered),
            Assert((~columns) | (entered != 0)),
            Assert(Mux(scheduler.o_idle, ~is_open, 1)),
            # Two rows of one bank, a refresh of a bank that was open, and a channel that
            # was handed back after work.
            Cover(at_bank & (since["pre"] < 15) & (given == 1) & ~refreshed),
            Cover(refreshes & (since["act"] < 15)),
            Cover(scheduler.o_idle & (given == 2)),
        ]
        for phase in range(PHASES):
            if phase not in (COLUMN_PHASE, ACTIVATE_PHASE, PRECHARGE_PHASE):
                m.d.comb += Assert(getattr(scheduler, f"p{phase}").cs_n.all())
        if self.ranks > 1:
            self._check_ranks(m, column, row, precharge)
        return m

    def _check_ranks(self, m, column, row, precharge) -> None:
        """No command is for both ranks, and the data of two ranks are apart."""
        timing = FabricTiming(SCHEDULED)
        for pins in (column, row, precharge):
            m.d.comb += Assert(pins.cs_n != 0)
        for number in range(self.ranks):
            mine, theirs = ~column.cs_n[number], ~column.cs_n[1 - number]
            writes = (column.address & encode(Command.RD).address) != encode(Command.RD).address
            since = {kind: Signal(3, init=7, name=f"{kind}{number}") for kind in ("read", "write")}
            for kind, event in (("read", theirs & ~writes), ("write", theirs & writes)):
                with m.If(event):
                    m.d.sync += since[kind].eq(1)
                with m.Elif(since[kind] != 7):
                    m.d.sync += since[kind].eq(since[kind] + 1)
            switch = timing.column_to_column_other_rank
            with m.If(mine & writes):
                m.d.comb += Assert(since["read"] >= timing.read_to_write_other_rank)
                m.d.comb += Assert(since["write"] >= switch)
            with m.If(mine & ~writes):
                m.d.comb += Assert(since["read"] >= switch)
                m.d.comb += Assert(since["write"] >= timing.write_to_read_other_rank)
        refreshed = ~row.cs_n.all() & row.act_n
        # One rank is refreshed while the other moves data, and both move data.
        m.d.comb += Cover(refreshed & ~column.cs_n.all())
        m.d.comb += Cover(self.switched(m, column))

    @staticmethod
    def switched(m, column):
        """A column command of a rank after one of the other."""
        last = Signal(2, init=3)
        with m.If(~column.cs_n.all()):
            m.d.sync += last.eq(column.cs_n)
        return ~column.cs_n.all() & (last != 3) & (last != column.cs_n)


class AheadProperties(SchedulerProperties):
    """The same with more beats inside."""

    lookahead = 4


class RankProperties(SchedulerProperties):
    """The same with two ranks, whatever the scheduler is told of the bursts to come."""

    ranks = 2
    lookahead = 4


class OverfullUse(UseProperties):
    """More beats inside than `BankUse` was made for: numbers repeat, and the proof has to fail."""

    BEATS = 3

    def use(self) -> BankUse:
        return BankUse(banks=self.BANKS, beats=1)


SUPPLIED = 4
"""Beats that a supply outputs within `SUPPLY_DEPTH` cycles at most, two bursts of two."""
SUPPLY_DEPTH = 12

HASTY = {
    "activate_to_column": (SchedulerProperties, 1),
    "activate_to_precharge": (SchedulerProperties, 4),
    "read_to_precharge": (SchedulerProperties, 1),
    "write_to_precharge": (SchedulerProperties, 2),
    "precharge_to_activate": (SchedulerProperties, 1),
    "precharge_to_refresh": (SchedulerProperties, 1),
    "refresh_cycle": (SchedulerProperties, 2),
    "calibration": (SchedulerProperties, 4),
    "column_to_column_other_rank": (RankProperties, 1),
    "read_to_write_other_rank": (RankProperties, 1),
}
"""Distances with which a scheduler is wrong, in cycles; the proof of each has to fail."""

SCHEDULER_DEPTH = 12

REFRESH_DEPTH = 56
"""Cycles of more than three intervals, after which a refresh too many is due without refreshes."""

CASES = (
    ("dram_hold", HoldProperties, "prove", 20),
    ("dram_bank_use", UseProperties, "bmc", 9),
    ("dram_arbiter", ArbiterProperties, "bmc", 12),
    ("dram_refresh", RefreshProperties, "bmc", REFRESH_DEPTH),
    ("dram_read_return", ReturnProperties, "bmc", 9),
    ("dram_write_supply", SupplyProperties, "bmc", SUPPLY_DEPTH),
    ("dram_scheduler", SchedulerProperties, "bmc", SCHEDULER_DEPTH),
    ("dram_scheduler_ahead", AheadProperties, "bmc", 9),
    ("dram_scheduler_ranks", RankProperties, "bmc", 9),
    ("dram_refresh_ranks", SharedRefreshProperties, "bmc", REFRESH_DEPTH),
)
COVERS = (
    ("dram_bank_use", UseProperties, 10),
    ("dram_refresh", RefreshProperties, REFRESH_DEPTH),
    ("dram_read_return", ReturnProperties, 14),
    ("dram_write_supply", SupplyProperties, SUPPLY_DEPTH),
    ("dram_scheduler", SchedulerProperties, 16),
    ("dram_scheduler_ranks", RankProperties, 24),
    ("dram_refresh_ranks", SharedRefreshProperties, REFRESH_DEPTH),
)


@pytest.mark.parametrize(("name", "properties", "mode", "depth"), CASES)
def test_holds(name, properties, mode, depth) -> None:
    proof = prove(properties(), name, mode, depth)
    print(f"{proof.statements} statements, depth {proof.depth}")
    assert proof.statements > 0


@pytest.mark.parametrize(("name", "properties", "depth"), COVERS)
def test_interesting_cases_are_reached(name, properties, depth) -> None:
    assert prove(properties(), name, "cover", depth).statements > 0


def test_a_bank_use_that_is_too_small_is_found() -> None:
    refuted(OverfullUse(), "dram_bank_use_overfull", 9)


@pytest.mark.parametrize("distance", HASTY)
def test_a_distance_that_is_too_short_is_found(distance) -> None:
    properties, cycles = HASTY[distance]
    refuted(properties(**{distance: cycles}), "dram_scheduler_hasty", SCHEDULER_DEPTH)


def test_a_calibration_that_is_cut_short_is_found() -> None:
    refuted(RefreshProperties(flaw=4), "dram_refresh_short", 30)


@pytest.mark.parametrize("properties", [RefreshProperties, SharedRefreshProperties])
def test_a_refresh_that_is_postponed_too_long_is_found(properties) -> None:
    refuted(properties(postponed=3), "dram_refresh_late", REFRESH_DEPTH)


@pytest.mark.parametrize("beat", [1, SUPPLIED - 1])
def test_other_data_of_a_beat_are_found(beat) -> None:
    refuted(SupplyProperties(wrong=beat), "dram_write_supply_wrong", SUPPLY_DEPTH)
