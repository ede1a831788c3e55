"""Power is cut at every write: what is resumed is the last whole step, or the next one."""

from __future__ import annotations

import random

import pytest
import torch

from nearstep.storage.store import Store
from nearstep_sim.models.drive import Flush, MemoryBlocks, after_cut, every_cut

from .jobs import URL, Drives, Job, everything, images

STEPS = 3


def check_cuts(
    job: Job, count: int, most: int, every: int, seed: int, url: str = URL, **more: object
) -> int:
    """Train with a journal, cut the power after each event, in ways of `every_cut`, and resume."""
    print(f"seed {seed}")
    begin = images(count, 60)
    on = Drives(begin)
    parameters = job.parameters()
    optimizer = job.make(parameters, url, drives=on.store, **more)
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
            again = [torch.nn.Parameter(torch.zeros_like(p)) for p in parameters]
            resumed = job.make(again, url, drives=store, resume=True, **more)
            state = everything(again, resumed)
            assert state in states[last : last + 2], (at, kept)
            seen[found] = states.index(state)
            store.close()
    assert set(seen.values()) == set(range(STEPS + 1))
    return cuts


def test_a_small_job_at_some_writes() -> None:
    assert check_cuts(Job([(8, 4), (5,)]), 2, 2, 5, 31, memory=1 << 14) > 20


@pytest.mark.deep
@pytest.mark.parametrize("count", [1, 2])
def test_a_small_job_at_every_write(count: int) -> None:
    assert check_cuts(Job([(8, 4), (5,)]), count, 16, 1, 32, memory=1 << 14) > 200


def test_what_is_resumed_goes_on_with_the_same_bits() -> None:
    job = Job([(40, 16), (16,), (30, 20)], skips=4)
    on = Drives(images(2))
    parameters = job.parameters()
    optimizer = job.make(parameters, URL, drives=on.store, memory=1 << 14, eviction="belady")
    optimizer.param_groups[1]["betas"] = (0.8, 0.9)
    compared = 0
    for step in range(3):
        job.step(optimizer, parameters, step)
        copy = Drives([bytes(each.image) for each in on.places])
        again = [torch.nn.Parameter(torch.zeros_like(p)) for p in parameters]
        resumed = job.make(again, URL, drives=copy.store, memory=1 << 15, resume=True)
        twin = job.parameters()
        plain = job.make(twin, URL)
        plain.param_groups[1]["betas"] = (0.8, 0.9)
        for earlier in range(step + 1):
            job.step(plain, twin, earlier)
        assert everything(again, resumed) == everything(twin, plain)
        job.step(plain, twin, 77)
        job.step(resumed, again, 77)
        assert everything(again, resumed) == everything(twin, plain)
        compared += 1
        copy.store.close()
    on.store.close()
    assert compared == 3
