"""`sim:board` through its serial line: steps bit for bit, resets, a memory that answers wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from random import Random

import numpy as np
import pytest

import nearstep
from nearstep.errors import OptionError, ProtocolError
from nearstep.serial import link
from nearstep.serial.backend import LinkBackend
from nearstep.serial.errors import MemoryNotReadyError, SessionLostError
from nearstep.serial.link import Link
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.boards import board as simulated
from nearstep_sim.boards.board import BoardBackend, BoardLine
from nearstep_sim.boards.options import SimulatedBoardOptions
from nearstep_sim.models.sdram.chip import CHIPS
from nearstep_spec.boards.board import BOARDS, Clock
from nearstep_spec.boards.design import MHZ
from nearstep_spec.codec import from_text

from ...host.driver.job import Job

BAUD = "12500000"  # a bit takes four cycles
MEMORIES = ("blockram", "dram")
COUNT = 70  # elements: a chunk is 256


SMALL = "memory=blockram&rules=sgd&copy_out_formats=&compression="
"""A card that is built in a fraction of the time."""


@pytest.fixture(params=["small", *(pytest.param(m, marks=pytest.mark.deep) for m in MEMORIES)])
def board(request: pytest.FixtureRequest) -> Iterator[SmartssdDevice]:
    options = SMALL if request.param == "small" else f"memory={request.param}"
    with nearstep.open(f"sim:board?{options}&baud={BAUD}") as opened:
        assert isinstance(opened, SmartssdDevice)
        assert isinstance(opened.backend, BoardBackend)
        yield opened


def line_of(board: SmartssdDevice) -> BoardLine:
    assert isinstance(board.backend, BoardBackend)
    return board.backend.wire


def line(memory: str, **others: str) -> BoardLine:
    options = {"memory": memory, "baud": BAUD, **others}
    return BoardLine(from_text(SimulatedBoardOptions, options))


def step(board: SmartssdDevice, job: Job) -> int:
    """Run a step of the rule that the board has, and compare; the number of elements compared."""
    if board.config.rules == ("sgd",):
        job.run("sgd", lr=0.01)
    else:
        job.run(copy_out=job.copy("bf16"))
    return job.check()


@pytest.mark.deep
@pytest.mark.parametrize("clock", BOARDS["ulx3s_85f"].clocks, ids=str)
def test_steps_are_right_with_each_clock_of_the_board(clock: Clock) -> None:
    small = SMALL.replace("blockram", "dram")
    with nearstep.open(f"sim:board?{small}&clock_mhz={clock.hz // MHZ}&baud={BAUD}") as board:
        assert isinstance(board, SmartssdDevice)
        job = Job(board, COUNT, seed=9, arrays=arrays_of(board))
        assert step(board, job) == COUNT
        counts = line_of(board).counts
        assert min(counts.reads, counts.writes) > COUNT
        # What is left of the cycles went before memory was initialised.
        assert counts.refreshes * 7.8125e-6 * clock.hz > 0.7 * counts.cycles


@pytest.mark.deep
@pytest.mark.parametrize("memory", ["blockram", "dram"])
def test_units_in_cpp_take_the_same_cycles_to_the_same_bits(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step, a reset in the midst of one, and a step: as with the RTL of the units.

    Both have the same numbers of sessions: bytes of a number that are escaped delay the step, and a
    refresh then meets it elsewhere.
    """
    seen = []
    for fu in ("rtl", "native"):
        monkeypatch.setattr(link.secrets, "randbits", Random(10).getrandbits)
        with nearstep.open(f"sim:board?memory={memory}&fu={fu}&baud={BAUD}") as board:
            assert isinstance(board, SmartssdDevice)
            job = Job(board, COUNT, seed=10)
            before = job.run(copy_out=job.copy("bf16")).cycles
            assert job.check() >= COUNT
            job.start()
            board.reset()
            job.upload()
            after = job.run(copy_out=job.copy("bf16")).cycles
            assert job.check() >= COUNT
            seen.append((before, after, line_of(board).counts))
    assert seen[0] == seen[1]
    assert min(seen[0][:2]) > 100


def arrays_of(board: SmartssdDevice) -> tuple[str, ...]:
    return tuple(board.config.arrays)


def test_a_step_gives_the_bits_of_the_golden_rule(board: SmartssdDevice) -> None:
    job = Job(board, COUNT, seed=5, arrays=arrays_of(board))
    assert step(board, job) == COUNT * (4 if len(arrays_of(board)) == 4 else 1)
    counts = line_of(board).counts
    assert counts.framing_errors == 0
    assert (counts.reads > COUNT) == (counts.writes > COUNT) == (line_of(board).memory.size > 0)


def test_a_reset_in_the_midst_of_a_run_leaves_the_board_usable(board: SmartssdDevice) -> None:
    job = Job(board, COUNT, seed=6, arrays=arrays_of(board))
    run = job.start("sgd", lr=0.01) if len(arrays_of(board)) == 2 else job.start()
    board.reset()
    assert not run.done
    job.upload()
    assert step(board, job) >= COUNT


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "memory"),
    [("ulx3s_85f", "dram"), ("ulx3s_85f", "blockram"), ("orangecrab_85f", "blockram")],
)
def test_a_board_as_it_ships_steps_and_is_reset(name: str, memory: str) -> None:
    """With the rate of its own line, which others here have not."""
    with nearstep.open(f"sim:board?board={name}&memory={memory}") as board:
        assert isinstance(board, SmartssdDevice)
        job = Job(board, COUNT, seed=8, arrays=arrays_of(board))
        assert step(board, job) == 4 * COUNT
        run = job.start()
        board.reset()
        assert not run.done
        job.upload()
        assert step(board, job) == 4 * COUNT
        assert line_of(board).counts.framing_errors == 0


class Cable:
    """A line that outlives whoever closes it."""

    def __init__(self, wire: BoardLine) -> None:
        self.port, self.baud = wire.port, wire.baud
        self.write, self.read, self._wire = wire.write, wire.read, wire

    @property
    def now(self) -> float:
        return self._wire.now

    def close(self) -> None:
        pass


@pytest.mark.deep
@pytest.mark.parametrize("memory", MEMORIES)
def test_the_button_ends_the_session(memory: str) -> None:
    """And what is opened on the line then is the board as it was."""
    with closing(line(memory)) as wire:
        first = LinkBackend(Link(Cable(wire)))
        data = np.arange(64, dtype=np.uint8)
        first.write_memory(5000, data)
        wire.press_reset()
        with pytest.raises(SessionLostError):
            first.read_register(0)
        again = LinkBackend(Link(Cable(wire)))
        assert again.config == first.config
        found = np.empty_like(data)
        again.read_memory(5000, found)
        np.testing.assert_array_equal(found, data)


@pytest.mark.deep
def test_several_chunks_on_dram_with_every_kind_of_run() -> None:
    with nearstep.open(f"sim:board?baud={BAUD}") as board:
        assert isinstance(board, SmartssdDevice)
        job = Job(board, 1001, seed=7)
        for step in range(1, 4):
            job.run(step=step)
            assert job.check() == 3 * 1001
        counts = line_of(board).counts
        hertz = BOARDS["ulx3s_85f"].clock.hz
        assert counts.refreshes * 7.8125e-6 * hertz > 0.95 * counts.cycles


@pytest.mark.deep
@pytest.mark.parametrize("wrong", [{"flip": 0x0100}, {"row": 1}], ids=["bits", "row"])
def test_memory_that_answers_wrongly_at_the_beginning_is_not_ready(wrong: dict[str, int]) -> None:
    with closing(line("dram")) as wire:
        wire.inject(reads=40, times=1, **wrong)
        with pytest.raises(MemoryNotReadyError, match=r"at 0x\w+ there must be 0x\w+, not 0x"):
            LinkBackend(Link(wire))


@pytest.mark.deep
def test_memory_that_answers_wrongly_later_shows_in_the_results() -> None:
    """Nothing on the board checks what it reads: that the results are wrong tells it."""
    with nearstep.open(f"sim:board?baud={BAUD}") as board:
        assert isinstance(board, SmartssdDevice)
        job = Job(board, COUNT, seed=8)
        line_of(board).inject(reads=100, flip=0x4000)
        job.run()
        with pytest.raises(AssertionError, match="is wrong at"):
            job.check()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("rule", "longer"),
    [("tRCD", {"trcd": 30_000}), ("tRFC", {"trfc": 160_000}), ("setup time", {"tset": 5_001})],
)
def test_a_chip_that_needs_more_time_complains(
    rule: str, longer: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {name: replace(chip, **longer) for name, chip in CHIPS.items()}
    monkeypatch.setattr(simulated, "CHIPS", slow)
    with closing(line("dram")) as wire, pytest.raises(ProtocolError, match=rule):
        LinkBackend(Link(wire))


@pytest.mark.deep
def test_data_that_is_taken_too_early_is_not_what_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a clock an eighth of a turn behind the commands, and no delay of the pads."""
    monkeypatch.setattr(simulated, "OUT_DELAY", 0)
    monkeypatch.setattr(simulated, "IN_DELAY", 0)
    late = line("dram", clock_mhz="100")
    with closing(late) as wire, pytest.raises(MemoryNotReadyError):
        LinkBackend(Link(wire))


@pytest.mark.parametrize(
    ("options", "option", "what"),
    [
        ("board=orangecrab_85f", "board", "there is no model of ddr3"),
        ("board=icebreaker", "board", "ulx3s_85f"),
        ("baud=1", "baud", "9600"),
        ("clock_mhz=60", "clock_mhz", r"\[50, 75, 100\], not 60"),
        ("memory=flash", "memory", "blockram"),
        ("design=coarse&rules=sgd", "rules", "cannot be used with design=coarse"),
        ("design=coarse&memory=dram", "memory", "cannot be used with design=coarse"),
        ("design=coarse&board=orangecrab_85f", "board", "40 pins"),
        ("design=coarse&memory_bytes=512KiB", "memory_bytes", "262144"),
        ("design=coarse&devices=9", "devices", "8"),
        ("design=coarse&clock_mhz=60", "clock_mhz", r"\[25, 50, 75, 100\], not 60"),
        ("design=coarse&entry_phits=32", "entry_phits", "7072 cycles .* after 4096"),
        ("design=coarse&groups=3", "groups", "power of two"),
        ("alus=4", "alus", "design=coarse"),
        ("design=dimm", "design", "coarse"),
    ],
)
def test_what_there_is_not_is_refused(options: str, option: str, what: str) -> None:
    with pytest.raises(OptionError, match=what) as raised:
        nearstep.open(f"sim:board?{options}")
    assert raised.value.option == option
