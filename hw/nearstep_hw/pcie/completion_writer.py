"""Sends completions: descriptor, and payload from memory or registers."""

from amaranth import Cat, Const, Elaboratable, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.pcie.completion_job import MAX_PAYLOAD_DWORDS, CompletionJob, Source
from nearstep_hw.pcie.descriptor import (
    COMPLETION_DWORDS,
    REQUEST_COPY_DWORDS,
    CompletionDescriptor,
    RequestType,
    Status,
)
from nearstep_hw.pcie.dword_packer import DwordRun, interleave
from nearstep_hw.pcie.register_access import RegisterAnswer, RegisterRead
from nearstep_hw.pcie.stream import DWORD_BITS

ELEMENT_BITS = DWORD_BITS + 1  # a dword and its bit of TKEEP


class CompletionWriter(wiring.Component):
    """Executes completion jobs in order.

    A completion begins when all of its payload is available, and continues without a gap, as the
    hard block requires. A burst that memory answered with an error is a Completer Abort, and ends
    its request: other data read for the request are dropped. A register access with an error is an
    Unsupported Request. The descriptor of an unsuccessful completion is followed by a copy
    of the request, for the error log of the hard block.

    *Timing*: one run for the descriptor (two if `width` is 64), then one for each `width` bits of
    memory that the payload touches, without a gap between completions.

    Parameters
    ----------
    width : bits of the CC stream.
    data_width : bits of a beat of memory.

    Members
    -------
    i : jobs.
    i_beat, i_verdict : beats and verdicts of the jobs' bursts, in order.
    o_read, i_answer : reads of registers, and their answers.
    o : runs of dwords, each with a bit of TKEEP.
    o_failed : an unsuccessful completion begins.

    Ref: PG213, "Completer Completion Interface Operation" and "Completions with Error Status".
    """

    def __init__(self, *, width: int, data_width: int) -> None:
        self.width = width
        self.data_width = data_width
        self.elements = width // DWORD_BITS
        self.lanes = data_width // DWORD_BITS
        run = DwordRun(elements=self.elements, element_width=ELEMENT_BITS, lanes=self.elements)
        super().__init__(
            {
                "i": In(stream.Signature(CompletionJob(self.lanes))),
                "i_beat": In(stream.Signature(data_width)),
                "i_verdict": In(stream.Signature(1)),
                "o_read": Out(stream.Signature(RegisterRead)),
                "i_answer": In(stream.Signature(RegisterAnswer)),
                "o": Out(stream.Signature(run)),
                "o_failed": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        elements, job, run = self.elements, self.i.payload, self.o.payload
        status = Signal(Status)
        good = Signal()
        from_memory = Signal()
        from_registers = Signal()
        asked = Signal()  # the registers of this job have been read
        at_hand = Signal()  # payload and status
        abandoned = Signal()  # the request has been answered already, with an error
        m.d.comb += [
            from_memory.eq(job.source == Source.MEMORY),
            from_registers.eq((job.source == Source.REGISTERS) & ~job.empty),
            good.eq(status == Status.SUCCESSFUL),
            self.o_read.valid.eq(self.i.valid & from_registers & ~asked),
            self.o_read.payload.word.eq(job.word),
            self.o_read.payload.both.eq(job.dwords == 2),
        ]
        with m.If(from_memory):
            m.d.comb += at_hand.eq(self.i_verdict.valid)
            with m.If(self.i_verdict.payload):
                m.d.comb += status.eq(Status.COMPLETER_ABORT)
        with m.Elif(from_registers):
            m.d.comb += at_hand.eq(self.i_answer.valid)
            with m.If(self.i_answer.payload.error):
                m.d.comb += status.eq(Status.UNSUPPORTED_REQUEST)
        with m.Else():
            m.d.comb += at_hand.eq(1)
            with m.If(job.source == Source.NOWHERE):
                m.d.comb += status.eq(job.status)
        with m.If(self.o_read.valid & self.o_read.ready):
            m.d.sync += asked.eq(1)

        head_dwords = Mux(good, COMPLETION_DWORDS, COMPLETION_DWORDS + REQUEST_COPY_DWORDS)
        parts = -(-(COMPLETION_DWORDS + REQUEST_COPY_DWORDS) // elements)
        part = Signal(range(parts + 1))
        sent = Signal(range(parts * elements + 1))  # dwords of the head
        head = self._head(m, job, status, good)
        head_left = Signal(range(COMPLETION_DWORDS + REQUEST_COPY_DWORDS + 1))
        head_ends = Signal()
        m.d.comb += [
            sent.eq(part * elements),
            head_left.eq(head_dwords - sent),
            head_ends.eq(head_left <= elements),
        ]

        lane = Signal(range(self.lanes))
        left = Signal(range(MAX_PAYLOAD_DWORDS + 1))  # dwords of payload
        quiet = Signal()  # payload is dropped
        word, count, word_ends = self._word(m, lane, left)
        payload_ends = Signal()
        done = Signal()
        m.d.comb += [
            payload_ends.eq(left == count),
            self.i.ready.eq(done),
            self.i_verdict.ready.eq(done & from_memory),
            self.i_answer.ready.eq(done & from_registers),
        ]
        keep = Const(-1, elements)
        with m.If(done):
            m.d.sync += [asked.eq(0), abandoned.eq(quiet & ~job.last)]
        with m.FSM():
            with m.State("HEAD"):
                m.d.comb += [
                    self.o.valid.eq(self.i.valid & at_hand & ~abandoned),
                    run.elements.eq(interleave(head.word_select(part, self.width), keep, elements)),
                    run.count.eq(Mux(head_ends, head_left, elements)),
                    run.last.eq(head_ends & ~good),
                ]
                m.d.sync += [lane.eq(job.lane), left.eq(job.dwords), quiet.eq(abandoned)]
                with m.If(self.o.valid & self.o.ready):
                    m.d.sync += part.eq(part + 1)
                    with m.If(head_ends):
                        m.d.sync += [part.eq(0), quiet.eq(~good)]
                        m.d.comb += self.o_failed.eq(~good)
                        with m.If(from_memory):
                            m.next = "MEMORY"
                        with m.Elif(good):
                            m.next = "REGISTERS"
                        with m.Else():
                            m.d.comb += done.eq(1)
                with m.If(self.i.valid & at_hand & abandoned):
                    m.next = "MEMORY"
            with m.State("MEMORY"):
                step = Signal()
                m.d.comb += [
                    self.o.valid.eq(self.i_beat.valid & ~quiet),
                    step.eq(self.i_beat.valid & (self.o.ready | quiet)),
                    run.elements.eq(interleave(word, keep, elements)),
                    run.count.eq(count),
                    run.last.eq(payload_ends),
                    self.i_beat.ready.eq(step & (word_ends | payload_ends)),
                ]
                with m.If(step):
                    m.d.sync += [lane.eq(lane + count), left.eq(left - count)]
                    with m.If(payload_ends):
                        m.d.comb += done.eq(1)
                        m.next = "HEAD"
            with m.State("REGISTERS"):
                answer = Mux(from_registers, self.i_answer.payload.data, 0)
                m.d.comb += [
                    self.o.valid.eq(1),
                    run.elements.eq(interleave(answer, keep[:2], 2)),
                    run.count.eq(left),
                    run.last.eq(1),
                ]
                with m.If(self.o.ready):
                    m.d.comb += done.eq(1)
                    m.next = "HEAD"
        return m

    def _head(self, m: Module, job: data.View, status: Signal, good: Signal) -> Signal:
        """Return the descriptor of the completion and a copy of the request."""
        request = job.head.descriptor
        descriptor = Signal(CompletionDescriptor)
        m.d.comb += [
            descriptor.lower_address.eq(job.lower_address),
            descriptor.address_type.eq(request.address_type),
            descriptor.byte_count.eq(job.byte_count),
            descriptor.locked.eq(request.request_type == RequestType.LOCKED_READ),
            descriptor.dwords.eq(Mux(good, job.dwords, 0)),
            descriptor.status.eq(status),
            descriptor.requester_id.eq(request.requester_id),
            descriptor.tag.eq(request.tag),
            descriptor.function.eq(request.function),
            descriptor.traffic_class.eq(request.traffic_class),
            descriptor.attributes.eq(request.attributes),
        ]
        head_bits = DWORD_BITS * (COMPLETION_DWORDS + REQUEST_COPY_DWORDS)
        head = Signal(-(-head_bits // self.width) * self.width)
        m.d.comb += head.eq(Cat(descriptor, job.head.sideband, job.head.descriptor))
        return head

    def _word(self, m: Module, lane: Signal, left: Signal) -> tuple[Signal, Signal, Signal]:
        """Return the next dwords of the beat, their count, and whether they end the beat."""
        bits = exact_log2(self.elements)
        word = Signal(self.width)
        count = Signal(range(self.elements + 1))
        ends = Signal()
        start = lane[:bits]
        room = Signal.like(count)
        m.d.comb += [
            word.eq(
                self.i_beat.payload.word_select(lane[bits:], self.width) >> (start * DWORD_BITS)
            ),
            room.eq(self.elements - start),
            count.eq(Mux(left < room, left, room)),
            ends.eq((lane[bits:] + 1) * self.elements == self.lanes),
        ]
        return word, count, ends
