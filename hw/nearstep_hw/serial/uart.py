"""A UART: bytes of eight bits, no parity, one stop bit."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.cdc import FFSynchronizer
from amaranth.lib.wiring import In, Out

from nearstep_spec.errors import NearstepError

MOST_ERROR = 0.02  # of the bit rate: both ends together must stay below 5 % to sample the stop bit
LEAST_DIVISOR = 4
BYTE_BITS = 8


class BaudError(NearstepError, ValueError):
    """No divisor of the clock is near enough to a bit rate."""


def divisor_of(*, clock_hz: int, baud: int) -> int:
    """Return the clock cycles of a bit.

    Raises
    ------
    BaudError : no divisor is near enough; the message gives the nearest rate.
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


class UartReceiver(wiring.Component):
    """Receives bytes from a line.

    Each bit is the majority of three samples in its middle. A byte without a stop bit is dropped,
    and reception resumes after the line was high.

    *Timing*: a byte is at `o` about three cycles after the middle of its stop bit. Bits of the
    sender may be 4 % longer or shorter than `divisor` if `divisor` is at least 8, and 2 % if it is
    4.

    Parameters
    ----------
    divisor : clock cycles of a bit, see `divisor_of`.

    Members
    -------
    rx : the line, idle high; synchronised here.
    o : bytes.
    o_framing_error : strobe: a byte had no stop bit.

    Raises
    ------
    BaudError
    """

    rx: In(1, init=1)
    o: Out(stream.Signature(BYTE_BITS, always_ready=True))
    o_framing_error: Out(1)

    def __init__(self, *, divisor: int) -> None:
        self.divisor = _checked(divisor)
        super().__init__()

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        line, before, sample = Signal(init=1), Signal(2, init=3), Signal()
        m.submodules.synchronizer = FFSynchronizer(self.rx, line, init=1)
        timer = Signal(range(self.divisor))
        number = Signal(range(BYTE_BITS + 2))  # of the bit: start, data, stop
        now = Signal()

        m.d.comb += [
            sample.eq((line & before[0]) | (line & before[1]) | (before[0] & before[1])),
            now.eq(timer == 0),
        ]
        m.d.sync += [
            before.eq(Cat(line, before)),
            timer.eq(Mux(now, self.divisor - 1, timer - 1)),
            self.o.valid.eq(0),
            self.o_framing_error.eq(0),
        ]
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [number.eq(0), timer.eq((self.divisor - 1) // 2)]
                with m.If(~line):
                    m.next = "BITS"
            with m.State("BITS"), m.If(now):
                m.d.sync += number.eq(number + 1)
                with m.If((number == 0) & sample):  # no start bit
                    m.next = "IDLE"
                with m.Elif(number != BYTE_BITS + 1):  # the start bit is shifted out
                    m.d.sync += self.o.payload.eq(Cat(self.o.payload[1:], sample))
                with m.Elif(sample):
                    m.d.sync += self.o.valid.eq(1)
                    m.next = "IDLE"
                with m.Else():
                    m.d.sync += self.o_framing_error.eq(1)
                    m.next = "BREAK"
            with m.State("BREAK"), m.If(sample):
                m.next = "IDLE"
        return m


class UartTransmitter(wiring.Component):
    """Sends bytes to a line.

    *Timing*: the start bit begins the cycle after a byte was taken; a byte takes ten bits of
    `divisor` cycles, and bytes follow each other without a gap.

    Parameters
    ----------
    divisor : clock cycles of a bit, see `divisor_of`.

    Members
    -------
    i : bytes.
    tx : the line, idle high; a register.

    Raises
    ------
    BaudError
    """

    i: In(stream.Signature(BYTE_BITS))
    tx: Out(1, init=1)

    def __init__(self, *, divisor: int) -> None:
        self.divisor = _checked(divisor)
        super().__init__()

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        timer = Signal(range(self.divisor))
        rest = Signal(BYTE_BITS + 1)  # bits that follow the one on the line, with the stop bit
        number = Signal(range(BYTE_BITS + 2))
        with m.FSM():
            with m.State("IDLE"):  # the last cycle of a stop bit too
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += [number.eq(0), timer.eq(self.divisor - 1)]
                with m.If(self.i.valid):
                    m.d.sync += [self.tx.eq(0), rest.eq(Cat(self.i.payload, 1))]
                    m.next = "BITS"
            with m.State("BITS"):
                m.d.sync += timer.eq(timer - 1)
                with m.If(timer == 0):
                    m.d.sync += [
                        self.tx.eq(rest[0]),
                        rest.eq(rest[1:]),
                        number.eq(number + 1),
                        timer.eq(self.divisor - 1),
                    ]
                    with m.If(number == BYTE_BITS):  # a stop bit begins
                        m.d.sync += timer.eq(self.divisor - 2)
                        m.next = "STOP"
            with m.State("STOP"):
                m.d.sync += timer.eq(timer - 1)
                with m.If(timer == 0):
                    m.next = "IDLE"
        return m
