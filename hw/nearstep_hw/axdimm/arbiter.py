"""Arbiter of the mode of a rank."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.dfi_switch import RowCommandLayout
from nearstep_hw.dram.dfi import PHASES, TPHY_RDLAT
from nearstep_spec.axdimm.hand_over import PATIENCE
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import DramTiming

CUT_CYCLES = TPHY_RDLAT + 2  # until the data of issued commands are transferred
STATES = (
    *("NORMAL", "TAKE", "CLOSED", "KERNEL", "LEAVE"),
    *("CUT", "CLOSE", "RESTORE", "YIELD"),
)


class ModeArbiter(wiring.Component):
    """Switches a rank of DRAM between the host and the kernel.

    - `NORMAL`: host commands are forwarded, the controller is disabled and empty.
    - `TAKE`, `CLOSED`: no owner; all minima elapse, all banks are precharged, tRP elapses.
    - `KERNEL`: the controller owns the channel, and issues due refreshes.
    - `LEAVE`: the controller drains, precharges, refreshes.
    - `CUT`: the kernel is being reset; its commands are blocked. After data in flight have passed,
      kernel and controller are reset, and `CLOSE` follows.
    - `CLOSE`: all minima elapse, all banks are precharged.
    - `RESTORE`: owed refreshes are issued, then a calibration, then every bank that the host
      expects to be open is opened. If the host opens or closes such a bank afterwards, the bank is
      precharged again. If a refresh becomes due, the host calibrates, or has closed all banks, the
      state returns to `CLOSE`. When all banks are as the host expects, nothing is owed, and all
      minima have elapsed, the mode is normal.
    - `YIELD`: banks are kept closed, and when the host has closed all of them the mode is normal.

    A change of mode is completed before the next one begins. After a reset of the kernel the mode
    is normal for at least a cycle; after one in `TAKE` or `CLOSED` the change is completed instead.

    With several ranks each has an arbiter (`shared`). All arbiters leave normal mode in the same
    cycle and enter `KERNEL` in the same cycle, so that the controller owns all ranks or none, and
    are synchronous until `LEAVE` ends. Then each returns to normal mode independently; none leaves
    normal mode before all have returned.

    A host that opens and closes banks without pause, for accesses that are refused, could prevent
    the end of `RESTORE`. Such a host still must close all banks tRP before its own refresh; after
    `PATIENCE` cycles `YIELD` waits for this.

    *Timing*: to acceleration at most tRFC + tRP and some cycles, and with seven or eight refreshes
    due the time to the host's next refresh. To normal the drain of the controller, a tRFC for each
    refresh that the DRAM lacks, and 16 ACT followed by tRAS; with such a host, `PATIENCE` cycles
    and the time to the host's next refresh in addition. For the bounds see
    `nearstep_spec.axdimm.hand_over`.

    Parameters
    ----------
    timing, geometry : of the rank.
    shared : there are other ranks.

    Members
    -------
    i_accelerate : requested mode.
    i_reset : reset the kernel in any state.
    i_wait : a hand-over to the kernel must not begin; equal for all ranks.
    o_closed, i_closed : this rank, and every other one, is ready for the kernel; with other ranks.
    i_idle : the controller is disabled, and all banks are closed.
    i_settled : see `RowSettle`.
    i_owing, i_hold : refreshes are due; the mode must not become normal; see `RefreshDebt`.
    i_host_refreshes : the host refreshes in this cycle.
    i_calibrate, i_calibrate_long : the DRAM lacks a ZQCS, or ZQCL, of the host.
    i_host_calibrates : the host calibrates in this cycle.
    i_open, i_row, i_touched : see `HostShadow`.
    o_pass : host commands of this cycle reach the DRAM: the mode is normal.
    o_kernel : the controller owns the pins.
    o_enable : for the controller.
    o_acceleration : the mode is acceleration, with no change in progress.
    o_reset : resets kernel and controller.
    o_yield : the next refresh of the host will be forwarded: in `YIELD`, neither held nor
        calibrating.
    o_command : command of the arbiter itself.

    Attributes
    ----------
    opened, wrong : banks that `RESTORE` has opened, and those among them that the host has opened
        or closed since. All attributes are for proofs only.
    restoring, yielding, closing : three of the states, `YIELD` being part of the first.
    astray : the FSM is in none of `STATES`; unreachable.
    fsm : the state; from `elaborate` on.
    """

    def __init__(self, timing: DramTiming, geometry: DramGeometry, *, shared: bool = False) -> None:
        self.timing = timing
        self.geometry = geometry
        self.shared = shared
        self.opened = Signal(geometry.banks)
        self.wrong = Signal(geometry.banks)
        self.restoring = Signal()
        self.yielding = Signal()
        self.closing = Signal()
        self.astray = Signal()
        super().__init__(
            {
                "i_accelerate": In(1),
                "i_reset": In(1),
                "i_wait": In(1),
                "i_idle": In(1),
                "i_settled": In(1),
                "i_owing": In(1),
                "i_hold": In(1),
                "i_host_refreshes": In(1),
                "i_calibrate": In(1),
                "i_calibrate_long": In(1),
                "i_host_calibrates": In(1),
                "i_open": In(geometry.banks),
                "i_row": In(geometry.row_bits).array(geometry.banks),
                "i_touched": In(geometry.banks),
                "o_pass": Out(1),
                "o_kernel": Out(1),
                "o_enable": Out(1),
                "o_acceleration": Out(1),
                "o_reset": Out(1),
                "o_yield": Out(1),
                "o_command": Out(RowCommandLayout(geometry)),
                **({"i_closed": In(1), "o_closed": Out(1)} if shared else {}),
            }
        )

    @property
    def activate_distance(self) -> int:
        """Cycles between two ACT of `RESTORE`, whichever the banks: tRRD_L, and tFAW / 4."""
        return max(-(-self.timing.t_rrd_l // PHASES), -(-self.timing.t_faw // (4 * PHASES)))

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        banks = self.geometry.banks
        opened, wrong = self.opened, self.wrong
        missing = Signal(banks)
        opens = Signal(banks)
        closes = Signal(banks)
        paced = Signal()  # the last command of RESTORE was ACT
        pace = Signal(range(self.activate_distance + 1))
        cut = Signal(range(CUT_CYCLES))
        patience = Signal(range(PATIENCE + 1))
        still = Signal()  # the host opens, closes, refreshes or calibrates no bank
        command = self.o_command
        calibrate = self.i_calibrate | self.i_calibrate_long
        calibrates = [
            command.calibrate.eq(self.i_settled & ~self.i_calibrate_long),
            command.calibrate_long.eq(self.i_settled & self.i_calibrate_long),
        ]
        calibrating = Signal()  # a REF afterwards would be too late

        m.d.comb += missing.eq(self.i_open & ~opened)
        for bank in reversed(range(banks)):
            with m.If(Mux(wrong.any(), wrong[bank], missing[bank])):
                m.d.comb += [command.bank.eq(bank), command.row.eq(self.i_row[bank])]
        m.d.comb += [
            opens.eq(Mux(command.activate, 1 << command.bank, 0)),
            closes.eq(Mux(command.precharge, 1 << command.bank, 0)),
        ]
        m.d.sync += [
            opened.eq((opened | opens) & ~closes),
            wrong.eq((wrong | ((opened | opens) & self.i_touched)) & ~closes),
        ]
        with m.If(command.activate):
            m.d.sync += [paced.eq(1), pace.eq(self.activate_distance - 1)]
        with m.Elif(command.precharge):
            m.d.sync += paced.eq(0)
        with m.Elif(pace != 0):
            m.d.sync += pace.eq(pace - 1)

        with m.If(command.calibrate | command.calibrate_long):
            m.d.sync += calibrating.eq(1)
        with m.Elif(self.i_settled):
            m.d.sync += calibrating.eq(0)

        with m.FSM() as fsm:
            self.fsm = fsm
            with m.State("NORMAL"):
                m.d.comb += [self.o_pass.eq(1), self.o_reset.eq(self.i_reset)]
                m.d.sync += [opened.eq(0), wrong.eq(0), paced.eq(0)]
                with m.If(self.i_accelerate & ~self.i_wait):
                    m.next = "TAKE"
            with m.State("TAKE"):
                m.d.comb += self.o_reset.eq(self.i_reset)
                with m.If(self.i_settled):
                    m.d.comb += command.precharge_all.eq(1)
                    m.next = "CLOSED"
            with m.State("CLOSED"):
                m.d.comb += self.o_reset.eq(self.i_reset)
                if self.shared:
                    m.d.comb += self.o_closed.eq(self.i_settled)
                with m.If(self.i_settled & self.i_closed if self.shared else self.i_settled):
                    m.next = "KERNEL"
            with m.State("KERNEL"):
                m.d.comb += [
                    self.o_kernel.eq(1),
                    self.o_enable.eq(1),
                    self.o_acceleration.eq(self.i_accelerate),
                ]
                m.d.sync += [cut.eq(CUT_CYCLES - 1), patience.eq(PATIENCE)]
                with m.If(self.i_reset):
                    m.next = "CUT"
                with m.Elif(~self.i_accelerate):
                    m.next = "LEAVE"
            with m.State("LEAVE"):
                m.d.comb += self.o_kernel.eq(1)
                with m.If(self.i_reset):
                    m.next = "CUT"
                with m.Elif(self.i_idle):
                    m.next = "RESTORE"
            with m.State("CUT"):
                m.d.sync += cut.eq(cut - 1)
                with m.If(cut == 0):
                    m.d.comb += self.o_reset.eq(1)
                    m.next = "CLOSE"
            with m.State("CLOSE"):
                m.d.comb += self.o_reset.eq(self.i_reset)
                with m.If(self.i_settled):
                    m.d.comb += command.precharge_all.eq(1)
                    m.d.sync += [opened.eq(0), wrong.eq(0), paced.eq(0)]
                    with m.If(patience == 0):
                        m.next = "YIELD"
                    with m.Else():
                        m.next = "RESTORE"
            with m.State("RESTORE"):
                m.d.comb += self.o_reset.eq(self.i_reset)
                with m.If((patience != 0) & ~self.i_hold):
                    m.d.sync += patience.eq(patience - 1)
                with m.If(
                    ((self.i_owing | calibrate) & opened.any()) | (wrong.any() & ~self.i_open.any())
                ):
                    m.next = "CLOSE"
                with m.Elif(self.i_owing):
                    m.d.comb += command.refresh.eq(self.i_settled & ~self.i_host_refreshes)
                with m.Elif(calibrate):
                    m.d.comb += calibrates
                with m.Elif(patience == 0):
                    m.next = "CLOSE"
                with m.Elif(self.i_hold):
                    pass  # all banks are kept closed
                with m.Elif(wrong.any()):
                    m.d.comb += command.precharge.eq(self.i_settled)
                with m.Elif(missing.any()):
                    m.d.comb += command.activate.eq(self.i_settled | (paced & (pace == 0)))
                with m.Elif(self.i_settled & still):
                    m.next = "NORMAL"
            with m.State("YIELD"):
                m.d.comb += [
                    self.o_reset.eq(self.i_reset),
                    self.o_yield.eq(~self.i_hold & ~calibrate & ~calibrating),
                ]
                with m.If(self.i_owing):
                    m.d.comb += command.refresh.eq(self.i_settled & ~self.i_host_refreshes)
                with m.Elif(calibrate):
                    m.d.comb += calibrates
                with m.Elif(self.i_settled & ~self.i_hold & ~self.i_open.any() & still):
                    m.next = "NORMAL"
        m.d.comb += [
            still.eq(~(self.i_touched.any() | self.i_host_refreshes | self.i_host_calibrates)),
            self.yielding.eq(fsm.ongoing("YIELD")),
            self.restoring.eq(fsm.ongoing("RESTORE") | self.yielding),
            self.closing.eq(fsm.ongoing("CLOSE")),
            self.astray.eq(~Cat(fsm.ongoing(state) for state in STATES).any()),
        ]
        return m
