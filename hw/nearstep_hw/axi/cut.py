"""A register in every path of an AXI4 port."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import Axi4Signature
from nearstep_hw.stream.slice import StreamSlice


class AxiCut(wiring.Component):
    """Passes all channels on, through registers.

    RREADY and BREADY of the initiator have to be high always, as those of the movers are: answers
    pass one register, and RREADY and BREADY of the port are always high.

    *Timing*: a cycle more for each channel, a beat a cycle.

    Parameters
    ----------
    signature : an `Axi4Signature`.

    Members
    -------
    s_axi : the initiator.
    m_axi : the port.
    """

    def __init__(self, signature: Axi4Signature) -> None:
        super().__init__({"s_axi": In(signature), "m_axi": Out(signature)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        for name in ("ar", "aw", "w"):
            given, taken = getattr(self.s_axi, name), getattr(self.m_axi, name)
            m.submodules[name] = cut = StreamSlice(given.payload.shape())
            wiring.connect(m, wiring.flipped(given), cut.i)
            wiring.connect(m, cut.o, wiring.flipped(taken))
        for name in ("r", "b"):
            given, taken = getattr(self.m_axi, name), getattr(self.s_axi, name)
            m.d.sync += [taken.valid.eq(given.valid), taken.payload.eq(given.payload)]
            m.d.comb += given.ready.eq(1)
        return m
