"""DDR4 controller: AXI4 on one side, DFI on the other."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import (
    Axi4ReadSignature,
    Axi4Signature,
    Axi4WriteSignature,
    connect_channels,
)
from nearstep_hw.dram.activate_stage import ActivateStage
from nearstep_hw.dram.address import AddressMapping
from nearstep_hw.dram.bank_rules import BankRules
from nearstep_hw.dram.bank_use import BankUse
from nearstep_hw.dram.batch_arbiter import BatchArbiter
from nearstep_hw.dram.burst_expander import BurstExpander
from nearstep_hw.dram.column_stage import ColumnStage, Slot
from nearstep_hw.dram.command_pins import CommandPins
from nearstep_hw.dram.dfi import PHASES, DfiSignature
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.geometry import BEAT_BYTES
from nearstep_hw.dram.precharge_stage import PrechargeStage
from nearstep_hw.dram.queue import ShortQueue
from nearstep_hw.dram.read_return import ReadReturn
from nearstep_hw.dram.refresh_manager import RefreshManager
from nearstep_hw.dram.request import BEAT_SHIFT, BeatLayout, BurstLayout, RowLayout
from nearstep_hw.dram.request_guard import ReadGuard, WriteGuard
from nearstep_hw.dram.slot_counters import SlotCounters, counter_members
from nearstep_hw.dram.timing import MAX_POSTPONED_REFRESHES, DramTiming, dram_timing
from nearstep_hw.dram.write_supply import WriteSupply

READ_PLACES = 32  # beats between a read command and R; 12 keep it busy, the rest takes up stalls
WRITE_PLACES = 256  # beats: a burst that is sent, one that arrives, two behind
READ_BURSTS = 16
WRITE_BURSTS = 16
LOOKAHEAD = 32  # beats whose rows are prepared
IDLE_CYCLES = 32


class DramController(wiring.Component):
    """..."""

    def __init__(
        self,
        timing: DramTiming | None = None,
        mapping: AddressMapping | None = None,
        *,
        address_width: int = 34,
        id_width: int = 2,
        batch_beats: int = 2048,
        low_beats: int = 16,
        postponed: int = MAX_POSTPONED_REFRESHES,
    ) -> None:
        self.timing = dram_timing() if timing is None else timing
        self.mapping = AddressMapping() if mapping is None else mapping
        self.address_width = address_width
        self.id_width = id_width
        self.batch_beats = batch_beats
        self.low_beats = low_beats
        self.postponed = postponed
        debt = range(2 * MAX_POSTPONED_REFRESHES)
        self._port = {
            "address_width": address_width,
            "data_width": 8 * BEAT_BYTES,
            "id_width": id_width,
        }
        super().__init__(
            {
                "s_axi": In(Axi4Signature(**self._port)),
                "dfi": Out(DfiSignature()),
                "i_enable": In(1),
                "o_idle": Out(1),
                "i_debt": In(debt),
                "o_debt": Out(debt),
                "o_slot": Out(Slot),
                "i_clear_slots": In(1),
                **counter_members(),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        fabric, geometry, id_width = FabricTiming(self.timing), self.mapping.geometry, self.id_width
        beat = BeatLayout(geometry, id_width=id_width)
        m.submodules.read_guard = read_guard = ReadGuard(
            geometry, Axi4ReadSignature(**self._port), bursts=2 * READ_BURSTS
        )
        m.submodules.write_guard = write_guard = WriteGuard(
            geometry, Axi4WriteSignature(**self._port), bursts=WRITE_BURSTS
        )
        burst = BurstLayout(geometry, id_width=id_width)
        m.submodules.reads = reads = ShortQueue(burst, depth=READ_BURSTS)
        m.submodules.writes = writes = ShortQueue(burst, depth=WRITE_BURSTS)
        m.submodules.arbiter = arbiter = BatchArbiter(
            geometry, id_width=id_width, batch_beats=self.batch_beats
        )
        m.submodules.expander = expander = BurstExpander(self.mapping, id_width=id_width)
        m.submodules.precharge = precharge = PrechargeStage(geometry, id_width=id_width)
        m.submodules.beats = beats = ShortQueue(beat, depth=LOOKAHEAD)
        m.submodules.rows = rows = ShortQueue(RowLayout(geometry), depth=geometry.banks)
        m.submodules.activate = activate = ActivateStage(fabric, geometry)
        m.submodules.column = column = ColumnStage(fabric, geometry, id_width=id_width)
        m.submodules.use = use = BankUse(banks=geometry.banks, beats=LOOKAHEAD)
        m.submodules.rules = rules = BankRules(fabric, banks=geometry.banks)
        m.submodules.refresh = refresh = RefreshManager(
            fabric, postponed=self.postponed, idle_cycles=IDLE_CYCLES
        )
        m.submodules.pins = pins = CommandPins(geometry)
        m.submodules.returns = returns = ReadReturn(id_width=id_width, depth=READ_PLACES)
        m.submodules.supply = supply = WriteSupply(
            id_width=id_width, depth=WRITE_PLACES, bursts=WRITE_BURSTS
        )
        m.submodules.slots = slots = SlotCounters()

        connect_channels(m, read_guard.i, wiring.flipped(self.s_axi))
        connect_channels(m, write_guard.i, wiring.flipped(self.s_axi))
        wiring.connect(m, expander.o, precharge.i)
        wiring.connect(m, precharge.o, beats.i)
        wiring.connect(m, precharge.o_row, rows.i)
        wiring.connect(m, rows.o, activate.i)
        wiring.connect(m, beats.o, column.i)
        wiring.connect(m, arbiter.o, expander.i)
        ar, aw = read_guard.o, write_guard.o
        reopening = Signal()

        m.d.comb += [
            reads.i.valid.eq(ar.arvalid),
            ar.arready.eq(reads.i.ready),
            reads.i.payload.id.eq(ar.arid),
            reads.i.payload.address.eq(ar.araddr[BEAT_SHIFT:]),
            reads.i.payload.last.eq(ar.arlen),
            writes.i.valid.eq(aw.awvalid),
            aw.awready.eq(writes.i.ready),
            writes.i.payload.id.eq(aw.awid),
            writes.i.payload.address.eq(aw.awaddr[BEAT_SHIFT:]),
            writes.i.payload.last.eq(aw.awlen),
            arbiter.i_read.valid.eq(reads.o.valid),
            arbiter.i_read.payload.eq(reads.o.payload),
            reads.o.ready.eq(arbiter.i_read.ready),
            arbiter.i_write.valid.eq(writes.o.valid & supply.o_whole),
            arbiter.i_write.payload.eq(writes.o.payload),
            writes.o.ready.eq(arbiter.i_write.ready),
            supply.i_enter.eq(arbiter.i_write.ready),
            arbiter.i_low.eq(use.o_beats <= self.low_beats),
            precharge.i_stop.eq(refresh.o_stop),
            precharge.i_used.eq(use.o_used),
            precharge.i_no_precharge.eq(rules.o_no_precharge),
            precharge.i_close.eq(refresh.o_precharge),
            activate.i_stop.eq(refresh.o_no_activate),
            activate.i_no_activate.eq(rules.o_no_activate),
            column.i_opened.eq(activate.i.ready),
            column.i_no_column.eq(rules.o_no_column),
            column.i_space.eq(returns.o_space),
            use.i_enter.eq(precharge.i.ready),
            use.i_enter_bank.eq(precharge.i.payload.bank),
            use.i_leave.eq(column.i.ready),
            use.i_leave_bank.eq(column.i.payload.bank),
            rules.i_activate.eq(activate.o_activate),
            rules.i_precharge.eq(precharge.o_precharge),
            rules.i_read.eq(Mux(column.o_read, 1 << column.i.payload.bank, 0)),
            rules.i_write.eq(Mux(column.o_write, 1 << column.i.payload.bank, 0)),
            refresh.i_enable.eq(self.i_enable),
            refresh.i_debt.eq(self.i_debt),
            refresh.i_busy.eq(
                reads.o.valid | writes.o.valid | expander.o.valid | (use.o_beats != 0)
            ),
            refresh.i_clear.eq((use.o_beats == 0) & (rules.o_no_precharge == 0)),
            self.o_debt.eq(refresh.o_debt),
            self.o_idle.eq(refresh.o_idle & returns.o_idle & supply.o_idle),
        ]
        m.d.comb += [
            pins.i_column.eq(column.i.ready),
            pins.i_write.eq(column.o_write),
            pins.i_column_bank.eq(column.i.payload.bank),
            pins.i_column_address.eq(column.i.payload.column),
            pins.i_activate.eq(activate.o_activate.any()),
            pins.i_activate_bank.eq(activate.i.payload.bank),
            pins.i_activate_row.eq(activate.i.payload.row),
            pins.i_refresh.eq(refresh.o_refresh),
            pins.i_precharge.eq(precharge.o_precharge.any()),
            pins.i_precharge_bank.eq(precharge.i.payload.bank),
            pins.i_precharge_all.eq(refresh.o_precharge),
        ]
        for phase in range(PHASES):
            wiring.connect(
                m, getattr(pins, f"p{phase}"), wiring.flipped(getattr(self.dfi, f"p{phase}"))
            )
        m.d.comb += [
            returns.i_issue.eq(column.o_read),
            returns.i_id.eq(column.i.payload.id),
            returns.i_last.eq(column.i.payload.last),
            returns.i_valid.eq(self.dfi.rddata_valid),
            returns.i_data.eq(self.dfi.rddata),
            ar.rvalid.eq(returns.o_valid),
            returns.i_ready.eq(ar.rready),
            ar.rdata.eq(returns.o_data),
            ar.rid.eq(returns.o_id),
            ar.rlast.eq(returns.o_last),
            ar.rresp.eq(returns.o_response),
            supply.i_valid.eq(aw.wvalid),
            aw.wready.eq(supply.o_ready),
            supply.i_data.eq(aw.wdata),
            supply.i_strobe.eq(aw.wstrb),
            supply.i_last.eq(aw.wlast),
            supply.i_issue.eq(column.o_write),
            supply.i_id.eq(column.i.payload.id),
            supply.i_end.eq(column.i.payload.last),
            self.dfi.wrdata.eq(supply.o_data),
            self.dfi.wrdata_mask.eq(supply.o_mask),
            self.dfi.wrdata_en.eq(supply.o_enable),
            aw.bvalid.eq(supply.o_answer_valid),
            supply.i_answer_ready.eq(aw.bready),
            aw.bid.eq(supply.o_answer_id),
            aw.bresp.eq(supply.o_answer),
        ]
        with m.If(refresh.o_no_activate | refresh.o_precharge):
            m.d.sync += reopening.eq(1)
        with m.Elif(column.i.ready | (use.o_beats == 0)):
            m.d.sync += reopening.eq(0)
        m.d.comb += [
            self.o_slot.eq(column.o_slot),
            slots.i_slot.eq(self.o_slot),
            slots.i_clear.eq(self.i_clear_slots),
        ]
        waits = (column.o_slot == Slot.EMPTY) | (column.o_slot == Slot.ROW)
        with m.If(waits & (refresh.o_stop | refresh.o_no_activate | reopening)):
            m.d.comb += self.o_slot.eq(Slot.REFRESH)
        with m.Elif((column.o_slot == Slot.EMPTY) & (expander.o.valid | (use.o_beats != 0))):
            m.d.comb += self.o_slot.eq(Slot.ROW)
        for slot in Slot:
            name = f"o_{slot.name.lower()}"
            m.d.comb += getattr(self, name).eq(getattr(slots, name))
        return m
