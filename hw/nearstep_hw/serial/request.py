"""Requests: layout, the reader that checks them, and the port of the units that execute them."""

from amaranth import Cat, Elaboratable, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, Signature

from nearstep_hw.serial.request_buffer import LENGTH_BITS
from nearstep_hw.serial.uart import BYTE_BITS
from nearstep_spec.csr.model import WORD_BYTES
from nearstep_spec.serial.protocol import (
    ADDRESS_BYTES,
    ANSWER_BIT,
    MOST_DATA,
    PAGE_BYTES,
    REQUEST_BYTES,
    Op,
    Space,
    Status,
)

ADDRESS_BITS = BYTE_BITS * ADDRESS_BYTES
PAGE_BITS = (PAGE_BYTES - 1).bit_length()
STATUS_BITS = max(Status).bit_length()
WORD_SPACES = (Space.REGISTERS, Space.BOARD, Space.CONTROLLER)
"""Spaces of registers, which are accessed in whole words."""

HeaderLayout = data.StructLayout(
    {
        "op": 4,
        "space": 3,
        "is_answer": 1,
        "sequence": 8,
        "length": 16,
        "address": ADDRESS_BITS,
    }
)
"""The header of a request, in the byte order of the frame."""

assert HeaderLayout.size == BYTE_BITS * REQUEST_BYTES
assert ANSWER_BIT == 1 << (BYTE_BITS - 1)


class AccessSignature(Signature):
    """A request in execution, from the initiator's side.

    `valid` and `header` hold until `done`; `status` and `failed` are valid in the cycle of `done`.
    A write takes `header.length` bytes from `write_data`, or fewer after an error; a read outputs
    `header.length` bytes, or any number after an error.

    Members
    -------
    valid, header : the request.
    write_data : bytes to write.
    read_data : bytes read.
    done : the request has ended, with or without an error.
    status : of `nearstep_spec.serial.protocol.Status`.
    failed : address of the failure, within the page.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "valid": Out(1),
                "header": Out(HeaderLayout),
                "write_data": Out(stream.Signature(BYTE_BITS)),
                "read_data": In(stream.Signature(BYTE_BITS, always_ready=True)),
                "done": In(1),
                "status": In(STATUS_BITS),
                "failed": In(PAGE_BITS),
            }
        )


class RequestReader(wiring.Component):
    """Parses requests from a `RequestBuffer` and checks them.

    Bodies have at least a header. Bodies of answers, echoed by a line, and bodies
    with an unknown op or space are dropped.

    *Timing*: `o_valid` rises three cycles after the last byte of the header was taken.

    Members
    -------
    i_length, i : of a `RequestBuffer`.
    o_valid, o_header : a request, until `i_done`.
    o_bad : the request must not be executed, see `nearstep_spec.serial.protocol.Request.check`.
    o_data : data of the request; bytes not taken before `i_done` are discarded.
    i_done : strobe: the request has ended.
    """

    i_length: In(stream.Signature(LENGTH_BITS))
    i: In(stream.Signature(BYTE_BITS))
    o_valid: Out(1)
    o_header: Out(HeaderLayout)
    o_bad: Out(1)
    o_data: Out(stream.Signature(BYTE_BITS))
    i_done: In(1)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        header = self.o_header
        left = Signal(LENGTH_BITS)  # bytes of the body not taken yet
        number = Signal(range(REQUEST_BYTES))
        taken = Signal()
        m.d.comb += [self.o_data.payload.eq(self.i.payload), taken.eq(self.i.valid & self.i.ready)]
        with m.If(taken):
            m.d.sync += left.eq(left - 1)
        known = self._judge(m, left)
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.i_length.ready.eq(1)
                m.d.sync += [number.eq(0), left.eq(self.i_length.payload)]
                with m.If(self.i_length.valid):
                    m.next = "HEADER"
            with m.State("HEADER"):
                m.d.comb += self.i.ready.eq(1)
                with m.If(self.i.valid):
                    shifted = Cat(header.as_value()[BYTE_BITS:], self.i.payload)
                    m.d.sync += [header.eq(shifted), number.eq(number + 1)]
                    with m.If(number == REQUEST_BYTES - 1):
                        m.next = "COMPARE"
            with m.State("COMPARE"):
                m.next = "JUDGE"
            with m.State("JUDGE"):
                m.next = "SKIP"
                with m.If(known):
                    m.next = "SHOW"
            with m.State("SHOW"):
                m.d.comb += [
                    self.o_valid.eq(1),
                    self.o_data.valid.eq(self.i.valid & (left != 0)),
                    self.i.ready.eq(self.o_data.ready & (left != 0)),
                ]
                with m.If(self.i_done):
                    m.next = "SKIP"
            with m.State("SKIP"):
                m.d.comb += self.i.ready.eq(left != 0)
                with m.If(left == 0):
                    m.next = "IDLE"
        return m

    def _judge(self, m: Module, left: Signal) -> Signal:
        """Check the header, two cycles after it is complete; drive `o_bad`.

        Return whether the body is a request, valid one cycle after the header.
        """
        header = self.o_header
        is_sync, is_write, known = Signal(), Signal(), Signal()
        long, empty, plain, unaligned, words = (
            Signal(name=name) for name in ("long", "empty", "plain", "unaligned", "words")
        )
        data_wrong, read_only = Signal(), Signal()
        end = Signal(range(PAGE_BYTES + (1 << len(header.length))))
        m.d.sync += [
            is_sync.eq(header.op == Op.SYNC),
            known.eq(~header.is_answer & (header.op <= max(Op)) & (header.space <= max(Space))),
            empty.eq(header.length == 0),
            plain.eq(header.space == 0),
            long.eq(header.length > MOST_DATA),
            end.eq(header.address[:PAGE_BITS] + header.length),
            unaligned.eq((header.address[:2] | header.length[:2]) != 0),
            words.eq((header.space != Space.MEMORY) & (header.space != Space.MANIFEST)),
            read_only.eq((header.space == Space.MANIFEST) & (header.op == Op.WRITE)),
            is_write.eq(header.op == Op.WRITE),
        ]
        with m.If(is_write):
            m.d.comb += data_wrong.eq(left != header.length)
        with m.Else():
            m.d.comb += data_wrong.eq(left != 0)
        with m.If(is_sync):
            bad_use = ~empty | ~plain
            m.d.sync += self.o_bad.eq(data_wrong | bad_use)
        with m.Else():
            bad_use = empty | long | (end > PAGE_BYTES) | read_only | (unaligned & words)
            m.d.sync += self.o_bad.eq(data_wrong | bad_use)
        return known


assert WORD_BYTES == 4, "the two low bits of an address are within a word"
