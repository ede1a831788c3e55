"""A shared DRAM is refreshed within JEDEC's limits whoever owns it, if its host keeps them."""

from dataclasses import replace

import pytest
from amaranth.hdl import (
    Assert,
    Assume,
    Cat,
    Const,
    Cover,
    Module,
    Mux,
    ResetInserter,
    Signal,
    Value,
)
from amaranth.lib.wiring import Component, In, connect, flipped

from nearstep_hw.axdimm.host_command import (
    HostCommandLayout,
    decode,
    is_calibration,
    not_selected,
)
from nearstep_hw.axdimm.host_front_end import host_port
from nearstep_hw.axdimm.refresh_debt import DEBT, LEAST, POSTPONED, RefreshDebt
from nearstep_hw.axdimm.refresh_debt import MOST as COUNTED
from nearstep_hw.axdimm.shared_dram import SharedDram
from nearstep_hw.dram.dfi import ACTIVATE_PHASE, HOST_PHASES, PHASES, DfiSignature
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.refresh_manager import RefreshManager
from nearstep_sim.bench.formal import prove
from nearstep_spec.dram.timing import MAX_POSTPONED_REFRESHES

from .small_dram import SHORT, SmallGeometry, is_refresh, state_that_ranks_move_together
from .toolkit import held, opened, past, refuted

pytestmark = pytest.mark.formal

# Shorter than tRFC, as it is of every density: a host does not refresh twice while the controller
# calibrates.
TIMING = replace(SHORT, t_refi=4 * 24, t_zqcs=4)
# In three cycles the other rank has the command bus for one at most, and the host refreshes once.
SHARED = replace(TIMING, t_refi=4 * 32, t_rfc=12, t_zqcs=12)
DRAIN = 3  # cycles in which the controller's beats leave it
LATE = 2  # cycles in which its last read data return
# Cycles of the induction, longer than an interval; of one rank, and of two.
DEPTH, DEPTH_OF_TWO = 26, 34
# Cycles of the longest way to a refresh: a hand-over that a reset of the kernel ends. Likewise.
HURRY, HURRY_OF_TWO = 22, 30
MOST = MAX_POSTPONED_REFRESHES
CLOSED = 2  # cycles in which a host has closed all banks before it refreshes: tRP


FLAWS = {"forgets": 20}  # and the cycles in which it shows
PARTS = 8  # cycles in which it shows that a rank is handed back without the other


class Forgetful(RefreshDebt):
    """Counts, but does not see that the host has refreshed since the DRAM's last."""

    def elaborate(self, platform: object) -> Module:
        m = super().elaborate(platform)
        m.d.sync += self.stale.eq(0)
        return m


class RefreshLimit(Component):
    """A shared DRAM, the refresh manager of a controller, and a host that keeps JEDEC's limits.

    The host gives commands as it likes. It refreshes from eight in advance to eight behind, by
    intervals that begin `offset` cycles before the module's, and two of its REF are at least tRFC
    and at most nine intervals apart; mode and resets are requested at any time. The controller is
    the real refresh manager, told that beats are inside as long as the solver likes, `DRAIN` cycles
    after it stops them at most; without it (`controller`) the kernel does what it likes, but
    refreshes in time.

    With two `ranks` this is one of them, `rank`. The host does to the other what it likes, within
    JEDEC's limits or not, and so keeps the two as far apart as it likes; so do the kernel's pins.

    With a `flaw` the refreshes are not counted as they should be (`forgets`), or the controller
    hands each of two ranks back without waiting for the other (`parts`).
    """

    def __init__(
        self,
        *,
        controller: bool = True,
        hurry: int | None = None,
        ranks: int = 1,
        rank: int = 0,
        flaw: str | None = None,
    ) -> None:
        self.controller = controller
        self.timing = TIMING if ranks == 1 else SHARED
        self.ranks = ranks
        self.rank = rank
        self.hurry = hurry or (HURRY if ranks == 1 else HURRY_OF_TWO)
        self.flaw = flaw
        super().__init__(
            {
                "host": In(host_port(ranks)),
                "kernel": In(DfiSignature(ranks=ranks)),
                "accelerate": In(1),
                "reset": In(1),
                "busy": In(ranks),
                "clear": In(ranks),
                "free": In(ranks),
                "inside": In(ranks),
                "returned": In(1),
                "offset": In(range(FabricTiming(self.timing).refresh_interval)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        timing = FabricTiming(self.timing)
        interval = timing.refresh_interval
        longest = (MOST + 1) * interval
        geometry = SmallGeometry(ranks=self.ranks)
        dram = SharedDram(self.timing, geometry, hurry=self.hurry)
        mine = dram.ranks[self.rank]
        if self.flaw == "forgets":
            mine.debt = Forgetful(timing, hurry=self.hurry)
        debt, arbiter, passes = mine.debt, mine.arbiter, dram.o_pass[self.rank]
        m.submodules.dram, inside = opened(dram)
        if self.ranks > 1:
            state_that_ranks_move_together(m, dram, inside)
        hosts = [getattr(self.host, f"p{slot}") for slot in range(HOST_PHASES)]
        for number in range(self.ranks * HOST_PHASES):
            rank, phase = divmod(number, HOST_PHASES)
            slot = Signal(HostCommandLayout(geometry), name=f"slot{number}")
            decode(m, hosts[phase], slot, rank)
            m.d.comb += dram.i_slot[number].eq(slot)
        m.d.comb += [
            dram.i_accelerate.eq(self.accelerate),
            dram.i_reset.eq(self.reset),
        ]
        connect(m, flipped(self.kernel), dram.kernel)
        if self.controller:
            self._controller(m, dram)
        else:
            m.d.comb += dram.i_idle.eq(self.returned)

        # The host.
        asks = Signal()
        m.d.comb += asks.eq(Cat(is_refresh(pins, self.rank) for pins in hosts).any())
        held(m, self.offset)
        owes = Signal(DEBT)
        m.d.sync += owes.eq(owes + (debt.left == self.offset) - asks)
        since_host = Signal(range(longest + 2), init=1)
        m.d.sync += since_host.eq(Mux(asks, 1, since_host + 1))
        still = Signal(range(CLOSED + 1))
        with m.If(mine.shadow.o_touched.any()):
            m.d.sync += still.eq(0)
        with m.Elif(still != CLOSED):
            m.d.sync += still.eq(still + 1)
        m.d.comb += [
            Assume(~(is_refresh(hosts[0], self.rank) & is_refresh(hosts[1], self.rank))),
            Assume(~(asks & (owes <= -MOST))),
            Assume(owes <= MOST),
            Assume(since_host <= longest),
            Assume(self.offset < interval),
            Assume(~asks | ((still == CLOSED) & ~mine.shadow.o_open.any())),
            Assume(~asks | (since_host >= timing.refresh_cycle)),
        ]

        # What the DRAM sees, by the time of decision: a cycle before the pins.
        gets = Signal()
        m.d.comb += gets.eq((asks & passes & ~debt.o_hide) | arbiter.o_command.refresh | debt.i_own)
        since_dram = Signal(range(2 * longest), init=1)
        with m.If(gets):
            m.d.sync += since_dram.eq(1)
        with m.Elif(~since_dram.all()):
            m.d.sync += since_dram.eq(since_dram + 1)

        # The host must refresh before it owes nine.
        due_in = Signal(range(interval + 1))
        host_left = Signal(range(2 * longest))
        m.d.comb += [
            due_in.eq(
                Mux(
                    debt.left >= self.offset,
                    debt.left - self.offset,
                    debt.left + interval - self.offset,
                )
            ),
            host_left.eq((MOST - owes) * interval + due_in),
        ]
        # What each of the two proofs shows, the other takes for granted; that of the gap in the
        # cycles before alone, so that neither rests on what follows from it.
        in_time = since_dram <= longest
        kept = debt.stale | (since_dram <= since_host) | (since_dram + host_left <= longest)
        was_late = past(m, ~in_time & ~passes, "late")
        with m.If(passes):
            m.d.comb += Assert(in_time)
        with m.Else():
            m.d.comb += Assert(in_time) if self.controller else Assume(~was_late)
        m.d.comb += [
            Assume(kept) if self.controller else Assert(kept),
            Assert(debt.o_dram >= LEAST + debt.gap + (debt.left > debt.gap_left)),
            Assert((debt.hold == 0) | (debt.hold + since_dram <= 2 * interval + 1)),
            Assert(owes >= -MOST),
            Assert(debt.o_host == owes - (debt.left < self.offset)),
            Assert(~arbiter.astray),
            Assert(debt.left < interval),
            Assert(debt.gap_left < interval),
            Assert(since_dram == debt.gap * interval + interval - debt.gap_left),
            Assert(~passes | ((debt.o_dram <= debt.o_host) & ~debt.stale)),
        ]
        m.d.comb += Assert(debt.o_dram <= (MOST if self.controller else COUNTED))
        with m.If(arbiter.yielding):
            m.d.comb += [Assert(arbiter.opened == 0), Assert(arbiter.wrong == 0)]

        # The rate: the mode is not normal for two intervals after the DRAM was refreshed with more
        # due than `POSTPONED` and than the host owed.
        rest = Signal(range(2 * interval + 1))
        with m.If(gets & (debt.o_dram > debt.o_host) & (debt.o_dram > POSTPONED)):
            m.d.sync += rest.eq(2 * interval)
        with m.Elif(rest != 0):
            m.d.sync += rest.eq(rest - 1)
        m.d.comb += [Assert(~(passes & (rest != 0))), Assert(rest == debt.hold)]

        away = Signal()
        with m.If(dram.o_kernel):
            m.d.sync += away.eq(1)
        m.d.comb += [
            Cover(passes & away & (debt.o_host == 1) & (debt.o_dram == 1)),
        ]
        return m

    def _controller(self, m: Module, dram: SharedDram) -> None:
        """The refresh manager of each rank, on the pins `kernel`."""
        shared = self.ranks > 1
        managers = [
            RefreshManager(FabricTiming(self.timing), postponed=None, idle_cycles=3, shared=shared)
            for _ in range(self.ranks)
        ]
        idle = Cat(manager.o_idle for manager in managers).all()
        m.d.comb += dram.i_idle.eq(idle & self.returned)
        taken: Value = Const(0, 1)
        for rank, manager in enumerate(managers):
            m.submodules[f"manager{rank}"] = ResetInserter(dram.o_reset)(manager)
            m.d.comb += [
                manager.i_enable.eq(dram.o_enable),
                manager.i_owed.eq(dram.o_owed[rank]),
                manager.i_must.eq(dram.o_must[rank]),
                manager.i_hold.eq(dram.o_refresh_hold[rank]),
                manager.i_busy.eq(self.busy[rank]),
                manager.i_clear.eq(self.clear[rank]),
                manager.i_calibrate.eq(dram.o_calibrate[rank]),
            ]
            if shared:
                m.d.comb += [
                    manager.i_free.eq(self.free[rank]),
                    manager.i_inside.eq(self.inside[rank]),
                    manager.i_pins.eq(~taken),
                    manager.i_done.eq(
                        manager.o_done
                        if self.flaw == "parts"
                        else Cat(each.o_done for each in managers).all()
                    ),
                ]
            taken = taken | manager.o_precharge | manager.o_refresh | manager.o_calibrate
        if shared:  # they take the channel together, and hand it back together
            m.d.comb += Assert(managers[0].o_idle == managers[1].o_idle)
        self._watch(m, dram, managers[self.rank])
        late = Signal(range(LATE + 1))
        with m.If(~idle):
            m.d.sync += late.eq(0)
        with m.Elif(late != LATE):
            m.d.sync += late.eq(late + 1)
        m.d.comb += Assume((late != LATE) | self.returned)

    def _watch(self, m: Module, dram: SharedDram, manager: RefreshManager) -> None:
        """The refresh manager of the rank, and its pins."""
        rank, arbiter = self.rank, dram.ranks[self.rank].arbiter
        kernel = [getattr(self.kernel, f"p{phase}") for phase in range(PHASES)]
        refreshed = past(m, manager.o_refresh, "refreshed")  # the pins follow a cycle later
        calibrated = past(m, manager.o_calibrate, "calibrated")
        for phase, pins in enumerate(kernel):
            if phase == ACTIVATE_PHASE:
                m.d.comb += Assume(is_refresh(pins, rank) == refreshed)
                m.d.comb += Assume(is_calibration(pins, rank) == calibrated)
            else:
                m.d.comb += Assume(~is_refresh(pins, rank))
            quiet = not_selected(pins, rank) | ~manager.o_idle | refreshed | calibrated
            m.d.comb += Assume(quiet)

        stopped = Signal(range(DRAIN + 1))  # where rows may be opened for what is inside
        shut = manager.o_no_activate & ~manager.o_idle if self.ranks > 1 else Const(0, 1)
        with m.If(~manager.o_stop | shut):
            m.d.sync += stopped.eq(0)
        with m.Elif(stopped != DRAIN):
            m.d.sync += stopped.eq(stopped + 1)
        m.d.comb += Assume((stopped != DRAIN) | self.clear[rank])
        if self.ranks > 1:  # nothing enters while it is stopped
            inside = self.inside[rank]
            entered = ~past(m, manager.o_stop, "stop") | past(m, inside, "inside")
            m.d.comb += [Assume(~(inside & self.clear[rank])), Assume(~inside | entered)]
        m.d.comb += Assert(manager.o_idle == ~manager.taken)
        with m.If(dram.o_pass[rank] | arbiter.restoring | arbiter.closing):
            m.d.comb += Assert(manager.o_idle)
        # The host has refreshed while the kernel has the channel: the DRAM lacks that one.
        m.d.comb += Cover(dram.o_kernel & manager.o_refresh)


@pytest.mark.deep
def test_in_normal_mode_the_gap_is_that_of_the_host() -> None:
    proof = prove(RefreshLimit(controller=False), "refresh_gap", "prove", depth=2)
    print(proof)
    assert proof.statements == 16


@pytest.mark.deep
def test_outside_normal_mode_the_dram_is_refreshed_in_time() -> None:
    proof = prove(RefreshLimit(), "refresh_limit", "prove", depth=DEPTH)
    print(proof)
    assert proof.statements == 18


@pytest.mark.deep
def test_refreshes_are_due_when_the_channel_changes_hands() -> None:
    assert prove(RefreshLimit(), "refresh_limit", "cover", depth=36).statements == 2


@pytest.mark.deep
@pytest.mark.parametrize("rank", [0, 1])
def test_the_gap_of_each_of_two_ranks_is_that_of_the_host(rank: int) -> None:
    design = RefreshLimit(controller=False, ranks=2, rank=rank)
    proof = prove(design, f"refresh_gap_of_two_{rank}", "prove", depth=2)
    print(proof)
    assert proof.statements == 26


@pytest.mark.deep
@pytest.mark.parametrize("rank", [0, 1])
def test_outside_normal_mode_each_of_two_ranks_is_refreshed_in_time(rank: int) -> None:
    design = RefreshLimit(ranks=2, rank=rank)
    proof = prove(design, f"refresh_limit_of_two_{rank}", "prove", depth=DEPTH_OF_TWO)
    print(proof)
    assert proof.statements == 29


@pytest.mark.deep
@pytest.mark.parametrize("rank", [0, 1])
def test_refreshes_of_each_of_two_ranks_are_due_when_the_channel_changes_hands(rank: int) -> None:
    design = RefreshLimit(ranks=2, rank=rank)
    assert prove(design, f"refresh_limit_of_two_{rank}", "cover", depth=36).statements == 2


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_found(flaw: str) -> None:
    design = RefreshLimit(controller=False, flaw=flaw)
    refuted(design, f"refresh_limit_{flaw}", depth=FLAWS[flaw])


@pytest.mark.deep
def test_a_hand_over_that_takes_longer_than_is_believed_is_not_proven() -> None:
    design = RefreshLimit(hurry=2)
    refuted(design, "refresh_limit_more", DEPTH, mode="prove", status="UNKNOWN")


@pytest.mark.deep
def test_a_hand_over_of_two_ranks_that_takes_longer_than_is_believed_is_not_proven() -> None:
    design = RefreshLimit(ranks=2, rank=1, hurry=2)
    refuted(design, "refresh_limit_of_two_more", DEPTH_OF_TWO, mode="prove", status="UNKNOWN")


@pytest.mark.deep
def test_a_rank_that_is_handed_back_alone_is_found() -> None:
    design = RefreshLimit(ranks=2, rank=1, flaw="parts")
    refuted(design, "refresh_limit_of_two_parts", depth=PARTS)
