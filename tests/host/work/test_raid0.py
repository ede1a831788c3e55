"""The baseline of cards with drives takes what its slowest part takes, and no less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nearstep.backends.peer import HostLinks
from nearstep.errors import ArgumentError
from nearstep.smartssd.raid0 import Raid0
from nearstep_spec.platform.machine import Drive, Duplex, Figure

READ, WRITE, MEMORY = 3.3e9, 2e9, 400e9
COUNT, BLOCK = 64_000_000, 1_000_000
CAPACITY, READS, WRITES = (
    Figure(value=value, origin="fitted", source="a test") for value in (1e12, READ, WRITE)
)
DRIVE = Drive(title="", capacity_bytes=CAPACITY, read_bytes_per_s=READS, write_bytes_per_s=WRITES)


def machine(
    drives: int, uplink: int | None = None, memory: float = MEMORY, duplex: Duplex = "full"
) -> Raid0:
    return Raid0(
        drives=drives,
        drive=replace(DRIVE, duplex=duplex),
        links=HostLinks(uplink_bytes_per_s=uplink, link_bytes_per_s=4_000_000_000),
        memory_bytes_per_s=memory,
    )


@pytest.mark.parametrize(
    ("drives", "uplink", "memory", "duplex", "bound"),
    [
        (1, None, MEMORY, "full", 12 * COUNT / WRITE),
        (1, None, MEMORY, "half", COUNT * (16 / READ + 12 / WRITE)),
        (4, 16_000_000_000, MEMORY, "full", 12 * COUNT / WRITE / 4),
        (8, 8_000_000_000, MEMORY, "full", 16 * COUNT / 8e9),
        (8, 16_000_000_000, 8e9, "full", 28 * COUNT / 8e9),
    ],
    ids=["drive", "half-duplex drive", "drives", "uplink", "memory"],
)
def test_a_step_takes_what_its_slowest_part_does(
    drives: int, uplink: int | None, memory: float, duplex: Duplex, bound: float
) -> None:
    timeline = machine(drives, uplink, memory, duplex).update(COUNT, BLOCK)
    seconds = timeline.seconds
    assert seconds is not None
    assert bound <= seconds <= 1.06 * bound
    read = sum(timeline.traffic[f"drive {drive}", 0] for drive in range(drives))
    written = sum(timeline.traffic[f"drive {drive}", 1] for drive in range(drives))
    assert (read, written) == (16 * COUNT, 12 * COUNT)
    if uplink is not None:
        assert (timeline.traffic["uplink", 1], timeline.traffic["uplink", 0]) == (read, written)


def test_what_there_is_none_of_is_refused() -> None:
    with pytest.raises(ArgumentError, match="drives must be at least 1, not 0"):
        machine(0)
    with pytest.raises(ArgumentError, match="at least 1, not 8, 0"):
        machine(1).update(8, 0)
