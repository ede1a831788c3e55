"""Writer of answers, with read data or the board's manifest."""

from amaranth import Array, Const, Elaboratable, Module, Mux, Signal
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearstep_hw.serial.request import STATUS_BITS, HeaderLayout
from nearstep_hw.serial.uart import BYTE_BITS
from nearstep_hw.stream.gearbox import PieceLayout
from nearstep_spec.errors import NearstepError
from nearstep_spec.serial.protocol import (
    ADDRESS_BYTES,
    ANSWER_BIT,
    ANSWER_BYTES,
    MOST_DATA,
    VERSION,
    Hello,
)

MOST_MANIFEST = (1 << 16) - 1
MOST_WINDOW = (1 << 8) - 1
HELLO_BYTES = len(Hello(number=0, window=1, manifest_bytes=0).encode())


class ManifestSizeError(NearstepError, ValueError):
    """A manifest is too long for the length field of an answer."""


class Content(enum.Enum, shape=2):
    """Kind of an answer's data."""

    NOTHING = 0
    ADDRESS = 1  # of the failure
    HELLO = 2  # the answer to SYNC
    BYTES = 3  # read data, or part of the manifest


AnswerLayout = data.StructLayout(
    {
        "header": HeaderLayout,  # of the request, with the address of the failure
        "status": STATUS_BITS,
        "content": Content,
        "manifest": 1,  # the bytes are read from the manifest
    }
)
"""An answer without its read data."""


class AnswerWriter(wiring.Component):
    """Buffers the bytes that a request reads, and writes its answer.

    Manifest and bytes share a memory: one block RAM of 2 KiB holds a manifest of 1 KiB.

    *Timing*: the first byte is at `o` four cycles behind `i.valid`; a byte every four cycles.

    Parameters
    ----------
    manifest : the text behind `Space.MANIFEST`.
    window : requests that the board holds.

    Members
    -------
    i_data : bytes that were read.
    i_clear : strobe: the next bytes belong to another answer.
    i : an answer; ready in the cycle of its last byte.
    o : bytes of the answer; `last` marks the last byte.

    Raises
    ------
    ManifestSizeError
    ValueError : `window` is not 1 to 255.
    """

    def __init__(self, *, manifest: bytes, window: int) -> None:
        if len(manifest) > MOST_MANIFEST:
            raise ManifestSizeError(
                f"a manifest has at most {MOST_MANIFEST} bytes, not {len(manifest)}"
            )
        if not 1 <= window <= MOST_WINDOW:
            raise ValueError(f"Window must be 1 to {MOST_WINDOW}, not {window!r}")
        self.manifest = manifest
        self.window = window
        super().__init__(
            {
                "i_data": In(stream.Signature(BYTE_BITS, always_ready=True)),
                "i_clear": In(1),
                "i": In(stream.Signature(AnswerLayout)),
                "o": Out(stream.Signature(PieceLayout(BYTE_BITS))),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.memory = memory = Memory(
            shape=BYTE_BITS,
            depth=MOST_DATA + len(self.manifest),
            init=bytes(MOST_DATA) + self.manifest,
        )
        write_port, read_port = memory.write_port(), memory.read_port()
        stored = Signal(range(MOST_DATA + 1))
        address = Signal(range(memory.depth))
        length = Signal(range(MOST_DATA + 1))
        number = Signal(range(ANSWER_BYTES + MOST_DATA))
        in_memory, last = Signal(), Signal()
        known, stored_byte = Signal(BYTE_BITS), Signal(BYTE_BITS)
        answer, output = self.i.payload, self.o.payload

        m.d.comb += [
            write_port.addr.eq(stored),
            write_port.data.eq(self.i_data.payload),
            write_port.en.eq(self.i_data.valid),
            read_port.addr.eq(address),
        ]
        with m.If(self.i_clear):
            m.d.sync += stored.eq(0)
        with m.Elif(self.i_data.valid):
            m.d.sync += stored.eq(stored + 1)
        with m.Switch(answer.content):
            with m.Case(Content.NOTHING):
                m.d.comb += length.eq(0)
            with m.Case(Content.ADDRESS):
                m.d.comb += length.eq(ADDRESS_BYTES)
            with m.Case(Content.HELLO):
                m.d.comb += length.eq(HELLO_BYTES)
            with m.Case(Content.BYTES):
                m.d.comb += length.eq(answer.header.length)

        with m.FSM():
            with m.State("IDLE"):
                base = Mux(answer.manifest, MOST_DATA + answer.header.address[:16], 0)
                m.d.sync += [number.eq(0), address.eq(base)]
                with m.If(self.i.valid):
                    m.next = "CHOOSE"
            with m.State("CHOOSE"):
                m.d.sync += [
                    in_memory.eq((answer.content == Content.BYTES) & (number >= ANSWER_BYTES)),
                    last.eq(number == ANSWER_BYTES - 1 + length),
                ]
                m.next = "FETCH"
            with m.State("FETCH"):  # a block RAM reads a cycle late
                m.d.sync += [
                    known.eq(self._known(length)[number[:4]]),
                    stored_byte.eq(read_port.data),
                ]
                m.next = "TAKE"
            with m.State("TAKE"):
                m.d.sync += [
                    output.data.eq(Mux(in_memory, stored_byte, known)),
                    output.last.eq(last),
                    self.o.valid.eq(1),
                ]
                m.next = "GIVE"
            with m.State("GIVE"), m.If(self.o.ready):
                m.d.sync += [
                    self.o.valid.eq(0),
                    number.eq(number + 1),
                    address.eq(address + in_memory),
                ]
                m.next = "CHOOSE"
                with m.If(output.last):
                    m.d.comb += self.i.ready.eq(1)
                    m.next = "IDLE"
        return m

    def _known(self, length: Signal) -> Array:
        """Return the bytes of an answer that are not in memory, by index."""
        answer = self.i.payload
        header = answer.header.as_value()
        size = Const(len(self.manifest), 16)
        address = answer.header.address
        return Array(
            [
                header.word_select(0, BYTE_BITS) | ANSWER_BIT,
                header.word_select(1, BYTE_BITS),
                answer.status,
                Const(0, BYTE_BITS),
                length[:BYTE_BITS],
                length[BYTE_BITS:],
                *(address.word_select(k, BYTE_BITS) for k in range(ADDRESS_BYTES)),
                Const(VERSION, BYTE_BITS),
                Const(self.window, BYTE_BITS),
                size[:BYTE_BITS],
                size[BYTE_BITS:],
            ]
        )
