"""Executor of requests, one after the other."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.serial.answer_writer import MOST_MANIFEST, AnswerLayout, Content
from nearstep_hw.serial.request import (
    PAGE_BITS,
    STATUS_BITS,
    WORD_SPACES,
    AccessSignature,
    HeaderLayout,
)
from nearstep_hw.serial.uart import BYTE_BITS
from nearstep_spec.serial.protocol import Op, Space, Status

MANIFEST_BITS = MOST_MANIFEST.bit_length()
COMPARED_BITS = 8  # compared at once


class Executor(wiring.Component):
    """Dispatches requests: checks the session and repeated writes, and selects the port.

    *Timing*: four cycles before the access or the answer, and one after an access.

    Parameters
    ----------
    manifest_bytes : length of the manifest.

    Members
    -------
    i_valid, i_header, i_bad, i_data, o_done : of a `RequestReader`.
    words, memory : to the units that access registers and memory.
    o_data : bytes read.
    o_clear : strobe: a request begins.
    o : answer to the request.
    """

    def __init__(self, *, manifest_bytes: int) -> None:
        self.manifest_bytes = manifest_bytes
        super().__init__(
            {
                "i_valid": In(1),
                "i_header": In(HeaderLayout),
                "i_bad": In(1),
                "i_data": In(stream.Signature(BYTE_BITS)),
                "o_done": Out(1),
                "words": Out(AccessSignature()),
                "memory": Out(AccessSignature()),
                "o_data": Out(stream.Signature(BYTE_BITS, always_ready=True)),
                "o_clear": Out(1),
                "o": Out(stream.Signature(AnswerLayout)),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        header, answer = self.i_header, self.o.payload
        on_memory, run, session = Signal(), Signal(), Signal()
        status, failed = Signal(STATUS_BITS), Signal(PAGE_BITS)
        words, memory = self.words, self.memory
        outside = self._outside(m)
        write, remember = Signal(), Signal()
        repeated, then_status, then_failed = self._last_write(m, write, remember, status, failed)
        number = Signal.like(header.address)  # of the session
        same_number = _same(m, number, header.address)

        for access, chosen in ((words, ~on_memory), (memory, on_memory)):
            m.d.comb += [
                access.valid.eq(run & chosen),
                access.header.eq(header),
                access.write_data.valid.eq(self.i_data.valid & chosen),
                access.write_data.payload.eq(self.i_data.payload),
            ]
            with m.If(chosen):
                m.d.comb += [
                    self.i_data.ready.eq(access.write_data.ready),
                    self.o_data.valid.eq(access.read_data.valid),
                    self.o_data.payload.eq(access.read_data.payload),
                ]
        m.d.comb += [
            answer.header.eq(header),
            answer.header.address[:PAGE_BITS].eq(failed),
            answer.status.eq(status),
            self.o_done.eq(self.o.valid & self.o.ready),
        ]
        m.d.sync += on_memory.eq(header.space == Space.MEMORY)
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.o_clear.eq(1)
                m.d.sync += [
                    status.eq(Status.OK),
                    failed.eq(header.address),
                    answer.content.eq(Content.NOTHING),
                    answer.manifest.eq(0),
                ]
                with m.If(self.i_valid):
                    m.next = "COMPARE"
            with m.State("COMPARE"):
                m.next = "COMBINE"
            with m.State("COMBINE"):
                m.next = "DECIDE"
            with m.State("DECIDE"):
                m.next = "ANSWER"
                with m.If((header.op == Op.SYNC) & ~self.i_bad):
                    m.d.comb += remember.eq(~(session & same_number))
                    m.d.sync += [
                        session.eq(1),
                        number.eq(header.address),
                        answer.content.eq(Content.HELLO),
                    ]
                with m.Elif(~session):
                    m.d.sync += status.eq(Status.NO_SESSION)
                with m.Elif(self.i_bad):
                    m.d.sync += status.eq(Status.BAD_REQUEST)
                with m.Elif(repeated):
                    m.d.sync += [status.eq(then_status), failed.eq(then_failed)]
                    with m.If(then_status != Status.OK):
                        m.d.sync += answer.content.eq(Content.ADDRESS)
                with m.Elif(header.space != Space.MANIFEST):
                    m.next = "RUN"
                with m.Elif(outside):
                    m.d.comb += remember.eq(1)
                    m.d.sync += [status.eq(Status.DECERR), answer.content.eq(Content.ADDRESS)]
                with m.Else():
                    m.d.comb += remember.eq(1)
                    m.d.sync += [answer.content.eq(Content.BYTES), answer.manifest.eq(1)]
            with m.State("RUN"):
                m.d.comb += run.eq(1)
                m.d.sync += [
                    status.eq(Mux(on_memory, memory.status, words.status)),
                    failed.eq(Mux(on_memory, memory.failed, words.failed)),
                ]
                with m.If(words.done | memory.done):
                    m.next = "OUTCOME"
            with m.State("OUTCOME"):
                m.d.comb += [remember.eq(1), write.eq(header.op == Op.WRITE)]
                with m.If(status != Status.OK):
                    m.d.sync += answer.content.eq(Content.ADDRESS)
                with m.Elif(header.op == Op.READ):
                    m.d.sync += answer.content.eq(Content.BYTES)
                m.next = "ANSWER"
            with m.State("ANSWER"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.next = "IDLE"
        return m

    def _outside(self, m: Module) -> Signal:
        """Return whether the requested range exceeds the manifest."""
        header = self.i_header
        offset = header.address[:MANIFEST_BITS]
        end, beyond, outside = Signal(MANIFEST_BITS + 1), Signal(), Signal()
        m.d.sync += [
            end.eq(offset + header.length),
            beyond.eq(header.address[MANIFEST_BITS:] != 0),
            outside.eq((end > self.manifest_bytes) | beyond),
        ]
        return outside

    def _last_write(
        self, m: Module, write: Signal, remember: Signal, status: Signal, failed: Signal
    ) -> tuple[Signal, Signal, Signal]:
        """Return whether the request repeats the last request, a write of registers, with the
        status and the address of failure of that write.

        `remember` records the request, `write` that it was a write.
        """
        header = self.i_header
        now = Cat(header.sequence, header.space, header.address)
        is_words = Signal()
        last, known = Signal(len(now)), Signal()
        then_status, then_failed = Signal.like(status), Signal.like(failed)
        repeats, repeated = Signal(), Signal()
        m.d.sync += [
            is_words.eq(Cat(header.space == space for space in WORD_SPACES).any()),
            repeats.eq(known & is_words & (header.op == Op.WRITE)),
        ]
        m.d.comb += repeated.eq(repeats & _same(m, now, last))
        with m.If(remember):
            m.d.sync += [
                known.eq(write & is_words),
                last.eq(now),
                then_status.eq(status),
                then_failed.eq(failed),
            ]
        return repeated, then_status, then_failed


def _same(m: Module, first: Value, second: Value) -> Signal:
    """Return whether the values were equal two cycles ago."""
    parts, same = Signal(-(-len(first) // COMPARED_BITS), name="parts"), Signal()
    for number, bit in enumerate(parts):
        part = slice(number * COMPARED_BITS, (number + 1) * COMPARED_BITS)
        m.d.sync += bit.eq(first[part] == second[part])
    m.d.sync += same.eq(parts.all())
    return same
