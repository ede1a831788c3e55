"""Ranks share parameters, each with drives of its own: they commit a generation together."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from nearstep.storage.store import Store
from nearstep.torch.homes.resume import Made
from nearstep_sim.models.drive import (
    SECTOR_BYTES,
    Event,
    Kept,
    MemoryBlocks,
    after_cut,
    every_cut,
    unflushed,
)

from ...on_a_drive import on_a_drive
from ...processes import ROOT, on_processes
from . import sharded
from .sharded import Recorded

PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "nearstep.torch.checkpoint"]
SEED = 48
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else gloo finds addresses of the last life
}
STEPS = 3


def gloo() -> str:
    return "gloo"


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return on_processes(count, function, *args, backend=gloo, preloaded=PRELOADED, timeout_s=120.0)


def two_ranks(folder: Path, deep: bool) -> tuple[dict[str, int], Recorded]:
    mesh = init_device_mesh("cpu", (2,))
    return sharded.two_ranks(mesh, folder, deep=deep), sharded.recorded(mesh, STEPS)


@pytest.mark.parametrize("deep", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_two_ranks_have_the_bits_of_no_drives_and_commit_together(
    deep: bool, tmp_path: Path
) -> None:
    with on_a_drive(tmp_path) as folder:
        found = on_ranks(2, two_ranks, folder, deep)
    for checks, _ in found:
        print(checks)
        assert len(checks) == (24 if deep else 9)
        assert min(checks.values()) >= 5
    assert check_cuts([record for _, record in found], most=0, every=3) > 50


Name = tuple[int, int, str]


def check_cuts(ranks: list[Recorded], most: int, every: int) -> int:
    """Kill each rank after each of its events, or cut its power in up to `most` ways of
    `every_cut`, wherever the others may be then: a generation of all is on the drives, and it is
    the last one that was committed, or the next."""
    print(f"seed {SEED}")
    rng, pairs, seen = random.Random(SEED), 0, set[Name]()
    windows = len(ranks[0].votes) + 1
    assert all(len(each.votes) == windows - 1 for each in ranks)
    for window in range(windows):
        left = [generations(each, window, most, every, rng) for each in ranks]
        least = [opened(before(each, window), each) for each in ranks]
        oldest, newest = (
            max(found, default=None)
            for found in (least[0] & least[1], set().union(*left[0], *left[1]))
        )
        pairs += len(left[0]) * len(left[1])
        for mine in set(left[0]):
            for others in set(left[1]):
                common = mine & others
                if oldest is None and not common:
                    continue  # before the end of the first commit
                assert newest is not None
                assert max(common) in {oldest, newest}, (window, mine, others)
                seen.add(max(common))
    assert {name[:2] for name in seen} == set(ranks[0].states)
    return pairs


def generations(
    rank: Recorded, window: int, most: int, every: int, rng: random.Random
) -> list[frozenset[Name]]:
    """Generations that each cut between two votes leaves, which are checked to be whole."""
    ends = [0, *rank.votes, len(rank.events)]
    first, last = ends[window], ends[window + 1]
    found, known = list[frozenset[Name]](), dict[bytes, frozenset[Name]]()
    for at in sorted({*range(first, last, every), last}):
        events = rank.events[:at]
        for kept in (whole(events), *(every_cut(events, most, rng) if most else ())):
            (image,) = after_cut([rank.image], events, kept)
            if image not in known:
                known[image] = opened(image, rank)
            found.append(known[image])
    return found


def before(rank: Recorded, window: int) -> bytes:
    """A drive at the beginning of a window, without a power cut."""
    events = rank.events[: [0, *rank.votes][window]]
    return after_cut([rank.image], events, whole(events))[0]


def whole(events: Sequence[Event]) -> Kept:
    """All that was written is kept, as after a kill."""
    return {
        at: range(len(events[at].data) // SECTOR_BYTES)  # type: ignore[union-attr]
        for at in unflushed(events)
    }


def opened(image: bytes, rank: Recorded) -> frozenset[Name]:
    """Generations of a drive, whose arrays are those that the rank had."""
    found = []
    with Store.open([MemoryBlocks(image)], owner=None, read_only=True) as store:
        for number, meta in store.generations.items():
            if not meta:
                continue
            made, view = Made.of(meta, number), store.at(number)
            state = rank.states[made.steps, made.changes]
            for name, tensor in view.tensors.items():
                array = np.empty(tensor.nbytes, np.uint8)
                view.read(name, array)
                zeros = bytes(tensor.nbytes)  # of moments before the first step
                assert array.tobytes() == state.get(name, zeros), (made, name)
            assert view.tensors.keys() >= state.keys()
            found.append(tuple(made))
    return frozenset(found)


def recorded(steps: int) -> Recorded:
    return sharded.recorded(init_device_mesh("cpu", (dist.get_world_size(),)), steps)


@pytest.mark.deep
def test_a_power_cut_of_two_ranks_at_every_write_leaves_a_generation_of_both() -> None:
    pairs = check_cuts(on_ranks(2, recorded, STEPS), most=8, every=2)
    print(f"{pairs} pairs of cuts")
    assert pairs > 1000


def save(folder: Path) -> dict[str, bytes]:
    return sharded.saved(init_device_mesh("cpu", (dist.get_world_size(),)), folder)


def load(folder: Path, ranks: int, expected: dict[str, bytes]) -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return sharded.loaded(mesh, folder, ranks, expected)


@pytest.mark.deep
def test_drives_of_four_ranks_are_read_by_two_three_and_eight(tmp_path: Path) -> None:
    with on_a_drive(tmp_path) as folder:
        expected = on_ranks(4, save, folder)[0]
        for count in (2, 3, 8):
            compared = on_ranks(count, load, folder, 4, expected)
            print(f"{count} ranks: {compared} tensors each")
            assert min(compared) == len(sharded.KINDS) * len(expected)


def run(folder: Path, kills: int, steps: int) -> list[str]:
    """Train by torchrun; what the ranks of the last life say."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(kills), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.1"]
    program = ["-m", "tests.host.overflow.elastic", str(folder), str(steps), str(SEED), str(kills)]
    ended = subprocess.run(
        [*command, *program],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600 + 120 * kills,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return sorted(re.findall(r"rank \d of life \d+ began at \d+: \w{64}", ended.stdout))


@pytest.mark.deep
@pytest.mark.parametrize("kills", [1, 20])
def test_workers_that_are_killed_end_with_the_bits_of_an_undisturbed_run(
    kills: int, tmp_path: Path
) -> None:
    steps = 3 * kills + 3
    with on_a_drive(tmp_path) as folder:
        alone, killed = (run(folder / str(count), count, steps) for count in (0, kills))
    print(*alone, *killed, sep="\n")
    assert [each.split(": ")[1] for each in killed] == [each.split(": ")[1] for each in alone]
    assert len(killed) == 2
    assert all(f"of life {kills} began at" in each for each in killed)
    assert not any(each.split(": ")[0].endswith(" at 0") for each in killed)
