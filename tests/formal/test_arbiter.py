"""Proofs of the mode arbiter and of what surrounds it, for every stimulus of host and kernel."""

from abc import ABC, abstractmethod

import pytest
from amaranth.hdl import Assert, Assume, Cat, Cover, Module, Mux, Signal, Value
from amaranth.lib.wiring import Component, In, Out, connect, flipped

from nearstep_hw.axdimm.arbiter import ModeArbiter
from nearstep_hw.axdimm.host_command import (
    CODE,
    HostCommandLayout,
    code_of,
    decode,
    not_selected,
)
from nearstep_hw.axdimm.host_front_end import HOST_READ_LATENCY, host_port
from nearstep_hw.axdimm.memory_channel import MemoryChannel
from nearstep_hw.axdimm.shared_dram import SharedDram
from nearstep_hw.axi.signature import Axi4Signature
from nearstep_hw.csr.line import LINE_BITS
from nearstep_hw.dram.dfi import HOST_PHASES, PHASES, DfiSignature
from nearstep_sim.bench.formal import prove
from nearstep_spec.axdimm.registers import WINDOW_BYTES
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import MAX_POSTPONED_REFRESHES

from .small_dram import SHORT, SmallGeometry, is_refresh, state_that_ranks_move_together
from .toolkit import held, opened, past, refuted

pytestmark = pytest.mark.formal


class WindowGeometry(DramGeometry):
    """Two bank groups of two banks, just larger than the CSR window."""

    bank_group_bits = 1
    bank_bits = 1
    row_bits = 2
    column_bits = 8


HURRY = 14  # a hand-over with these timings, and the controller's first refresh


class BankView:
    """Row of one bank, and whether it is open, by the pins; written without the shadow's code.

    `open` and `row` hold before this cycle's commands, `now_open` and `now_row` after them.
    """

    def __init__(
        self,
        m: Module,
        name: str,
        pins: list[object],
        bank: Value,
        geometry: DramGeometry,
        rank: int = 0,
    ) -> None:
        self.open = Signal(name=f"{name}_open")
        self.row = Signal(geometry.row_bits, name=f"{name}_row")
        self.now_open: Value = self.open
        self.now_row: Value = self.row
        for each in pins:
            code = each.address[CODE]
            mine = Cat(each.ba[: geometry.bank_bits], each.bg[: geometry.bank_group_bits]) == bank
            a10 = each.address[10]
            precharge = (code == code_of(Command.PRE)) & (a10 | mine)
            column = ((code == code_of(Command.RD)) | (code == code_of(Command.WR))) & a10 & mine
            selected = ~not_selected(each, rank)
            opens = selected & ~each.act_n & mine
            closes = selected & each.act_n & (precharge | column)
            self.now_row = Mux(opens, each.address, self.now_row)[: geometry.row_bits]
            self.now_open = Mux(opens, 1, Mux(closes, 0, self.now_open))[0]
        m.d.sync += [self.open.eq(self.now_open), self.row.eq(self.now_row)]


class Hasty(ModeArbiter):
    """Gives its rank to the kernel without the other one."""

    def elaborate(self, platform: object) -> Module:
        self.shared = False
        return super().elaborate(platform)


class SharedDramProperties(Component, ABC):
    """A shared DRAM between a host and a controller that do what they like.

    Of the controller it is assumed that all banks are closed when it is idle, and that it gives no
    command then.

    Parameters
    ----------
    ranks : of the channel.
    rank : that the properties are about, whatever is done to the other.
    """

    def __init__(self, *, ranks: int = 1, rank: int = 0, flaw: str | None = None) -> None:
        self.flaw = flaw
        self.geometry = SmallGeometry(ranks=ranks)
        self.rank = rank
        super().__init__(
            {
                "host": In(host_port(ranks)),
                "kernel": In(DfiSignature(ranks=ranks)),
                "idle": In(1),
                "accelerate": In(1),
                "reset": In(1),
                "bank": In(range(self.geometry.banks)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        ranks = self.geometry.ranks
        self.dram = dram = SharedDram(SHORT, self.geometry, hurry=HURRY)
        if self.flaw == "hasty":
            dram.ranks[1].arbiter = Hasty(SHORT, self.geometry, shared=True)
        self.mine = dram.ranks[self.rank]
        self.passes = dram.o_pass[self.rank]
        m.submodules.dram, inside = opened(dram)
        connect(m, flipped(self.kernel), dram.kernel)
        for number in range(ranks * HOST_PHASES):
            rank, phase = divmod(number, HOST_PHASES)
            slot = Signal(HostCommandLayout(self.geometry), name=f"slot{number}")
            decode(m, getattr(self.host, f"p{phase}"), slot, rank)
            m.d.comb += dram.i_slot[number].eq(slot)
        if ranks > 1:
            state_that_ranks_move_together(m, dram, inside)
        m.d.comb += [
            dram.i_idle.eq(self.idle),
            dram.i_accelerate.eq(self.accelerate),
            dram.i_reset.eq(self.reset),
        ]
        self.pins = [getattr(dram.dfi, f"p{phase}") for phase in range(PHASES)]
        self.theirs = [getattr(self.kernel, f"p{phase}") for phase in range(PHASES)]
        self.ours = [getattr(self.host, f"p{slot}") for slot in range(HOST_PHASES)]
        self.state(m)
        return m

    @abstractmethod
    def state(self, m: Module) -> None:
        """States the properties."""


class Ownership(SharedDramProperties):
    """Host and kernel never both reach the DRAM, no kernel command does in normal mode, and nothing
    of the host is lost or changed in it.

    No calibration of the host is owed in it; none is given while the arbiter has opened a bank.
    """

    def state(self, m: Module) -> None:
        dram, arbiter, rank = self.dram, self.mine.arbiter, self.rank
        passed = past(m, self.passes, "pass")
        owned = self.accelerate if self.flaw == "owner" else dram.o_kernel
        own = arbiter.o_command
        cs_n = [not_selected(pins, rank) for pins in self.pins]
        m.d.comb += [
            Assert(~(self.passes & dram.o_kernel)),
            Assert(~(passed & owned)),
            Assert(~(dram.o_acceleration & ~dram.o_kernel)),
            Assert(~(dram.o_enable & ~dram.o_kernel)),
            Assert(~(self.passes & (self.mine.owes | self.mine.owes_long))),
            Assert(~(own.calibrate | own.calibrate_long) | ~arbiter.opened.any()),
            Assert(~arbiter.yielding | ~arbiter.opened.any()),
        ]
        with m.If(self.passes):
            m.d.comb += [Assert(cs_n[1]), Assert(cs_n[3])]
        for slot, phase in enumerate((0, 2)):
            command = self.ours[slot]
            selected = ~not_selected(command, rank)
            was = past(m, selected & ~is_refresh(command, rank), f"command{slot}")
            same = [
                getattr(self.pins[phase], name) == past(m, getattr(command, name), f"{name}{slot}")
                for name in ("act_n", "address", "bg", "ba")
            ]
            with m.If(passed & was):
                m.d.comb += [Assert(~cs_n[phase]), Assert(Cat(same).all())]
            with m.If(~passed & ~dram.o_kernel):
                m.d.comb += Assert(cs_n[phase])
        theirs = [not_selected(each, rank) for each in self.theirs]
        with m.If(dram.o_kernel):
            for mine, each in zip(cs_n, theirs, strict=True):
                m.d.comb += Assert(mine == each)
        m.d.comb += [
            Cover(dram.o_kernel & ~theirs[0] & past(m, dram.o_kernel, "kernel")),
            Cover(own.calibrate_long),
        ]
        if self.geometry.ranks > 1:
            # The host has this rank and not yet the other, which gets a command of its arbiter.
            other = 1 - rank
            alone = self.passes & ~dram.o_pass[other] & dram.ranks[other].arbiter.o_command.activate
            m.d.comb += Cover(alone & past(m, passed, "passed_before"))


class Banks(SharedDramProperties):
    """In normal mode every bank is as the host believes, whatever was done in between."""

    def state(self, m: Module) -> None:
        dram, arbiter = self.dram, self.mine.arbiter
        held(m, self.bank)
        memory = BankView(m, "memory", self.pins, self.bank, self.geometry, self.rank)
        host = BankView(m, "host", self.ours, self.bank, self.geometry, self.rank)
        with m.If(dram.o_kernel & self.idle):
            m.d.comb += Assume(~memory.now_open)
        opened = Signal()
        wrong = Signal()
        believed = Signal()
        row = Signal(self.geometry.row_bits)
        with m.Switch(self.bank):
            for number in range(self.geometry.banks):
                with m.Case(number):
                    m.d.comb += [
                        opened.eq(arbiter.opened[number]),
                        wrong.eq(arbiter.wrong[number]),
                        believed.eq(self.mine.shadow.o_open[number]),
                        row.eq(dram.o_row[self.rank * self.geometry.banks + number]),
                    ]
        as_believed = (memory.now_open == believed) & (~believed | (memory.now_row == row))
        m.d.comb += Assert(believed == host.open)
        with m.If(host.open):
            m.d.comb += Assert(row == host.row)
        with m.If(self.passes & (self.flaw is None)):
            m.d.comb += Assert(as_believed)
        with m.If(self.passes & (self.flaw is not None)):
            m.d.comb += Assert(memory.open == host.now_open)
        with m.If(arbiter.restoring):
            m.d.comb += Assert(memory.now_open == opened)
            with m.If(opened & ~wrong):
                m.d.comb += Assert(as_believed)
        with m.If((~arbiter.restoring & ~arbiter.closing & ~self.passes) | arbiter.yielding):
            m.d.comb += [Assert(arbiter.opened == 0), Assert(arbiter.wrong == 0)]

        away = Signal()  # the kernel had the channel
        moved = Signal()  # and in that time the host opened another row
        with m.If(dram.o_kernel):
            m.d.sync += away.eq(1)
        with m.If(away & ~self.passes & host.open & (past(m, host.row, "row") != host.row)):
            m.d.sync += moved.eq(1)
        m.d.comb += [
            Cover(self.passes & moved & memory.now_open),
            Cover(arbiter.restoring & wrong),
        ]


class Refreshes(SharedDramProperties):
    """In normal mode the DRAM has got every refresh of the host, and owes no more than the host.

    Assumed: the host refreshes in one slot at a time, and keeps within eight, either way; so do
    controller and arbiter; a ninth in advance would not count.
    """

    def state(self, m: Module) -> None:
        dram, rank = self.dram, self.rank
        host_debt, dram_debt = self.mine.debt.o_host, self.mine.debt.o_dram
        most = MAX_POSTPONED_REFRESHES
        asks = is_refresh(self.ours[0], rank) | is_refresh(self.ours[1], rank)
        gets = Cat(is_refresh(each, rank) for each in self.pins).any()
        asked = Signal(8)
        given = Signal(8)
        m.d.sync += [asked.eq(asked + asks), given.eq(given + gets)]
        m.d.comb += [
            Assume(~(is_refresh(self.ours[0], rank) & is_refresh(self.ours[1], rank))),
            Assume(~(asks & (host_debt <= -most))),
            Assume(host_debt <= most),
            Assume(~(dram.o_kernel & gets & (dram_debt <= -most))),
            Assume(~(self.mine.arbiter.o_command.refresh & (dram_debt <= -most))),
            Assume(~(self.passes & asks & (dram_debt <= -most))),
            Assume(dram_debt <= most + 1),
        ]
        for phase in (0, 2, 3):  # where the controller has no refreshes
            m.d.comb += Assume(~(dram.o_kernel & is_refresh(self.theirs[phase], rank)))
        counted = Signal(8)  # what the pins will have seen of what was decided until now
        m.d.comb += counted.eq(given + (gets & ~dram.o_kernel))
        ahead = Signal(8)
        difference = Signal(8)
        m.d.comb += [
            ahead.eq(counted - asked),
            difference.eq(host_debt - dram_debt),
            Assert(ahead == difference),
        ]
        with m.If(self.passes):
            m.d.comb += Assert(dram_debt <= host_debt)
            m.d.comb += Assert(ahead < 2 * most + 1)
        for debt in (host_debt, dram_debt):
            m.d.comb += Assert(debt >= -most)
        m.d.comb += Cover(self.passes & (ahead == 2) & (asked == 1))


class IdleController(Component):
    """Ports of a controller that never gives a command, and is idle when `idle` says so."""

    def __init__(self, idle: Value, *, ranks: int, address_width: int, id_width: int) -> None:
        self.idle = idle
        port = {"address_width": address_width, "id_width": id_width, "data_width": LINE_BITS}
        super().__init__(
            {
                "s_axi": In(Axi4Signature(**port)),
                "dfi": Out(DfiSignature(ranks=ranks)),
                "i_enable": In(1),
                "i_owed": In(ranks),
                "i_must": In(ranks),
                "i_hold": In(ranks),
                "i_calibrate": In(ranks),
                "o_idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.comb += self.o_idle.eq(self.idle)
        return m


class WindowAnswers(Component):
    """Every read of the host is answered after `HOST_READ_LATENCY` cycles, in every mode; one of a
    kernel register with the line that the kernel shows for it.

    The window is all of a row of the last rank.
    """

    def __init__(self, *, ranks: int = 1, flaw: str | None = None) -> None:
        self.flaw = flaw
        self.geometry = WindowGeometry(ranks=ranks)
        super().__init__(
            {
                "host": In(host_port(ranks)),
                "idle": In(1),
                "kernel_data": In(LINE_BITS),
                "memory_data": In(LINE_BITS),
                "bank": In(range(self.geometry.banks)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        geometry = self.geometry

        def controller(*_: object, postponed: None, **port: int) -> IdleController:
            return IdleController(self.idle, ranks=geometry.ranks, **port)

        mapping = AddressMapping(geometry, interleave=WINDOW_BYTES)
        channel = MemoryChannel(SHORT, mapping, controller=controller)
        m.submodules.channel = channel
        connect(m, flipped(self.host), channel.host)
        m.d.comb += [
            channel.kernel.read_data.eq(self.kernel_data),
            channel.dfi.rddata.eq(self.memory_data),
        ]
        held(m, self.bank)
        slots = [getattr(self.host, f"p{slot}") for slot in range(HOST_PHASES)]
        last = geometry.ranks - 1
        view = BankView(m, "host", slots, self.bank, geometry, last)
        with m.Switch(self.bank):
            for number, row in enumerate(channel.dram.o_row[last * geometry.banks :]):
                with m.Case(number):
                    m.d.comb += Assert(row == past(m, view.row, "row"))
        read = Signal()
        window = Signal()
        line = Signal(7)
        for each in slots:
            selected = [~not_selected(each, rank) for rank in range(geometry.ranks)]
            code = each.act_n & (each.address[CODE] == code_of(Command.RD))
            is_read = Cat(selected).any() & code
            if geometry.ranks > 1:
                m.d.comb += Assume(~(self._is_column(each) & Cat(selected).all()))
            place = Cat(each.bg[0], each.ba[0], each.address[3 : geometry.column_bits])
            with m.If(is_read):
                m.d.comb += [
                    read.eq(1),
                    line.eq(place),
                    window.eq(
                        selected[last]
                        & (place[:2] == Cat(self.bank[1], self.bank[0]))
                        & view.row.all()
                    ),
                ]
        m.d.comb += Assume(~(self._is_column(slots[0]) & self._is_column(slots[1])))
        reads, windows, lines = [read], [window], [line]
        latency = HOST_READ_LATENCY if self.flaw is None else HOST_READ_LATENCY - 1
        for cycle in range(1, latency + 2):
            reads.append(past(m, reads[-1], f"read{cycle}"))
            windows.append(past(m, windows[-1], f"window{cycle}"))
            lines.append(past(m, lines[-1], f"line{cycle}"))
        due = reads[latency] | reads[latency + 1]
        m.d.comb += Assert(self.host.rddata_valid == due)
        kernel = [windows[n] & lines[n][6] & reads[n] for n in range(len(reads))]
        with m.If(kernel[latency - 2]):
            m.d.comb += Assert(channel.kernel.read_address == lines[latency - 2][:6])
        shown = past(m, self.kernel_data, "shown")
        before = past(m, shown, "shown_before")
        with m.If(kernel[latency]):
            m.d.comb += Assert(self.host.rddata == shown[: LINE_BITS // 2])
        with m.If(kernel[latency + 1] & ~reads[latency]):
            m.d.comb += Assert(self.host.rddata == before[LINE_BITS // 2 :])
        m.d.comb += Cover(kernel[latency] & channel.o_normal)
        m.d.comb += Cover(kernel[latency] & ~channel.o_normal)
        return m

    @staticmethod
    def _is_column(pins: object) -> Value:
        code = pins.address[CODE]
        column = (code == code_of(Command.RD)) | (code == code_of(Command.WR))
        return ~pins.cs_n.all() & pins.act_n & column


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_window_always_answers_in_the_fixed_time(ranks: int) -> None:
    name = f"window_answers_{ranks}"
    proof = prove(WindowAnswers(ranks=ranks), name, "prove", depth=HOST_READ_LATENCY + 3)
    print(proof)
    assert proof.statements == 8


@pytest.mark.deep
def test_the_window_answers_in_both_modes() -> None:
    assert prove(WindowAnswers(), "window_answers", "cover", depth=26).statements == 2


@pytest.mark.deep
def test_an_answer_at_another_time_would_be_found() -> None:
    refuted(WindowAnswers(flaw="early"), "window_flaw", depth=14)


@pytest.mark.deep
def test_a_wrong_owner_would_be_found() -> None:
    refuted(Ownership(flaw="owner"), "ownership_flaw", depth=4)


@pytest.mark.deep
def test_a_rank_that_goes_to_the_kernel_alone_would_be_found() -> None:
    refuted(Ownership(ranks=2, flaw="hasty"), "ownership_hasty", depth=8)


@pytest.mark.deep
def test_a_bank_in_another_state_would_be_found() -> None:
    refuted(Banks(flaw="early"), "banks_flaw", depth=6)


@pytest.mark.parametrize(
    ("properties", "statements"),
    [
        (Ownership, 17),
        pytest.param(Banks, 8, marks=pytest.mark.deep),
        pytest.param(Refreshes, 5, marks=pytest.mark.deep),
    ],
)
def test_shared_dram(properties: type[SharedDramProperties], statements: int) -> None:
    proof = prove(properties(), properties.__name__.lower(), "prove", depth=3)
    print(proof)
    assert proof.statements >= statements


@pytest.mark.parametrize(
    ("properties", "rank", "statements"),
    [
        (Ownership, 1, 29),
        pytest.param(Ownership, 0, 29, marks=pytest.mark.deep),
        *(
            pytest.param(each, rank, statements, marks=pytest.mark.deep)
            for each, statements in ((Banks, 18), (Refreshes, 15))
            for rank in (0, 1)
        ),
    ],
)
def test_each_of_two_ranks(
    properties: type[SharedDramProperties], rank: int, statements: int
) -> None:
    """The properties are about one, whatever is done to the other."""
    name = f"{properties.__name__.lower()}_of_two_{rank}"
    proof = prove(properties(ranks=2, rank=rank), name, "prove", depth=3)
    print(proof)
    assert proof.statements >= statements


@pytest.mark.parametrize(
    ("properties", "covers"),
    [
        pytest.param(Ownership, 2, marks=pytest.mark.deep),
        pytest.param(Banks, 2, marks=pytest.mark.deep),
        pytest.param(Refreshes, 1, marks=pytest.mark.deep),
    ],
)
def test_interesting_cases_are_reached(properties: type[SharedDramProperties], covers: int) -> None:
    proof = prove(properties(), properties.__name__.lower(), "cover", depth=40)
    print(proof)
    assert proof.statements == covers


@pytest.mark.deep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_the_hosts_before_the_other(rank: int) -> None:
    proof = prove(Ownership(ranks=2, rank=rank), f"ownership_of_two_{rank}", "cover", depth=40)
    print(proof)
    assert proof.statements == 3
