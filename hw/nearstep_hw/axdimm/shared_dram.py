"""A DRAM rank that belongs to the host or to a controller, and changes hands."""

from amaranth import Cat, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.arbiter import ModeArbiter
from nearstep_hw.axdimm.dfi_switch import DfiSwitch
from nearstep_hw.axdimm.host_command import HostCommandLayout, is_calibration, is_refresh
from nearstep_hw.axdimm.host_modes import LOST_BITS, HostModes
from nearstep_hw.axdimm.host_shadow import HostShadow
from nearstep_hw.axdimm.refresh_debt import DEBT, RefreshDebt
from nearstep_hw.axdimm.row_settle import RowSettle
from nearstep_hw.dram.dfi import HOST_PHASES, PHASES, DfiSignature
from nearstep_hw.dram.fabric import REFRESH_PHASE, FabricTiming
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.mode_registers import MODE_REGISTERS
from nearstep_spec.dram.timing import DramTiming


class SharedDram(wiring.Component):
    """The mode arbiter with all that it looks at and moves.

    ZQCS and ZQCL of the host outside normal mode are remembered: the controller carries out ZQCS
    with its next refreshes, the arbiter what is left, before the mode is normal. A mode register
    that the controller cannot work with keeps the channel in normal mode.

    *Timing*: host commands and arbiter commands are on the pins a cycle later. For the duration of
    a change of mode see `ModeArbiter`.

    Parameters
    ----------
    timing, geometry : of the rank.
    hurry : cycles in which the controller gets the channel and refreshes at once; see
        `RefreshDebt`.

    Members
    -------
    dfi : the rank.
    i_slot, i_write_data, i_write_mask, i_hide_write : the host, see `DfiSwitch`.
    kernel : the controller's pins.
    o_calibrate : the DRAM lacks ZQCS of the host; to the controller.
    o_enable, i_idle, o_owed, o_must, o_refresh_hold : to and from the controller, whose refreshes
        are counted here; none is given in the cycle of one of the host, which it would precede on
        the pins by a phase.
    i_accelerate, i_reset : what the host wants.
    o_pass : the mode is normal, host commands of this cycle reach the DRAM.
    o_kernel : the controller's commands reach the DRAM.
    o_acceleration : the mode is acceleration.
    o_reset : resets controller and kernel.
    o_row : rows that the host has opened, by bank.
    o_host_debt, o_dram_debt, o_overdue : see `RefreshDebt`.
    o_unsupported, o_lost, o_lost_command : see `HostModes`.

    Attributes
    ----------
    owes, owes_long : ZQCS, and ZQCL, of the host that the DRAM lacks. For proofs; nothing else
        reads them.
    """

    def __init__(self, timing: DramTiming, geometry: DramGeometry, *, hurry: int) -> None:
        self.timing = timing
        self.geometry = geometry
        self.hurry = hurry
        self.shadow = HostShadow(geometry)
        self.arbiter = ModeArbiter(timing, geometry)
        self.debt = RefreshDebt(FabricTiming(timing), hurry=hurry)
        self.modes = HostModes(timing, geometry)
        self.owes = Signal()
        self.owes_long = Signal()
        super().__init__(
            {
                "dfi": Out(DfiSignature()),
                "i_slot": In(HostCommandLayout(geometry)).array(HOST_PHASES),
                "i_write_data": In(8 * BEAT_BYTES),
                "i_write_mask": In(BEAT_BYTES),
                "i_hide_write": In(1),
                "kernel": In(DfiSignature()),
                "o_enable": Out(1),
                "i_idle": In(1),
                "o_owed": Out(1),
                "o_must": Out(1),
                "o_refresh_hold": Out(1),
                "i_accelerate": In(1),
                "i_reset": In(1),
                "o_pass": Out(1),
                "o_kernel": Out(1),
                "o_acceleration": Out(1),
                "o_reset": Out(1),
                "o_row": Out(geometry.row_bits).array(geometry.banks),
                "o_host_debt": Out(DEBT),
                "o_dram_debt": Out(DEBT),
                "o_overdue": Out(1),
                "o_calibrate": Out(1),
                "o_unsupported": Out(MODE_REGISTERS),
                "o_lost": Out(1),
                "o_lost_command": Out(LOST_BITS),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.shadow = shadow = self.shadow
        m.submodules.arbiter = arbiter = self.arbiter
        m.submodules.debt = debt = self.debt
        m.submodules.modes = modes = self.modes
        m.submodules.settle = settle = RowSettle(self.timing)
        m.submodules.switch = switch = DfiSwitch(self.geometry)

        wiring.connect(m, wiring.flipped(self.kernel), switch.kernel)
        wiring.connect(m, switch.dfi, wiring.flipped(self.dfi))
        for phase in range(PHASES):
            watched, driven = getattr(settle, f"p{phase}"), getattr(self.dfi, f"p{phase}")
            for name in watched.signature.members:
                m.d.comb += getattr(watched, name).eq(getattr(driven, name))
        for user in (shadow, switch, modes):
            for theirs, slot in zip(user.i_slot, self.i_slot, strict=True):
                m.d.comb += theirs.eq(slot)
        for theirs, ours, row in zip(arbiter.i_row, self.o_row, shadow.o_row, strict=True):
            m.d.comb += [theirs.eq(row), ours.eq(row)]
        refreshes = Cat(slot.refresh for slot in self.i_slot).any()
        m.d.comb += [
            arbiter.i_accelerate.eq(self.i_accelerate),
            arbiter.i_reset.eq(self.i_reset),
            arbiter.i_wait.eq(debt.o_wait | modes.o_unsupported.any()),
            arbiter.i_idle.eq(self.i_idle),
            arbiter.i_settled.eq(settle.o_settled),
            arbiter.i_owing.eq(debt.o_owing),
            arbiter.i_hold.eq(debt.o_hold),
            arbiter.i_host_refreshes.eq(refreshes),
            arbiter.i_open.eq(shadow.o_open),
            arbiter.i_touched.eq(shadow.o_touched),
            debt.i_host.eq(refreshes),
            debt.i_pass.eq(arbiter.o_pass),
            debt.i_enable.eq(arbiter.o_enable),
            debt.i_yield.eq(arbiter.o_yield),
            debt.i_own.eq(
                arbiter.o_command.refresh
                | (arbiter.o_kernel & is_refresh(getattr(self.kernel, f"p{REFRESH_PHASE}")))
            ),
            switch.i_kernel.eq(arbiter.o_kernel),
            switch.i_pass.eq(arbiter.o_pass),
            switch.i_hide_refresh.eq(debt.o_hide),
            switch.i_hide_write.eq(self.i_hide_write),
            switch.i_row.eq(arbiter.o_command),
            switch.i_write_data.eq(self.i_write_data),
            switch.i_write_mask.eq(self.i_write_mask),
            self.o_enable.eq(arbiter.o_enable),
            self.o_owed.eq(debt.o_owed),
            self.o_must.eq(debt.o_must),
            self.o_refresh_hold.eq(refreshes),
            self.o_pass.eq(arbiter.o_pass),
            self.o_kernel.eq(arbiter.o_kernel),
            self.o_acceleration.eq(arbiter.o_acceleration),
            self.o_reset.eq(arbiter.o_reset),
            self.o_host_debt.eq(debt.o_host),
            self.o_dram_debt.eq(debt.o_dram),
            self.o_overdue.eq(debt.o_overdue),
            modes.i_pass.eq(arbiter.o_pass),
            self.o_unsupported.eq(modes.o_unsupported),
            self.o_lost.eq(modes.o_lost),
            self.o_lost_command.eq(modes.o_command),
        ]
        self._defer_calibrations(m)
        return m

    def _defer_calibrations(self, m: Module) -> None:
        arbiter, given = self.arbiter, self.arbiter.o_command
        short = Cat(slot.calibrate for slot in self.i_slot).any()
        long = Cat(slot.calibrate_long for slot in self.i_slot).any()
        by_kernel = arbiter.o_kernel & is_calibration(getattr(self.kernel, f"p{REFRESH_PHASE}"))
        with m.If(short & ~arbiter.o_pass):
            m.d.sync += self.owes.eq(1)
        with m.Elif(given.calibrate | given.calibrate_long | by_kernel):
            m.d.sync += self.owes.eq(0)
        with m.If(long & ~arbiter.o_pass):
            m.d.sync += self.owes_long.eq(1)
        with m.Elif(given.calibrate_long):
            m.d.sync += self.owes_long.eq(0)
        m.d.comb += [
            self.o_calibrate.eq(self.owes),
            arbiter.i_calibrate.eq(self.owes),
            arbiter.i_calibrate_long.eq(self.owes_long),
            arbiter.i_host_calibrates.eq(short | long),
        ]
