"""A DDR4 channel that a host and a kernel use in turn."""

from amaranth import Cat, Elaboratable, Module, ResetInserter
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.access_log import AccessLog
from nearstep_hw.axdimm.arbiter import ModeArbiter
from nearstep_hw.axdimm.arbiter_registers import arbiter_map
from nearstep_hw.axdimm.csr_window import CsrWindow
from nearstep_hw.axdimm.dfi_switch import DfiSwitch
from nearstep_hw.axdimm.hand_over_timer import HandOverTimer
from nearstep_hw.axdimm.host_access import HostAccess
from nearstep_hw.axdimm.host_command import is_refresh
from nearstep_hw.axdimm.host_front_end import (
    HOST_PORT,
    HOST_READ_LATENCY,
    HOST_WRITE_LATENCY,
    HostFrontEnd,
    ReadSource,
)
from nearstep_hw.axdimm.host_shadow import HostShadow
from nearstep_hw.axdimm.refresh_debt import RefreshDebt
from nearstep_hw.axdimm.row_settle import RowSettle
from nearstep_hw.axi.signature import Axi4Signature
from nearstep_hw.csr.bank import CsrBank
from nearstep_hw.csr.line import CsrLineSignature
from nearstep_hw.dram.address import AddressMapping
from nearstep_hw.dram.controller import DramController
from nearstep_hw.dram.dfi import PHASES, DfiSignature
from nearstep_hw.dram.fabric import REFRESH_PHASE, FabricTiming
from nearstep_hw.dram.geometry import BEAT_BYTES
from nearstep_hw.dram.timing import MAX_POSTPONED_REFRESHES, DramTiming, dram_timing

HURRY_CYCLES = 128  # a hand-over with tRFC in it, and the controller's first refresh
POSTPONED = MAX_POSTPONED_REFRESHES - 1  # see `RefreshDebt.o_start`


class MemoryChannel(wiring.Component):
    """Host front end, mode arbiter, CSR window and the kernel's DDR4 controller.

    In normal mode host commands reach the DRAM `COMMAND_DELAY` cycles later, and the kernel's AXI
    port stands still. In acceleration mode the kernel owns the DRAM; the host's ACT, PRE and REF
    are followed, its accesses of the CSR window work, any other read gives zeros, any other write
    does nothing, and both are flagged. The host's data always come at the same time.

    Two things pass in normal mode in another form. A write of the CSR window has all its bytes
    masked. A REF that the DRAM has got already, from this side, does not pass: otherwise a host
    that pays many postponed refreshes behind a hand-over would exceed 16 in 2 tREFI.

    *Timing*: `HOST_READ_LATENCY` and `HOST_WRITE_LATENCY`, fixed.

    Parameters
    ----------
    timing : of the part, at the DRAM's clock.
    mapping : bytes to banks, for host and kernel.
    address_width, id_width : of the kernel's AXI port.

    Members
    -------
    host : the host's bus.
    dfi : the DRAM.
    s_axi : the kernel's port to memory.
    kernel : the kernel's registers, by lines.
    o_kernel_reset : resets the kernel; high for a cycle.
    o_normal, o_acceleration : the mode; neither while it changes.

    Ref: AXDIMM paper, sections 3.1 and 3.2, figure 2.
    """

    def __init__(
        self,
        timing: DramTiming | None = None,
        mapping: AddressMapping | None = None,
        *,
        address_width: int = 34,
        id_width: int = 2,
    ) -> None:
        self.timing = dram_timing() if timing is None else timing
        self.mapping = AddressMapping() if mapping is None else mapping
        self.port = {
            "address_width": address_width,
            "data_width": 8 * BEAT_BYTES,
            "id_width": id_width,
        }
        self.register_map = arbiter_map(
            self.mapping, read_latency=HOST_READ_LATENCY, write_latency=HOST_WRITE_LATENCY
        )
        super().__init__(
            {
                "host": In(HOST_PORT),
                "dfi": Out(DfiSignature()),
                "s_axi": In(Axi4Signature(**self.port)),
                "kernel": Out(CsrLineSignature()),
                "o_kernel_reset": Out(1),
                "o_normal": Out(1),
                "o_acceleration": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        timing, geometry = self.timing, self.mapping.geometry
        m.submodules.front = front = HostFrontEnd(geometry)
        m.submodules.shadow = shadow = HostShadow(geometry)
        m.submodules.access = access = HostAccess(self.mapping)
        m.submodules.arbiter = arbiter = ModeArbiter(timing, geometry)
        m.submodules.debt = debt = RefreshDebt(FabricTiming(timing), hurry=HURRY_CYCLES)
        m.submodules.settle = settle = RowSettle(timing)
        m.submodules.switch = switch = DfiSwitch(geometry)
        m.submodules.window = window = CsrWindow()
        m.submodules.bank = bank = CsrBank(self.register_map, line=True)
        controller = DramController(
            timing,
            self.mapping,
            address_width=self.port["address_width"],
            id_width=self.port["id_width"],
            postponed=POSTPONED,
        )
        m.submodules.controller = ResetInserter(arbiter.o_reset)(controller)

        wiring.connect(m, wiring.flipped(self.host), front.host)
        wiring.connect(m, wiring.flipped(self.s_axi), controller.s_axi)
        wiring.connect(m, controller.dfi, switch.kernel)
        wiring.connect(m, switch.dfi, wiring.flipped(self.dfi))
        wiring.connect(m, window.arbiter, bank.line)
        wiring.connect(m, window.kernel, wiring.flipped(self.kernel))
        for phase in range(PHASES):
            watched, driven = getattr(settle, f"p{phase}"), getattr(self.dfi, f"p{phase}")
            for name in watched.signature.members:
                m.d.comb += getattr(watched, name).eq(getattr(driven, name))
        for user in (shadow, access, switch):
            for theirs, slot in zip(user.i_slot, front.o_slot, strict=True):
                m.d.comb += theirs.eq(slot)
        for user in (access, arbiter):
            for theirs, row in zip(user.i_row, shadow.o_row, strict=True):
                m.d.comb += theirs.eq(row)

        refreshes = Cat(slot.refresh for slot in front.o_slot).any()
        theirs = getattr(controller.dfi, f"p{REFRESH_PHASE}")
        m.d.comb += [
            arbiter.i_accelerate.eq(bank.o_mode_acceleration),
            arbiter.i_reset.eq(bank.o_control_kernel_reset),
            arbiter.i_wait.eq(debt.o_wait),
            arbiter.i_idle.eq(controller.o_idle),
            arbiter.i_settled.eq(settle.o_settled),
            arbiter.i_owing.eq(debt.o_owing),
            arbiter.i_host_refreshes.eq(refreshes),
            arbiter.i_open.eq(shadow.o_open),
            arbiter.i_touched.eq(shadow.o_touched),
            controller.i_enable.eq(arbiter.o_enable),
            controller.i_debt.eq(debt.o_start),
            debt.i_host.eq(refreshes),
            debt.i_dram.eq(
                (refreshes & arbiter.o_pass & ~debt.o_hide)
                | arbiter.o_command.refresh
                | (arbiter.o_kernel & is_refresh(theirs))
            ),
            switch.i_kernel.eq(arbiter.o_kernel),
            switch.i_pass.eq(arbiter.o_pass),
            switch.i_hide_refresh.eq(debt.o_hide),
            switch.i_row.eq(arbiter.o_command),
            self.o_kernel_reset.eq(arbiter.o_reset),
            self.o_normal.eq(arbiter.o_pass),
            self.o_acceleration.eq(arbiter.o_acceleration),
        ]
        self._connect_accesses(m, front, access, arbiter, switch, window)
        self._connect_status(m, access, arbiter, debt, window, bank)
        return m

    def _connect_accesses(
        self,
        m: Module,
        front: HostFrontEnd,
        access: HostAccess,
        arbiter: ModeArbiter,
        switch: DfiSwitch,
        window: CsrWindow,
    ) -> None:
        m.d.comb += [
            switch.i_hide_write.eq(access.o_window),
            switch.i_write_data.eq(front.o_write_data),
            switch.i_write_mask.eq(front.o_write_mask),
            window.i_line.eq(access.o_line),
            window.i_write.eq(access.o_write & access.o_window),
            window.i_write_data.eq(front.o_write_data),
            window.i_write_mask.eq(front.o_write_mask),
            window.i_acceleration.eq(arbiter.o_acceleration),
            front.i_line_data.eq(window.o_read_data),
            front.i_dram_data.eq(self.dfi.rddata),
        ]
        with m.If(access.o_read):
            with m.If(access.o_window):
                m.d.comb += front.i_source.eq(ReadSource.CSR)
            with m.Elif(arbiter.o_pass):
                m.d.comb += front.i_source.eq(ReadSource.DRAM)
            with m.Else():
                m.d.comb += front.i_source.eq(ReadSource.REFUSED)

    def _connect_status(
        self,
        m: Module,
        access: HostAccess,
        arbiter: ModeArbiter,
        debt: RefreshDebt,
        window: CsrWindow,
        bank: CsrBank,
    ) -> None:
        m.submodules.log = log = AccessLog(self.mapping.geometry.address_bits)
        m.submodules.to_acceleration = to_acceleration = HandOverTimer()
        m.submodules.to_normal = to_normal = HandOverTimer()
        clear = bank.o_control_clear
        m.d.comb += [
            log.i_refused.eq((access.o_read | access.o_write) & ~access.o_window & ~arbiter.o_pass),
            log.i_write.eq(access.o_write),
            log.i_address.eq(access.o_address),
            log.i_clear.eq(clear),
            to_acceleration.i_request.eq(bank.o_mode_acceleration),
            to_acceleration.i_reached.eq(arbiter.o_acceleration),
            to_normal.i_request.eq(~bank.o_mode_acceleration),
            to_normal.i_reached.eq(arbiter.o_pass),
            bank.i_status_acceleration.eq(arbiter.o_acceleration),
            bank.i_status_normal.eq(arbiter.o_pass),
            bank.i_status_refused_access.eq(log.o_seen),
            bank.i_refresh_debt_host.eq(debt.o_host),
            bank.i_refresh_debt_dram.eq(debt.o_dram),
            bank.i_refused_count.eq(log.o_count),
            bank.i_refused_access_write.eq(log.o_write),
            bank.i_refused_address.eq(log.o_address),
        ]
        for flag, event in (
            (bank.i_status_refused_start, window.o_start_refused),
            (bank.i_status_refresh_overdue, debt.o_overdue),
        ):
            with m.If(event):
                m.d.sync += flag.eq(1)
            with m.Elif(clear):
                m.d.sync += flag.eq(0)
        for name, timer in (("to_acceleration", to_acceleration), ("to_normal", to_normal)):
            m.d.comb += [
                timer.i_clear.eq(clear),
                getattr(bank, f"i_{name}_last").eq(timer.o_last),
                getattr(bank, f"i_{name}_longest").eq(timer.o_longest),
            ]
