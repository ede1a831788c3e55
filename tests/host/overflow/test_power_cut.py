"""Power is cut at every write: what is resumed is the last whole step, or the next one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from nearstep.storage.store import Store
from nearstep.torch import in_backward
from nearstep_sim.models.drive import Flush, MemoryBlocks, after_cut, every_cut

from .jobs import EARLY, URL, Drives, Job, card_url, everything, images

STEPS = 3


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward updates each parameter by itself."""
    monkeypatch.setattr(in_backward, "TOGETHER", 1)


QUARTER = {"compression": 0.25}


def check_cuts(
    job: Job, count: int, most: int, every: int, seed: int, url: str = URL, **more: object
) -> int:
    """Train with a journal, cut the power after each event, in ways of `every_cut`, and resume."""
    print(f"seed {seed}")
    begin = images(count, 60)
    on = Drives(begin)
    parameters, optimizer = job.trained(url, drives=on.store, **more)
    started = len(on.journal.events)
    states = [everything(parameters, optimizer)]
    ended = [started]
    for step in range(STEPS):
        job.step(optimizer, parameters, step)
        states.append(everything(parameters, optimizer))
        ended.append(len(on.journal.events))
    on.store.close()
    events = on.journal.events
    assert sum(isinstance(each, Flush) for each in events[started:]) >= STEPS * (count + 1)
    rng = random.Random(seed)
    seen: dict[tuple[bytes, ...], int] = {}
    cuts = 0
    for at in sorted({*range(started, len(events), every), len(events)}):
        last = max(step for step, end in enumerate(ended) if end <= at)
        for kept in every_cut(events[:at], most, rng):
            cuts += 1
            found = tuple(after_cut(begin, events[:at], kept))
            if found in seen and seen[found] in (last, last + 1):
                continue
            places = [MemoryBlocks(image, drive) for drive, image in enumerate(found)]
            store = Store.open(places, owner=None)
            state = everything(*job.resumed(url, drives=store, **more))
            assert state in states[last : last + 2], (at, kept)
            seen[found] = states.index(state)
            store.close()
    assert set(seen.values()) == set(range(STEPS + 1))
    return cuts


HOST = Job([(8, 4), (5,)])
BACKWARD = replace(HOST, early=True)
CARDS, MOMENTUM = Job([(20, 16), (5,)]), Job([(20, 16), (5,)], "momentum")
"""The first parameter takes several subgroups of a card."""


def rows(*rows: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Job, drives, ways to cut, events between cuts, seed, URL, options, cuts at least."""
    return pytest.mark.parametrize("row", [row[1:] for row in rows], ids=[row[0] for row in rows])


def on_cards(count: int) -> str:
    return card_url(count, 128)


@rows(
    ("host", HOST, 2, 2, 5, 31, URL, {"memory": 1 << 14}, 20),
    ("processor", HOST, 2, 2, 5, 33, "host:", {"memory": 1 << 14}, 20),
    ("host, in backward", BACKWARD, 2, 2, 5, 35, URL, {"memory": 1 << 14, **EARLY}, 20),
    ("processor, in backward", BACKWARD, 2, 2, 5, 36, "host:", {"memory": 1 << 14, **EARLY}, 20),
    ("cards", CARDS, 2, 2, 6, 41, on_cards(2), {}, 20),
    ("cards, with what error feedback holds back", CARDS, 2, 2, 7, 44, on_cards(2), QUARTER, 20),
)
def test_a_step_at_some_writes(row: tuple[Any, ...]) -> None:
    *arguments, more, least = row
    assert check_cuts(*arguments, **more) > least


@pytest.mark.deep
@rows(
    ("host-1", HOST, 1, 16, 1, 32, URL, {"memory": 1 << 14}, 200),
    ("host-2", HOST, 2, 16, 1, 32, URL, {"memory": 1 << 14}, 200),
    ("processor", HOST, 2, 16, 1, 34, "host:", {"memory": 1 << 14}, 200),
    ("host, in backward", BACKWARD, 2, 16, 1, 35, URL, {"memory": 1 << 14, **EARLY}, 200),
    ("processor, in backward", BACKWARD, 2, 16, 1, 36, "host:", {"memory": 1 << 14, **EARLY}, 200),
    ("cards-1", CARDS, 1, 16, 1, 42, on_cards(1), {}, 200),
    ("cards-2", CARDS, 2, 16, 1, 42, on_cards(2), {}, 200),
    ("pairs", MOMENTUM, 2, 4, 2, 43, on_cards(2), {**QUARTER, "error_feedback": False}, 100),
    ("pairs, error feedback", MOMENTUM, 2, 4, 2, 43, on_cards(2), QUARTER, 100),
)
def test_a_step_at_every_write(row: tuple[Any, ...]) -> None:
    *arguments, more, least = row
    assert check_cuts(*arguments, **more) > least


def test_what_is_resumed_goes_on_with_the_same_bits() -> None:
    job = Job([(40, 16), (16,), (30, 20)], skips=4)
    on = Drives(images(2))
    parameters, optimizer = job.trained(URL, drives=on.store, memory=1 << 14, eviction="belady")
    optimizer.param_groups[1]["betas"] = (0.8, 0.9)
    compared = 0
    for step in range(3):
        job.step(optimizer, parameters, step)
        copy = Drives([bytes(each.image) for each in on.places])
        again, resumed = job.resumed(URL, drives=copy.store, memory=1 << 15)
        twin, plain = job.trained(URL)
        plain.param_groups[1]["betas"] = (0.8, 0.9)
        job.go_on(twin, plain, range(step + 1))
        assert everything(again, resumed) == everything(twin, plain)
        job.step(plain, twin, 77)
        job.step(resumed, again, 77)
        assert everything(again, resumed) == everything(twin, plain)
        compared += 1
        copy.store.close()
    on.store.close()
    assert compared == 3
