"""The platform of the OrangeCrab, with corrected pins of its memory."""

from typing import ClassVar

from amaranth.build import Attrs, Pins, PinsN, Resource, Subsignal
from amaranth_boards.orangecrab_r0_2 import OrangeCrabR0_2_85FPlatform

MEMORY = Resource(
    "ddr3",
    0,
    Subsignal("rst", PinsN("L18", dir="o")),
    Subsignal("clk", Pins("J18", dir="o"), Attrs(IO_TYPE="SSTL135D_I")),
    Subsignal("clk_en", Pins("D18", dir="o")),
    Subsignal("cs", PinsN("A12", dir="o")),
    Subsignal("we", PinsN("B12", dir="o")),
    Subsignal("ras", PinsN("C12", dir="o")),
    Subsignal("cas", PinsN("D13", dir="o")),
    Subsignal("a", Pins("C4 D2 D3 A3 A4 D4 C3 B2 B1 D1 A7 C2 B6 C1 A2", dir="o")),
    Subsignal("ba", Pins("D6 B7 A6", dir="o")),
    Subsignal(
        "dqs",
        Pins("B15 G18", dir="io"),
        Attrs(IO_TYPE="SSTL135D_I", TERMINATION="OFF", DIFFRESISTOR="100"),
    ),
    Subsignal(
        "dq",
        Pins("C17 D15 B17 C16 A15 B13 A17 A13 F17 F16 G15 F15 J16 C18 H16 F18", dir="io"),
        Attrs(TERMINATION="OFF"),
    ),
    Subsignal("dm", Pins("D16 G16", dir="o")),
    Subsignal("odt", Pins("C13", dir="o")),
    Attrs(IO_TYPE="SSTL135_I", SLEWRATE="FAST"),
)
"""Pins of litex-boards, `gsd_orangecrab.py`, revision 0.2: amaranth-boards 0.0.21 has the bank
address on pins of a LED, and the strobes in an order other than that of the bytes. The positive pin
of a pair places both.
"""


DFU_SUFFIX = "dfu-suffix"
"""Program that appends 16 bytes to a bitstream; here the flow appends them, see `Board.dfu`."""


class OrangeCrabPlatform(OrangeCrabR0_2_85FPlatform):
    """An OrangeCrab r0.2 with an ECP5-85F."""

    resources: ClassVar[list[Resource]] = [
        MEMORY if resource.name == MEMORY.name else resource
        for resource in OrangeCrabR0_2_85FPlatform.resources
    ]

    @property
    def required_tools(self) -> list[str]:
        return [tool for tool in super().required_tools if tool != DFU_SUFFIX]

    @property
    def command_templates(self) -> list[str]:
        return [each for each in super().command_templates if DFU_SUFFIX not in each]
