"""Selection of the DRAM's command source."""

from amaranth import Cat, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.data import StructLayout
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.axdimm.host_command import HostCommandLayout, numbered
from nearstep_hw.axdimm.host_front_end import HostFrontEnd, slots_of
from nearstep_hw.dram.dfi import (
    ACTIVATE_PHASE,
    HOST_PHASES,
    PHASES,
    TPHY_RDLAT,
    TPHY_WRLAT,
    DfiSignature,
)
from nearstep_spec.dram.command import Command, encode
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry

HOST_PHASE = tuple(slot * PHASES // HOST_PHASES for slot in range(HOST_PHASES))
"""DRAM phase of each host slot: the same moment in time."""

OWN_PHASES = (ACTIVATE_PHASE, 3)
"""DRAM phase of each rank's arbiter; unused by the host, which may own another rank."""


class RowCommandLayout(StructLayout):
    """A command of the arbiter itself; at most one of the first six is high."""

    def __init__(self, geometry: DramGeometry) -> None:
        super().__init__(
            {
                "activate": 1,
                "precharge": 1,
                "precharge_all": 1,
                "refresh": 1,
                "calibrate": 1,
                "calibrate_long": 1,
                "bank": range(geometry.banks),
                "row": geometry.row_bits,
            }
        )


class DfiSwitch(wiring.Component):
    """Puts the commands of the host, of the arbiter or of the kernel's controller on the pins.

    Host slot 0 becomes phase 0 and slot 1 phase 2, so that the host's distances in time are those
    of the DRAM; the arbiters' own commands are in `OWN_PHASES`. Write bursts are taken from the
    source of their command, and the controller gets `rddata_valid` only for its own reads. A
    controller that loses the channel thus completes exactly the bursts of issued commands.

    *Timing*: commands of host and arbiter are on the pins a cycle later; those of the controller
    pass at once.

    Parameters
    ----------
    geometry : of the channel.

    Members
    -------
    dfi : to the DRAM.
    kernel : from the controller.
    i_kernel : the controller owns the channel; otherwise host or arbiter.
    i_slot, i_pass : commands of the host, see `HostFrontEnd`, and whether they reach the DRAM, a
        bit for each rank.
    i_hide_refresh : a refresh of the host is blocked, a bit for each rank.
    i_hide_write : the write of the host in this cycle has all its bytes masked.
    i_row, i_row1 : commands of the arbiter of each rank.
    i_write_data, i_write_mask : of the host, `HostFrontEnd.WRITE_DATA_DELAY` cycles after the
        write.
    """

    def __init__(self, geometry: DramGeometry) -> None:
        self.geometry = geometry
        super().__init__(
            {
                "dfi": Out(DfiSignature(ranks=geometry.ranks)),
                "kernel": In(DfiSignature(ranks=geometry.ranks)),
                "i_kernel": In(1),
                "i_slot": In(HostCommandLayout(geometry)).array(geometry.ranks * HOST_PHASES),
                "i_pass": In(geometry.ranks),
                "i_hide_refresh": In(geometry.ranks),
                "i_hide_write": In(1),
                **{
                    numbered("i_row", rank): In(RowCommandLayout(geometry))
                    for rank in range(geometry.ranks)
                },
                "i_write_data": In(8 * BEAT_BYTES),
                "i_write_mask": In(BEAT_BYTES),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        held = {phase: wiring.Signature.create(self._pins()) for phase in range(PHASES)}
        for phase, pins in held.items():
            m.d.sync += pins.cs_n.eq((1 << self.geometry.ranks) - 1)
            driven = getattr(self.dfi, f"p{phase}")
            theirs = getattr(self.kernel, f"p{phase}")
            for name in ("act_n", "address", "bg", "ba"):
                m.d.comb += getattr(driven, name).eq(getattr(pins, name))
            m.d.comb += driven.cs_n.eq(pins.cs_n)
            with m.If(self.i_kernel):
                for name in ("cs_n", "act_n", "address", "bg", "ba"):
                    m.d.comb += getattr(driven, name).eq(getattr(theirs, name))

        ranks = range(self.geometry.ranks)
        for number, phase in enumerate(HOST_PHASE):
            pins = held[phase]
            slots = [slots_of(self.i_slot, rank)[number] for rank in ranks]
            passes = [
                self.i_pass.bit_select(rank, 1)
                & ~(slot.refresh & self.i_hide_refresh.bit_select(rank, 1))
                for rank, slot in enumerate(slots)
            ]
            slot = slots[0]  # all have the same pins, but for the chip select
            m.d.sync += [
                pins.cs_n.eq(
                    Cat(each.cs_n | ~passed for each, passed in zip(slots, passes, strict=True))
                ),
                *(getattr(pins, name).eq(getattr(slot, name)) for name in ("act_n", "address")),
                pins.bg.eq(slot.bg),
                pins.ba.eq(slot.ba),
            ]
        for rank in ranks:
            self._drive_own(m, held[OWN_PHASES[rank]], rank)
        self._steer_data(m)
        return m

    def _drive_own(self, m: Module, own: object, rank: int) -> None:
        """Drive pins with the command of an arbiter."""
        row = getattr(self, numbered("i_row", rank))
        bank_bits = exact_log2(self.geometry.banks_per_group)
        m.d.sync += [
            own.cs_n.bit_select(rank, 1).eq(
                ~(row.activate | row.precharge | row.precharge_all | row.refresh)
                & ~(row.calibrate | row.calibrate_long)
            ),
            own.act_n.eq(~row.activate),
            own.address.eq(row.row),
            own.ba.eq(row.bank[:bank_bits]),
            own.bg.eq(row.bank[bank_bits:]),
        ]
        for wanted, command in (
            (row.precharge, Command.PRE),
            (row.precharge_all, Command.PREA),
            (row.refresh, Command.REF),
            (row.calibrate, Command.ZQCS),
            (row.calibrate_long, Command.ZQCL),
        ):
            with m.If(wanted):
                m.d.sync += own.address.eq(encode(command).address)

    def _pins(self) -> wiring.Signature:
        return self.dfi.p0.signature

    def _steer_data(self, m: Module) -> None:
        first, *others = (
            Cat(slot.write for slot in slots_of(self.i_slot, rank)).any() & self.i_pass[rank]
            for rank in range(self.geometry.ranks)
        )
        writes = first
        for each in others:
            writes = writes | each
        host = self._later(m, Cat(writes, self.i_hide_write), HostFrontEnd.WRITE_DATA_DELAY, "host")
        writing = self._later(m, self.i_kernel, TPHY_WRLAT, "kernel_writes")
        reading = self._later(m, self.i_kernel, TPHY_RDLAT, "kernel_reads")
        m.d.comb += [
            self.kernel.rddata.eq(self.dfi.rddata),
            self.kernel.rddata_valid.eq(self.dfi.rddata_valid & reading),
        ]
        with m.If(writing):
            m.d.comb += [
                self.dfi.wrdata.eq(self.kernel.wrdata),
                self.dfi.wrdata_mask.eq(self.kernel.wrdata_mask),
                self.dfi.wrdata_en.eq(self.kernel.wrdata_en),
            ]
        with m.Else():
            m.d.comb += [
                self.dfi.wrdata.eq(self.i_write_data),
                self.dfi.wrdata_mask.eq(self.i_write_mask | host[1].replicate(BEAT_BYTES)),
                self.dfi.wrdata_en.eq(host[0]),
            ]

    @staticmethod
    def _later(m: Module, value: object, cycles: int, name: str) -> object:
        for stage in range(cycles):
            following = Signal.like(value, name=f"{name}{stage + 1}")
            m.d.sync += following.eq(value)
            value = following
        return value
