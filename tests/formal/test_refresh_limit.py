"""No more refreshes are ever due to a shared DRAM than may be postponed, whoever owns it."""

from dataclasses import replace

import pytest
from amaranth.hdl import Assert, Assume, Cat, Cover, Module, ResetInserter, Signal
from amaranth.lib.wiring import Component, In, connect, flipped

from nearstep_hw.axdimm.host_command import HostCommandLayout, decode, is_calibration
from nearstep_hw.axdimm.host_front_end import HOST_PORT
from nearstep_hw.axdimm.memory_channel import POSTPONED
from nearstep_hw.axdimm.shared_dram import SharedDram
from nearstep_hw.dram.dfi import ACTIVATE_PHASE, HOST_PHASES, PHASES, DfiSignature
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.refresh_manager import RefreshManager
from nearstep_hw.dram.timing import MAX_POSTPONED_REFRESHES
from nearstep_sim.bench.formal import ProofError, prove

from .test_arbiter import SHORT, SmallGeometry, is_refresh

pytestmark = [pytest.mark.formal, pytest.mark.deep]

TIMING = replace(SHORT, t_refi=4 * 24)
DRAIN = 3  # cycles in which the controller's beats leave it
LATE = 2  # cycles in which its last read data return
DEPTH = 26  # cycles of the induction, longer than an interval
HURRY = 22  # cycles of the longest way to a refresh: a hand-over that a reset of the kernel ends
MOST = MAX_POSTPONED_REFRESHES


class RefreshLimit(Component):
    """A shared DRAM, the refresh manager of a controller, and a host that keeps its own limit.

    The host gives commands as it likes, and refreshes from eight in advance to eight behind; the
    mode and resets are requested at any time. The controller is the real refresh manager, told
    that beats are inside as long as the solver likes, `DRAIN` cycles after it stops them at most.
    """

    def __init__(
        self, *, postponed: int = POSTPONED, hurry: int = HURRY, flaw: str | None = None
    ) -> None:
        self.postponed = postponed
        self.hurry = hurry
        self.flaw = flaw
        super().__init__(
            {
                "host": In(HOST_PORT),
                "kernel": In(DfiSignature()),
                "accelerate": In(1),
                "reset": In(1),
                "busy": In(1),
                "clear": In(1),
                "returned": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        timing = FabricTiming(TIMING)
        geometry = SmallGeometry()
        m.submodules.dram = dram = SharedDram(TIMING, geometry, hurry=self.hurry)
        manager = RefreshManager(timing, postponed=self.postponed, idle_cycles=3)
        m.submodules.manager = ResetInserter(dram.o_reset)(manager)
        debt = dram.debt
        hosts = [getattr(self.host, f"p{slot}") for slot in range(HOST_PHASES)]
        for number, pins in enumerate(hosts):
            slot = Signal(HostCommandLayout(geometry), name=f"slot{number}")
            decode(m, pins, slot)
            m.d.comb += dram.i_slot[number].eq(slot)
        m.d.comb += [
            dram.i_accelerate.eq(self.accelerate),
            dram.i_reset.eq(self.reset),
            dram.i_idle.eq(manager.o_idle & self.returned),
            manager.i_enable.eq(dram.o_enable),
            manager.i_debt.eq(dram.o_debt if self.flaw is None else 0),
            manager.i_busy.eq(self.busy),
            manager.i_clear.eq(self.clear),
            manager.i_calibrate.eq(dram.o_calibrate),
        ]
        connect(m, flipped(self.kernel), dram.kernel)
        kernel = [getattr(self.kernel, f"p{phase}") for phase in range(PHASES)]
        for phase, pins in enumerate(kernel):
            if phase == ACTIVATE_PHASE:
                m.d.comb += Assume(is_refresh(pins) == manager.o_refresh)
                m.d.comb += Assume(is_calibration(pins) == manager.o_calibrate)
            else:
                m.d.comb += Assume(~is_refresh(pins))
            m.d.comb += Assume(pins.cs_n | ~manager.o_idle)

        stopped = Signal(range(DRAIN + 1))
        with m.If(~manager.o_stop):
            m.d.sync += stopped.eq(0)
        with m.Elif(stopped != DRAIN):
            m.d.sync += stopped.eq(stopped + 1)
        late = Signal(range(LATE + 1))
        with m.If(~manager.o_idle):
            m.d.sync += late.eq(0)
        with m.Elif(late != LATE):
            m.d.sync += late.eq(late + 1)
        m.d.comb += [
            Assume((stopped != DRAIN) | self.clear),
            Assume((late != LATE) | self.returned),
        ]

        asks = [is_refresh(pins) for pins in hosts]
        m.d.comb += [
            Assume(~(asks[0] & asks[1])),
            Assume(~(Cat(asks).any() & (dram.o_host_debt <= -MOST))),
            Assume(dram.o_host_debt <= MOST),
        ]

        m.d.comb += [
            Assert(dram.o_dram_debt <= MOST),
            Assert(dram.o_dram_debt >= -MOST),
            Assert(dram.o_host_debt >= -MOST),
            Assert(debt.left < timing.refresh_interval),
            Assert(manager.interval < timing.refresh_interval),
            Assert(manager.o_idle == ~manager.taken),
            Assert(~dram.o_pass | (dram.o_dram_debt <= dram.o_host_debt)),
        ]
        with m.If(dram.o_pass | dram.arbiter.restoring | dram.arbiter.closing):
            m.d.comb += Assert(manager.o_idle)
        with m.If(dram.o_kernel):
            behind = debt.left >= manager.interval
            with m.If(~manager.o_idle):
                m.d.comb += Assert(dram.o_dram_debt <= manager.o_debt + behind)
            with m.Elif(~dram.o_enable):
                m.d.comb += Assert(dram.o_dram_debt <= 2)
        away = Signal()
        with m.If(dram.o_kernel):
            m.d.sync += away.eq(1)
        m.d.comb += [
            Cover(dram.o_kernel & manager.o_refresh & (dram.o_host_debt == 1)),
            Cover(dram.o_pass & away & (dram.o_host_debt == 1) & (dram.o_dram_debt == 0)),
        ]
        return m


def test_no_more_refreshes_are_due_than_may_be_postponed() -> None:
    proof = prove(RefreshLimit(), "refresh_limit", "prove", depth=DEPTH)
    print(proof)
    assert proof.statements == 10


def test_refreshes_are_due_when_the_channel_changes_hands() -> None:
    assert prove(RefreshLimit(), "refresh_limit", "cover", depth=44).statements == 2


def test_a_controller_that_forgets_what_is_due_is_found() -> None:
    with pytest.raises(ProofError, match="expected PASS, got FAIL"):
        prove(RefreshLimit(flaw="forgets"), "refresh_limit_flaw", "bmc", depth=32)


def test_a_controller_that_postpones_one_more_is_not_proven() -> None:
    with pytest.raises(ProofError, match="expected PASS, got UNKNOWN"):
        prove(RefreshLimit(postponed=MOST), "refresh_limit_more", "prove", depth=DEPTH)
