"""Random programs on drives that fail: every state is the one before an operation, or after it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ...on_a_drive import on_a_drive
from .programs import LARGE, Action, Case, Fault, FaultPoint, Home, homes, operations, run

CARDS, HOST = Home(2, 512), Home(0, 512)
CASES = {
    "cards": ("cards", Case()),
    "host": ("host", Case()),
    "moving-bf16": ("any", Case(torch.bfloat16)),
    "residual": ("cards", Case(compression=0.25)),
    "residual-bf16": ("cards", Case(torch.bfloat16, 0.25)),
    "moving": ("any", Case()),
    "large": ("cards", Case(shapes=LARGE)),
    "large-moving-bf16": ("any", Case(torch.bfloat16, shapes=LARGE)),
}
"""Kinds of homes, and what is trained."""

QUICK = {"cards": 8, "host": 6, "moving-bf16": 6, "residual": 5, "large": 6}
"""Episodes."""

DEEP = 3_000 // len(CASES) + 1


@pytest.fixture
def point() -> Iterator[FaultPoint]:
    found = FaultPoint()
    with found.installed():
        yield found


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with on_a_drive(tmp_path) as folder:
        yield folder


def campaign(name: str, episodes: int, number: int, folder: Path, point: FaultPoint) -> None:
    """Episodes of random programs. What nobody refers to is not collected meanwhile."""
    kind, case = CASES[name]
    done: Counter[str] = Counter()
    print(f"seed {number}")

    @seed(number)
    @settings(
        max_examples=episodes, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(homes(kind), st.lists(operations(kind), min_size=1, max_size=14))
    def episode(home: Home, program: list[Action]) -> None:
        if gc.isenabled():
            gc.collect()
            gc.disable()
        ended = run(case, home, program, folder / "drives", point)
        done.update(episodes=1, compared=ended.compared, failed=ended.failed)
        if done["episodes"] % 50 == 0:
            gc.collect()

    try:
        episode()
    finally:
        gc.enable()
    assert done["episodes"] >= episodes
    assert done["compared"] >= 2 * episodes
    assert done["failed"] >= episodes // 8


@pytest.mark.parametrize("name", QUICK)
def test_some_random_programs(name: str, tmp_path: Path, point: FaultPoint) -> None:
    campaign(name, QUICK[name], 43, tmp_path, point)


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_three_thousand_random_programs(name: str, tmp_path: Path, point: FaultPoint) -> None:
    campaign(name, DEEP, 4300, tmp_path, point)


def step(fault: Fault | None = None, mask: int = 7) -> Action:
    return "step", (mask, 0, fault)


LOAD_OF_NO_STATE: list[Action] = [("save", ()), step(), ("load", (0, None)), step()]
"""State that a step begins anew is written after the first reads of the step have begun."""

SUPERBLOCK = Fault("flush", 2, 1, done=False)
"""Of two drives, the flush that ends the commit of a step."""


@pytest.mark.parametrize(
    ("home", "program", "failed"),
    [
        pytest.param(HOST, [("save", ()), step(), ("load", (0, None)), ("resume", (None, None))],
            0, id="loaded-and-resumed"),
        pytest.param(CARDS, LOAD_OF_NO_STATE, 0, id="loaded-without-state"),
        pytest.param(CARDS, [step(SUPERBLOCK), step()], 0, id="superblock-flushed-again"),
        pytest.param(HOST, [step(SUPERBLOCK), step()], 0,
            id="superblock-flushed-again-on-the-host"),
        pytest.param(Home(1, 512), [step(Fault("read", 0, 2, done=False), 1), step()], 1,
            id="two-reads"),
        pytest.param(HOST, [("resume", (Home(1, 512), Fault("read", 7, 1, done=False)))], 1,
            id="move"),
    ],
)  # fmt: skip
def test_programs_that_failed(
    home: Home, program: list[Action], failed: int, tmp_path: Path, point: FaultPoint
) -> None:
    """The shortest ones."""
    ended = run(Case(torch.bfloat16), home, program, tmp_path / "drives", point)
    assert ended.compared > 1
    assert ended.failed == failed
