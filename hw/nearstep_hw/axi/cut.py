"""A register in every path of an AXI4 port."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import Axi4Signature
from nearstep_hw.stream.slice import StreamSlice


class AxiCut(wiring.Component):
    """Forwards all channels through registers.

    Unless `waits`, RREADY and BREADY of the initiator must always be high, as those of movers are:
    responses pass one register, and RREADY and BREADY of the port are always high.

    *Timing*: a cycle more for each channel, a beat a cycle.

    Parameters
    ----------
    signature : an `Axi4Signature`.
    waits : the initiator may stall responses.

    Members
    -------
    s_axi : the initiator.
    m_axi : the port.
    """

    def __init__(self, signature: Axi4Signature, *, waits: bool = False) -> None:
        self.waits = waits
        super().__init__({"s_axi": In(signature), "m_axi": Out(signature)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        requests = [(name, self.s_axi, self.m_axi) for name in ("ar", "aw", "w")]
        answers = [(name, self.m_axi, self.s_axi) for name in ("r", "b")]
        for name, source, target in requests + (answers if self.waits else []):
            given, taken = getattr(source, name), getattr(target, name)
            m.submodules[name] = cut = StreamSlice(given.payload.shape())
            wiring.connect(m, wiring.flipped(given), cut.i)
            wiring.connect(m, cut.o, wiring.flipped(taken))
        for name, source, target in [] if self.waits else answers:
            given, taken = getattr(source, name), getattr(target, name)
            m.d.sync += [taken.valid.eq(given.valid), taken.payload.eq(given.payload)]
            m.d.comb += given.ready.eq(1)
        return m
