"""Proofs of the sequence numbers of links, over links that lose, double and hold back anything;
and of what a snapshot keeps, and of a queue of jobs.
"""

import pytest
from amaranth.hdl import Assert, Assume, Cover, Module, Mux, Signal, Value
from amaranth.lib.wiring import Component, In
from amaranth.utils import exact_log2

from nearstep_hw.coarse.job_queue import JobQueue
from nearstep_hw.coarse.recv_flow import RecvFlow
from nearstep_hw.coarse.send_flow import SendFlow
from nearstep_hw.coarse.snapshot import SnapshotGate
from nearstep_sim.bench.formal import prove
from nearstep_spec.coarse.config import PAGE_BYTES, CoarseConfig

from .toolkit import held, refuted

pytestmark = pytest.mark.formal


def moved(m: Module, name: str, now: Value, bits: int, width: int) -> Signal:
    """A number modulo `2 ** bits` without the modulo: steps are taken to go forward."""
    whole = Signal(width, name=name)
    before = Signal(width, name=f"{name}_before")
    step = Signal(bits, name=f"{name}_step")
    m.d.comb += [step.eq(now - before[:bits]), whole.eq(before + step)]
    m.d.sync += before.eq(whole)
    return whole


class SendOrder(Component):
    """Whatever the peer says, the numbers of a sender stay in order and in their buffers."""

    def __init__(self, depth: int, sequence_bits: int) -> None:
        self.flow = SendFlow(depth=depth, sequence_bits=sequence_bits)
        inputs = {
            name: In(member.shape)
            for name, member in self.flow.signature.members.items()
            if name.startswith("i_")
        }
        super().__init__(inputs)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.flow = flow = self.flow
        for name in self.signature.members:
            m.d.comb += getattr(flow, name).eq(getattr(self, name))
        depth, bits = flow.depth, flow.sequence_bits
        acknowledged, again, next_, sent, promised, written = (
            Signal(bits, name=name)
            for name in ("acknowledged", "again", "next_", "sent", "promised", "written")
        )
        m.d.comb += [
            acknowledged.eq(flow.o_acknowledged - flow.o_consumed),
            promised.eq(flow.o_sent - flow.o_consumed),
            again.eq(flow.o_again - flow.o_acknowledged),
            next_.eq(flow.o_next - flow.o_acknowledged),
            sent.eq(flow.o_sent - flow.o_acknowledged),
            written.eq(flow.o_written - flow.o_acknowledged),
            Assume(~self.i_put | flow.o_room),
            Assume(~self.i_take | flow.o_offer),
            Assert((sent <= written) & (written <= depth)),
            Assert((acknowledged <= promised) & (promised <= depth)),
            Assert(flow.o_room == (written != depth)),
            # What goes out is in the buffer, and was sent before if that is said of it.
            Assert(~flow.o_offer | (next_ < written)),
            Assert(~flow.o_found | ((again < sent) & flow.o_missing[0])),
            Assert((flow.o_missing == 0) | (again <= sent)),
            Cover((promised == depth) & (next_ == 0) & flow.o_replay),
        ]
        return m


class Flows(Component):
    """A sender and a receiver, and a link that brings anything that was ever sent, at any time.

    Numbers are followed without modulo. An entry that comes is any that was sent, and a header
    any that could have been, as long as it is not so old that its numbers came round again. What is
    said of serial numbers and single entries is anything at all. One entry is watched, any.

    Parameters
    ----------
    older : numbers by which what comes may be older than allowed.
    """

    DEPTH, BITS, WIDTH = 2, 3, 7

    def __init__(self, older: int = 0) -> None:
        self.older = older
        width = self.WIDTH
        super().__init__(
            {
                "i_put": In(1),
                "i_take": In(1),
                "i_retry": In(2),
                "i_heard": In(1),
                "i_received": In(width),
                "i_consumed": In(width),
                "i_told": In(1),
                "i_passed": In(self.BITS),
                "i_accepted": In(self.DEPTH),
                "i_begin": In(1),
                "i_entry": In(width),
                "i_serial": In(self.BITS),
                "i_probe": In(1),
                "i_answer": In(1),
                "i_watched": In(width),
                "i_end": In(1),
                "i_fail": In(1),
                "i_consume": In(1),
                "i_report": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        depth, bits, width = self.DEPTH, self.BITS, self.WIDTH
        m.submodules.sender = sender = SendFlow(depth=depth, sequence_bits=bits)
        m.submodules.receiver = receiver = RecvFlow(depth=depth, sequence_bits=bits)
        for flow in (sender, receiver):
            for name in self.signature.members.keys() & flow.signature.members.keys():
                m.d.comb += getattr(flow, name).eq(getattr(self, name))
        m.d.comb += receiver.i_sequence.eq(self.i_entry)
        held(m, self.i_watched)

        written = moved(m, "written", sender.o_written, bits, width)
        sent = moved(m, "sent", sender.o_sent, bits, width)
        acknowledged = moved(m, "acknowledged", sender.o_acknowledged, bits, width)
        freed = moved(m, "freed", sender.o_consumed, bits, width)
        received = moved(m, "received", receiver.o_received, bits, width)
        consumed = moved(m, "consumed", receiver.o_consumed, bits, width)
        storing, watched = Signal(width), self.i_watched
        taken = Signal()  # the one that is watched
        beyond = Signal(width)
        in_map = Signal()
        m.d.comb += [
            beyond.eq(watched - received),
            in_map.eq((watched >= received) & (beyond < depth)),
        ]
        with m.If(self.i_begin):
            m.d.sync += storing.eq(self.i_entry)
        with m.If(receiver.o_accept & (storing == watched)):
            m.d.sync += taken.eq(1)

        entry_age = (1 << bits) - depth + self.older
        header_age = (1 << bits) - depth - 1 + self.older
        m.d.comb += [
            Assume(written < (1 << width) - (1 << bits)),  # of the count only: it must not wrap
            Assume(~self.i_put | sender.o_room),
            Assume(~self.i_take | sender.o_offer),
            Assume(~self.i_consume | receiver.o_available),
            Assume(~(self.i_end & (self.i_begin | self.i_fail))),
            Assume(
                ~self.i_begin | ((self.i_entry < sent) & (self.i_entry + entry_age >= consumed))
            ),
            Assume((self.i_received <= received) & (self.i_consumed <= consumed)),
            Assume(self.i_received + header_age >= acknowledged),
            Assume(self.i_consumed + header_age >= freed),
        ]
        m.d.comb += [
            # Nothing is dropped before it is there, nor read before it came, nor over-promised.
            Assert((freed <= acknowledged) & (acknowledged <= received)),
            Assert((freed <= consumed) & (consumed <= received) & (received <= sent)),
            Assert((acknowledged <= sent) & (sent <= written)),
            Assert(sent - freed <= depth),
            Assert(written - acknowledged <= depth),
            Assert(received - consumed <= depth),
            # Each entry once, none left out; what is read was taken.
            Assert(~receiver.o_accept | (storing != watched) | ~taken),
            Assert((watched >= received) | taken),
            Assert(~receiver.o_available | (consumed < received)),
            Assert(~in_map | (receiver.o_accepted.bit_select(beyond[:1], 1) == taken)),
            Assert(~taken | (watched < received) | in_map),
            *(
                Assert(~bit | ((received + ahead < sent) & (received + ahead < consumed + depth)))
                for ahead, bit in enumerate(receiver.o_accepted)
            ),
            # There is a place for it, that of no other entry that was taken and not read.
            Assert(~receiver.o_storing | ((storing >= received) & (storing < sent))),
            Assert(~receiver.o_storing | (storing < consumed + depth)),
            Assert(
                ~receiver.o_storing
                | ~receiver.o_accepted.bit_select((storing - received)[: exact_log2(depth)], 1)
            ),
            Assert(~receiver.o_storing | (receiver.o_place == storing[:bits])),
            Assert(
                ~(receiver.o_storing & taken & (watched >= consumed))
                | ((storing ^ watched)[: exact_log2(depth)] != 0)
            ),
            Assert(~self.i_begin | (self.i_entry != watched) | (receiver.o_duplicate == taken)),
            Cover(receiver.o_accept & (received == 4)),
            Cover(receiver.o_accept & (storing == received + 1)),
            Cover(receiver.o_duplicate & (received == 3)),
        ]
        return m


class FairLink(Component):
    """While nothing is lost, an entry that is out is taken within `LIMIT` cycles.

    An entry takes two cycles on the link. A probe goes in each other cycle in which `i_probe`, a
    header the other way in each other cycle in which `i_speak`; any may be lost, whenever the
    solver likes. No timer runs.
    """

    DEPTH, BITS, LIMIT = 2, 3, 10

    def __init__(self, limit: int | None = None) -> None:
        self.limit = self.LIMIT if limit is None else limit
        super().__init__(
            {
                f"i_{name}": In(1)
                for name in ("put", "wait", "probe", "lose", "break", "speak", "deaf", "read")
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        depth, bits = self.DEPTH, self.BITS
        m.submodules.sender = sender = SendFlow(depth=depth, sequence_bits=bits)
        m.submodules.receiver = receiver = RecvFlow(depth=depth, sequence_bits=bits)
        begins, ends, probes, speaks, spoke = (Signal() for _ in range(5))
        sequence, serial = Signal(bits), Signal(bits)
        take = Signal()
        m.d.comb += [
            take.eq(sender.o_offer & ~begins & ~self.i_wait),
            sender.i_put.eq(self.i_put & sender.o_room),
            sender.i_take.eq(take),
            receiver.i_begin.eq(begins & ~self.i_lose),
            receiver.i_sequence.eq(sequence),
            receiver.i_serial.eq(serial),
            receiver.i_probe.eq(probes & ~self.i_lose),
            receiver.i_end.eq(ends & ~self.i_break),
            receiver.i_fail.eq(ends & self.i_break),
            receiver.i_consume.eq(self.i_read & receiver.o_available),
            speaks.eq(self.i_speak & ~spoke),
            receiver.i_report.eq(speaks),
            sender.i_heard.eq(speaks & ~self.i_deaf),
            sender.i_received.eq(receiver.o_received),
            sender.i_consumed.eq(receiver.o_consumed),
            sender.i_told.eq(1),
            sender.i_passed.eq(receiver.o_passed),
            sender.i_accepted.eq(receiver.o_accepted),
        ]
        m.d.sync += [
            begins.eq(take),
            ends.eq(receiver.i_begin),
            spoke.eq(speaks),
            probes.eq(self.i_probe & ~take & ~begins),
            serial.eq(sender.o_serial + take),
        ]
        with m.If(take):
            m.d.sync += sequence.eq(sender.o_next)

        fair = Signal()
        waits = Signal()
        stuck = Signal(range(self.limit + 2))
        m.d.comb += [
            fair.eq(
                ~self.i_wait
                & self.i_probe
                & ~self.i_lose
                & ~self.i_break
                & self.i_speak
                & ~self.i_deaf
            ),
            waits.eq((sender.o_sent != receiver.o_received) & ~receiver.o_accept),
            Assert(stuck <= self.limit),
            Cover((stuck > 2) & sender.o_replay),
        ]
        m.d.sync += stuck.eq(Mux(fair & waits & (stuck <= self.limit), stuck + 1, 0))
        return m


class GateHolds(Component):
    """No write passes to a page that is frozen and not copied, and none is under way at opening.

    A snapshot that is told to close keeps nothing more.

    One page is watched, any. An address of a write holds until it is taken. The ranges of the
    snapshot do not change. Nothing of a copy arrives: it takes more cycles than the proof has.

    Parameters
    ----------
    behind : pages behind the frozen ones that are said to be frozen as well.
    """

    def __init__(self, behind: int = 0) -> None:
        self.behind = behind
        config = CoarseConfig(memory_bytes=4 * PAGE_BYTES, snapshot_pages=2)
        self.gate = SnapshotGate(config, id_width=1)
        super().__init__(
            {
                **{name: In(1) for name in ("i_open", "i_close")},
                **{name: In(1) for name in ("i_awvalid", "i_awready", "i_wvalid", "i_bvalid")},
                **{name: In(2) for name in ("i_page", "i_base", "i_area", "i_pages", "i_watched")},
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.gate = gate = self.gate
        host, memory = gate.s_axi, gate.m_axi
        held(m, self.i_base, self.i_area, self.i_pages, self.i_watched)
        m.d.comb += [
            gate.i_open.eq(self.i_open),
            gate.i_close.eq(self.i_close),
            gate.i_base.eq(self.i_base * PAGE_BYTES),
            gate.i_area.eq(self.i_area * PAGE_BYTES),
            gate.i_pages.eq(self.i_pages),
            host.aw.valid.eq(self.i_awvalid),
            host.aw.payload.addr.eq(self.i_page * PAGE_BYTES),
            host.w.valid.eq(self.i_wvalid),
            host.b.ready.eq(1),
            memory.aw.ready.eq(self.i_awready),
            memory.b.valid.eq(self.i_bvalid),
            gate.read.ar.ready.eq(1),
            gate.write.aw.ready.eq(1),
            gate.write.w.ready.eq(1),
        ]
        waits, page = Signal(), Signal(2)
        m.d.sync += [waits.eq(host.aw.valid & ~host.aw.ready), page.eq(self.i_page)]
        m.d.comb += Assume(~waits | (host.aw.valid & (self.i_page == page)))
        under_way = Signal(8)
        was_open, copied, given_up = Signal(), Signal(), Signal()
        passes, frozen = Signal(), Signal()
        offset = Signal(2)
        m.d.comb += [
            passes.eq(memory.aw.valid & memory.aw.ready),
            offset.eq(self.i_watched - self.i_base),
            frozen.eq(gate.o_open & ~given_up & (offset < self.i_pages + self.behind)),
            Assume(~self.i_bvalid | (under_way != 0)),
            Assert(~passes | (host.aw.valid & host.aw.ready)),
            Assert(~(passes & frozen & (self.i_page == self.i_watched)) | copied),
            Assert(~(gate.o_open & ~was_open) | (under_way == 0)),
            Cover(gate.read.ar.valid & (under_way == 2)),
            Cover(passes & gate.o_open & (under_way == 1)),
        ]
        m.d.sync += [
            under_way.eq(under_way + passes - (self.i_bvalid & (under_way != 0))),
            was_open.eq(gate.o_open),
        ]
        with m.If(self.i_close):
            m.d.sync += given_up.eq(1)
        with m.Elif(~gate.o_open):
            m.d.sync += given_up.eq(0)
        with m.If(~gate.o_open):
            m.d.sync += copied.eq(0)
        with m.Elif(gate.o_page_copied & (self.i_page == self.i_watched)):
            m.d.sync += copied.eq(1)
        return m


class QueueKeeps(Component):
    """A queue of jobs holds what was pushed and not taken, and tells what it dropped.

    Parameters
    ----------
    depth : of the queue.
    claimed : depth that the property states.
    """

    def __init__(self, depth: int, claimed: int | None = None) -> None:
        self.claimed = depth if claimed is None else claimed
        self.queue = JobQueue(address_width=1, depth=depth)
        super().__init__({name: In(1) for name in ("i_push", "i_take", "i_clear", "i_tag")})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.queue = queue = self.queue
        depth = self.queue.depth
        waiting = Signal(8)
        tags = Signal(depth)  # of the jobs that wait, the oldest lowest
        dropped, put, taken = Signal(), Signal(), Signal()
        m.d.comb += [
            queue.i_push.eq(self.i_push),
            queue.i_job.tag.eq(self.i_tag),
            queue.o.ready.eq(self.i_take),
            queue.i_clear.eq(self.i_clear),
            put.eq(self.i_push & (waiting != self.claimed)),
            taken.eq(queue.o.valid & self.i_take),
            Assert(queue.o_waiting == waiting),
            Assert(queue.o_overflow == dropped),
            Assert(~queue.o.valid | (waiting != 0)),
            Assert(~queue.o.valid | (queue.o.payload.tag == tags[0])),
            Cover(dropped & (waiting == 1)),
        ]
        left = Signal.like(waiting)
        m.d.comb += left.eq(waiting - taken)
        with m.If(self.i_clear):
            m.d.sync += [waiting.eq(0), dropped.eq(0)]
        with m.Else():
            m.d.sync += [waiting.eq(left + put), dropped.eq(dropped | (self.i_push & ~put))]
            rest = (tags >> taken) & ((1 << left) - 1)
            m.d.sync += tags.eq(rest | ((put & self.i_tag) << left))
        return m


@pytest.mark.parametrize(
    ("depth", "sequence_bits"),
    [(2, 6), (8, 6), (32, 6)],
)
@pytest.mark.deep
def test_a_senders_numbers_stay_in_order_whatever_it_hears(depth, sequence_bits):
    """By induction: for runs of any length."""
    dut = SendOrder(depth, sequence_bits)
    assert prove(dut, f"send_order{depth}", "prove", depth=2).statements >= 6


def test_every_entry_is_taken_once_and_has_a_place():
    """By induction: for any loss, doubling and order, as long as no number comes round."""
    assert prove(Flows(), "flows", "prove", depth=2).statements >= 16


@pytest.mark.deep
def test_flows_move_and_see_duplicates():
    assert prove(Flows(), "flows", "cover", depth=16).statements == 3


@pytest.mark.deep
def test_the_proof_fails_for_numbers_that_came_round():
    refuted(Flows(older=1), "flows_old", depth=32)


@pytest.mark.deep
def test_an_entry_that_is_out_is_taken_once_the_link_is_fair():
    assert prove(FairLink(), "fair", "bmc", depth=18).statements == 1
    assert prove(FairLink(), "fair", "cover", depth=24).statements == 1


@pytest.mark.deep
def test_the_proof_of_progress_fails_for_a_limit_too_short():
    refuted(FairLink(limit=3), "fair_short", depth=16)


@pytest.mark.deep
def test_no_write_passes_to_a_page_that_is_frozen_and_not_copied():
    """For as long as it takes to open a snapshot, close it and open it again."""
    assert prove(GateHolds(), "gate", "bmc", depth=14).statements == 3
    assert prove(GateHolds(), "gate", "cover", depth=14).statements == 2


@pytest.mark.deep
def test_the_proof_fails_for_a_page_that_is_not_frozen():
    refuted(GateHolds(behind=1), "gate_behind", depth=14)


@pytest.mark.deep
def test_a_queue_of_jobs_keeps_their_order_and_tells_what_it_dropped():
    assert prove(QueueKeeps(2), "job_queue", "bmc", depth=10).statements == 4
    assert prove(QueueKeeps(2), "job_queue", "cover", depth=10).statements == 1


@pytest.mark.deep
def test_the_proof_fails_for_a_queue_of_another_depth():
    refuted(QueueKeeps(4, claimed=2), "job_queue_deep", depth=14)
