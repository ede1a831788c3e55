"""The rank behind a PHY: data come and go in the cycles that the DFI port promises."""

import numpy as np
import pytest

from nearstep_hw.dram.dfi import COLUMN_PHASE, HOST_PHASES, TPHY_RDLAT, TPHY_WRLAT
from nearstep_sim.models.dram.device import Ddr4Device, Ddr4Port, DramViolationError
from nearstep_spec.dram.address import AddressMapping, DramAddress
from nearstep_spec.dram.command import DESELECT, Command, Pins, encode
from nearstep_spec.dram.timing import dram_timing

ACT = encode(Command.ACT, row=5)
KEEP_ALL = (1 << 64) - 1


def beat(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(64)


class Bench:
    """A port with its rank; keeps what came back, by cycle."""

    def __init__(self, **options: int) -> None:
        self.device = Ddr4Device(dram_timing("DDR4-1600", "8Gb", "x8"))
        self.port = Ddr4Port(self.device, **options)
        self.received: dict[int, bytes] = {}

    def tick(self, pins: Pins = DESELECT, phase: int = COLUMN_PHASE, **data: object) -> None:
        slots = [DESELECT] * self.port.phases
        slots[phase] = pins
        back = self.port.tick(slots, **data)
        if back is not None:
            self.received[self.port.cycle] = back

    def idle_until(self, cycle: int) -> None:
        while self.port.cycle < cycle:
            self.tick()

    def write(self, cycle: int, column: int, data: bytes, mask: int = 0) -> None:
        self.idle_until(cycle)
        self.tick(encode(Command.WR, column=column))
        self.idle_until(cycle + TPHY_WRLAT)
        self.tick(wrdata=data, wrdata_mask=mask)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.tick(ACT, phase=1)
    return bench


def test_latencies_of_ddr4_1600() -> None:
    assert (TPHY_WRLAT, TPHY_RDLAT) == (3, 6)  # ceil(9 / 4), ceil((11 + 4) / 4) + 2


def test_what_is_written_comes_back_in_the_promised_cycle(bench: Bench) -> None:
    bench.write(3, 16, beat(1))
    bench.write(7, 24, beat(2))
    bench.idle_until(12)  # 5 cycles after the second write: tWTR_L is 19 clocks
    bench.tick(encode(Command.RD, column=16))
    bench.idle_until(14)
    bench.tick(encode(Command.RD, column=24))
    bench.idle_until(30)
    assert bench.received == {12 + TPHY_RDLAT: beat(1), 14 + TPHY_RDLAT: beat(2)}


def test_masked_bytes_stay(bench: Bench) -> None:
    bench.write(3, 0, beat(1))
    mask = 0xF00F_0000_0000_0001
    bench.write(7, 0, beat(2), mask)
    bench.write(11, 0, beat(3), KEEP_ALL)
    bench.idle_until(17)
    bench.tick(encode(Command.RD))
    bench.idle_until(30)
    old, new = beat(1), beat(2)
    expected = bytes(old[i] if mask >> i & 1 else new[i] for i in range(64))
    assert list(bench.received.values()) == [expected]
    assert expected not in (old, new)


def test_unwritten_beats_hold_a_pattern_of_their_place_and_are_counted(bench: Bench) -> None:
    bench.idle_until(3)
    bench.tick(encode(Command.RD, column=8))
    bench.idle_until(5)
    bench.tick(encode(Command.RD, column=16))
    bench.idle_until(20)
    first, second = bench.received.values()
    assert first != second
    assert len(set(first)) > 16
    assert bench.port.uninitialised_reads == 2
    place = DramAddress(bank_group=0, bank=0, row=5, column=8)
    mapping = AddressMapping()
    assert bench.device.read(mapping, mapping.encode(place), 64).tobytes() == first
    assert bench.device.allocated_rows == 0


def test_a_masked_write_to_an_unwritten_beat_keeps_the_pattern() -> None:
    bench = Bench()
    mapping = AddressMapping()
    address = mapping.encode(DramAddress(0, 0, 5, 0))
    before = bench.device.read(mapping, address, 64).tobytes()
    bench.tick(ACT, phase=1)
    bench.write(3, 0, beat(4), mask=KEEP_ALL ^ 1)
    after = bench.device.read(mapping, address, 64).tobytes()
    assert after[0] == beat(4)[0]
    assert after[1:] == before[1:]


def test_write_data_missing_early_late_or_unasked_for_is_a_violation() -> None:
    checks = 0
    for at in (TPHY_WRLAT - 1, TPHY_WRLAT + 1):
        bench = Bench()
        bench.tick(ACT, phase=1)
        bench.idle_until(3)
        bench.tick(encode(Command.WR))
        bench.idle_until(3 + min(at, TPHY_WRLAT))
        with pytest.raises(DramViolationError, match="CWL") as caught:
            bench.tick(wrdata=beat(0) if at < TPHY_WRLAT else None)
        assert caught.value.previous is not None
        assert caught.value.previous.command is Command.WR
        checks += 1
    with pytest.raises(DramViolationError, match="CWL: write data of no command"):
        Bench().tick(wrdata=beat(0))
    assert checks == 2


def test_data_of_a_violating_write_do_not_reach_the_contents() -> None:
    bench = Bench()
    mapping = AddressMapping()
    address = mapping.encode(DramAddress(0, 0, 5, 0))
    before = bench.device.read(mapping, address, 64).tobytes()
    bench.tick(ACT, phase=1)
    with pytest.raises(DramViolationError, match="tRCD"):
        bench.tick(encode(Command.WR))
    assert bench.device.read(mapping, address, 64).tobytes() == before


def test_two_slots_and_half_beats() -> None:
    timing = dram_timing("DDR4-800", cl=20, cwl=6)
    bench = Bench.__new__(Bench)
    bench.device = Ddr4Device(timing)
    bench.port = Ddr4Port(
        bench.device, phases=HOST_PHASES, data_bytes=32, read_latency=10, write_latency=3
    )
    bench.received = {}
    bench.tick(ACT, phase=1)
    bench.idle_until(4)
    bench.tick(encode(Command.WR, column=8))
    bench.idle_until(7)
    data = beat(9)
    bench.tick(wrdata=data[:32], wrdata_mask=0)
    bench.tick(wrdata=data[32:], wrdata_mask=0x8000_0000)
    bench.idle_until(12)
    bench.tick(encode(Command.RD, column=8))
    bench.idle_until(30)
    low, high = bench.received[22], bench.received[23]
    assert len(bench.received) == 2
    assert low + high[:31] == data[:63]
    assert high[31] != data[63]


def test_data_of_the_wrong_size_are_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="64 bytes, not 63"):
        bench.tick(wrdata=bytes(63))


def test_a_write_latency_beyond_the_timing_is_refused() -> None:
    device = Ddr4Device(dram_timing())
    with pytest.raises(ValueError, match="write_latency"):
        Ddr4Port(device, write_latency=5)


def test_a_forgotten_refresh_is_found_in_idle_cycles() -> None:
    bench = Bench()
    with pytest.raises(DramViolationError, match="tREFI"):
        bench.idle_until(9 * 6240 // 4 + 1025)


def test_contents_by_address_cross_banks_rows_and_the_end_is_guarded() -> None:
    device = Ddr4Device(dram_timing())
    mapping = AddressMapping()
    data = np.frombuffer(np.random.default_rng(3).bytes(300_032), np.uint8)
    start = 128 * 1024 - 64
    device.write(mapping, start, data)
    assert np.array_equal(device.read(mapping, start, data.size), data)
    size = device.geometry.capacity_bytes
    for address, count in ((size, 64), (size - 64, 128), (32, 64), (0, 63), (-64, 64)):
        with pytest.raises(ValueError, match=r"multiples of 64|exceed"):
            device.read(mapping, address, count)
