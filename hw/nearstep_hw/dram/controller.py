"""DDR4 controller: AXI4 on one side, DFI on the other."""

from amaranth import Elaboratable, Module, Mux
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_hw.dram.batch_arbiter import BatchArbiter
from nearstep_hw.dram.burst_expander import BurstExpander
from nearstep_hw.dram.column_stage import Slot
from nearstep_hw.dram.dfi import PHASES, DfiSignature
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.foresight import Foresight
from nearstep_hw.dram.read_port import ReadPort
from nearstep_hw.dram.refresh_manager import connect_debt, debt_members
from nearstep_hw.dram.request import BEAT_SHIFT, PAGE_BEATS
from nearstep_hw.dram.scheduler import CommandScheduler
from nearstep_hw.dram.slot_counters import SlotCounters, counter_members
from nearstep_hw.dram.write_port import WritePort
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.dram.latency import LOOKAHEAD
from nearstep_spec.dram.timing import MAX_POSTPONED_REFRESHES, DramTiming, dram_timing

READ_PLACES = 64  # beats: in the lookahead, and between command and R
WRITE_PLACES = 256  # beats: a burst sent, one received, two in reserve
BURSTS = 16  # waiting, in each direction


class DramController(wiring.Component):
    """Serves an AXI4 port from one or two ranks of DDR4, near the peak of their data bus.

    Reads and writes are each served in the order of AR and AW, in long batches of one direction.
    Beats get their column commands in that order, one a fabric cycle, while rows are precharged and
    opened ahead of them. Refreshes are postponed, eight at most, and issued together. With two
    ranks each is refreshed while the other transfers data: as soon as its refresh is due and the
    waiting bursts are for the other rank for a whole tRFC. The order of the beats does not change;
    the mapping alternates the ranks. Column commands are on phase 0, ACT and REF on phase 1, PRE on
    phase 2 (see `dfi`): so tCCD_L is 8 nCK, and two neighbouring beats should be in different bank
    groups, as they are with the default mapping.

    A write is answered when its last command is issued, so that a read after B returns the new
    data. Bursts are INCR, of full beats, inside a page of 4 KiB; others get SLVERR, those outside
    the channel DECERR, without a command. R and B may stall for any time; a beat is scheduled only
    when space for its data is reserved.

    `i_enable` and `o_idle` hand the channel over. While `o_idle` is high no command is issued. With
    `i_enable` high the controller acquires the channel, whose banks must all be precharged and
    whose tRP and tRFC must have passed. The refreshes due by then are `i_debt`: a started interval
    counts as a whole one, and so do all intervals since the last REF, even if refreshes were pulled
    in before, because JEDEC also bounds the time between two REF. If the channel has another owner
    that refreshes as well, refreshes are counted outside, and `i_owed`, `i_must` and `i_hold`
    control them (see `RefreshManager`). When `i_enable` falls, the beats inside get their commands,
    all banks are precharged, every due refresh is issued, and `o_idle` rises; bursts not yet
    served, or served in part, wait until the channel is acquired again. The time of a release is
    bounded for any AXI traffic: each of `LOOKAHEAD` beats takes at most CWL + BL/2 + tWR + tRP +
    tRCD, then tRFC for each due refresh.

    *Timing*: with an idle channel and closed rows, ACT is on the pins 4 cycles after ARVALID, the
    column command 3 cycles later, and RVALID 8 cycles after that. BVALID is high with the last
    write command on the pins. A beat a cycle; `o_slot` has the reason for a cycle without one.

    Parameters
    ----------
    timing : distances between commands; of DDR4-1600, 8Gb x8, by default.
    mapping : address mapping, whose geometry must belong to the part of `timing`.
    address_width, id_width : of the AXI port, bits.
    batch_beats : see `BatchArbiter`.
    few_beats : beats inside at which the arbiter no longer waits for more of the same direction.
    postponed : number of due refreshes at which they are issued, 1 to 8; None if they are counted
        outside.

    Members
    -------
    s_axi : AXI4, 512 bit.
    dfi : the ranks.
    i_enable, o_idle : see above.
    i_debt : refreshes due when the channel is acquired.
    i_calibrate : ZQCS is requested, with the next refreshes; held until it is on the pins. The
        controller also issues ZQCS by itself, every 128 ms; see `dram_timing`.
    o_debt : refreshes due now; 0 while `o_idle`.
    i_owed, i_must, i_hold : in place of `i_debt` and `o_debt` if refreshes are counted outside.
        Ports from `i_debt` on have a field for each rank, rank 0 in the low bits.
    o_slot : use of the column slot in this cycle.
    i_clear_slots, o_<kind> : counters of `o_slot`, `o_read` to `o_refresh`, see `SlotCounters`.

    Raises
    ------
    ValueError : timing and geometry belong to different parts.

    Ref: AXDIMM paper, section 3.2: the arbiter "converts [...] the kernel's AXI4 transaction to a
    DDR4 transaction".
    """

    def __init__(
        self,
        timing: DramTiming | None = None,
        mapping: AddressMapping | None = None,
        *,
        address_width: int = 34,
        id_width: int = 2,
        batch_beats: int = 4096,
        few_beats: int = 16,
        postponed: int | None = MAX_POSTPONED_REFRESHES,
    ) -> None:
        self.timing = dram_timing() if timing is None else timing
        self.mapping = AddressMapping() if mapping is None else mapping
        part = (self.mapping.geometry.density, self.mapping.geometry.width)
        if part != (self.timing.density, self.timing.width):
            raise ValueError(
                f"Geometry must be that of {self.timing.density} {self.timing.width}, as the "
                f"timing is, not of {' '.join(part)}"
            )
        self.address_width = address_width
        self.id_width = id_width
        self.batch_beats = batch_beats
        self.few_beats = few_beats
        self.postponed = postponed
        ranks = self.mapping.geometry.ranks
        super().__init__(
            {
                "s_axi": In(
                    Axi4Signature(
                        address_width=address_width, data_width=8 * BEAT_BYTES, id_width=id_width
                    )
                ),
                "dfi": Out(DfiSignature(ranks=ranks)),
                "i_enable": In(1),
                "o_idle": Out(1),
                **debt_members(postponed, ranks),
                "i_calibrate": In(ranks),
                "o_slot": Out(Slot),
                "i_clear_slots": In(1),
                **counter_members(),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        geometry, id_width = self.mapping.geometry, self.id_width
        port = {
            "address_width": self.address_width,
            "id_width": id_width,
            "bursts": BURSTS,
        }
        m.submodules.read = read = ReadPort(geometry, **port, places=READ_PLACES)
        m.submodules.write = write = WritePort(geometry, **port, places=WRITE_PLACES)
        m.submodules.arbiter = arbiter = BatchArbiter(
            geometry, id_width=id_width, batch_beats=self.batch_beats
        )
        m.submodules.expander = expander = BurstExpander(self.mapping, id_width=id_width)
        m.submodules.scheduler = scheduler = CommandScheduler(
            FabricTiming(self.timing),
            geometry,
            id_width=id_width,
            lookahead=LOOKAHEAD,
            few_beats=self.few_beats,
            postponed=self.postponed,
        )
        m.submodules.slots = slots = SlotCounters()

        connect_channels(m, read.bus, self.s_axi)
        connect_channels(m, write.bus, self.s_axi)
        wiring.connect(m, read.o, arbiter.i_read)
        wiring.connect(m, write.o, arbiter.i_write)
        wiring.connect(m, arbiter.o, expander.i)
        wiring.connect(m, expander.o, scheduler.i)
        for phase in (f"p{number}" for number in range(PHASES)):
            wiring.connect(m, getattr(scheduler, phase), wiring.flipped(getattr(self.dfi, phase)))
        connect_debt(m, self, scheduler)
        for name in counter_members():
            m.d.comb += getattr(self, name).eq(getattr(slots, name))
        m.d.comb += [
            arbiter.i_few.eq(scheduler.o_few),
            scheduler.i_space.eq(read.o_space),
            *self._look_ahead(m, read, write, arbiter, scheduler),
            scheduler.i_enable.eq(self.i_enable),
            scheduler.i_calibrate.eq(self.i_calibrate),
            read.i_reserve.eq(scheduler.o_enter & ~scheduler.i.payload.write),
            read.i_issue.eq(scheduler.o_read),
            read.i_id.eq(scheduler.o_id),
            read.i_last.eq(scheduler.o_last),
            read.i_valid.eq(self.dfi.rddata_valid),
            read.i_data.eq(self.dfi.rddata),
            write.i_issue.eq(scheduler.o_write),
            write.i_id.eq(scheduler.o_id),
            write.i_last.eq(scheduler.o_last),
            self.dfi.wrdata.eq(write.o_data),
            self.dfi.wrdata_mask.eq(write.o_mask),
            self.dfi.wrdata_en.eq(write.o_enable),
            self.o_idle.eq(scheduler.o_idle & read.o_idle & write.o_idle),
            self.o_slot.eq(scheduler.o_slot),
            slots.i_slot.eq(self.o_slot),
            slots.i_clear.eq(self.i_clear_slots),
        ]
        return m

    def _look_ahead(
        self,
        m: Module,
        read: ReadPort,
        write: WritePort,
        arbiter: BatchArbiter,
        scheduler: CommandScheduler,
    ) -> list[object]:
        """Connect the state of the waiting bursts to the scheduler."""
        ranks = self.mapping.geometry.ranks
        if ranks == 1:
            return [scheduler.i_waiting.eq(read.o.valid | write.o.valid)]
        timing = FabricTiming(self.timing)
        refresh = timing.write_to_precharge + timing.precharge_to_refresh + timing.refresh_cycle
        enough = -(-(refresh + timing.activate_to_column) // PAGE_BEATS)
        shift = self.mapping.rank.shift - BEAT_SHIFT
        seen = {}
        for name, port in (("read", read), ("write", write)):
            seen[name] = Foresight(ranks=ranks, bursts=BURSTS, enough=enough)
            m.submodules[f"{name}_foresight"] = seen[name]
            m.d.comb += [
                seen[name].i_enter.eq(port.queue.i.valid & port.queue.i.ready),
                seen[name].i_rank.eq(port.queue.i.payload.address[shift]),
                seen[name].i_long.eq(port.queue.i.payload.last == PAGE_BEATS - 1),
                seen[name].i_leave.eq(port.queue.o.valid & port.queue.o.ready),
            ]
        return [
            scheduler.i_waiting.eq(seen["read"].o_waiting | seen["write"].o_waiting),
            scheduler.i_ahead.eq(
                Mux(arbiter.o.payload.write, seen["write"].o_ahead, seen["read"].o_ahead)
            ),
        ]
