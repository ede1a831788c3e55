"""The monitor of the CC stream raises at each thing that it looks for."""

import pytest

from nearstep_sim.bench.cc_monitor import CcMonitor, Completion, StreamError

KEEP = 0xF


def completion(*, payload: int, byte_count: int, lower: int = 0, status: int = 0) -> list[int]:
    """Dwords of a completion with `payload` dwords behind its descriptor."""
    return [lower | byte_count << 16, payload | status << 11, 5, *range(payload)]


def beats(dwords: list[int]) -> list[tuple[int, int, int, int]]:
    """Beats of 128 bits: TDATA, TKEEP, TLAST, TUSER."""
    parts = [dwords[at : at + 4] for at in range(0, len(dwords), 4)]
    return [
        (
            sum(dword << 32 * lane for lane, dword in enumerate(part)),
            (1 << len(part)) - 1,
            int(part is parts[-1]),
            0,
        )
        for part in parts
    ]


def follow(dwords: list[int]) -> list[Completion]:
    monitor = CcMonitor(None)
    for beat in beats(dwords):
        monitor.step(beat, ready=False)
        monitor.step(beat, ready=True)
    monitor.step(None, ready=False)
    assert monitor.checks == len(monitor.packets)
    return monitor.packets


def test_sound_packets_are_taken():
    (packet,) = follow(completion(payload=32, byte_count=300))
    assert (packet.length, packet.byte_count, packet.tag, packet.status) == (32, 300, 5, 0)
    (packet,) = follow([*completion(payload=0, byte_count=4, status=1), 1, 2, 3, 4, 5])
    assert packet.status == 1
    (packet,) = follow(completion(payload=3, byte_count=7, lower=0x7D))
    assert packet.lower_address == 0x7D


@pytest.mark.parametrize(
    ("dwords", "message"),
    [
        (completion(payload=4, byte_count=16)[:-1], "6 dwords, expected 7"),
        (completion(payload=0, byte_count=4, status=4), "3 dwords, expected 8"),
        (completion(payload=5, byte_count=4, status=1), "status 1 with 5 dwords"),
        (completion(payload=33, byte_count=132), "33 dwords, at most 128 bytes"),
        (completion(payload=16, byte_count=128), "cut at 0x40"),
        (completion(payload=2, byte_count=9, lower=0x3C), "cut at 0x44"),
    ],
)
def test_wrong_packets_are_named(dwords, message):
    with pytest.raises(StreamError, match=message):
        follow(dwords)


def test_a_gap_is_an_error():
    monitor = CcMonitor(None)
    first, _ = beats(completion(payload=4, byte_count=16))
    monitor.step(first, ready=True)
    with pytest.raises(StreamError, match="fell inside"):
        monitor.step(None, ready=True)


def test_a_beat_that_is_withdrawn_or_changes_is_an_error():
    first, last = beats(completion(payload=4, byte_count=16))
    for second, message in ((None, "fell inside"), (last, "a beat changed from")):
        monitor = CcMonitor(None)
        monitor.step(first, ready=False)
        with pytest.raises(StreamError, match=message):
            monitor.step(second, ready=True)


@pytest.mark.parametrize("keep", [0, 0b0101, 0b1110])
def test_a_hole_in_tkeep_is_an_error(keep):
    with pytest.raises(StreamError, match="has a hole"):
        CcMonitor(None).step((0, keep, 0, 0), ready=True)
