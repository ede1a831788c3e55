"""Clocks of an ECP5 from its PLL."""

from collections.abc import Sequence
from dataclasses import dataclass

from amaranth import Elaboratable, Instance, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_spec.errors import NearstepError

VCO_HZ = (400_000_000, 800_000_000)
DETECTOR_HZ = (10_000_000, 400_000_000)
DIVIDERS = range(1, 129)
TURN = 360
OUTPUTS = ("CLKOP", "CLKOS", "CLKOS2", "CLKOS3")


class ClockError(NearstepError, ValueError):
    """The PLL cannot generate the frequencies from its input."""


@dataclass(frozen=True, kw_only=True)
class PllClock:
    """A clock of a PLL.

    Attributes
    ----------
    hz : frequency.
    phase : degrees by which its edges lag those of the first output.
    """

    hz: int
    phase: int = 0


class Ecp5Pll(wiring.Component):
    """The PLL of an ECP5: clocks of exact frequencies, the first one fed back.

    Parameters
    ----------
    input_hz : frequency of the input.
    clocks : up to four; the phase of the first one is 0.

    Members
    -------
    i_clk : the input, directly from its pin.
    i_reset : high: no clocks, not locked.
    o_clk, o_locked : the clocks; valid while `o_locked` is high.

    Raises
    ------
    ClockError : no dividers give these frequencies or phases exactly.

    Ref: Lattice FPGA-TN-02200, ECP5 and ECP5-5G sysCLOCK PLL/DLL Design and Usage Guide.
    """

    def __init__(self, *, input_hz: int, clocks: Sequence[PllClock]) -> None:
        self.input_hz = input_hz
        self.clocks = tuple(clocks)
        self.input_divider, self.feedback_divider, self.dividers = _dividers(input_hz, self.clocks)
        super().__init__(
            {"i_clk": In(1), "i_reset": In(1), "o_clk": Out(len(self.clocks)), "o_locked": Out(1)}
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        settings: dict[str, object] = {}
        for number, (clock, divider) in enumerate(zip(self.clocks, self.dividers, strict=True)):
            name = OUTPUTS[number]
            late = divider * clock.phase // TURN
            settings |= {
                f"p_{name}_ENABLE": "ENABLED",
                f"p_{name}_DIV": divider,
                f"p_{name}_CPHASE": divider - 1 + late,
                f"p_{name}_FPHASE": 0,
                f"a_FREQUENCY_PIN_{name}": f"{clock.hz / 1e6:.6f}",
                f"o_{name}": self.o_clk[number],
            }
        feedback = Signal()
        m.d.comb += feedback.eq(self.o_clk[0])
        m.submodules.pll = Instance(
            "EHXPLLL",
            a_FREQUENCY_PIN_CLKI=f"{self.input_hz / 1e6:.6f}",
            a_ICP_CURRENT="12",  # values of Lattice's own tool
            a_LPF_RESISTOR="8",
            a_MFG_ENABLE_FILTEROPAMP="1",
            a_MFG_GMCREF_SEL="2",
            p_PLLRST_ENA="ENABLED",
            p_INTFB_WAKE="DISABLED",
            p_STDBY_ENABLE="DISABLED",
            p_DPHASE_SOURCE="DISABLED",
            p_OUTDIVIDER_MUXA="DIVA",
            p_OUTDIVIDER_MUXB="DIVB",
            p_OUTDIVIDER_MUXC="DIVC",
            p_OUTDIVIDER_MUXD="DIVD",
            p_FEEDBK_PATH="CLKOP",
            p_CLKI_DIV=self.input_divider,
            p_CLKFB_DIV=self.feedback_divider,
            i_CLKI=self.i_clk,
            i_CLKFB=feedback,
            i_RST=self.i_reset,
            i_STDBY=0,
            i_PHASESEL0=0,
            i_PHASESEL1=0,
            i_PHASEDIR=1,
            i_PHASESTEP=1,
            i_PHASELOADREG=1,
            i_PLLWAKESYNC=0,
            i_ENCLKOP=0,
            o_LOCK=self.o_locked,
            **settings,
        )
        return m


def _dividers(input_hz: int, clocks: Sequence[PllClock]) -> tuple[int, int, tuple[int, ...]]:
    """Return the dividers of input, feedback and outputs, with the fastest oscillator.

    Raises
    ------
    ClockError
    """
    wanted = ", ".join(f"{clock.hz} Hz at {clock.phase} degrees" for clock in clocks)
    if not 1 <= len(clocks) <= len(OUTPUTS) or clocks[0].phase:
        raise ClockError(f"a PLL has 1 to {len(OUTPUTS)} clocks, the first at 0, not {wanted}")
    for first in reversed(DIVIDERS):
        oscillator = clocks[0].hz * first
        if not VCO_HZ[0] <= oscillator <= VCO_HZ[1]:
            continue
        dividers = [oscillator // clock.hz for clock in clocks]
        exact = all(
            oscillator % clock.hz == 0 and divider in DIVIDERS and divider * clock.phase % TURN == 0
            for clock, divider in zip(clocks, dividers, strict=True)
        )
        for divider in DIVIDERS if exact else ():
            slow, rest = divmod(input_hz, divider)
            times, uneven = divmod(clocks[0].hz * divider, input_hz)
            in_range = DETECTOR_HZ[0] <= slow <= DETECTOR_HZ[1]
            if not rest and not uneven and in_range and times in DIVIDERS:
                return divider, times, tuple(dividers)
    raise ClockError(f"no dividers make {wanted} of {input_hz} Hz")
