"""The SDRAM chip: what it reads and writes, and each of its rules, kept and broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from nearstep_sim.models.sdram.bench import ALL_BANKS, Command, SdramBench
from nearstep_sim.models.sdram.chip import CHIPS

TCK = 10_000
CHIP = CHIPS["MT48LC16M16"]
SHORT = replace(CHIP, power_up=1_000_000, tras_most=20_000_000, trc=86_000)
"""Power-up in 100 clocks; rows closed after 2000, before a refresh is missed; and, as tRAS and tRP
together are as long as tRC, a longer one."""
C = Command


@pytest.fixture
def bench() -> Iterator[SdramBench]:
    made = SdramBench(SHORT, TCK)
    yield made
    made.close()


def begin(bench: SdramBench, *, refreshes: int = 2) -> None:
    bench.idle(100)
    bench.edge(C.PRECHARGE, address=ALL_BANKS)
    for _ in range(refreshes):
        bench.idle(9)
        bench.edge(C.REFRESH)
    bench.idle(9)
    bench.edge(C.MODE, address=0x20)
    bench.idle(2)


def fine(bench: SdramBench) -> None:
    fault = bench.fault
    assert fault is None, fault.error(())


def test_what_was_written_is_read_at_its_time(bench: SdramBench) -> None:
    begin(bench)
    random = np.random.default_rng(1)
    checks = 0
    for latency in (2, 3):
        bench.idle(10)
        bench.edge(C.PRECHARGE, address=ALL_BANKS)
        bench.idle(10)
        bench.edge(C.MODE, address=latency << 4)
        bench.idle(2)
        for _ in range(50):
            bank, row, column = (int(random.integers(n)) for n in (4, 8192, 512))
            words = random.integers(0, 1 << 16, 2)
            bench.edge(C.ACTIVE, bank=bank, address=row)
            bench.idle(1)
            for at, word in enumerate(words):
                bench.edge(C.WRITE, bank=bank, address=column ^ at, data=int(word))
            bench.edge(C.READ, bank=bank, address=column)
            for _ in range(latency - 1):
                assert bench.shows(TCK - 1) is None
                bench.edge(C.NOP)
            assert bench.shows(SHORT.tac - 1) is None
            assert bench.shows(SHORT.tac) == words[0]
            assert bench.shows(TCK + SHORT.toh) == words[0]
            bench.edge(C.NOP)
            assert bench.shows(SHORT.toh + 1) is None
            place = (bank << 13 | row) << 9 | column
            assert bench.words[place] == words[0]
            assert bench.words[place ^ 1] == words[1]
            bench.idle(2)
            bench.edge(C.PRECHARGE, bank=bank)
            bench.idle(4)
            if checks % 8 == 0:
                bench.edge(C.REFRESH)
                bench.idle(7)
            checks += 1
    fine(bench)
    assert checks == 100


def test_masks_keep_bytes_from_being_written_or_shown(bench: SdramBench) -> None:
    begin(bench)
    bench.edge(C.ACTIVE, address=5)
    bench.idle(1)
    bench.edge(C.WRITE, address=7, data=0x1234)
    for mask, word in ((1, 0xAB34), (2, 0xABCD), (3, 0xABCD)):
        bench.edge(C.WRITE, address=7, data=0xABCD, mask=mask)
        assert bench.words[5 << 9 | 7] == word
    for mask in (0, 3):
        bench.edge(C.READ, address=7, mask=mask)
        bench.edge(C.NOP)
        assert bench.shows(SHORT.tac) == (None if mask else 0xABCD)
        bench.idle(4)
    fine(bench)


def test_a_row_that_closes_itself_can_be_opened_again(bench: SdramBench) -> None:
    begin(bench)
    for command, wait in ((C.READ, 6), (C.WRITE, 6)):
        bench.edge(C.ACTIVE, address=1)
        bench.idle(1)
        data = 9 if command is C.WRITE else None
        bench.edge(command, address=ALL_BANKS | 3, data=data)
        bench.idle(wait)
    bench.edge(C.ACTIVE, address=2)
    fine(bench)


def test_wrong_answers_are_those_that_were_asked_for(bench: SdramBench) -> None:
    begin(bench)
    bench.words[5 << 9 | 7] = 0x1111
    bench.words[4 << 9 | 7] = 0x2222
    bench.edge(C.ACTIVE, address=5)
    bench.idle(1)
    found = []
    bench.inject(reads=1, times=2, flip=0x8000, row=1)
    for _ in range(4):
        bench.edge(C.READ, address=7)
        bench.edge(C.NOP)
        found.append(bench.shows(SHORT.tac))
        bench.idle(2)
    assert found == [0x1111, 0xA222, 0xA222, 0x1111]
    fine(bench)


Broken = Callable[[SdramBench], None]


def run(*steps: tuple[Command, dict[str, int]] | int, refreshes: int = 2) -> Broken:
    """After the initialisation: commands with their arguments, and clocks between them."""

    def body(bench: SdramBench) -> None:
        begin(bench, refreshes=refreshes)
        for step in steps:
            if isinstance(step, int):
                bench.idle(step)
            else:
                bench.edge(step[0], **step[1])

    return body


def at(command: Command, **arguments: int) -> tuple[Command, dict[str, int]]:
    return command, arguments


def early(bench: SdramBench) -> None:
    bench.idle(10)
    bench.edge(C.PRECHARGE, address=ALL_BANKS)
    bench.idle(2)
    for _ in range(2):
        bench.edge(C.REFRESH)
        bench.idle(7)
    bench.edge(C.MODE, address=0x20)
    bench.idle(2)
    bench.edge(C.ACTIVE)


def unloaded(bench: SdramBench) -> None:
    bench.idle(100)
    bench.edge(C.PRECHARGE, address=ALL_BANKS)
    bench.idle(2)
    bench.edge(C.ACTIVE)


def unprecharged(bench: SdramBench) -> None:
    bench.idle(100)
    bench.edge(C.MODE, address=0x20)


OPEN, WAIT = at(C.ACTIVE, address=1), 10
BROKEN: dict[str, tuple[str, Broken]] = {
    "power-up": ("power-up", early),
    "no mode register": ("mode register", unloaded),
    "no precharge": ("initial precharge", unprecharged),
    "one refresh": ("initial refreshes", run(OPEN, refreshes=1)),
    "tRCD": ("tRCD", run(OPEN, at(C.READ))),
    "tRP": ("tRP", run(OPEN, WAIT, at(C.PRECHARGE), at(C.ACTIVE))),
    "tRP before refresh": ("tRP", run(OPEN, WAIT, at(C.PRECHARGE), at(C.REFRESH))),
    "tRAS": ("tRAS", run(OPEN, 3, at(C.PRECHARGE))),
    "tRAS at most": ("tRAS (most)", run(OPEN, 2_001, at(C.PRECHARGE))),
    "tRC": ("tRC", run(OPEN, 4, at(C.PRECHARGE), 2, at(C.ACTIVE))),
    "tRRD": ("tRRD", run(OPEN, at(C.ACTIVE, bank=1))),
    "tWR": ("tWR", run(OPEN, WAIT, at(C.WRITE, data=1), at(C.PRECHARGE))),
    "tRFC": ("tRFC", run(at(C.REFRESH), 5, at(C.ACTIVE))),
    "tMRD": ("tMRD", run(at(C.MODE, address=0x20), at(C.ACTIVE))),
    "open twice": ("bank state", run(OPEN, WAIT, OPEN)),
    "read of a closed bank": ("bank state", run(at(C.READ, bank=2))),
    "write of a closed bank": ("bank state", run(at(C.WRITE, bank=2, data=1))),
    "refresh of an open bank": ("bank state", run(OPEN, WAIT, at(C.REFRESH))),
    "mode register with an open bank": ("bank state", run(OPEN, WAIT, at(C.MODE, address=0x20))),
    "reserved bits": ("mode register", run(at(C.MODE, address=0x120))),
    "CAS latency": ("mode register", run(at(C.MODE, address=0x10))),
    "burst length": ("mode register", run(at(C.MODE, address=0x22))),
    "burst terminate": ("burst terminate", run(at(C.STOP))),
    "undriven write": ("write data", run(OPEN, WAIT, at(C.WRITE))),
    "refresh interval": (
        "refresh interval",
        run(OPEN, WAIT, at(C.PRECHARGE), 9 * CHIP.refresh // TCK + 1),
    ),
    "turnaround": (
        "turnaround",
        run(OPEN, WAIT, at(C.WRITE, data=1), at(C.READ), at(C.NOP), at(C.WRITE, data=2)),
    ),
    "setup": ("setup time", run(at(C.NOP, since=1_499))),
    "hold": ("hold time", run(at(C.NOP, since=TCK - 799))),
}

KEPT: dict[str, Broken] = {
    "tRCD": run(OPEN, 1, at(C.READ)),
    "tRP": run(OPEN, WAIT, at(C.PRECHARGE), 1, at(C.ACTIVE)),
    "tRAS": run(OPEN, 4, at(C.PRECHARGE)),
    "tRC": run(OPEN, 4, at(C.PRECHARGE), 3, at(C.ACTIVE)),
    "tRRD": run(OPEN, 1, at(C.ACTIVE, bank=1)),
    "tWR": run(OPEN, WAIT, at(C.WRITE, data=1), 1, at(C.PRECHARGE)),
    "tRFC": run(at(C.REFRESH), 6, at(C.ACTIVE)),
    "tMRD": run(at(C.MODE, address=0x20), 1, at(C.ACTIVE)),
    "refresh interval": run(OPEN, WAIT, at(C.PRECHARGE), 9 * CHIP.refresh // TCK - 14),
    "tRAS at most": run(OPEN, 1_999, at(C.PRECHARGE)),
    "turnaround": run(OPEN, WAIT, at(C.WRITE, data=1), at(C.READ), 3, at(C.WRITE, data=2)),
    "setup": run(at(C.NOP, since=1_500)),
    "hold": run(at(C.NOP, since=TCK - 800)),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_rule_is_found(bench: SdramBench, name: str) -> None:
    rule, body = BROKEN[name]
    body(bench)
    fault = bench.fault
    assert fault is not None
    assert fault.rule.decode() == rule, fault.error(())


@pytest.mark.parametrize("name", list(KEPT))
def test_a_rule_that_is_just_kept_is_no_fault(bench: SdramBench, name: str) -> None:
    KEPT[name](bench)
    fine(bench)


def test_a_clock_that_is_too_fast_for_the_latency_is_found() -> None:
    bench = SdramBench(SHORT, 7_500)
    bench.idle(40)
    begin(bench)
    fault = bench.fault
    assert fault is not None
    assert fault.rule.decode() == "mode register"
    bench.close()
