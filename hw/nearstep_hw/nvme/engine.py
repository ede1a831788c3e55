"""The queue engine of an NVMe controller."""

from amaranth import Array, Cat, Elaboratable, Module, Mux, Signal, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.join import AxiReadJoin
from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.nvme.host_port import (
    BEAT_SHIFT,
    LINE_BEATS,
    PORT,
    BeatWrite,
    LineRead,
)
from nearstep_hw.nvme.layout import (
    IDENTIFIER_BITS,
    PAGE_BITS,
    RESULT_BITS,
    STATUS_BITS,
    CommandLayout,
    DoneLayout,
    EventLayout,
    OrderKind,
    OrderLayout,
    PartLayout,
    WalkLayout,
)
from nearstep_hw.nvme.queues import QueueTable
from nearstep_hw.nvme.registers import ADDRESS_BITS, NvmeRegisters
from nearstep_hw.nvme.under_way import UnderWay
from nearstep_hw.nvme.walker import PrpWalker
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_spec.nvme import EngineStatus, completed

ADMIN, IO = 0, 1
REPORTS = 4  # as many as a controller has requests for events
IDENTIFIER_AT = 16  # in an entry
NUMBER_BITS = 16  # of a queue, or of an entry, in a completion
EARLY, LATE = 0x0FFF, 0xF000  # bytes of a completion: the last dword has the phase
ABORTED = completed(EngineStatus.ABORTED_BY_DELETION)

Job = data.StructLayout(
    {
        "identifier": unsigned(IDENTIFIER_BITS),
        "status": unsigned(STATUS_BITS),
        "result": unsigned(RESULT_BITS),
        "io": unsigned(1),
        "event": unsigned(1),
        "aborts": unsigned(1),
    }
)
"""A completion, and what it is of: the admin command under way, or that of `io`; an `event`; a
command that is aborted because its queue is deleted."""


class QueueEngine(wiring.Component):
    """Registers and queues of a controller; firmware executes the commands.

    One admin command and one I/O command are under way at a time. A command is fetched when its
    executor has completed the last one and its completion queue has room; I/O queues have turns. A
    completion is written without its last dword, then the last dword, which has the phase, then the
    vector of the queue is requested. If a completion queue has become full in the meantime, the
    completion waits for room, and nothing else does.

    When a submission queue is deleted, its commands are completed as aborted, that under way too,
    as long as there is room; what firmware says of an aborted command is dropped. When the
    controller is disabled everything is dropped, and no access to memory of the host begins;
    CSTS.RDY falls when those under way have ended. If memory of a queue cannot be accessed,
    CSTS.CFS is set, and nothing more is fetched until the controller is disabled.

    Firmware takes a command, asks for the parts of its data if it has any (`i_walk`), and ends it
    (`i_done`), always, once, after the end of its walk. It takes `o_command`, `o_answer` and
    `o_part` at any time without waiting for anything else. Orders are those of the admin command
    under way. Firmware moves the data: it must begin no access for a command that is not `o_alive`.

    *Timing*: ARVALID rises three cycles after a fetch is chosen, `o_command.valid` three cycles
    after the last beat. AWVALID rises two cycles after a completion is chosen, and two after the
    first response; the interrupt is requested with the second.

    Parameters
    ----------
    io_queues : pairs of I/O queues.

    Members
    -------
    csr : registers and doorbells, see `NvmeRegisters`.
    m_axi : memory of the host; an error response is memory that is not there.
    o_interrupt : a bit for each vector, high for one cycle for each request.
    o_enabled : the controller is enabled; when it is not, firmware forgets requests for events.
    o_alive : of the admin and of the I/O command under way: it was not aborted.
    o_shutting, i_flushed : the host shuts down, caches must be flushed; they are.
    i_fail : firmware stops the controller: CSTS.CFS.
    o_command : commands.
    i_done : commands that were executed.
    i_event : admin commands that are completed later.
    i_order, o_answer : orders, and of each whether it was carried out.
    i_walk, o_part : see `PrpWalker`.
    o_report : wrong doorbells: 0 if there is none, 1 if the value is wrong. Some are kept.
    """

    def __init__(self, *, io_queues: int) -> None:
        if io_queues < 1:
            raise ValueError(f"I/O queues must be at least 1, not {io_queues!r}")
        self.queues = queues = io_queues + 1
        self.vectors = vectors = queues
        super().__init__(
            {
                "csr": In(CsrSignature(ADDRESS_BITS)),
                "m_axi": Out(Axi4Signature(**PORT, id_width=2)),
                "o_interrupt": Out(vectors),
                "o_enabled": Out(1),
                "o_alive": Out(2),
                "o_shutting": Out(1),
                "i_flushed": In(1),
                "i_fail": In(1),
                "o_command": Out(stream.Signature(CommandLayout(queues))),
                "i_done": In(stream.Signature(DoneLayout)),
                "i_event": In(stream.Signature(EventLayout)),
                "i_order": In(stream.Signature(OrderLayout(queues=queues, vectors=vectors))),
                "o_answer": Out(stream.Signature(1)),
                "i_walk": In(stream.Signature(WalkLayout)),
                "o_part": Out(stream.Signature(PartLayout)),
                "o_report": Out(stream.Signature(1)),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.registers = self._registers = NvmeRegisters()
        m.submodules.table = self._table = QueueTable(queues=self.queues, vectors=self.vectors)
        m.submodules.under_way = self._under_way = UnderWay(queues=self.queues)
        m.submodules.read = self._read = LineRead()
        m.submodules.write = self._write = BeatWrite()
        m.submodules.walker = self._walker = PrpWalker()
        m.submodules.join = join = AxiReadJoin(ports=2, **PORT, id_width=1)
        m.submodules.reports = reports = StreamFifo(1, depth=REPORTS)
        connect_channels(m, self._read.bus, join.s_axi[0])
        connect_channels(m, self._walker.bus, join.s_axi[1])
        connect_channels(m, join.m_axi, self.m_axi)
        connect_channels(m, self._write.bus, self.m_axi)
        wiring.connect(m, wiring.flipped(self.csr), self._registers.csr)
        wiring.connect(m, wiring.flipped(self.i_walk), self._walker.i)
        wiring.connect(m, self._walker.o, wiring.flipped(self.o_part))
        wiring.connect(m, wiring.flipped(self.i_done), self._under_way.i_done)
        wiring.connect(m, reports.o, wiring.flipped(self.o_report))
        m.d.comb += [
            reports.i.valid.eq(self._table.o_wrong),
            reports.i.payload.eq(self._table.o_wrong_value),
            reports.i_clear.eq(self._registers.o_clear),
        ]
        self._connect_registers(m)
        self._sequence(m)
        return m

    def _connect_registers(self, m: Module) -> None:
        registers, table, under_way = self._registers, self._table, self._under_way
        m.d.comb += [
            table.i_clear.eq(registers.o_clear),
            under_way.i_clear.eq(registers.o_clear),
            table.i_start.eq(registers.o_start),
            table.i_ring.eq(registers.o_ring),
            table.i_completions.eq(registers.o_completions),
            table.i_number.eq(registers.o_number),
            table.i_value.eq(registers.o_value),
            registers.i_flushed.eq(self.i_flushed),
            self.o_shutting.eq(registers.o_shutting),
            self.o_enabled.eq(registers.o_enabled),
            self.o_alive.eq(under_way.o_alive),
            self._walker.i_alive.eq(under_way.o_alive),
        ]
        for number in range(2):
            m.d.comb += [
                table.i_base[number].eq(registers.o_base[number]),
                table.i_last[number].eq(registers.o_last[number]),
            ]

    def _sequence(self, m: Module) -> None:
        """Do one thing at a time: an order, a completion, a fetch."""
        registers, table, under_way = self._registers, self._table, self._under_way
        read, write, queue = self._read, self._write, self._table.o_submissions
        number = Signal(range(self.queues))  # of the submission queue that is served
        off = Signal()  # the controller was disabled meanwhile
        off_since_idle = Signal()
        calm, failed, carried_out = Signal(), Signal(), Signal()
        job = Signal(Job)
        m.d.comb += [
            off.eq(off_since_idle | registers.o_clear),
            registers.i_quiet.eq(calm & read.o_idle & write.o_idle & self._walker.o_quiet),
            registers.i_fail.eq(failed | self.i_fail),
            table.i_drop.eq(failed | self.i_fail),
            table.i_select.eq(number),
            table.order.eq(self.i_order.payload),
            under_way.i_queue.eq(number),
            under_way.i_identifier.eq(read.line[IDENTIFIER_AT:]),
            under_way.i_io.eq(job.io),
            read.i.payload.beat.eq(
                (queue.base << PAGE_BITS - BEAT_SHIFT) + queue.head * LINE_BEATS
            ),
            read.i.payload.last.eq(LINE_BEATS - 1),
            self.o_command.payload.queue.eq(number),
            self.o_command.payload.entry.eq(read.line),
            self.o_answer.payload.eq(carried_out),
        ]
        with m.If(registers.o_clear):
            m.d.sync += off_since_idle.eq(1)

        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += calm.eq(1)
                m.d.sync += [
                    off_since_idle.eq(registers.o_clear),
                    job.event.eq(0),
                    job.aborts.eq(0),
                    carried_out.eq(0),
                ]
                self._choose(m, number, job)
            with m.State("ORDER"):  # `number` is that of a queue to be deleted
                self._carry_out(m, job, carried_out)
            with m.State("ANSWER"):
                m.d.comb += [calm.eq(1), self.o_answer.valid.eq(1)]
                with m.If(self.o_answer.ready):
                    m.next = "IDLE"

            with m.State("FETCH"):
                m.d.comb += read.i.valid.eq(~off)
                with m.If(off):
                    m.next = "FETCHED"
                with m.Elif(read.i.ready):
                    m.next = "READ"
            with m.State("READ"), m.If(read.o_done):
                m.next = "FETCHED"
            with m.State("FETCHED"):
                m.d.sync += job.identifier.eq(read.line[IDENTIFIER_AT:])
                with m.If(off | read.o_failed):
                    m.d.comb += failed.eq(~off)
                    m.d.sync += carried_out.eq(0)
                    with m.If(job.aborts):
                        m.next = "ANSWER"
                    with m.Else():
                        m.next = "IDLE"
                with m.Else():
                    m.d.comb += table.i_fetched.eq(1)
                    with m.If(job.aborts):
                        m.next = "ABORT"
                    with m.Else():
                        m.d.comb += under_way.i_take.eq(1)
                        m.next = "HAND"
            with m.State("HAND"):
                m.d.comb += [calm.eq(1), self.o_command.valid.eq(1)]
                with m.If(self.o_command.ready):
                    m.next = "IDLE"

            with m.State("ABORT"):  # a completion of an aborted command is optional
                with m.If(table.o_room.bit_select(number, 1)):
                    m.next = "POST"
                with m.Else():
                    m.next = "POSTED"
            self._post(m, number, job, off, failed)
            with m.State("POSTED"):
                m.d.comb += [
                    under_way.i_end.eq(~job.event & ~job.aborts),
                    self.i_event.ready.eq(job.event),
                ]
                with m.If(~job.aborts):
                    m.next = "IDLE"
                with m.Elif(off | (queue.head == queue.tail)):
                    m.d.sync += carried_out.eq(~off)
                    m.next = "ANSWER"
                with m.Else():
                    m.next = "FETCH"

    def _choose(self, m: Module, number: Signal, job: data.View) -> None:
        """Begin what is next."""
        registers, table, under_way = self._registers, self._table, self._under_way
        fetchable, next_io = Signal(self.queues), Signal(range(self.queues))
        last_io = Signal(range(self.queues))  # outlives a reset
        due = Signal(2)
        m.d.comb += fetchable.eq(
            Mux(registers.o_enabled & ~registers.o_failed, table.o_pending & table.o_room, 0)
        )
        for behind in (0, 1):  # queues behind the last one take precedence
            for each in reversed(range(1, self.queues)):
                with m.If(fetchable[each] & ((last_io < each) | (not behind))):
                    m.d.comb += next_io.eq(each)
        for each in (ADMIN, IO):
            room = table.o_room.bit_select(under_way.o_queue[each], 1)
            m.d.comb += due[each].eq(under_way.o_due[each] & room)

        with m.If(self.i_order.valid):
            m.d.sync += number.eq(self.i_order.payload.number)
            m.next = "ORDER"
        with m.Elif(due.any()):
            chosen = Mux(due[ADMIN], ADMIN, IO)
            m.d.sync += [
                job.io.eq(chosen),
                number.eq(Array(under_way.o_queue)[chosen]),
                job.identifier.eq(Array(under_way.o_identifier)[chosen]),
                job.status.eq(Array(under_way.o_status)[chosen]),
                job.result.eq(Array(under_way.o_result)[chosen]),
            ]
            m.next = "POST"
        with m.Elif(self.i_event.valid & (table.o_room[0] | ~registers.o_enabled)):
            m.d.sync += [
                number.eq(0),
                job.event.eq(1),
                job.identifier.eq(self.i_event.payload.identifier),
                job.status.eq(EngineStatus.SUCCESS),
                job.result.eq(self.i_event.payload.result),
            ]
            m.next = "POST"
            with m.If(~registers.o_enabled):
                m.next = "POSTED"
        with m.Elif(fetchable[0] & ~under_way.o_busy[ADMIN]):
            m.d.sync += number.eq(0)
            m.next = "FETCH"
        with m.Elif((next_io != 0) & ~under_way.o_busy[IO]):
            m.d.sync += [number.eq(next_io), last_io.eq(next_io)]
            m.next = "FETCH"

    def _carry_out(self, m: Module, job: data.View, carried_out: Signal) -> None:
        """Carry out an order; that deletes a queue, abort its commands."""
        table, under_way, order = self._table, self._under_way, self.i_order.payload
        may, deletes = Signal(), Signal()
        m.d.comb += [
            may.eq(table.o_may & under_way.o_alive[ADMIN]),
            deletes.eq(may & (order.kind == OrderKind.DELETE_SUBMISSIONS)),
            table.i_order.eq(may),
            under_way.i_delete.eq(deletes),
            self.i_order.ready.eq(1),
        ]
        m.d.sync += [
            carried_out.eq(may),
            job.aborts.eq(deletes),
            job.identifier.eq(under_way.o_identifier[IO]),
            job.status.eq(ABORTED),
            job.result.eq(0),
        ]
        m.next = "ANSWER"
        with m.If(deletes):
            m.next = "POSTED"
            with m.If(under_way.o_alive[IO] & (under_way.o_queue[IO] == order.number)):
                m.next = "ABORT"

    def _post(self, m: Module, number: Signal, job: data.View, off: Signal, failed: Signal) -> None:
        """Write a completion: all but its last dword, then that; then request the interrupt."""
        table, write = self._table, self._write
        queue, to = table.o_submissions, table.o_completions
        asked, late = write.i.payload, Signal()
        head, own = Signal(NUMBER_BITS), Signal(NUMBER_BITS)
        m.d.comb += [
            head.eq(Mux(job.aborts, queue.tail, queue.head)),
            own.eq(number),
            asked.beat.eq((to.base << PAGE_BITS - BEAT_SHIFT) + to.tail),
            asked.data.eq(Cat(job.result, head, own, job.identifier, to.phase, job.status)),
            asked.bytes.eq(Mux(late, LATE, EARLY)),
        ]
        with m.State("POST"):
            m.d.comb += write.i.valid.eq(~off)
            with m.If(off):
                m.d.sync += late.eq(0)
                m.next = "POSTED"
            with m.Elif(write.i.ready):
                m.next = "WRITE"
        with m.State("WRITE"), m.If(write.o_done):
            m.d.sync += late.eq(~late)
            m.next = "POST"
            with m.If(off | write.o_failed | late):
                m.d.sync += late.eq(0)
                m.d.comb += failed.eq(write.o_failed & ~off)
                m.next = "POSTED"
            with m.If(late & ~write.o_failed & ~off):
                m.d.comb += [
                    table.i_posted.eq(1),
                    self.o_interrupt.eq(Mux(to.interrupts, 1 << to.vector, 0)),
                ]
