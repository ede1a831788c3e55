"""Boards that can be bought, as data: chip, clock, memory, link."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from nearstep_spec.coarse.lanes import PINS

__all__ = ["BOARDS", "Board", "Clock"]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A frequency of a design, and the timing of an SDRAM at it.

    Attributes
    ----------
    phase : degrees by which the clock of an SDRAM lags that of the design.
    late_reads : clocks by which SDRAM data are sampled later than by LiteDRAM's choice.
    """

    hz: int
    phase: int = 0
    late_reads: int = 0


@dataclass(frozen=True, kw_only=True)
class Board:
    """A board.

    Attributes
    ----------
    name, title : in options, and for people.
    platform : class of amaranth-boards, or derived from one: chip, package, pins, clock.
    device : chip, by LiteX's name.
    technology : determines the pipeline stages of datapaths.
    input_hz : of the oscillator on the board.
    clocks : of the design, `sync` and the memory controller; the first is the default.
    memory : kind of DRAM.
    memory_module : part, by LiteDRAM's name of its timing.
    memory_options : for LiteDRAM's generator, by name: resistances, swapped pins.
    memory_bytes, memory_bits, row_bits, bank_bits : of the DRAM: size, data pins, address pins,
        pins of the bank's number.
    baud : of the link, bits a second.
    line : pins of the link, receiver and transmitter, of a connector; None: the platform's UART.
    dfu : vendor and product of the loader in USB's Device Firmware Upgrade, if any.
    links : pins of the connector `gpio` for each link of a COARSE device, driven and read ones:
        strobe, first, data. None if the board has too few.
    button, light : of the platform; they reset the board, and show that memory is ready. A light
        may be one of several: `rgb_led.g`.
    source : of these figures.
    chosen : number of the clock in `clocks`.
    """

    name: str
    title: str
    platform: str
    device: str
    technology: str
    input_hz: int
    clocks: tuple[Clock, ...]
    memory: Literal["sdr", "ddr3"]
    memory_module: str
    memory_options: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: int
    memory_bits: int
    row_bits: int
    bank_bits: int
    baud: int
    line: tuple[str, str] | None = None
    dfu: tuple[int, int] | None = None
    links: tuple[tuple[str, str], ...] = ()
    button: str
    light: str
    source: str
    chosen: int = 0

    @property
    def clock(self) -> Clock:
        """The clock of the design."""
        return self.clocks[self.chosen]

    @property
    def system_hz(self) -> int:
        """Frequency of the design."""
        return self.clock.hz

    def at(self, hz: int) -> "Board":
        """Return the board with another clock of the design.

        Raises
        ------
        ValueError : the board has no such clock.
        """
        known = [clock.hz for clock in self.clocks]
        if hz not in known:
            raise ValueError(f"the clock must be one of {known} Hz, not {hz!r}")
        return replace(self, chosen=known.index(hz))


def _link(first: int) -> tuple[str, str]:
    """Pins GP and GN of an ULX3S from `first` on."""
    numbers = range(first, first + PINS)
    return " ".join(f"{n}+" for n in numbers), " ".join(f"{n}-" for n in numbers)


BOARDS = MappingProxyType(
    {
        board.name: board
        for board in (
            Board(
                name="ulx3s_85f",
                title="Radiona ULX3S-85F",
                platform="amaranth_boards.ulx3s:ULX3S_85F_Platform",
                device="LFE5U-85F-6BG381C",
                technology="ecp5",
                input_hz=25_000_000,
                clocks=(
                    Clock(hz=50_000_000, phase=90),
                    Clock(hz=75_000_000, phase=270, late_reads=1),
                    Clock(hz=100_000_000, phase=180, late_reads=1),
                ),
                memory="sdr",
                memory_module="MT48LC16M16",
                memory_bytes=32 << 20,
                memory_bits=16,
                row_bits=13,
                bank_bits=2,
                baud=3_000_000,
                links=(_link(0), _link(18)),
                button="button_fire",
                light="led",
                source="amaranth-boards 0.0.21, ulx3s.py; ULX3S schematics v3.0.8",
            ),
            Board(
                name="orangecrab_85f",
                title="OrangeCrab r0.2 85F",
                platform="nearstep_hw.boards.orangecrab:OrangeCrabPlatform",
                device="LFE5U-85F-8MG285C",
                technology="ecp5",
                input_hz=48_000_000,
                clocks=(Clock(hz=48_000_000), Clock(hz=96_000_000)),
                memory="ddr3",
                memory_module="MT41K256M16",
                memory_options=MappingProxyType(
                    {
                        "init_clk_freq": 24e6,
                        "rtt_nom": "disabled",
                        "rtt_wr": "disabled",
                        "ron": "34ohm",
                        "dm_swap": True,
                    }
                ),
                memory_bytes=512 << 20,
                memory_bits=16,
                row_bits=15,
                bank_bits=3,
                baud=3_000_000,
                line=("0", "1"),
                dfu=(0x1209, 0x5AF0),
                button="button",
                light="rgb_led.g",
                source="amaranth-boards 0.0.21, orangecrab_r0_2.py; litex-boards, orangecrab",
            ),
        )
    }
)
"""Every board with a bitstream, by name."""
