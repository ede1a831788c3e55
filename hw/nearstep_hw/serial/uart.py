"""A UART: bytes of eight bits, no parity, one stop bit."""

from amaranth import Cat, Const, Elaboratable, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.cdc import FFSynchronizer
from amaranth.lib.wiring import In, Out

MOST_ERROR = 0.02  # of the bit rate: a receiver finds the stop bit as long as both ends make 5 %
LEAST_DIVISOR = 4
BYTE_BITS = 8


class BaudError(ValueError):
    """A bit rate that no divisor of the clock is near enough to."""


def divisor_of(*, clock_hz: int, baud: int) -> int:
    """Clock cycles of a bit.

    Raises
    ------
    BaudError : with the rate that there is instead.
    """
    divisor = max(1, round(clock_hz / baud))
    found = clock_hz / divisor
    if divisor < LEAST_DIVISOR:
        raise BaudError(
            f"a bit must take at least {LEAST_DIVISOR} cycles of {clock_hz} Hz, which is "
            f"{clock_hz // LEAST_DIVISOR} baud, not {baud}"
        )
    if abs(found / baud - 1) > MOST_ERROR:
        raise BaudError(
            f"{clock_hz} Hz give {found:.0f} baud, {abs(found / baud - 1):.1%} off {baud}; "
            f"{MOST_ERROR:.0%} is allowed"
        )
    return divisor


def _checked(divisor: int) -> int:
    if divisor < LEAST_DIVISOR:
        raise BaudError(f"a bit must take at least {LEAST_DIVISOR} cycles, not {divisor!r}")
    return divisor
