"""A DIMM with two ranks on each channel: its bits are those of one with a rank, wherever arrays
are cut, and its ranks never wait for each other's refreshes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.errors import ArgumentError, LostCommandError, ModeRegisterError
from nearstep_sim.models.dram.replay import replay
from nearstep_sim.models.dram.trace import read_trace
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.dram.command import Command
from nearstep_spec.updater.config import ConfigError
from nearstep_spec.updater.registers import ARRAYS

from .conftest import BLOCK, RANKS
from .job import Job

PAGE = 4096
TWO = RANKS["sim-dimm-two-ranks"]
LINES = 2 * PAGE // 64
"""Of a page of each rank."""


@pytest.fixture
def ranks() -> Iterator[AxdimmDevice]:
    with nearstep.open(TWO) as opened:
        assert isinstance(opened, AxdimmDevice)
        yield opened


def test_a_channel_of_two_ranks_has_twice_the_memory() -> None:
    one, two = DimmConfig(), DimmConfig(ranks=2)
    assert two.memory_bytes + 8192 == 2 * (one.memory_bytes + 8192) == 1 << 34
    assert two.maps()["arbiter1"][0] == (2 << 34) - 8192
    names = [field.name for field in two.maps()["arbiter0"][1]["refresh_debt"].fields]
    assert names == ["host", "dram", "host1", "dram1"]
    with pytest.raises(ConfigError, match="channels times ranks must be at most 4"):
        DimmConfig(channels=4, ranks=2)


@pytest.mark.deep
def test_arrays_may_be_cut_by_the_ranks_at_every_line(ranks: AxdimmDevice) -> None:
    """Each array takes the beginning of a line of a page of either rank, and crosses two pages."""
    count = 2 * PAGE // 4 + 5
    seen = {name: set() for name in ARRAYS}
    checks = 0
    for place in range(LINES):
        ahead = ranks.alloc(16 * place + 16, channel=place % 2, align=2 * PAGE)
        work = Job(ranks, count, place, channel=place % 2)
        for name, buffer in work.buffers.items():
            seen[name].add(buffer.address // 64 % LINES)
        work.start().wait()
        checks += work.check()
        for buffer in (ahead, *work.buffers.values()):
            buffer.free()
    assert all(len(places) == LINES for places in seen.values())
    assert checks == LINES * 3 * count


@pytest.mark.deep
def test_the_bits_are_those_of_one_rank(ranks: AxdimmDevice) -> None:
    found = []
    for device in (ranks, nearstep.open(TWO.replace("ranks=2", "ranks=1"))):
        works = [Job(device, 40 * BLOCK + 5, 3 + c, channel=c) for c in range(2)]
        with device.acceleration():
            for run in [work.start() for work in works]:
                run.wait()
        assert [work.check() for work in works] == [3 * (40 * BLOCK + 5)] * 2
        found.append([work.buffers[name].read().tobytes() for work in works for name in ARRAYS])
    assert found[0] == found[1]


@pytest.mark.deep
def test_both_ranks_are_in_the_trace_and_keep_the_rules(tmp_path: Path) -> None:
    """The kernel of each channel reads and writes in one rank while the other is refreshed."""
    file = tmp_path / "commands"
    with nearstep.open(f"{TWO}&commands={file}") as device:
        works = [Job(device, 300 * BLOCK, 5 + c, channel=c) for c in range(2)]
        with device.acceleration():
            for run in [work.start() for work in works]:
                run.wait()
        assert [work.check() for work in works] == [900 * BLOCK] * 2
    for channel in range(2):
        path = tmp_path / f"commands.{channel}"
        result = replay(path)
        print(result)
        assert result.violation is None
        assert result.ranks == (2 * channel, 2 * channel + 1)
        given = Counter((each.rank, each.command) for each in read_trace(path))
        for rank in result.ranks:
            assert min(given[rank, kind] for kind in (Command.RD, Command.WR)) > 1000
            assert given[rank, Command.REF] > 3


@pytest.mark.deep
def test_a_mode_register_of_either_rank_counts(ranks: AxdimmDevice) -> None:
    """The host sets refresh mode 2x in one rank, which the model takes until its next refresh."""
    refresh_mode = {"bank_group": 0, "bank": 3}
    for rank in (0, 1):
        backend = ranks.backend
        backend.give(0, Command.MRS, rank=rank, row=1 << 6, **refresh_mode)
        with pytest.raises(ModeRegisterError, match="MR3 of channel 0 must be set as"):
            ranks.acceleration(0).__enter__()
        backend.give(0, Command.MRS, rank=rank, row=0, **refresh_mode)
        with ranks.acceleration(0):
            assert ranks.regs.arbiter0.status.acceleration == 1
    with pytest.raises(ArgumentError, match="rank must be below 2, not 2"):
        backend.give(0, Command.ZQCS, rank=2)


@pytest.mark.deep
def test_an_mrs_to_either_rank_is_lost_outside_normal_mode(ranks: AxdimmDevice) -> None:
    def lose(rank: int) -> None:
        with ranks.acceleration(0):
            ranks.backend.give(0, Command.MRS, rank=rank, bank_group=1, bank=2, row=0x880)
            assert ranks.regs.arbiter0.status.acceleration == 1

    for rank in (0, 1):
        with pytest.raises(LostCommandError, match=f"lost {rank + 1} command"):
            lose(rank)  # the count is of all since the device was opened
