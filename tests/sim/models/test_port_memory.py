"""The emulated memories do what their names promise, measured with a manager that never waits."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep_sim.models.memory import GUARD, UNWRITTEN, EmulatedMemory
from nearstep_sim.updater.port_bench import run_traffic

CAPACITY = 1 << 20
BURST = 64
BURSTS = 128
BEATS = BURSTS * BURST


@pytest.fixture
def memory() -> EmulatedMemory:
    made = EmulatedMemory(CAPACITY)
    made.mark(0, CAPACITY, UNWRITTEN)
    made.write(0, np.arange(CAPACITY // 2, dtype=np.uint32).view(np.uint8)[: CAPACITY // 2])
    return made


def test_ideal_moves_a_read_and_a_write_beat_in_every_cycle(memory):
    report, fault = run_traffic(memory, half_duplex=False, latency=1, reads=BURSTS, writes=BURSTS)
    assert fault.kind == 0
    assert (report.read_beats, report.write_beats) == (BEATS, BEATS)
    assert report.sum == int(memory.data[: CAPACITY // 2].sum(dtype=np.uint64))
    assert report.cycles <= BEATS + 8


def test_halfduplex_moves_one_beat_in_a_cycle_less_turnarounds(memory):
    report, fault = run_traffic(memory, half_duplex=True, latency=40, reads=BURSTS, writes=BURSTS)
    assert fault.kind == 0
    assert report.turnarounds >= 2
    spent = 2 * BEATS + 4 * report.turnarounds
    assert spent <= report.cycles <= spent + 100


def test_halfduplex_gathers_bursts_before_it_turns(memory):
    report, _ = run_traffic(memory, half_duplex=True, latency=40, reads=BURSTS, writes=BURSTS)
    assert 2 * BURSTS / report.turnarounds >= 8


@pytest.mark.parametrize("latency", [1, 40, 200])
def test_one_read_takes_its_latency(memory, latency):
    first, _ = run_traffic(memory, half_duplex=False, latency=latency, reads=1, writes=0)
    assert latency + BURST <= first.cycles <= latency + BURST + 4


@pytest.mark.parametrize("half_duplex", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_stalls_lose_no_beat_and_repeat_with_their_seed(memory, half_duplex, seed):
    runs = [
        run_traffic(
            memory,
            half_duplex=half_duplex,
            latency=7,
            reads=BURSTS,
            writes=BURSTS,
            stall=0.5,
            seed=seed,
        )
        for _ in range(2)
    ]
    for report, fault in runs:
        assert fault.kind == 0
        assert (report.answered_reads, report.answered_writes) == (BURSTS, BURSTS)
        assert report.sum == int(memory.data[: CAPACITY // 2].sum(dtype=np.uint64))
    assert runs[0][0].cycles == runs[1][0].cycles


@pytest.mark.parametrize("beat_bytes", [4, 8, 16, 32, 64])
def test_writes_land_where_they_were_sent(memory, beat_bytes):
    beats = 16
    report, fault = run_traffic(
        memory,
        half_duplex=False,
        latency=1,
        reads=0,
        writes=4,
        beat_bytes=beat_bytes,
        burst_beats=beats,
    )
    assert fault.kind == 0
    assert report.write_beats == 4 * beats
    written = memory.data[CAPACITY // 2 :][: 4 * beats * beat_bytes].reshape(-1, beat_bytes)
    np.testing.assert_array_equal(written, np.arange(4 * beats)[:, None].repeat(beat_bytes, 1))


def test_reading_an_unwritten_line_or_a_guard_is_a_fault(memory):
    for state, kind in ((UNWRITTEN, 2), (GUARD, 3)):
        memory.mark(64 * 100, 64, state)
        _, fault = run_traffic(memory, half_duplex=False, latency=1, reads=4, writes=0)
        assert (fault.kind, fault.write, fault.address) == (kind, 0, 6400)


def test_writing_a_guard_is_a_fault_and_changes_nothing(memory):
    at = CAPACITY // 2 + 64 * 5
    memory.mark(at, 64, GUARD)
    _, fault = run_traffic(memory, half_duplex=False, latency=1, reads=0, writes=1)
    assert (fault.kind, fault.write, fault.address) == (3, 1, at)
    assert not memory.data[at : at + 64].any()


def test_an_access_beyond_the_end_is_a_fault(memory):
    _, fault = run_traffic(
        memory, half_duplex=False, latency=1, reads=0, writes=BURSTS + 1, max_cycles=20_000
    )
    assert (fault.kind, fault.write, fault.address) == (1, 1, CAPACITY)
