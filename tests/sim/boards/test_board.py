"""`sim:board` through its serial line: steps bit for bit, resets, a memory that answers wrongly."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import nearstep
from nearstep.errors import OptionError
from nearstep.serial.errors import MemoryNotReadyError, SessionLostError
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.boards.board import BoardBackend, BoardLine

from ...host.driver.job import Job

FAST = "baud=25000000"  # a bit takes four cycles
URLS = {
    "blockram": f"sim:board?memory=blockram&{FAST}",
    "dram": f"sim:board?memory=dram&{FAST}",
}
COUNT = 70  # elements: a chunk is 256


@pytest.fixture(params=["blockram", pytest.param("dram", marks=pytest.mark.deep)])
def board(request: pytest.FixtureRequest) -> Iterator[SmartssdDevice]:
    with nearstep.open(URLS[request.param]) as opened:
        assert isinstance(opened, SmartssdDevice)
        assert isinstance(opened.backend, BoardBackend)
        yield opened


def line_of(board: SmartssdDevice) -> BoardLine:
    assert isinstance(board.backend, BoardBackend)
    return board.backend.wire


def test_a_step_gives_the_bits_of_the_golden_rule(board: SmartssdDevice) -> None:
    job = Job(board, COUNT, seed=5)
    copy = job.copy("bf16")
    job.run(copy_out=copy)
    assert job.check() == 4 * COUNT
    assert line_of(board).counts.framing_errors == 0


def test_a_reset_in_the_midst_of_a_run_leaves_the_board_usable(board: SmartssdDevice) -> None:
    job = Job(board, COUNT, seed=6)
    run = job.start()
    board.reset()
    assert not run.done
    job.upload()
    job.run()
    assert job.check() == 3 * COUNT
