"""From packed beats to the CC stream."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.pcie.completion_writer import ELEMENT_BITS
from nearstep_hw.pcie.dword_packer import PackedBeat
from nearstep_hw.pcie.stream import DWORD_BITS, CcSignature

EOP_BIT = 6  # of TUSER, 512 bits: is_eop0
EOP_LANE_BIT = 8  # last dword of the packet


class CcOutput(wiring.Component):
    """Drives the CC stream from packed beats, without a gap inside a packet.

    With 64 bits the first beat waits for the second, since the packer needs two runs for
    the second beat; from then on there is a beat a cycle.

    *Timing*: combinational; one cycle with 64 bits.

    Parameters
    ----------
    width : bits of the stream.

    Members
    -------
    i : beats; one a cycle within a packet, but for the gap at 64 bits.
    cc : the stream.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        beat = PackedBeat(lanes=width // DWORD_BITS, element_width=ELEMENT_BITS)
        super().__init__({"i": In(stream.Signature(beat)), "cc": Out(CcSignature(width))})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        lanes, cc = self.width // DWORD_BITS, self.cc
        if lanes == 2:
            held = Signal(self.i.payload.shape())
            holds = Signal()
            m.d.comb += [
                cc.tvalid.eq(holds & (held.last | self.i.valid)),
                self.i.ready.eq(~holds | (cc.tvalid & cc.tready)),
            ]
            with m.If(self.i.ready):
                m.d.sync += [holds.eq(self.i.valid), held.eq(self.i.payload)]
            beat = held
        else:
            m.d.comb += [cc.tvalid.eq(self.i.valid), self.i.ready.eq(cc.tready)]
            beat = self.i.payload
        m.d.comb += [
            cc.tdata.eq(Cat(beat.elements[lane][:DWORD_BITS] for lane in range(lanes))),
            cc.tkeep.eq(Cat(beat.elements[lane][DWORD_BITS:] for lane in range(lanes))),
            cc.tlast.eq(beat.last),
        ]
        if self.width == 512:
            inside = Signal()
            with m.If(cc.tvalid & cc.tready):
                m.d.sync += inside.eq(~cc.tlast)
            last_lane = Signal(range(lanes))
            m.d.comb += [
                last_lane.eq(sum(cc.tkeep) - 1),
                cc.tuser[0].eq(~inside),
                cc.tuser[EOP_BIT].eq(cc.tlast),
                cc.tuser[EOP_LANE_BIT : EOP_LANE_BIT + len(last_lane)].eq(
                    Mux(cc.tlast, last_lane, 0)
                ),
            ]
        return m
