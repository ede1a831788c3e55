"""Proofs of the FIFO of streams."""

import pytest
from amaranth.hdl import Assert, Cover, Module, Signal
from amaranth.lib import stream
from amaranth.lib.wiring import Component, In, Out, connect, flipped

from nearstep_hw.stream.fifo import StreamFifo
from nearstep_sim.bench.formal import prove

from .toolkit import History

pytestmark = pytest.mark.formal


class FifoProperties(Component):
    """Whatever goes in comes out once, in order: followed for one item, the `i_index`th."""

    WIDTH = 2

    def __init__(self, depth: int) -> None:
        self.depth = depth
        super().__init__(
            {
                "i": In(stream.Signature(self.WIDTH)),
                "o": Out(stream.Signature(self.WIDTH)),
                "i_clear": In(1),
                "i_index": In(3),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.fifo = fifo = StreamFifo(self.WIDTH, depth=self.depth)
        connect(m, flipped(self.i), fifo.i)
        connect(m, fifo.o, flipped(self.o))
        m.d.comb += fifo.i_clear.eq(self.i_clear)
        history = History(m)
        history.hold(self.i_index)
        history.keeps_valid(fifo.o, cleared=self.i_clear)

        puts, gets = Signal(4), Signal(4)
        item = Signal(self.WIDTH)
        put, get = fifo.i.valid & fifo.i.ready, fifo.o.valid & fifo.o.ready
        m.d.sync += [puts.eq(puts + put), gets.eq(gets + get)]
        with m.If(put & (puts == self.i_index)):
            m.d.sync += item.eq(fifo.i.payload)
        with m.If(self.i_clear):
            m.d.sync += [puts.eq(0), gets.eq(0)]
        with m.If(fifo.o.valid):
            m.d.comb += Assert(gets < puts)
            with m.If(gets == self.i_index):
                m.d.comb += Assert(fifo.o.payload == item)
        inside = puts - gets
        m.d.comb += [
            Assert(inside <= self.depth + 1),
            # Ready unless the memory is full, whatever is at the output.
            Assert(fifo.i.ready | (inside >= self.depth)),
            Cover(get & (gets == self.depth + 3) & (inside == self.depth)),
            Cover(~fifo.i.ready & (inside == self.depth + 1)),
        ]
        return m


class FifoHandshake(Component):
    """Only the rules of a stream, which hold by induction."""

    def __init__(self) -> None:
        super().__init__({"i": In(stream.Signature(4)), "o": Out(stream.Signature(4))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.fifo = fifo = StreamFifo(4, depth=4)
        connect(m, flipped(self.i), fifo.i)
        connect(m, fifo.o, flipped(self.o))
        History(m).keeps_valid(fifo.o)
        return m


@pytest.mark.deep
@pytest.mark.parametrize("depth", [1, 2])
def test_fifo_gives_every_item_once_and_in_order(depth):
    assert prove(FifoProperties(depth), f"fifo{depth}", "bmc", depth=11).statements >= 5
    assert prove(FifoProperties(depth), f"fifo{depth}", "cover", depth=14).statements == 2


def test_fifo_holds_what_it_offers():
    assert prove(FifoHandshake(), "fifo_handshake", "prove", depth=4).statements >= 2
