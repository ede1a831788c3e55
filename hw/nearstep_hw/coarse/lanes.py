"""A link between two boards: phits over a few pins, without a common clock."""

from amaranth import Cat, Elaboratable, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.cdc import FFSynchronizer
from amaranth.lib.wiring import In, Out

from nearstep_hw.coarse.wire import LinkPhit
from nearstep_spec.coarse.lanes import LANES, PINS, TRANSFER_CYCLES, TRANSFERS

LanesLayout = data.StructLayout({"strobe": 1, "first": 1, "data": LANES})
"""Levels of the pins of one direction. Each edge of `strobe` transfers `data`; `first` is high in
the first transfer of a phit.
"""


class LaneTransmitter(wiring.Component):
    """Drives phits onto the pins of a link, `LANES` bits a transfer, lowest bits first.

    Data change half a transfer before the strobe and are held half a transfer after it. A reset
    does not change the strobe, and so causes no transfer.

    *Timing*: a phit in `PHIT_CYCLES` = 68 cycles, without a gap; the first change of the strobe
    is three cycles after the phit was accepted.

    Members
    -------
    i : phits.
    o : pins; registers.
    """

    i: In(stream.Signature(LinkPhit))
    o: Out(LanesLayout)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        rest = Signal(TRANSFERS * LANES)  # from the current transfer on
        left = Signal(range(TRANSFERS + 1))
        phase = Signal(range(TRANSFER_CYCLES))
        strobe, first = Signal(reset_less=True), Signal()
        ends = Signal()

        m.d.comb += [
            ends.eq(phase == TRANSFER_CYCLES - 1),
            self.i.ready.eq((left == 0) | ((left == 1) & ends)),
            self.o.strobe.eq(strobe),
            self.o.first.eq(first),
            self.o.data.eq(rest[:LANES]),
        ]
        with m.If(left != 0):
            m.d.sync += phase.eq(phase + 1)
            with m.If(phase == TRANSFER_CYCLES // 2 - 1):
                m.d.sync += strobe.eq(~strobe)
            with m.If(ends):
                m.d.sync += [left.eq(left - 1), rest.eq(rest[LANES:]), first.eq(0)]
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                left.eq(TRANSFERS),
                rest.eq(self.i.payload.as_value()),
                first.eq(1),
                phase.eq(0),
            ]
        return m


class LaneReceiver(wiring.Component):
    """Receives phits from the pins of a link, sampled with the receiver's own clock.

    A transfer is sampled at each edge of the strobe. Data may be skewed against the strobe by a
    cycle late to two cycles early. The clocks of the ends may differ as long as each level of the
    strobe is sampled once. The CRCs of frames detect lost and changed transfers: a phit with too
    few transfers when the next phit begins is dropped, and so are transfers after the last one of a
    phit. Undriven pins that keep a level are no transfers.

    *Timing*: a phit is at `o` five cycles after the last change of the strobe, at most.

    Members
    -------
    i : pins; synchronised here.
    o : phits.
    """

    i: In(LanesLayout)
    o: Out(stream.Signature(LinkPhit, always_ready=True))

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        sampled = Signal(PINS)
        m.submodules.synchronizer = FFSynchronizer(self.i.as_value(), sampled)
        lanes = LanesLayout(sampled)
        before = Signal(reset_less=True)
        come = Signal(range(TRANSFERS + 1), init=TRANSFERS)
        number = Signal.like(come)  # of this transfer
        word = Signal(TRANSFERS * LANES)

        m.d.comb += [
            number.eq(come),
            self.o.payload.eq(word[: len(self.o.payload.as_value())]),
        ]
        with m.If(lanes.first):
            m.d.comb += number.eq(0)
        m.d.sync += [before.eq(lanes.strobe), self.o.valid.eq(0)]
        with m.If((lanes.strobe != before) & (number != TRANSFERS)):
            m.d.sync += [
                come.eq(number + 1),
                word.eq(Cat(word[LANES:], lanes.data)),
                self.o.valid.eq(number == TRANSFERS - 1),
            ]
        return m
