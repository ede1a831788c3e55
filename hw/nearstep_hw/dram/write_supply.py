"""Buffer of write data for the DRAM."""

from amaranth import Cat, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.dram.dfi import TPHY_WRLAT
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_spec.dram.geometry import BEAT_BYTES


class WriteSupply(wiring.Component):
    """Buffers write data until their command is issued, and outputs them to the PHY in time.

    A burst may be scheduled when all of its data were received, so that no command waits for W.

    *Timing*: a beat a cycle. Data follow their command, which is on the pins a cycle later than
    `i_issue`, by TPHY_WRLAT cycles.

    Parameters
    ----------
    places : beats, a power of two; more than two of the longest bursts, so that a burst is received
        while another is sent.

    Members
    -------
    i_valid, o_ready, i_data, i_strobe, i_last : beats of W.
    o_whole : a burst that is not scheduled yet was received in full.
    i_enter : this burst is scheduled.
    i_issue : a write command is issued.
    o_data, o_mask, o_enable : to the PHY.
    o_idle : the data of all commands have been output.
    """

    def __init__(self, *, places: int) -> None:
        self.places = places
        super().__init__(
            {
                "i_valid": In(1),
                "o_ready": Out(1),
                "i_data": In(8 * BEAT_BYTES),
                "i_strobe": In(BEAT_BYTES),
                "i_last": In(1),
                "o_whole": Out(1),
                "i_enter": In(1),
                "i_issue": In(1),
                "o_data": Out(8 * BEAT_BYTES),
                "o_mask": Out(BEAT_BYTES),
                "o_enable": Out(1),
                "o_idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.data = data = StreamFifo(8 * BEAT_BYTES, depth=self.places)
        m.submodules.strobes = strobes = StreamFifo(BEAT_BYTES, depth=self.places)
        whole = Signal(range(self.places + 1))
        awaited = Signal(TPHY_WRLAT + 1)  # commands whose data are not output yet, a cycle each
        arrives = Signal()

        m.d.comb += [
            data.i.valid.eq(self.i_valid),
            data.i.payload.eq(self.i_data),
            strobes.i.valid.eq(self.i_valid),
            strobes.i.payload.eq(self.i_strobe),
            self.o_ready.eq(data.i.ready),
            arrives.eq(self.i_valid & self.o_ready & self.i_last),
            self.o_whole.eq(whole != 0),
            self.o_enable.eq(awaited[-1]),
            data.o.ready.eq(self.o_enable),
            strobes.o.ready.eq(self.o_enable),
            self.o_data.eq(data.o.payload),
            self.o_mask.eq(~strobes.o.payload),
            self.o_idle.eq(awaited == 0),
        ]
        m.d.sync += [
            whole.eq(whole + arrives - self.i_enter),
            awaited.eq(Cat(self.i_issue, awaited)),
        ]
        return m
