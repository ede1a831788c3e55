"""Buffer of read data, with a verdict for each burst."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import ReadDataLayout, Response
from nearstep_hw.stream.fifo import StreamFifo


class ReadLanding(wiring.Component):
    """Buffers the beats of bursts with reserved space, and outputs a verdict for each burst.

    *Timing*: RREADY is always high. A burst's verdict and its last beat are output together, two
    cycles after the beat was taken: a consumer that waits for the verdict can take the beats
    without a gap.

    Parameters
    ----------
    data_width : bits of a beat.
    beats : capacity, a power of two.

    Members
    -------
    r : R channel; one ID.
    o : beats.
    o_verdict : one for each burst: 1 if a beat was answered other than OKAY.
    """

    def __init__(self, *, data_width: int, beats: int) -> None:
        self.data_width = data_width
        self.beats = beats
        super().__init__(
            {
                "r": In(stream.Signature(ReadDataLayout(data_width=data_width, id_width=1))),
                "o": Out(stream.Signature(data_width)),
                "o_verdict": Out(stream.Signature(1)),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.data = data = StreamFifo(self.data_width, depth=self.beats)
        m.submodules.verdicts = verdicts = StreamFifo(1, depth=self.beats)
        r, beat = self.r, self.r.payload
        bad = Signal()
        failed = Signal()  # an earlier beat of the burst
        m.d.comb += [
            r.ready.eq(1),
            bad.eq(failed | (beat.resp != Response.OKAY)),
            data.i.valid.eq(r.valid),
            data.i.payload.eq(beat.data),
            verdicts.i.valid.eq(r.valid & beat.last),
            verdicts.i.payload.eq(bad),
        ]
        with m.If(r.valid):
            m.d.sync += failed.eq(bad & ~beat.last)
        wiring.connect(m, data.o, wiring.flipped(self.o))
        wiring.connect(m, verdicts.o, wiring.flipped(self.o_verdict))
        return m
