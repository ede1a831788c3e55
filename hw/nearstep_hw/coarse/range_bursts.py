"""Split of ranges of memory beats into bursts."""

from amaranth import Cat, Const, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.axi.burst import BurstLayout
from nearstep_hw.coarse.entry import RangeLayout
from nearstep_spec.coarse.config import BEAT_BYTES, BURST_BEATS, CoarseConfig


class RangeBursts(wiring.Component):
    """Splits ranges into bursts that end at multiples of the longest burst.

    *Timing*: a burst a cycle, the first one cycle after its range was accepted; a range may be
    accepted with the last burst of the previous range.

    Members
    -------
    i : ranges.
    o : bursts; `run_last` marks the burst with the last beat of the tensor.
    i_clear : clears all state.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.layout = BurstLayout(
            streams=1, address_width=config.address_width, burst_beats=BURST_BEATS
        )
        super().__init__(
            {
                "i": In(stream.Signature(RangeLayout(config))),
                "o": Out(stream.Signature(self.layout)),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        rest = Signal.like(self.i.payload, reset_less=True)
        room = Signal(range(BURST_BEATS + 1))
        ends = Signal()
        burst = self.o.payload

        m.d.comb += [
            room.eq(BURST_BEATS - rest.at[: exact_log2(BURST_BEATS)]),
            ends.eq(rest.beats <= room),
            burst.address.eq(Cat(Const(0, exact_log2(BEAT_BYTES)), rest.at)),
            burst.beats.eq(Mux(ends, rest.beats, room)),
            burst.run_last.eq(rest.tail & ends),
            self.i.ready.eq(~self.o.valid | (self.o.ready & ends)),
        ]
        with m.If(self.i.ready):
            m.d.sync += [rest.eq(self.i.payload), self.o.valid.eq(self.i.valid)]
        with m.Elif(self.o.ready):
            m.d.sync += [rest.at.eq(rest.at + room), rest.beats.eq(rest.beats - room)]
        return ResetInserter(self.i_clear)(m)
