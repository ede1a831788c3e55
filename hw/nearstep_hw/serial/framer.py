"""Encoder of frames for a line of bytes."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.crc.catalog import CRC32_ETHERNET
from amaranth.lib.wiring import In, Out

from nearstep_hw.serial.uart import BYTE_BITS
from nearstep_hw.stream.gearbox import PieceLayout
from nearstep_spec.serial.framing import CRC_BYTES, ESCAPE, FLAG, INVERT


class Framer(wiring.Component):
    """Encodes frames, with the bytes of `nearstep_spec.serial.framing.to_frame`.

    *Timing*: the first flag is at `o` a cycle after the first byte of the body is offered; then a
    byte a cycle, and two cycles for an escaped byte.

    Members
    -------
    i : bytes of the body; `last` marks the last byte.
    o : bytes of the line.
    """

    i: In(stream.Signature(PieceLayout(BYTE_BITS)))
    o: Out(stream.Signature(BYTE_BITS))

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.crc = crc = CRC32_ETHERNET(data_width=BYTE_BITS).create()
        valid, take = Signal(), Signal()
        byte, flag = Signal(BYTE_BITS), Signal()
        number = Signal(range(CRC_BYTES))
        m.d.comb += [
            crc.start.eq(0),
            crc.data.eq(self.i.payload.data),
            crc.valid.eq(self.i.valid & self.i.ready),
        ]
        with m.FSM():
            with m.State("BEGIN"):
                m.d.comb += [valid.eq(self.i.valid), byte.eq(FLAG), flag.eq(1), crc.start.eq(1)]
                with m.If(valid & take):
                    m.next = "BODY"
            with m.State("BODY"):
                m.d.comb += [
                    valid.eq(self.i.valid),
                    byte.eq(self.i.payload.data),
                    self.i.ready.eq(take),
                ]
                m.d.sync += number.eq(0)
                with m.If(valid & take & self.i.payload.last):
                    m.next = "CRC"
            with m.State("CRC"):
                m.d.comb += [valid.eq(1), byte.eq(crc.crc.word_select(number, BYTE_BITS))]
                with m.If(take):
                    m.d.sync += number.eq(number + 1)
                    with m.If(number == CRC_BYTES - 1):
                        m.next = "END"
            with m.State("END"):
                m.d.comb += [valid.eq(1), byte.eq(FLAG), flag.eq(1)]
                with m.If(take):
                    m.next = "BEGIN"

        free, special, escaped = Signal(), Signal(), Signal()
        m.d.comb += [
            free.eq(~self.o.valid | self.o.ready),
            special.eq(~flag & ((byte == FLAG) | (byte == ESCAPE))),
            take.eq(free & (~special | escaped)),
        ]
        with m.If(free):
            m.d.sync += [
                self.o.valid.eq(valid),
                escaped.eq(valid & special & ~escaped),
            ]
            with m.If(valid):
                m.d.sync += self.o.payload.eq(
                    Mux(special & ~escaped, ESCAPE, byte ^ Mux(escaped, INVERT, 0))
                )
        return m
