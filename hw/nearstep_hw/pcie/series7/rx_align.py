"""Alignment of received packets to lane 0."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.pcie.series7.stream import BARS, HALF, LANES, WIDTH, RxSignature

PacketBeat = data.StructLayout(
    {
        "data": unsigned(WIDTH),
        "dwords": unsigned(range(LANES + 1).stop.bit_length() - 1),
        "last": unsigned(1),
        "bar_hit": unsigned(BARS),
    }
)
"""Dwords of a packet from lane 0 on; all but the last beat have every lane."""


class RxAlign(wiring.Component):
    """Shifts packets that begin in the middle of a beat to lane 0.

    `bar_hit` of a packet is sampled in the beat in which the packet begins.

    *Timing*: one cycle; a beat a cycle, and one cycle more for a packet that begins in the middle
    of a beat and ends in the upper half of one.

    Members
    -------
    rx : from the block.
    o : beats of packets.
    """

    def __init__(self) -> None:
        super().__init__({"rx": In(RxSignature()), "o": Out(stream.Signature(PacketBeat))})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        rx, beat = self.rx, self.o.payload
        user = rx.tuser
        half_bits = WIDTH // 2
        held = Signal(half_bits)
        shifted = Signal()  # the current packet began in the middle: `held` has its next half
        rest = Signal()  # `held` ends a packet
        rest_dwords = Signal(range(HALF + 1))
        bars = Signal(BARS)  # of the current packet
        room = Signal()
        take = Signal()
        middle = Signal()
        lane = Signal(range(LANES))
        ends_low = Signal()
        ends_high = Signal()
        m.d.comb += [
            room.eq(~self.o.valid | self.o.ready),
            rx.tready.eq(room & ~rest),
            take.eq(rx.tvalid & rx.tready),
            middle.eq(user.start & user.start_byte[-1]),
            lane.eq(user.end_byte[2:]),
            ends_low.eq(user.end & (lane < HALF)),
            ends_high.eq(user.end & (lane >= HALF)),
        ]
        with m.If(room):
            m.d.sync += self.o.valid.eq(rest)
        with m.If(room & rest):
            m.d.sync += [
                beat.data.eq(held),
                beat.dwords.eq(rest_dwords),
                beat.last.eq(1),
                rest.eq(0),
            ]
        with m.If(take):
            m.d.sync += [
                held.eq(rx.tdata[half_bits:]),
                shifted.eq(Mux(user.start, middle, shifted & ~user.end)),
                beat.bar_hit.eq(Mux(user.start & ~middle, user.bar_hit, bars)),
            ]
            with m.If(user.start):
                m.d.sync += bars.eq(user.bar_hit)
            with m.If(shifted):
                m.d.sync += [
                    self.o.valid.eq(1),
                    beat.data.eq(Cat(held, rx.tdata[:half_bits])),
                    beat.dwords.eq(Mux(ends_low, HALF + 1 + lane, LANES)),
                    beat.last.eq(ends_low),
                    rest.eq(ends_high),
                    rest_dwords.eq(lane - (HALF - 1)),
                ]
            with m.Else():
                m.d.sync += [
                    self.o.valid.eq(~middle | ends_low),
                    beat.data.eq(rx.tdata),
                    beat.dwords.eq(Mux(user.end, lane + 1, LANES)),
                    beat.last.eq(user.end),
                ]
        return m
