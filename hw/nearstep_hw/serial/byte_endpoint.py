"""The board's end of the serial link, on any line of bytes."""

from amaranth import Elaboratable, Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.serial.answer_writer import AnswerWriter
from nearstep_hw.serial.deframer import Deframer
from nearstep_hw.serial.executor import Executor
from nearstep_hw.serial.framer import Framer
from nearstep_hw.serial.memory_access import MemoryAccess
from nearstep_hw.serial.request import RequestReader
from nearstep_hw.serial.request_buffer import RequestBuffer
from nearstep_hw.serial.uart import BYTE_BITS
from nearstep_hw.serial.wishbone import WishboneSignature
from nearstep_hw.serial.word_access import WordAccess
from nearstep_spec.csr.model import ADDRESS_WIDTH
from nearstep_spec.serial.protocol import MOST_REQUEST, REQUEST_BYTES

WINDOW = 7
"""Default capacity of the request buffer: 8 KiB, which at 3 Mbaud takes longer than the 16 ms for
which a USB adapter may delay answers.
"""

TIMEOUT_CYCLES = 1 << 16
"""Default timeout of an access: 0.7 ms at 100 MHz, many refreshes of a DRAM."""


class ByteEndpoint(wiring.Component):
    """Executes a host's requests from frames, as `nearstep_spec.serial` specifies.

    *Timing*: `i` takes a byte a cycle. A memory request takes a cycle a byte plus its bursts, a
    register request some ten cycles a word, an answer four cycles a byte. A request is answered
    before the next one is executed.

    Parameters
    ----------
    manifest : the text behind `Space.MANIFEST`.
    address_width, data_width : bits of the memory port; data 32 to 1024.
    csr_address_width : bits of a byte address of the device's registers.
    window : capacity of the request buffer in requests, up to 255.
    timeout_cycles : cycles after which an access is answered with BUS_TIMEOUT.

    Members
    -------
    i : bytes of the line.
    i_damage : strobe: a byte of the line was lost.
    o : bytes to the line.
    csr, board, m_axi, wishbone, i_reset, o_dropped, o_active : see `SerialEndpoint`.

    Raises
    ------
    ManifestSizeError
    ValueError : a width, `window` or `timeout_cycles` is out of range.
    """

    def __init__(
        self,
        *,
        manifest: bytes,
        address_width: int,
        data_width: int,
        csr_address_width: int = ADDRESS_WIDTH,
        window: int = WINDOW,
        timeout_cycles: int = TIMEOUT_CYCLES,
    ) -> None:
        self.buffer = RequestBuffer(window=window)
        self.executor = Executor(manifest_bytes=len(manifest))
        self.words = WordAccess(csr_address_width=csr_address_width, timeout_cycles=timeout_cycles)
        self.memory = MemoryAccess(
            address_width=address_width, data_width=data_width, timeout_cycles=timeout_cycles
        )
        self.writer = AnswerWriter(manifest=manifest, window=window)
        super().__init__(
            {
                "i": In(stream.Signature(BYTE_BITS, always_ready=True)),
                "i_damage": In(1),
                "o": Out(stream.Signature(BYTE_BITS)),
                **endpoint_ports(
                    address_width=address_width,
                    data_width=data_width,
                    csr_address_width=csr_address_width,
                ),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.deframer = deframer = Deframer(
            least_bytes=REQUEST_BYTES, most_bytes=MOST_REQUEST
        )
        m.submodules.buffer = buffer = self.buffer
        m.submodules.reader = reader = RequestReader()
        m.submodules.executor = executor = self.executor
        m.submodules.words = words = self.words
        m.submodules.memory = memory = self.memory
        m.submodules.writer = writer = self.writer
        m.submodules.framer = framer = Framer()

        for source, sink in (
            (wiring.flipped(self.i), deframer.i),
            (deframer.o, buffer.i),
            (buffer.o_length, reader.i_length),
            (buffer.o, reader.i),
            (reader.o_data, executor.i_data),
            (executor.words, words.access),
            (executor.memory, memory.access),
            (executor.o_data, writer.i_data),
            (executor.o, writer.i),
            (writer.o, framer.i),
            (framer.o, wiring.flipped(self.o)),
            (words.csr, wiring.flipped(self.csr)),
            (words.board, wiring.flipped(self.board)),
            (words.wishbone, wiring.flipped(self.wishbone)),
        ):
            wiring.connect(m, source, sink)
        connect_channels(m, memory.m_axi, self.m_axi)
        m.d.comb += [
            deframer.i_damage.eq(self.i_damage),
            buffer.i_end.eq(deframer.o_end),
            buffer.i_drop.eq(deframer.o_drop),
            executor.i_valid.eq(reader.o_valid),
            executor.i_header.eq(reader.o_header),
            executor.i_bad.eq(reader.o_bad),
            reader.i_done.eq(executor.o_done),
            writer.i_clear.eq(executor.o_clear),
            words.i_reset.eq(self.i_reset),
            memory.i_reset.eq(self.i_reset),
            self.o_dropped.eq(buffer.o_dropped),
            self.o_active.eq(reader.o_valid),
        ]
        return m


def endpoint_ports(
    *, address_width: int, data_width: int, csr_address_width: int
) -> dict[str, wiring.Member]:
    """Return the members of an endpoint besides its line."""
    memory = Axi4Signature(address_width=address_width, data_width=data_width, id_width=1)
    return {
        "csr": Out(CsrSignature(csr_address_width)),
        "board": Out(CsrSignature()),
        "m_axi": Out(memory),
        "wishbone": Out(WishboneSignature()),
        "i_reset": In(1),
        "o_dropped": Out(1),
        "o_active": Out(1),
    }
