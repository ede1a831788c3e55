"""Decoder of frames from a line of bytes."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.crc.catalog import CRC32_ETHERNET
from amaranth.lib.wiring import In, Out

from nearstep_hw.serial.uart import BYTE_BITS
from nearstep_spec.serial.framing import CRC_BYTES, ESCAPE, FLAG, INVERT


class Deframer(wiring.Component):
    """Decodes frames as `nearstep_spec.serial.framing.Deframer` does, and drops short ones.

    Bytes of a frame are output before its CRC is checked; then `o_end` commits the frame or
    `o_drop` discards it. `o_drop` may pulse for a frame without a byte.

    *Timing*: two cycles from a byte or flag to the output; a byte a cycle.

    Parameters
    ----------
    least_bytes, most_bytes : limits of a body; shorter and longer frames are dropped.

    Members
    -------
    i : bytes of the line.
    i_damage : strobe: a byte of the line was lost.
    o : bytes of a frame, without escapes; the last four are its CRC.
    o_end : strobe: the frame is intact.
    o_drop : strobe: the frame must be discarded.
    """

    def __init__(self, *, least_bytes: int, most_bytes: int) -> None:
        self.least_bytes = least_bytes
        self.most_bytes = most_bytes
        super().__init__(
            {
                "i": In(stream.Signature(BYTE_BITS, always_ready=True)),
                "i_damage": In(1),
                "o": Out(stream.Signature(BYTE_BITS, always_ready=True)),
                "o_end": Out(1),
                "o_drop": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.crc = crc = CRC32_ETHERNET(data_width=BYTE_BITS).create()
        least, most = (each + CRC_BYTES for each in (self.least_bytes, self.most_bytes))
        valid, flag, escape, byte = Signal(), Signal(), Signal(), Signal(BYTE_BITS)
        damage = Signal()
        m.d.sync += [
            valid.eq(self.i.valid),
            damage.eq(self.i_damage),
            flag.eq(self.i.payload == FLAG),
            escape.eq(self.i.payload == ESCAPE),
            byte.eq(self.i.payload),
        ]

        started, escaped, bad = Signal(), Signal(), Signal()
        count = Signal(range(most + 1))
        plain = Signal(BYTE_BITS)
        put, whole, empty = Signal(), Signal(), Signal()
        m.d.comb += [
            plain.eq(byte ^ Mux(escaped, INVERT, 0)),
            put.eq(valid & ~flag & ~escape & started & (count != most)),
            whole.eq(~bad & ~escaped & (count >= least) & crc.match_detected),
            empty.eq(~bad & ~escaped & (count == 0)),
            crc.data.eq(plain),
            crc.valid.eq(put),
            crc.start.eq(valid & flag),
        ]
        m.d.sync += [
            self.o.valid.eq(put & ~bad),
            self.o.payload.eq(plain),
            self.o_end.eq(0),
            self.o_drop.eq(0),
        ]
        with m.If(valid & flag):
            m.d.sync += [
                self.o_end.eq(started & whole),
                self.o_drop.eq(started & ~whole & ~empty),
                started.eq(1),
                escaped.eq(0),
                bad.eq(0),
                count.eq(0),
            ]
        with m.Elif(valid & started):
            m.d.sync += [
                escaped.eq(escape),
                bad.eq(bad | Mux(escape, escaped, count == most)),
                count.eq(count + put),
            ]
        with m.If(damage & started):
            m.d.sync += bad.eq(1)
        return m
