"""Scheduler of DDR4 commands."""

from collections.abc import Sequence

from amaranth import Cat, Const, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.data import View
from amaranth.lib.wiring import In, Out

from nearstep_hw.dram.activate_stage import ActivateStage
from nearstep_hw.dram.bank_rules import BankRules
from nearstep_hw.dram.bank_use import BankUse
from nearstep_hw.dram.column_stage import ColumnStage, Slot
from nearstep_hw.dram.command_pins import CommandPins
from nearstep_hw.dram.dfi import PHASES, CommandSignature
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.precharge_stage import PrechargeStage
from nearstep_hw.dram.queue import ShortQueue
from nearstep_hw.dram.refresh_manager import RefreshManager, connect_part, debt_members
from nearstep_hw.dram.request import BeatLayout, RowLayout, of_rank, rank_select
from nearstep_spec.dram.geometry import DramGeometry

IDLE_CYCLES = 32  # without a beat, before a refresh is issued early


class CommandScheduler(wiring.Component):
    """Issues the column commands of beats in order and prepares rows ahead of them.

    A beat enters as soon as its row is open, or the conflicting row is precharged; rows are then
    opened in order, apart from the beats, so that up to `lookahead` beats are between a precharge
    and its column command. While there are beats of other banks, a row miss costs nothing.
    For a refresh, and when the channel is handed back, no beats enter and the beats inside get
    their commands. A refresh of one of two ranks stops only its own beats.

    *Timing*: a beat a cycle. On the pins one cycle after the decision.

    Parameters
    ----------
    timing, geometry : of the channel.
    id_width : bits of an AXI ID.
    lookahead : most beats inside.
    few_beats : see `o_few`.
    postponed : see `RefreshManager`.

    Members
    -------
    i : beats.
    i_space : data of one more read beat fit.
    i_waiting : a bit for each rank: bursts are waiting.
    i_ahead : a bit for each rank: the next bursts, for a tRFC, are for the other rank; with two
        ranks.
    i_enable, o_idle, i_debt, o_debt, i_owed, i_must, i_hold, i_calibrate : see `RefreshManager`; a
        field for each rank but in `i_enable` and `o_idle`.
    o_enter : a beat enters.
    o_read, o_write : a command is issued, of the beat with `o_id` and `o_last`.
    o_few : at most `few_beats` beats are inside.
    o_slot : use of the column slot.
    p0, p1, p2, p3 : command pins.
    """

    def __init__(
        self,
        timing: FabricTiming,
        geometry: DramGeometry,
        *,
        id_width: int,
        lookahead: int,
        few_beats: int,
        postponed: int | None,
    ) -> None:
        self.timing = timing
        self.geometry = geometry
        self.id_width = id_width
        self.lookahead = lookahead
        self.few_beats = few_beats
        self.postponed = postponed
        super().__init__(
            {
                "i": In(stream.Signature(BeatLayout(geometry, id_width=id_width))),
                "i_space": In(1),
                "i_waiting": In(geometry.ranks),
                **({"i_ahead": In(geometry.ranks)} if geometry.ranks > 1 else {}),
                "i_enable": In(1),
                **debt_members(postponed, geometry.ranks),
                "i_calibrate": In(geometry.ranks),
                "o_idle": Out(1),
                "o_enter": Out(1),
                "o_read": Out(1),
                "o_write": Out(1),
                "o_id": Out(id_width),
                "o_last": Out(1),
                "o_few": Out(1),
                "o_slot": Out(Slot),
                **{f"p{phase}": Out(CommandSignature(geometry.ranks)) for phase in range(PHASES)},
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        geometry, id_width, ranks = self.geometry, self.id_width, self.geometry.ranks
        m.submodules.precharge = precharge = PrechargeStage(geometry, id_width=id_width)
        m.submodules.beats = beats = ShortQueue(self.i.payload.shape(), depth=self.lookahead)
        m.submodules.rows = rows = ShortQueue(RowLayout(geometry), depth=geometry.all_banks)
        m.submodules.activate = activate = ActivateStage(self.timing, geometry)
        m.submodules.column = column = ColumnStage(self.timing, geometry, id_width=id_width)
        m.submodules.use = use = BankUse(banks=geometry.all_banks, beats=self.lookahead)
        m.submodules.rules = rules = BankRules(self.timing, banks=geometry.all_banks)
        managers = [
            RefreshManager(
                self.timing,
                postponed=self.postponed,
                idle_cycles=IDLE_CYCLES,
                shared=ranks > 1,
            )
            for _ in range(ranks)
        ]
        for number, manager in enumerate(managers):
            m.submodules["refresh" if ranks == 1 else f"refresh{number}"] = manager
        m.submodules.pins = pins = CommandPins(geometry)
        entering, row, leaving = precharge.i.payload, activate.i.payload, column.i.payload

        def of_all(name: str) -> Value:
            """Return a bit for each rank."""
            return Cat(getattr(manager, name) for manager in managers)

        stop = of_rank(of_all("o_stop"), rank_select(geometry, entering.bank))
        no_activate = of_all("o_no_activate")
        if ranks > 1:  # ACT shares its pins with REF and ZQCS
            given = (of_all("o_refresh") | of_all("o_calibrate")).any()
            no_activate = no_activate | given.replicate(ranks)
        wiring.connect(m, wiring.flipped(self.i), precharge.i)
        wiring.connect(m, precharge.o, beats.i)
        wiring.connect(m, precharge.o_row, rows.i)
        wiring.connect(m, rows.o, activate.i)
        wiring.connect(m, beats.o, column.i)
        for phase in (f"p{number}" for number in range(PHASES)):
            wiring.connect(m, getattr(pins, phase), wiring.flipped(getattr(self, phase)))
        m.d.comb += [
            precharge.i_stop.eq(stop | (~entering.write & ~self.i_space)),
            precharge.i_used.eq(use.o_used),
            precharge.i_no_precharge.eq(rules.o_no_precharge),
            precharge.i_close.eq(of_all("o_precharge")),
            activate.i_stop.eq(no_activate),
            activate.i_no_activate.eq(rules.o_no_activate),
            column.i_opened.eq(activate.i.ready),
            column.i_no_column.eq(rules.o_no_column),
            use.i_enter.eq(self.o_enter),
            use.i_enter_bank.eq(entering.bank),
            use.i_leave.eq(column.i.ready),
            use.i_leave_bank.eq(leaving.bank),
            rules.i_activate.eq(activate.o_activate),
            rules.i_precharge.eq(precharge.o_precharge),
            rules.i_read.eq(Mux(column.o_read, 1 << leaving.bank, 0)),
            rules.i_write.eq(Mux(column.o_write, 1 << leaving.bank, 0)),
            *(manager.i_enable.eq(self.i_enable) for manager in managers),
            *(
                manager.i_calibrate.eq(wanted)
                for manager, wanted in zip(managers, self.i_calibrate, strict=True)
            ),
            *self._watch_beats(managers, use, rules),
            pins.i_column.eq(column.i.ready),
            pins.i_write.eq(leaving.write),
            pins.i_column_bank.eq(leaving.bank),
            pins.i_column_address.eq(leaving.column),
            pins.i_activate.eq(activate.i.ready),
            pins.i_activate_bank.eq(row.bank),
            pins.i_activate_row.eq(row.row),
            pins.i_refresh.eq(of_all("o_refresh")),
            pins.i_calibrate.eq(of_all("o_calibrate")),
            pins.i_precharge.eq(precharge.o_precharge.any()),
            pins.i_precharge_bank.eq(entering.bank),
            pins.i_precharge_all.eq(of_all("o_precharge")),
            self.o_idle.eq(managers[0].o_idle if ranks == 1 else of_all("o_idle").all()),
            self.o_enter.eq(precharge.i.ready),
            self.o_read.eq(column.o_read),
            self.o_write.eq(column.o_write),
            self.o_id.eq(leaving.id),
            self.o_last.eq(leaving.last),
            self.o_few.eq(use.o_beats <= self.few_beats),
        ]
        for name, member in debt_members(self.postponed, ranks).items():
            outer = getattr(self, name)
            for number, manager in enumerate(managers):
                inner = getattr(manager, name)
                connect_part(m, outer.word_select(number, len(inner)), inner, member)
        self._account(m, column.o_slot, managers, use=use, leaving=leaving)
        return m

    def _watch_beats(
        self, managers: Sequence[RefreshManager], use: BankUse, rules: BankRules
    ) -> list[object]:
        """Connect the conditions of refreshes."""
        if len(managers) == 1:
            (refresh,) = managers
            return [
                refresh.i_busy.eq(self.i_waiting | self.i.valid | (use.o_beats != 0)),
                refresh.i_clear.eq((use.o_beats == 0) & (rules.o_no_precharge == 0)),
            ]
        statements: list[object] = []
        entering = rank_select(self.geometry, self.i.payload.bank)
        banks, taken = self.geometry.banks, Const(0, 1)
        done = Cat(manager.o_done for manager in managers).all()
        for number, manager in enumerate(managers):
            used = use.o_used.word_select(number, banks).any()
            here = used | (self.i.valid & entering[number])
            statements += [
                manager.i_busy.eq(here | self.i_waiting[number]),
                manager.i_inside.eq(used),
                manager.i_free.eq(~here & self.i_ahead[number]),
                manager.i_clear.eq(~used & ~rules.o_no_precharge.word_select(number, banks).any()),
                manager.i_pins.eq(~taken),
                manager.i_done.eq(done),
            ]
            taken = taken | manager.o_precharge | manager.o_refresh | manager.o_calibrate
        return statements

    def _account(
        self,
        m: Module,
        slot: Value,
        managers: Sequence[RefreshManager],
        *,
        use: BankUse,
        leaving: View,
    ) -> None:
        """Classify the column slots without a command."""
        ranks, beats = len(managers), use.o_beats
        refreshing = Signal(ranks)
        reopening = Signal(ranks)  # from a refresh to the next column command
        next_rank = rank_select(self.geometry, Mux(beats != 0, leaving.bank, self.i.payload.bank))
        m.d.comb += [
            *(
                mine.eq(refresh.o_stop | refresh.o_no_activate | again)
                for mine, refresh, again in zip(refreshing, managers, reopening, strict=True)
            ),
            self.o_slot.eq(slot),
        ]
        for number, (refresh, again) in enumerate(zip(managers, reopening, strict=True)):
            read, write = self.o_read, self.o_write
            if ranks > 1:
                read, write = read & next_rank[number], write & next_rank[number]
            m.d.sync += again.eq(
                refresh.o_no_activate | (again & ~read & ~write & (self.i.valid | (beats != 0)))
            )
        here = of_rank(refreshing, next_rank)
        # With other ranks the refresh of an unused rank costs no slot.
        lost = here if ranks == 1 else here & self.i.valid
        with m.If(slot == Slot.ROW), m.If(here):
            m.d.comb += self.o_slot.eq(Slot.REFRESH)
        with m.Elif(slot == Slot.EMPTY):
            with m.If(lost):
                m.d.comb += self.o_slot.eq(Slot.REFRESH)
            with m.Elif(self.i.valid & ~self.i.payload.write & ~self.i_space):
                m.d.comb += self.o_slot.eq(Slot.SPACE)
            with m.Elif(self.i.valid):
                m.d.comb += self.o_slot.eq(Slot.ROW)
