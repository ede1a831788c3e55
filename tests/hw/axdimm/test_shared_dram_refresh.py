"""A legal host's limits of refreshing hold for a shared DRAM, however the mode changes: many short
hand-overs, at every phase, over the pins of `SharedDram`."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import pytest
from amaranth.hdl import Module, Mux, ResetInserter, Signal
from amaranth.lib.wiring import Component, In, Out

from nearstep_hw.axdimm.host_command import is_refresh
from nearstep_hw.axdimm.refresh_debt import RefreshDebt
from nearstep_hw.axdimm.shared_dram import SharedDram
from nearstep_hw.dram.dfi import ACTIVATE_PHASE, HOST_PHASES, PHASES
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.refresh_manager import RefreshManager
from nearstep_hw.verilog import to_verilog
from nearstep_sim.verilate.build import Model, verilate_library
from nearstep_spec.axdimm.hand_over import HURRY_CYCLES, longest_to_normal
from nearstep_spec.dram.command import Command, encode
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import DramTiming, dram_timing

ACTIVATE, PRECHARGE_ALL, REFRESH = 1, 2, 3  # of `cmd`
CYCLES = 150_000
PULL_IN, POSTPONE = (0, 8, 8, 3), (8, 8, 1, 4)


class FourBanks(DramGeometry):
    bank_group_bits = 1
    bank_bits = 1
    row_bits = 2
    burst_column_bits = 1


class SharedDramWithManager(Component):
    """A shared DRAM and the refresh manager of a controller whose beats take `drain` to leave."""

    cmd: In(3)
    slot: In(1)
    bank: In(2)
    acc: In(1)
    rst_k: In(1)
    busy: In(1)
    drain: In(6)
    ref: Out(PHASES)
    normal: Out(1)
    kern: Out(1)
    hold: Out(1)
    e: Out(6)
    h: Out(6)
    hide: Out(1)

    def __init__(self, timing: DramTiming, debt: type[RefreshDebt] = RefreshDebt) -> None:
        self.timing = timing
        self.debt = debt
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        m = Module()
        fabric = FabricTiming(self.timing)
        m.submodules.dram = dram = SharedDram(
            self.timing, FourBanks("8Gb", "x8"), hurry=fabric.refresh_cycle + HURRY_CYCLES
        )
        if self.debt is not RefreshDebt:
            dram.ranks[0].debt = self.debt(fabric, hurry=dram.hurry)
        manager = RefreshManager(fabric, postponed=None, idle_cycles=32)
        m.submodules.manager = ResetInserter(dram.o_reset)(manager)
        for number in range(HOST_PHASES):
            slot, mine = dram.i_slot[number], self.slot == number
            given = {kind: mine & (self.cmd == kind) for kind in (ACTIVATE, PRECHARGE_ALL, REFRESH)}
            m.d.comb += [
                slot.cs_n.eq(~(given[ACTIVATE] | given[PRECHARGE_ALL] | given[REFRESH])),
                slot.act_n.eq(~given[ACTIVATE]),
                slot.activate.eq(given[ACTIVATE]),
                slot.precharge_all.eq(given[PRECHARGE_ALL]),
                slot.refresh.eq(given[REFRESH]),
                slot.bank.eq(self.bank),
            ]
            coded = Mux(
                given[PRECHARGE_ALL], encode(Command.PREA).address, encode(Command.REF).address
            )
            m.d.comb += slot.address.eq(Mux(given[ACTIVATE], 0, coded))
        left = Signal(6)
        with m.If(~manager.o_stop):
            m.d.sync += left.eq(self.drain)
        with m.Elif(left != 0):
            m.d.sync += left.eq(left - 1)
        refreshed = Signal()
        m.d.sync += refreshed.eq(manager.o_refresh)
        for phase in range(PHASES):
            pins = getattr(dram.kernel, f"p{phase}")
            m.d.comb += [
                pins.cs_n.eq(~refreshed if phase == ACTIVATE_PHASE else 1),
                pins.act_n.eq(1),
                pins.address.eq(encode(Command.REF).address),
                self.ref[phase].eq(is_refresh(getattr(dram.dfi, f"p{phase}"))),
            ]
        m.d.comb += [
            dram.i_accelerate.eq(self.acc),
            dram.i_reset.eq(self.rst_k),
            dram.i_idle.eq(manager.o_idle),
            manager.i_enable.eq(dram.o_enable),
            manager.i_owed.eq(dram.o_owed),
            manager.i_hold.eq(dram.o_refresh_hold),
            manager.i_must.eq(dram.o_must),
            manager.i_busy.eq(self.busy),
            manager.i_clear.eq(left == 0),
            self.normal.eq(dram.o_pass),
            self.kern.eq(dram.o_acceleration),
            self.hold.eq(dram.ranks[0].debt.o_hold),
            self.e.eq(dram.o_dram_debt),
            self.h.eq(dram.o_host_debt),
            self.hide.eq(dram.ranks[0].debt.o_hide),
        ]
        return m


@dataclass(frozen=True)
class Found:
    """Gaps in tREFI; `host_` is what the host came to."""

    gap: float
    seventeen: float
    highest_debt: float
    lowest_debt: float
    to_normal: float
    to_acceleration: float
    changes: float
    host_gap: float
    host_seventeen: float
    held: float
    hidden: float


def run(
    density: str, seeds: range, folder: Path, debt: type[RefreshDebt] = RefreshDebt
) -> list[Found]:
    verilog = folder / "Top.v"
    dut = SharedDramWithManager(dram_timing(density=density), debt)
    verilog.write_text(to_verilog(dut, "Top"))
    model = Model(top="Top", verilog=verilog, prefix="VTop")
    source = Path(__file__).with_name("shared_dram_refresh.cpp")
    library = ctypes.CDLL(str(verilate_library("shared_dram_refresh", [model], [source])))
    host, found = dram_timing("DDR4-800", density), []
    for seed in seeds:
        out = (ctypes.c_double * 11)()
        bad = library.run(
            ctypes.c_uint64(seed + 1),
            ctypes.c_int64(CYCLES),
            *(host.t_refi, host.t_rfc, PULL_IN[seed % 4], POSTPONE[seed // 4 % 4], seed % 3),
            out,
        )
        found.append(Found(*out))
        print("seed", seed, found[-1])
        assert not bad, f"bad: {bad}"  # 1: gap, 2: rate, 4: debt, 8: gap at the end
        assert found[-1].to_normal <= longest_to_normal(dram_timing(density=density))
    return found


def test_gap_rate_and_debt_are_kept_at_every_phase(tmp_path: Path) -> None:
    found = run("8Gb", range(4), tmp_path)
    assert sum(each.changes for each in found) > 200
    assert max(each.host_gap for each in found) > 8.9


class Forgetful(RefreshDebt):
    """Does not see that the host has refreshed since the DRAM's last."""

    def elaborate(self, platform: object) -> Module:
        m = super().elaborate(platform)
        m.d.sync += self.stale.eq(0)
        return m


class Hasty(RefreshDebt):
    """Does not keep the mode from becoming normal, and gives what it likes meanwhile."""

    def elaborate(self, platform: object) -> Module:
        m = super().elaborate(platform)
        m.d.sync += self.hold.eq(0)
        return m


@pytest.mark.deep
@pytest.mark.parametrize("debt", [Forgetful, Hasty])
def test_a_flaw_is_seen_on_the_pins(debt: type[RefreshDebt], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="bad"):
        run("8Gb", range(200), tmp_path, debt)


@pytest.mark.deep
@pytest.mark.parametrize("density", ["4Gb", "8Gb", "16Gb"])
def test_gap_rate_and_debt_are_kept_for_long(density: str, tmp_path: Path) -> None:
    found = run(density, range(200), tmp_path)
    assert min(each.host_seventeen for each in found) < 2.01
    assert sum(each.hidden for each in found) > 100
