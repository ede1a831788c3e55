"""A DDR4 channel shared by a host and a kernel."""

from collections.abc import Callable

from amaranth import Elaboratable, Module, Mux, ResetInserter, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.access_log import AccessLog
from nearstep_hw.axdimm.csr_window import CsrWindow
from nearstep_hw.axdimm.hand_over_timer import HandOverTimer
from nearstep_hw.axdimm.host_access import HostAccess
from nearstep_hw.axdimm.host_command import numbered
from nearstep_hw.axdimm.host_front_end import (
    HOST_READ_LATENCY,
    HOST_WRITE_LATENCY,
    HostFrontEnd,
    ReadSource,
    host_port,
)
from nearstep_hw.axdimm.host_modes import LOST_BITS
from nearstep_hw.axdimm.shared_dram import SharedDram
from nearstep_hw.axi.signature import Axi4Signature
from nearstep_hw.csr.bank import CsrBank
from nearstep_hw.csr.line import CsrLineSignature
from nearstep_hw.dram.controller import DramController
from nearstep_hw.dram.dfi import DfiSignature
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.request import of_rank
from nearstep_spec.axdimm.hand_over import HURRY_CYCLES
from nearstep_spec.axdimm.registers import arbiter_map
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.command import ADDRESS_BITS
from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.dram.timing import DramTiming, dram_timing


class MemoryChannel(wiring.Component):
    """Host front end, mode arbiter, CSR window and the kernel's DDR4 controller.

    In normal mode host commands reach the DRAM `HOST_COMMAND_DELAY` cycles later, and the kernel's
    AXI port is stalled. In acceleration mode the kernel owns the DRAM; the host's ACT, PRE and REF
    are tracked, accesses of the CSR window work, any other read returns zeros, any other write is
    dropped, and both are flagged. The host's data have a fixed latency. ZQCS and ZQCL of the host
    are deferred; MRS is lost and flagged, see `HostModes`.

    Two commands are changed in normal mode. A write of the CSR window has all its bytes masked. A
    REF that the channel has already issued to the DRAM is blocked: otherwise a host that issues
    many postponed refreshes after a hand-over would exceed 16 in 2 tREFI.

    With two ranks the host has two chip selects, and each rank is returned to the host when its
    rows are as the host expects; the mode is normal when both are returned.

    *Timing*: `HOST_READ_LATENCY` and `HOST_WRITE_LATENCY`, fixed.

    Parameters
    ----------
    timing : of the part, at the DRAM's clock.
    mapping : address mapping of host and kernel.
    address_width, id_width : of the kernel's AXI port.
    controller : makes the controller, a component with the ports of `DramController`.

    Members
    -------
    host : the host's bus.
    dfi : the DRAM.
    s_axi : the kernel's port to memory.
    kernel : the kernel's registers, by lines.
    o_kernel_reset : resets the kernel; high for a cycle.
    o_normal, o_acceleration : the mode; neither during a change.

    Ref: AXDIMM paper, sections 3.1 and 3.2, figure 2.
    """

    def __init__(
        self,
        timing: DramTiming | None = None,
        mapping: AddressMapping | None = None,
        *,
        address_width: int = 34,
        id_width: int = 2,
        controller: Callable[..., DramController] = DramController,
    ) -> None:
        self.controller = controller
        self.timing = dram_timing() if timing is None else timing
        self.mapping = AddressMapping() if mapping is None else mapping
        fabric = FabricTiming(self.timing)
        self.dram = SharedDram(
            self.timing,
            self.mapping.geometry,
            hurry=max(fabric.refresh_cycle, fabric.long_calibration) + HURRY_CYCLES,
        )
        self.port = {
            "address_width": address_width,
            "id_width": id_width,
        }
        self.register_map = arbiter_map(
            self.mapping, read_latency=HOST_READ_LATENCY, write_latency=HOST_WRITE_LATENCY
        )
        super().__init__(
            {
                "host": In(host_port(self.mapping.geometry.ranks)),
                "dfi": Out(DfiSignature(ranks=self.mapping.geometry.ranks)),
                "s_axi": In(Axi4Signature(data_width=8 * BEAT_BYTES, **self.port)),
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
        m.submodules.access = access = HostAccess(self.mapping)
        m.submodules.dram = dram = self.dram
        m.submodules.window = window = CsrWindow()
        m.submodules.bank = bank = CsrBank(self.register_map, line=True)
        controller = self.controller(timing, self.mapping, postponed=None, **self.port)
        m.submodules.controller = ResetInserter(dram.o_reset)(controller)

        wiring.connect(m, wiring.flipped(self.host), front.host)
        wiring.connect(m, wiring.flipped(self.s_axi), controller.s_axi)
        wiring.connect(m, controller.dfi, dram.kernel)
        wiring.connect(m, dram.dfi, wiring.flipped(self.dfi))
        wiring.connect(m, window.arbiter, bank.line)
        wiring.connect(m, window.kernel, wiring.flipped(self.kernel))
        for user in (access, dram):
            for theirs, slot in zip(user.i_slot, front.o_slot, strict=True):
                m.d.comb += theirs.eq(slot)
        for theirs, row in zip(access.i_row, dram.o_row, strict=True):
            m.d.comb += theirs.eq(row)
        m.d.comb += [
            dram.i_accelerate.eq(bank.o_mode_acceleration),
            dram.i_reset.eq(bank.o_control_kernel_reset),
            dram.i_idle.eq(controller.o_idle),
            controller.i_enable.eq(dram.o_enable),
            controller.i_owed.eq(dram.o_owed),
            controller.i_must.eq(dram.o_must),
            controller.i_hold.eq(dram.o_refresh_hold),
            controller.i_calibrate.eq(dram.o_calibrate),
            dram.i_hide_write.eq(access.o_window),
            dram.i_write_data.eq(front.o_write_data),
            dram.i_write_mask.eq(front.o_write_mask),
            window.i_line.eq(access.o_line),
            window.i_write.eq(access.o_write & access.o_window),
            window.i_write_data.eq(front.o_write_data),
            window.i_write_mask.eq(front.o_write_mask),
            window.i_acceleration.eq(dram.o_acceleration),
            front.i_line_data.eq(window.o_read_data),
            front.i_dram_data.eq(self.dfi.rddata),
            self.o_kernel_reset.eq(dram.o_reset),
            self.o_normal.eq(self._normal),
            self.o_acceleration.eq(dram.o_acceleration),
        ]
        with m.If(access.o_read):
            with m.If(access.o_window):
                m.d.comb += front.i_source.eq(ReadSource.CSR)
            with m.Elif(self._passes(access)):
                m.d.comb += front.i_source.eq(ReadSource.DRAM)
            with m.Else():
                m.d.comb += front.i_source.eq(ReadSource.REFUSED)
        self._connect_status(m, front, access, dram, window, bank)
        return m

    @property
    def _normal(self) -> Value:
        """Whether the host owns all ranks."""
        return self.dram.o_pass if self.mapping.geometry.ranks == 1 else self.dram.o_pass.all()

    def _passes(self, access: HostAccess) -> Value:
        """Return whether the host owns the rank of the access."""
        if self.mapping.geometry.ranks == 1:
            return self.dram.o_pass
        return of_rank(self.dram.o_pass, access.o_rank)

    def _connect_status(
        self,
        m: Module,
        front: HostFrontEnd,
        access: HostAccess,
        dram: SharedDram,
        window: CsrWindow,
        bank: CsrBank,
    ) -> None:
        m.submodules.log = log = AccessLog(self.mapping.geometry.address_bits)
        m.submodules.lost = lost = AccessLog(LOST_BITS)
        m.submodules.to_acceleration = to_acceleration = HandOverTimer()
        m.submodules.to_normal = to_normal = HandOverTimer()
        clear = bank.o_control_clear
        turned = access.o_window & access.o_turned & (access.o_read | access.o_write)
        m.d.comb += [
            log.i_refused.eq(
                (access.o_read | access.o_write) & ~access.o_window & ~self._passes(access)
            ),
            log.i_write.eq(access.o_write),
            log.i_address.eq(access.o_address),
            log.i_clear.eq(clear),
            to_acceleration.i_request.eq(bank.o_mode_acceleration),
            to_acceleration.i_reached.eq(dram.o_acceleration),
            to_normal.i_request.eq(~bank.o_mode_acceleration),
            to_normal.i_reached.eq(self._normal),
            bank.i_status_acceleration.eq(dram.o_acceleration),
            bank.i_status_normal.eq(self._normal),
            bank.i_status_refused_access.eq(log.o_seen),
            *(
                getattr(bank, numbered(f"i_refresh_debt_{whose}", rank)).eq(
                    getattr(dram, numbered(f"o_{whose}_debt", rank))
                )
                for rank in range(self.mapping.geometry.ranks)
                for whose in ("host", "dram")
            ),
            bank.i_refused_count.eq(log.o_count),
            bank.i_refused_access_write.eq(log.o_write),
            bank.i_refused_address.eq(log.o_address),
            lost.i_refused.eq(dram.o_lost | turned),
            lost.i_address.eq(Mux(turned, access.o_command, dram.o_lost_command)),
            lost.i_clear.eq(clear),
            bank.i_status_lost_command.eq(lost.o_seen),
            bank.i_lost_count.eq(lost.o_count),
            bank.i_lost_command_pins.eq(lost.o_address[:ADDRESS_BITS]),
            bank.i_lost_command_bank.eq(lost.o_address[ADDRESS_BITS:]),
            bank.i_status_unsupported_mode.eq(dram.o_unsupported.any()),
            bank.i_mode_registers_unsupported.eq(dram.o_unsupported),
        ]
        for flag, event in (
            (bank.i_status_refused_start, window.o_start_refused),
            (bank.i_status_refresh_overdue, dram.o_overdue),
            (bank.i_status_missing_data, front.o_missing_data),
        ):
            with m.If(event):
                m.d.sync += flag.eq(1)
            with m.Elif(clear):
                m.d.sync += flag.eq(0)
        m.d.comb += [
            to_acceleration.i_clear.eq(clear),
            bank.i_to_acceleration_last.eq(to_acceleration.o_last),
            bank.i_to_acceleration_longest.eq(to_acceleration.o_longest),
            to_normal.i_clear.eq(clear),
            bank.i_to_normal_last.eq(to_normal.o_last),
            bank.i_to_normal_longest.eq(to_normal.o_longest),
        ]
