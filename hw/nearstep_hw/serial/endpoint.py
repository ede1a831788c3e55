"""The board's end of the serial link."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
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
from nearstep_hw.serial.uart import UartReceiver, UartTransmitter
from nearstep_hw.serial.wishbone import WishboneSignature
from nearstep_hw.serial.word_access import WordAccess
from nearstep_spec.csr.model import ADDRESS_WIDTH
from nearstep_spec.serial.protocol import MOST_REQUEST

WINDOW = 7
"""Requests that are held, unless told otherwise: they fill 8 KiB, and at 3 Mbaud they take longer
than the 16 ms that a USB adapter may keep their answers back."""

TIMEOUT_CYCLES = 1 << 16
"""That an access may take, unless told otherwise: 0.7 ms at 100 MHz, many refreshes of a DRAM."""


class SerialEndpoint(wiring.Component):
    """Carries out what a host asks for on a serial line, as `nearstep_spec.serial` says.

    Parameters
    ----------
    divisor : clock cycles of a bit, see `divisor_of`.
    manifest : the text behind `Space.MANIFEST`.
    address_width, data_width : bits of the memory port; data 32 to 1024.
    csr_address_width : bits of a byte address of the device's registers.
    window : requests that are held.
    timeout_cycles : that an access may take, before it is answered with BUS_TIMEOUT.

    Members
    -------
    rx, tx : the line, idle high; `rx` is synchronised here.
    csr : registers of the device.
    board : registers of the board, see `BoardControl`.
    m_axi : memory. RREADY and BREADY are always high; bursts have at most 16 beats.
    wishbone : registers of the memory controller.
    i_reset : what is behind `csr` and `m_axi` is being reset: what they owe is forgotten.
    o_dropped : strobe: a frame was damaged, too short or too long, or found no room.
    o_framing_error : strobe: a byte without a stop bit.
    o_active : a request is being carried out or answered.
    """

    def __init__(
        self,
        *,
        divisor: int,
        manifest: bytes,
        address_width: int,
        data_width: int,
        csr_address_width: int = ADDRESS_WIDTH,
        window: int = WINDOW,
        timeout_cycles: int = TIMEOUT_CYCLES,
    ) -> None:
        self.receiver = UartReceiver(divisor=divisor)
        self.transmitter = UartTransmitter(divisor=divisor)
        self.buffer = RequestBuffer(window=window)
        self.executor = Executor(manifest_bytes=len(manifest))
        self.words = WordAccess(csr_address_width=csr_address_width, timeout_cycles=timeout_cycles)
        self.memory = MemoryAccess(
            address_width=address_width, data_width=data_width, timeout_cycles=timeout_cycles
        )
        self.writer = AnswerWriter(manifest=manifest, window=window)
        super().__init__(
            {
                "rx": In(1, init=1),
                "tx": Out(1, init=1),
                "csr": Out(CsrSignature(csr_address_width)),
                "board": Out(CsrSignature()),
                "m_axi": Out(
                    Axi4Signature(address_width=address_width, data_width=data_width, id_width=1)
                ),
                "wishbone": Out(WishboneSignature()),
                "i_reset": In(1),
                "o_dropped": Out(1),
                "o_framing_error": Out(1),
                "o_active": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.receiver = receiver = self.receiver
        m.submodules.deframer = deframer = Deframer(most_bytes=MOST_REQUEST)
        m.submodules.buffer = buffer = self.buffer
        m.submodules.reader = reader = RequestReader()
        m.submodules.executor = executor = self.executor
        m.submodules.words = words = self.words
        m.submodules.memory = memory = self.memory
        m.submodules.writer = writer = self.writer
        m.submodules.framer = framer = Framer()
        m.submodules.transmitter = transmitter = self.transmitter

        for source, sink in (
            (receiver.o, deframer.i),
            (deframer.o, buffer.i),
            (buffer.o_length, reader.i_length),
            (buffer.o, reader.i),
            (reader.o_data, executor.i_data),
            (executor.words, words.access),
            (executor.memory, memory.access),
            (executor.o_data, writer.i_data),
            (executor.o, writer.i),
            (writer.o, framer.i),
            (framer.o, transmitter.i),
            (words.csr, wiring.flipped(self.csr)),
            (words.board, wiring.flipped(self.board)),
            (words.wishbone, wiring.flipped(self.wishbone)),
        ):
            wiring.connect(m, source, sink)
        connect_channels(m, memory.m_axi, self.m_axi)
        m.d.comb += [
            receiver.rx.eq(self.rx),
            deframer.i_damage.eq(receiver.o_framing_error),
            buffer.i_end.eq(deframer.o_end),
            buffer.i_drop.eq(deframer.o_drop),
            executor.i_valid.eq(reader.o_valid),
            executor.i_header.eq(reader.o_header),
            executor.i_bad.eq(reader.o_bad),
            reader.i_done.eq(executor.o_done),
            writer.i_clear.eq(executor.o_clear),
            words.i_reset.eq(self.i_reset),
            memory.i_reset.eq(self.i_reset),
            self.tx.eq(transmitter.tx),
            self.o_dropped.eq(buffer.o_dropped),
            self.o_framing_error.eq(receiver.o_framing_error),
            self.o_active.eq(reader.o_valid),
        ]
        return m
