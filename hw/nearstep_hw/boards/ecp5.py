"""Boards with an ECP5: clock, reset and pads around `BoardTop`."""

from amaranth import ClockDomain, ClockSignal, Elaboratable, Module, Signal
from amaranth.build import Platform
from amaranth.lib import io
from amaranth.lib.cdc import ResetSynchronizer

from nearstep_hw.boards.clock import Ecp5Pll, PllClock
from nearstep_hw.boards.top import BoardTop
from nearstep_spec.boards.config import BoardConfig


class Ecp5Board(Elaboratable):
    """`BoardTop` on a board with an ECP5: the PLL makes its clock, a button resets the board, and
    a light tells that memory is ready.

    Parameters
    ----------
    config : of the board.
    """

    def __init__(self, config: BoardConfig) -> None:
        self.config = config

    def elaborate(self, platform: Platform) -> Elaboratable:
        m = Module()
        board = self.config.described
        m.submodules.top = top = BoardTop(self.config)
        m.submodules.pll = pll = Ecp5Pll(
            input_hz=int(platform.default_clk_frequency), clocks=(PllClock(hz=board.system_hz),)
        )
        clock_pad = platform.request(platform.default_clk, dir="-")
        m.submodules.clock_pad = clock = io.Buffer("i", clock_pad)
        m.submodules.button_pad = button = io.Buffer("i", platform.request(board.button, dir="-"))
        line = platform.request("uart", dir="-")
        m.submodules.rx_pad = rx = io.Buffer("i", line.rx)
        m.submodules.tx_pad = tx = io.Buffer("o", line.tx)
        name, _, part = board.light.partition(".")
        light_pad = platform.request(name, dir="-")
        m.submodules.light_pad = light = io.Buffer("o", getattr(light_pad, part) if part else light_pad)
        m.domains.sync = ClockDomain("sync")
        stopped, system_clock = Signal(), Signal()

        m.d.comb += [
            pll.i_clk.eq(clock.i),
            system_clock.eq(pll.o_clk[0]),
            ClockSignal("sync").eq(system_clock),
            stopped.eq(~pll.o_locked | button.i),
            top.rx.eq(rx.i),
            tx.o.eq(top.tx),
            light.o.eq(top.o_memory_ready),
        ]
        m.submodules.reset = ResetSynchronizer(stopped, domain="sync")
        platform.add_clock_constraint(system_clock, board.system_hz)
        return m
