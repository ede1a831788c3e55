"""Boards with an ECP5: clock, reset and pads around `BoardTop`."""

from collections.abc import Mapping

from amaranth import (
    Cat,
    ClockDomain,
    ClockSignal,
    Elaboratable,
    Instance,
    IOPort,
    Module,
    ResetSignal,
    Signal,
)
from amaranth.build import Platform
from amaranth.lib import io
from amaranth.lib.cdc import ResetSynchronizer

from nearstep_hw.boards import free_rows as free
from nearstep_hw.boards.clock import Ecp5Pll, PllClock
from nearstep_hw.boards.litedram import MODULE
from nearstep_hw.boards.top import BoardTop
from nearstep_spec.boards.coarse_board import CoarseBoardConfig
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.coarse.config import PORTS

RESOURCES = {"sdr": "sdram", "ddr3": "ddr3"}
"""Resource of a platform, by the kind of memory."""

NAMES = {
    "sdr": {
        "a": "a", "ba": "ba", "cas_n": "cas", "cke": "clk_en", "cs_n": "cs", "dm": "dqm",
        "dq": "dq", "ras_n": "ras", "we_n": "we",
    },
    "ddr3": {
        "a": "a", "ba": "ba", "cas_n": "cas", "cke": "clk_en", "clk_p": "clk", "cs_n": "cs",
        "dm": "dm", "dq": "dq", "dqs_p": "dqs", "odt": "odt", "ras_n": "ras", "reset_n": "rst",
        "we_n": "we",
    },
}  # fmt: skip
"""Names of the core's pads in the platform's resource."""


class Ecp5Board(Elaboratable):
    """`BoardTop` on a board with an ECP5: a PLL generates the clock, a button resets the board, and
    a LED shows that memory is ready.
    """

    def __init__(self, config: BoardConfig | CoarseBoardConfig) -> None:
        self.config = config

    def elaborate(self, platform: Platform) -> Elaboratable:
        m = Module()
        board = self.config.described
        dram = board.memory if self.config.memory == "dram" else None
        clock_pad = platform.request(platform.default_clk, dir="-")
        m.submodules.clock_pad = clock = io.Buffer("i", clock_pad)
        m.submodules.button_pad = button = io.Buffer("i", platform.request(board.button, dir="-"))
        line = platform.request("uart", dir="-")
        m.submodules.rx_pad = rx = io.Buffer("i", line.rx)
        m.submodules.tx_pad = tx = io.Buffer("o", line.tx)
        name, _, part = board.light.partition(".")
        light_pad = platform.request(name, dir="-")
        m.submodules.light_pad = light = io.Buffer(
            "o", getattr(light_pad, part) if part else light_pad
        )
        pads = platform.request(RESOURCES[dram], dir="-") if dram else None
        m.submodules.top = top = BoardTop(self.config, pads=_named(dram, pads))
        if top.core is not None:
            platform.add_file(f"{MODULE}.v", top.core.verilog)
        m.domains.sync = ClockDomain("sync")
        system_clock = Signal()
        m.d.comb += [
            ClockSignal("sync").eq(system_clock),
            top.rx.eq(rx.i),
            tx.o.eq(top.tx),
            light.o.eq(top.o_memory_ready),
        ]
        if dram == "ddr3":
            m.d.comb += [
                top.i_clk.eq(clock.i),
                top.i_rst.eq(button.i),
                system_clock.eq(top.o_clk),
                ResetSignal("sync").eq(top.o_rst),
            ]
            _hold_supplies(m, platform)
        else:
            stopped, memory_clock = Signal(), Signal()
            clocks = [PllClock(hz=board.system_hz)]
            clocks += [PllClock(hz=board.system_hz, phase=board.clock.phase)] if dram else []
            m.submodules.pll = pll = Ecp5Pll(input_hz=board.input_hz, clocks=clocks)
            m.d.comb += [
                pll.i_clk.eq(clock.i),
                Cat(system_clock, memory_clock).eq(pll.o_clk),
                stopped.eq(~pll.o_locked | button.i),
            ]
            m.submodules.reset = ResetSynchronizer(stopped, domain="sync")
            if dram:
                m.submodules.memory_clock = Instance(
                    "ODDRX1F", i_SCLK=memory_clock, i_RST=0, i_D0=1, i_D1=0, o_Q=pads.clk.io
                )
        if isinstance(self.config, CoarseBoardConfig):
            _join_links(m, platform, top)
        platform.add_file(free.FILE, free.free_rows())
        m.submodules.free_rows = Instance(free.MODULE, a_keep=1)
        # nextpnr derives the PLL's clocks from the constraint of the oscillator.
        return m


def _named(dram: str | None, pads: object) -> Mapping[str, IOPort]:
    """Return the pads of a resource by their names in the core."""
    if dram is None:
        return {}
    return {name: getattr(pads, theirs).io for name, theirs in NAMES[dram].items()}


def _join_links(m: Module, platform: Platform, top: BoardTop) -> None:
    """Connect the pads of the links to other boards."""
    for port in range(PORTS):
        pads = platform.request("link", port, dir="-")
        m.submodules[f"link{port}_in"] = read = io.Buffer("i", pads.i)
        m.submodules[f"link{port}_out"] = driven = io.Buffer("o", pads.o)
        m.d.comb += [
            getattr(top, f"i_link{port}").eq(read.i),
            driven.o.eq(getattr(top, f"o_link{port}")),
        ]


def _hold_supplies(m: Module, platform: Platform) -> None:
    """Drive the OrangeCrab's pads that serve as supply and ground of its memory."""
    supplies = platform.request("ddr3_pseudo_power", dir="-")
    for name, level in (("vcc_virtual", 0), ("gnd_virtual", 0)):
        pads = getattr(supplies, name)
        m.submodules[name] = buffer = io.Buffer("o", pads)
        m.d.comb += buffer.o.eq(level)
