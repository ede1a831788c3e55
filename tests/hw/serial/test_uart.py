"""UART: bytes pass at any divisor, with either end too fast, and what is no byte is told."""

import random
from collections.abc import Iterator

import pytest
from amaranth.sim import SimulatorContext

from nearstep_hw.serial.uart import BaudError, UartReceiver, UartTransmitter, divisor_of

from ..simulate import simulate


def levels(data: bytes, *, gap: int = 0) -> Iterator[int]:
    """The line, bit by bit."""
    for byte in data:
        yield from (0, *(byte >> k & 1 for k in range(8)), 1, *[1] * gap)


def receive(divisor: int, bits: list[int], *, rate: float = 1.0) -> tuple[bytes, int, int]:
    """What comes of a line whose bits are `rate` times as fast: bytes, framing errors, cycles."""
    dut = UartReceiver(divisor=divisor)
    found, errors = bytearray(), 0
    cycles = int(len(bits) * divisor / rate) + 4 * divisor

    async def bench(ctx: SimulatorContext) -> None:
        nonlocal errors
        shown = 1
        for cycle in range(cycles):
            place = int((cycle + 0.5) * rate / divisor)
            level = bits[place] if place < len(bits) else 1
            if level != shown:
                ctx.set(dut.rx, level)
                shown = level
            await ctx.tick()
            if ctx.get(dut.o.valid):
                found.append(ctx.get(dut.o.payload))
            errors += ctx.get(dut.o_framing_error)

    simulate(dut, bench)
    return bytes(found), errors, cycles


@pytest.mark.parametrize("rate", [0.98, 1.0, 1.02])
@pytest.mark.parametrize("divisor", [4, 5, 33])
def test_bytes_come_in_though_the_sender_is_off_by_two_percent(divisor: int, rate: float) -> None:
    rng = random.Random(divisor)
    data = bytes([0, 255, 0x55, 0xAA]) + rng.randbytes(60 if divisor < 10 else 12)
    found, errors, _ = receive(divisor, list(levels(data)), rate=rate)
    assert found == data
    assert errors == 0


def test_seven_percent_are_too_many() -> None:
    data = random.Random(3).randbytes(20)
    found, _, _ = receive(16, list(levels(data)), rate=1.07)
    assert found != data


def test_a_byte_without_a_stop_bit_is_told_and_the_next_one_is_right() -> None:
    broken = [0, *[1, 0] * 4, 0, 0, 0, 1, 1]
    found, errors, _ = receive(8, [*levels(b"A"), *broken, *levels(b"BC")])
    assert found == b"ABC"
    assert errors == 1


def test_a_line_that_stays_low_is_one_error() -> None:
    found, errors, _ = receive(8, [*levels(b"A"), *[0] * 60, 1, *levels(b"B")])
    assert found == b"AB"
    assert errors == 1


def test_a_glitch_is_no_start_bit() -> None:
    dut = UartReceiver(divisor=16)
    seen = 0

    async def bench(ctx: SimulatorContext) -> None:
        nonlocal seen
        for cycle in range(400):
            ctx.set(dut.rx, cycle not in (20, 21, 22))
            await ctx.tick()
            seen += ctx.get(dut.o.valid) + ctx.get(dut.o_framing_error)

    simulate(dut, bench)
    assert seen == 0


@pytest.mark.parametrize("divisor", [4, 7])
def test_bytes_go_out_without_a_gap(divisor: int) -> None:
    data = random.Random(divisor).randbytes(20)
    dut = UartTransmitter(divisor=divisor)
    line: list[int] = []

    async def bench(ctx: SimulatorContext) -> None:
        sent = 0
        for _ in range(divisor * 10 * (len(data) + 1)):
            ctx.set(dut.i.valid, sent < len(data))
            ctx.set(dut.i.payload, data[min(sent, len(data) - 1)])
            sent += ctx.get(dut.i.valid) & ctx.get(dut.i.ready)
            await ctx.tick()
            line.append(ctx.get(dut.tx))

    simulate(dut, bench)
    first = line.index(0)
    wanted = [level for level in levels(data) for _ in range(divisor)]
    assert line[first : first + len(wanted)] == wanted
    assert all(line[first + len(wanted) :])


@pytest.mark.parametrize(
    ("clock_hz", "baud", "divisor"),
    [(100_000_000, 3_000_000, 33), (96_000_000, 3_000_000, 32), (12_000_000, 3_000_000, 4)],
)
def test_divisors(clock_hz: int, baud: int, divisor: int) -> None:
    assert divisor_of(clock_hz=clock_hz, baud=baud) == divisor


@pytest.mark.parametrize(
    ("clock_hz", "baud", "message"),
    [
        (10_000_000, 3_000_000, "at least 4 cycles of 10000000 Hz, which is 2500000 baud"),
        (25_000_000, 3_000_000, "give 3125000 baud, 4.2% off 3000000; 2% is allowed"),
    ],
)
def test_a_rate_that_no_divisor_gives_is_refused(clock_hz: int, baud: int, message: str) -> None:
    with pytest.raises(BaudError, match=message):
        divisor_of(clock_hz=clock_hz, baud=baud)


@pytest.mark.parametrize("kind", [UartReceiver, UartTransmitter])
def test_divisors_below_four_are_refused(kind: type) -> None:
    with pytest.raises(BaudError, match="at least 4 cycles, not 3"):
        kind(divisor=3)
