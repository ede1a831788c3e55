"""Proofs of address windows, for every stimulus."""

import pytest
from amaranth.hdl import Assert, Assume, Cover, Module, Value
from amaranth.lib import stream
from amaranth.lib.wiring import Component, In, connect, flipped

from nearstep_hw.axi.burst import BurstLayout
from nearstep_hw.axi.reader import ReadMover
from nearstep_hw.axi.window import WindowChecker, WindowSignature
from nearstep_sim.bench.formal import prove

from .toolkit import History, refuted

pytestmark = pytest.mark.formal


class WindowedReads(Component):
    """Checker and mover: no byte outside the windows is ever asked for on the bus."""

    WINDOWS, BEAT, BURST = 2, 64, 64

    def __init__(self, *, checked: bool = True) -> None:
        self.checked = checked
        self.layout = BurstLayout(streams=4, address_width=34, burst_beats=self.BURST)
        super().__init__(
            {
                "window": In(WindowSignature(34)).array(self.WINDOWS),
                "i": In(stream.Signature(self.layout)),
                "i_ready": In(1),
                "i_byte": In(34),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.checker = checker = WindowChecker(
            self.layout, beat_bytes=self.BEAT, windows=self.WINDOWS, write=False
        )
        m.submodules.mover = mover = ReadMover(
            streams=4,
            address_width=34,
            beat_bytes=self.BEAT,
            burst_beats=self.BURST,
            landing_beats=2 * self.BURST,
            bursts_ahead=8,
        )
        history = History(m)
        history.hold(self.i_byte)  # one byte, but any
        for mine, its in zip(self.window, checker.window, strict=True):
            connect(m, flipped(mine), its)
            history.hold(*(getattr(mine, name) for name in mine.signature.members))
        if self.checked:
            connect(m, flipped(self.i), checker.i)
            connect(m, checker.o, mover.i)
        else:
            connect(m, flipped(self.i), mover.i)
        m.d.comb += [
            checker.i_clear.eq(self.i_clear),
            mover.bus.ar.ready.eq(self.i_ready),
            Assume((self.i.payload.beats > 0) & (self.i.payload.beats <= self.BURST)),
        ]
        bus = mover.bus

        def granted(address: Value, beats: Value) -> Value:
            """The byte `i_byte` is not in the burst, or a window allows to read it."""
            byte = self.i_byte
            inside = (address <= byte) & (byte < address + beats * self.BEAT)
            allowed = [w.valid & w.read & (w.base <= byte) & (byte < w.limit) for w in self.window]
            return ~inside | allowed[0] | allowed[1]

        with m.If(bus.ar.valid):
            m.d.comb += Assert(granted(bus.ar.payload.addr, bus.ar.payload.len + 1))
        if self.checked:
            with m.If(checker.o.valid):
                offered = checker.o.payload
                m.d.comb += [
                    Assert(granted(offered.address, offered.beats)),
                    Assert((offered.beats > 0) & (offered.beats <= self.BURST)),
                ]
            with m.If(checker.o_refused):
                m.d.comb += Assert(~checker.o.valid & ~checker.i.ready)
        history.keeps_valid(checker.o, cleared=self.i_clear)
        m.d.comb += [
            Cover(bus.ar.valid & granted(bus.ar.payload.addr, bus.ar.payload.len + 1)),
            Cover(checker.o_refused),
        ]
        return m


@pytest.mark.deep
def test_a_refused_burst_never_reaches_the_bus():
    """By induction: for runs of any length."""
    assert prove(WindowedReads(), "windows", "prove", depth=3, solver="z3").statements >= 4


@pytest.mark.deep
def test_the_window_proof_fails_without_the_checker():
    assert prove(WindowedReads(), "windows", "cover", depth=8).statements == 2
    refuted(WindowedReads(checked=False), "windows_unchecked", depth=6)
