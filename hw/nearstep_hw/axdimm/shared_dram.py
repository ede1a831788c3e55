"""DRAM owned by the host or by a controller, with hand-over."""

from collections.abc import Callable

from amaranth import Cat, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.arbiter import ModeArbiter
from nearstep_hw.axdimm.dfi_switch import DfiSwitch
from nearstep_hw.axdimm.host_command import (
    HostCommandLayout,
    is_calibration,
    is_refresh,
    not_selected,
    numbered,
)
from nearstep_hw.axdimm.host_front_end import slots_of
from nearstep_hw.axdimm.host_modes import LOST_BITS, HostModes
from nearstep_hw.axdimm.host_shadow import HostShadow
from nearstep_hw.axdimm.refresh_debt import DEBT, RefreshDebt
from nearstep_hw.axdimm.row_settle import RowSettle
from nearstep_hw.dram.dfi import HOST_PHASES, PHASES, DfiSignature
from nearstep_hw.dram.fabric import REFRESH_PHASE, FabricTiming
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.mode_registers import MODE_REGISTERS
from nearstep_spec.dram.timing import DramTiming

__all__ = ["RankState", "SharedDram"]


class RankState:
    """State and ownership of one rank: blocks of `SharedDram`.

    Attributes
    ----------
    number : number of the rank.
    owes, owes_long : ZQCS, and ZQCL, of the host that the rank lacks. For proofs only.
    """

    def __init__(
        self, number: int, timing: DramTiming, geometry: DramGeometry, *, hurry: int
    ) -> None:
        self.number = number
        self.shadow = HostShadow(geometry)
        self.arbiter = ModeArbiter(timing, geometry, shared=geometry.ranks > 1)
        self.debt = RefreshDebt(FabricTiming(timing), hurry=hurry)
        self.modes = HostModes(timing, geometry)
        self.settle = RowSettle(timing)
        self.refreshes: Value = Signal()  # the host refreshes, in this cycle
        self.owes = Signal(name=numbered("owes", number))
        self.owes_long = Signal(name=numbered("owes_long", number))


class SharedDram(wiring.Component):
    """Mode arbiters, trackers and switch of a channel.

    Each rank has its own arbiter, shadow and counts of refreshes, and sees only the commands of its
    chip select. The controller acquires and releases all ranks at once; a rank is returned to the
    host when its rows are as the host expects, see `ModeArbiter`.

    ZQCS and ZQCL of the host outside normal mode are stored: the controller executes ZQCS with its
    next refreshes, the arbiter the others, before the mode is normal. An unsupported value of a
    mode register keeps the channel in normal mode.

    *Timing*: host commands and arbiter commands are on the pins a cycle later. For the duration of
    a change of mode see `ModeArbiter`.

    Parameters
    ----------
    timing, geometry : of the channel.
    hurry : cycles of a hand-over to the controller and an immediate refresh; see `RefreshDebt`.

    Members
    -------
    dfi : the ranks.
    i_slot, i_write_data, i_write_mask, i_hide_write : the host, see `DfiSwitch`.
    kernel : the controller's pins.
    o_calibrate : the DRAM lacks ZQCS of the host; to the controller. A bit for each rank, as in
        `o_owed`, `o_must`, `o_refresh_hold` and `o_pass`.
    o_enable, i_idle, o_owed, o_must, o_refresh_hold : to and from the controller, whose refreshes
        are counted. `o_refresh_hold` delays a refresh that would coincide with one of the host,
        which is a phase later on the pins.
    i_accelerate, i_reset : requests of the host.
    o_pass : the mode is normal, host commands of this cycle reach the rank.
    o_kernel : the controller's commands reach the DRAM.
    o_acceleration : the mode is acceleration.
    o_reset : resets controller and kernel.
    o_row : rows that the host has opened, by bank; those of rank 0 first.
    o_host_debt, o_dram_debt, o_host_debt1, o_dram_debt1 : of each rank, see `RefreshDebt`.
    o_overdue : see `RefreshDebt`; of any rank.
    o_unsupported, o_lost, o_lost_command : of any rank, see `HostModes`. Commands of both ranks
        that are lost in one cycle count once, with the pins of rank 1.

    Attributes
    ----------
    ranks : a `RankState` for each rank.
    """

    def __init__(self, timing: DramTiming, geometry: DramGeometry, *, hurry: int) -> None:
        self.timing = timing
        self.geometry = geometry
        self.hurry = hurry
        self.ranks = tuple(
            RankState(number, timing, geometry, hurry=hurry) for number in range(geometry.ranks)
        )
        ranks = geometry.ranks
        super().__init__(
            {
                "dfi": Out(DfiSignature(ranks=ranks)),
                "i_slot": In(HostCommandLayout(geometry)).array(ranks * HOST_PHASES),
                "i_write_data": In(8 * BEAT_BYTES),
                "i_write_mask": In(BEAT_BYTES),
                "i_hide_write": In(1),
                "kernel": In(DfiSignature(ranks=ranks)),
                "o_enable": Out(1),
                "i_idle": In(1),
                "o_owed": Out(ranks),
                "o_must": Out(ranks),
                "o_refresh_hold": Out(ranks),
                "i_accelerate": In(1),
                "i_reset": In(1),
                "o_pass": Out(ranks),
                "o_kernel": Out(1),
                "o_acceleration": Out(1),
                "o_reset": Out(1),
                "o_row": Out(geometry.row_bits).array(geometry.all_banks),
                **{
                    numbered(name, rank): Out(DEBT)
                    for rank in range(ranks)
                    for name in ("o_host_debt", "o_dram_debt")
                },
                "o_overdue": Out(1),
                "o_calibrate": Out(ranks),
                "o_unsupported": Out(MODE_REGISTERS),
                "o_lost": Out(1),
                "o_lost_command": Out(LOST_BITS),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        for rank in self.ranks:
            for name in ("shadow", "arbiter", "debt", "modes", "settle"):
                m.submodules[numbered(name, rank.number)] = getattr(rank, name)
        m.submodules.switch = switch = DfiSwitch(self.geometry)

        wiring.connect(m, wiring.flipped(self.kernel), switch.kernel)
        wiring.connect(m, switch.dfi, wiring.flipped(self.dfi))
        for rank in self.ranks:
            self._watch(m, rank)
        for theirs in (
            [slot for rank in self.ranks for slot in rank.shadow.i_slot],
            switch.i_slot,
            [slot for rank in self.ranks for slot in rank.modes.i_slot],
        ):
            for each, slot in zip(theirs, self.i_slot, strict=True):
                m.d.comb += each.eq(slot)
        for rank in self.ranks:
            self._arbitrate(m, rank)
        lead = self.ranks[0].arbiter  # synchronous with the others when used
        m.d.comb += [
            switch.i_kernel.eq(lead.o_kernel),
            switch.i_pass.eq(self._of_all(lambda rank: rank.arbiter.o_pass)),
            switch.i_hide_refresh.eq(self._of_all(lambda rank: rank.debt.o_hide)),
            switch.i_hide_write.eq(self.i_hide_write),
            *(
                getattr(switch, numbered("i_row", rank.number)).eq(rank.arbiter.o_command)
                for rank in self.ranks
            ),
            switch.i_write_data.eq(self.i_write_data),
            switch.i_write_mask.eq(self.i_write_mask),
            self.o_enable.eq(lead.o_enable),
            self.o_owed.eq(self._of_all(lambda rank: rank.debt.o_owed)),
            self.o_must.eq(self._of_all(lambda rank: rank.debt.o_must)),
            self.o_refresh_hold.eq(self._of_all(lambda rank: rank.refreshes)),
            self.o_pass.eq(self._of_all(lambda rank: rank.arbiter.o_pass)),
            self.o_kernel.eq(lead.o_kernel),
            self.o_acceleration.eq(lead.o_acceleration),
            self.o_reset.eq(lead.o_reset),
            *(
                getattr(self, numbered(f"o_{name}_debt", rank.number)).eq(debt)
                for rank in self.ranks
                for name, debt in (("host", rank.debt.o_host), ("dram", rank.debt.o_dram))
            ),
            self.o_overdue.eq(self._of_any(lambda rank: rank.debt.o_overdue)),
            *(rank.modes.i_pass.eq(rank.arbiter.o_pass) for rank in self.ranks),
            self.o_unsupported.eq(self._of_any(lambda rank: rank.modes.o_unsupported)),
            self.o_lost.eq(self._of_any(lambda rank: rank.modes.o_lost)),
            self.o_lost_command.eq(self._lost_command),
        ]
        for rank in self.ranks:
            self._defer_calibrations(m, rank)
        return m

    @property
    def _lost_command(self) -> Value:
        command = self.ranks[0].modes.o_command
        for rank in self.ranks[1:]:
            command = Mux(rank.modes.o_lost, rank.modes.o_command, command)
        return command

    def _of_all(self, what: Callable[[RankState], Value]) -> Value:
        """Return a bit for each rank."""
        return Cat(what(rank) for rank in self.ranks)

    def _of_any(self, what: Callable[[RankState], Value]) -> Value:
        """Return the OR over the ranks."""
        first, *others = (what(rank) for rank in self.ranks)
        for each in others:
            first = first | each
        return first

    def _watch(self, m: Module, rank: RankState) -> None:
        """Connect the DRAM's pins to the timing tracker of a rank."""
        number = rank.number
        for phase in (f"p{phase}" for phase in range(PHASES)):
            watched, driven = getattr(rank.settle, phase), getattr(self.dfi, phase)
            m.d.comb += watched.cs_n.eq(not_selected(driven, number))
            for name in ("act_n", "address", "bg", "ba"):
                m.d.comb += getattr(watched, name).eq(getattr(driven, name))

    def _arbitrate(self, m: Module, rank: RankState) -> None:
        arbiter, debt, shadow = rank.arbiter, rank.debt, rank.shadow
        ours = self.o_row[rank.number * self.geometry.banks :]
        for theirs, our, row in zip(arbiter.i_row, ours, shadow.o_row, strict=False):
            m.d.comb += [theirs.eq(row), our.eq(row)]
        slots = slots_of(self.i_slot, rank.number)
        rank.refreshes = Cat(slot.refresh for slot in slots).any()
        waits = self._of_any(lambda each: each.debt.o_wait | each.modes.o_unsupported.any())
        if len(self.ranks) > 1:
            waits = waits | ~self._of_all(lambda each: each.arbiter.o_pass).all()
            others = [each.arbiter for each in self.ranks if each is not rank]
            m.d.comb += arbiter.i_closed.eq(Cat(other.o_closed for other in others).all())
        by_kernel = is_refresh(getattr(self.kernel, f"p{REFRESH_PHASE}"), rank.number)
        m.d.comb += [
            arbiter.i_accelerate.eq(self.i_accelerate),
            arbiter.i_reset.eq(self.i_reset),
            arbiter.i_wait.eq(waits),
            arbiter.i_idle.eq(self.i_idle),
            arbiter.i_settled.eq(rank.settle.o_settled),
            arbiter.i_owing.eq(debt.o_owing),
            arbiter.i_hold.eq(debt.o_hold),
            arbiter.i_host_refreshes.eq(rank.refreshes),
            arbiter.i_open.eq(shadow.o_open),
            arbiter.i_touched.eq(shadow.o_touched),
            debt.i_host.eq(rank.refreshes),
            debt.i_pass.eq(arbiter.o_pass),
            debt.i_enable.eq(arbiter.o_enable),
            debt.i_yield.eq(arbiter.o_yield),
            debt.i_own.eq(arbiter.o_command.refresh | (arbiter.o_kernel & by_kernel)),
        ]

    def _defer_calibrations(self, m: Module, rank: RankState) -> None:
        arbiter, given = rank.arbiter, rank.arbiter.o_command
        slots = slots_of(self.i_slot, rank.number)
        short = Cat(slot.calibrate for slot in slots).any()
        long = Cat(slot.calibrate_long for slot in slots).any()
        pins = getattr(self.kernel, f"p{REFRESH_PHASE}")
        by_kernel = arbiter.o_kernel & is_calibration(pins, rank.number)
        with m.If(short & ~arbiter.o_pass):
            m.d.sync += rank.owes.eq(1)
        with m.Elif(given.calibrate | given.calibrate_long | by_kernel):
            m.d.sync += rank.owes.eq(0)
        with m.If(long & ~arbiter.o_pass):
            m.d.sync += rank.owes_long.eq(1)
        with m.Elif(given.calibrate_long):
            m.d.sync += rank.owes_long.eq(0)
        m.d.comb += [
            self.o_calibrate[rank.number].eq(rank.owes),
            arbiter.i_calibrate.eq(rank.owes),
            arbiter.i_calibrate_long.eq(rank.owes_long),
            arbiter.i_host_calibrates.eq(short | long),
        ]
