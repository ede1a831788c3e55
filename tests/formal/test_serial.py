"""Proofs of isolation and framing: what is offered holds, whatever the other side does."""

import pytest
from amaranth.hdl import Assert, Assume, Cover, Module
from amaranth.lib import stream
from amaranth.lib.wiring import Component, In, Out, connect, flipped

from nearstep_hw.axi.isolate import AxiIsolate
from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_hw.serial.framer import Framer
from nearstep_hw.serial.uart import BYTE_BITS
from nearstep_hw.stream.gearbox import PieceLayout
from nearstep_sim.bench.formal import prove

from .toolkit import History, refuted

pytestmark = pytest.mark.formal

WIDTHS = {"address_width": 12, "data_width": 8, "id_width": 1}


class IsolateHandshake(Component):
    """The initiator is free to do anything: it may be reset in any cycle.

    Parameters
    ----------
    careless : state as well that answers pass in isolation, which they must not.
    """

    s_axi: In(Axi4Signature(**WIDTHS))
    m_axi: Out(Axi4Signature(**WIDTHS))
    i_isolate: In(1)

    def __init__(self, *, careless: bool = False) -> None:
        self.careless = careless
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.dut = dut = AxiIsolate(**WIDTHS, bursts=2, write_bursts=2)
        connect_channels(m, dut.s_axi, flipped(self.s_axi))
        connect_channels(m, dut.m_axi, self.m_axi)
        m.d.comb += dut.i_isolate.eq(self.i_isolate)
        history = History(m)
        for name in ("ar", "aw", "w"):
            history.keeps_valid(getattr(dut.m_axi, name))
        with m.If(dut.o_isolated):
            m.d.comb += [Assert(~getattr(dut.s_axi, name).ready) for name in ("ar", "aw", "w")]
            m.d.comb += [Assert(~getattr(dut.s_axi, name).valid) for name in ("r", "b")]
            m.d.comb += [Assert(getattr(dut.m_axi, name).ready) for name in ("r", "b")]
        cut, idle = history.before(dut.o_isolated), history.before(dut.o_idle)
        m.d.comb += Assert(~(history.exists & cut & ~dut.o_isolated) | idle)
        m.d.comb += Cover(dut.o_isolated & dut.m_axi.w.valid & (dut.m_axi.w.payload.strb == 0))
        if self.careless:
            m.d.comb += Assert(~(dut.m_axi.r.valid & ~dut.s_axi.r.valid))
        return m


class FramerHandshake(Component):
    """The rules of a stream at both ends."""

    i: In(stream.Signature(PieceLayout(BYTE_BITS)))
    o: Out(stream.Signature(BYTE_BITS))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.dut = dut = Framer()
        connect(m, flipped(self.i), dut.i)
        connect(m, dut.o, flipped(self.o))
        history = History(m)
        history.keeps_valid(dut.i, Assume)
        history.keeps_valid(dut.o)
        return m


def test_an_isolated_port_keeps_its_promises() -> None:
    assert prove(IsolateHandshake(), "isolate", "prove", depth=3).statements >= 10


@pytest.mark.deep
def test_an_isolated_port_writes_nothing_in_place_of_data() -> None:
    assert prove(IsolateHandshake(), "isolate", "cover", depth=10).statements == 1


@pytest.mark.deep
def test_answers_do_not_pass_an_isolation() -> None:
    refuted(IsolateHandshake(careless=True), "isolate_careless", depth=6)


def test_the_framer_holds_what_it_offers() -> None:
    assert prove(FramerHandshake(), "framer", "prove", depth=3).statements >= 2
