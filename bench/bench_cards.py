"""A step of AdamW whose state lies on files, the drives of golden cards, beside what else does it.

All in turn in one run, on the same folder, in rounds whose order alternates:

- `golden:smartssd?drive=`: subgroups are read, updated and written back, and a generation is
  committed.
- storage alone: the same bytes, in the same pieces, read and written by `nearstep.storage`, and a
  generation. It is what the drive and the CRCs take.
- torch's fused AdamW with its moments on files that are mapped into memory, flushed after each
  step.
- DeepSpeed's ZeRO-3, its states on NVMe, updated by its CPU Adam, if this interpreter, or that of
  `--deepspeed`, has it. It runs by itself before the others; what keeps it from running is printed.
  Its pipeline needs buffers for the states and gradients of three subgroups: with DeepSpeed's
  default of 4 it ends with an error.

The ratio is that of the two in the same round, its interval that of the median (bootstrap). A disk
that others use, too, varies more than that: so the first two run once more on drives whose
transfers take their turns at a rate that is below the disk's.

Memory is what the process holds beyond the parameters and gradients: subgroups in the cards' DRAM,
and arrays that are on their way.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import report
import torch
import typer
from rich.console import Console
from rich.table import Table

import nearstep
from nearstep.backends.base import Completion
from nearstep.storage.aligned import aligned_empty
from nearstep.storage.blocks import BlockFile, Blocks, Calls, Move, create_file
from nearstep.storage.drive import QUEUE_DEPTH
from nearstep.storage.drive_set import Place
from nearstep.storage.store import Store

console = Console()

EXTENT = 4 << 20
"""Bytes of an extent of the paced drives, as of those that `drive=` makes."""

DEEPSPEED = """
import json, os, sys, time, torch, deepspeed
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1",
                  LOCAL_RANK="0")
folder, layers, width, steps, subgroup = sys.argv[1], *map(int, sys.argv[2:])
model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
aio = {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True, "single_submit": False}
nvme = {"device": "nvme", "nvme_path": folder, "buffer_count": 16, "pipeline_read": True,
        "pipeline_write": True}
config = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "aio": aio,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "sub_group_size": subgroup, "offload_optimizer": nvme},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
x, times = torch.randn(1, width, dtype=torch.bfloat16), []
for _ in range(steps + 1):
    engine.backward(engine(x).float().square().mean())
    begun = time.perf_counter()
    engine.step()
    times.append(time.perf_counter() - begun)
print(json.dumps({"version": deepspeed.__version__, "seconds": times[1:]}))
"""


def timed(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


class Alone:
    """The bytes of a step through a store, without anything that computes."""

    def __init__(self, places: Sequence[Place], source: Store, subgroup: int) -> None:
        self.subgroup_bytes = 4 * subgroup
        drive = source.drives[0].header
        self.store = Store.create(
            places,
            drive_bytes=drive.blocks * 4096,
            owner="alone",
            extent_bytes=drive.extent_bytes,
        )
        for name, tensor in source.tensors.items():
            self.store.add(name, tensor.nbytes, drive=int(name.partition("@")[2]))
        self.rooms = [aligned_empty(subgroup) for _ in range(9 * len(places))]

    def step(self) -> None:
        """As many pieces are under way as a step has room for: each is read, then written."""
        under_way: list[tuple[Completion, str, int, Any]] = []
        writing: list[Completion] = []
        pieces = [
            (name, at, min(self.subgroup_bytes, tensor.nbytes - at))
            for name, tensor in self.store.tensors.items()
            for at in range(0, tensor.nbytes, self.subgroup_bytes)
        ]
        for number, (name, at, nbytes) in enumerate(pieces):
            room = self.rooms[number % len(self.rooms)][: nbytes // 4]
            if len(under_way) == len(self.rooms) // 2:
                self._write(under_way, writing)
            if len(writing) > len(self.rooms) // 3:
                writing.pop(0).wait()
            under_way.append((self.store.submit_read(name, room, at), name, at, room))
        while under_way:
            self._write(under_way, writing)
        for each in writing:
            each.wait()
        self.store.commit({})

    def _write(self, under_way: list[Any], writing: list[Completion]) -> None:
        reading, name, at, room = under_way.pop(0)
        reading.wait()
        writing.append(self.store.submit_write(name, room, at))


class Mapped:
    """torch's fused AdamW with its moments on mapped files, flushed after each step."""

    def __init__(self, folder: Path, parameter: torch.nn.Parameter) -> None:
        self.optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
        state: dict[str, Any] = {"step": torch.zeros(())}
        self.paths = [folder / f"{key}.bin" for key in ("exp_avg", "exp_avg_sq")]
        self.maps = [
            np.memmap(path, np.float32, "w+", shape=(parameter.numel(),)) for path in self.paths
        ]
        for key, each in zip(("exp_avg", "exp_avg_sq"), self.maps, strict=True):
            state[key] = torch.from_numpy(each)
        self.optimizer.state[parameter] = state

    def step(self) -> None:
        self.optimizer.step()
        for each in self.maps:
            each.flush()


class Paced:
    """Calls of the system on a drive that moves so many bytes a second, one transfer after the
    other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free = 0.0
        self._lock = threading.Lock()

    def calls(self) -> Calls:
        return Calls(preadv=partial(self._move, os.preadv), pwritev=partial(self._move, os.pwritev))

    def _move(self, call: Move, fd: int, parts: Any, offset: int) -> int:
        with self._lock:
            begun = max(self._free, time.perf_counter())
            self._free = end = begun + sum(each.nbytes for each in parts) / self._rate
        done = call(fd, parts, offset)
        time.sleep(max(0.0, end - time.perf_counter()))
        return done


def places(folder: Path, name: str, cards: int, nbytes: int, rate: float | None) -> list[Blocks]:
    """New files for drives, open."""
    found: list[Blocks] = []
    paced = None if rate is None else Paced(rate)
    for index in range(cards):
        path = folder / f"{name}{index}"
        create_file(path, nbytes)
        found.append(BlockFile(path) if paced is None else BlockFile(path, calls=paced.calls()))
    return found


def in_turn(jobs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each job in each round; every second round is in the reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds):
        for name in list(jobs)[:: -1 if number % 2 else 1]:
            seconds[name].append(timed(jobs[name]))
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Of the time of storage alone to that of cards: median of the rounds, its 95 % interval, and
    the least and the most."""
    found = np.array(seconds["storage"]) / np.array(seconds["cards"])
    drawn = np.random.default_rng(1).choice(found, (10_000, found.size))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return {
        "median": float(np.median(found)),
        "interval": [float(low), float(high)],
        "extremes": [float(found.min()), float(found.max())],
    }


def said(found: Mapping[str, Any]) -> str:
    low, high = found["interval"]
    least, most = found["extremes"]
    return (
        f"{found['median']:.1%} of the rate of storage alone (95 % interval {low:.1%} to "
        f"{high:.1%}; rounds {least:.1%} to {most:.1%})"
    )


def paced(folder: Path, elements: int, subgroup: int, rate: float, rounds: int) -> dict[str, Any]:
    """The ratio on one drive of a constant rate."""
    own = torch.nn.Parameter(torch.full((elements,), 0.02))
    own.grad = torch.full((elements,), 0.5)
    nbytes = 36 * elements + (64 << 20)  # two generations and the next
    made = places(folder, "paced", 1, nbytes, rate)
    url = f"golden:smartssd?subgroup_elements={subgroup}&drive={folder}"
    with Store.create(made, drive_bytes=nbytes, owner="paced", extent_bytes=EXTENT) as store:
        optimizer = nearstep.optim.AdamW([own], lr=1e-3, device=url, drives=store)
        optimizer.step()
        others = places(folder, "paced-alone", 1, nbytes, rate)
        alone = Alone(others, store, subgroup)
        alone.step()
        seconds = in_turn({"cards": optimizer.step, "storage": alone.step}, rounds)
        alone.store.close()
    return {
        "bytes_per_s": rate,
        "parameters": elements,
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "seconds_all": seconds,
        "rate": ratio(seconds),
    }


def by_deepspeed(
    python: Path | None, folder: Path, elements: int, steps: int, subgroup: int
) -> dict[str, Any] | str:
    """What it takes; or why that is not known."""
    if python is None:
        if importlib.util.find_spec("deepspeed") is None:
            return "DeepSpeed is not installed here (--deepspeed PYTHON names an interpreter)"
        python = Path(sys.executable)
    width = 1024
    arguments = [elements // (width * width), width, steps, subgroup]
    done = subprocess.run(
        [str(python), "-c", DEEPSPEED, str(folder), *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        return f"DeepSpeed ended with {done.returncode}: {lines[-1]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    folder: Annotated[Path, typer.Option(help="of the files, on a drive")] = report.FOLDER,
    elements: Annotated[int, typer.Option(help="parameters")] = 1 << 26,
    subgroup: Annotated[int, typer.Option(help="elements of a subgroup, D")] = 1 << 22,
    cards: Annotated[int, typer.Option(help="cards, a file each")] = 1,
    steps: Annotated[int, typer.Option(help="that are measured, after one that is not")] = 7,
    deepspeed: Annotated[Path | None, typer.Option(help="an interpreter that has it")] = None,
    paced_gb: Annotated[float, typer.Option(help="GB/s of the paced drive; 0 leaves it out")] = 2.0,
    paced_elements: Annotated[int, typer.Option(help="parameters on it")] = 1 << 26,
) -> None:
    work = folder / "cards"
    work.mkdir(parents=True, exist_ok=True)
    for each in work.rglob("*"):
        if each.is_file():
            each.unlink()
    other = by_deepspeed(deepspeed, work, elements, steps, subgroup)
    generator = torch.Generator().manual_seed(1)
    own = torch.nn.Parameter(torch.randn(elements, generator=generator) * 0.02)
    twin = torch.nn.Parameter(own.detach().clone())
    own.grad = twin.grad = torch.randn(elements, generator=generator)
    tried = torch.nn.Parameter(torch.zeros(1 << 16))  # what is loaded once counts for no model
    tried.grad = torch.zeros(1 << 16)
    small = work / "small"
    small.mkdir(exist_ok=True)
    first = nearstep.optim.AdamW([tried], device=f"golden:smartssd?drive={small}")
    first.step()
    assert first.store is not None
    first.store.close()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    url = f"golden:smartssd?cards={cards}&subgroup_elements={subgroup}&drive={work}"
    optimizer = nearstep.optim.AdamW([own], lr=1e-3, device=url)
    store = optimizer.store
    assert store is not None
    optimizer.step()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held
    alone = Alone([work / f"alone{index}" for index in range(cards)], store, subgroup)
    mapped = Mapped(work, twin)
    jobs = {"cards": optimizer.step, "storage": alone.step, "mapped": mapped.step}
    alone.step()
    mapped.step()
    before = optimizer.traffic.as_dict()
    seconds = in_turn(jobs, steps)
    after = optimizer.traffic.as_dict()
    if not torch.equal(own.view(torch.int32), twin.view(torch.int32)):
        raise AssertionError("parameters differ from torch's")
    per_step = {
        key: (int(after[key] or 0) - int(before[key] or 0)) / steps / elements
        for key in ("drives_to_cards", "cards_to_drives", "gradients_down", "parameters_up")
    }
    alone.store.close()
    store.close()
    for path in work.rglob("*"):
        if path.is_file():
            path.unlink()
    found = ratio(seconds)
    paces = None
    if paced_gb:
        del own, twin, optimizer, mapped, jobs
        paces = paced(work, paced_elements, subgroup, paced_gb * 1e9, steps)
        for path in work.rglob("*"):
            if path.is_file():
                path.unlink()
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    if isinstance(other, str):
        console.print(other)
    else:
        seconds["deepspeed"] = other["seconds"]
        medians["deepspeed"] = statistics.median(other["seconds"])
    written = report.write(
        "cards",
        {
            "label": "measured (wall clock); the update itself is the golden model's",
            "cores": os.cpu_count(),
            "parameters": elements,
            "subgroup": subgroup,
            "cards": cards,
            "steps": steps,
            "bytes_per_parameter": per_step,
            "seconds": medians,
            "seconds_all": seconds,
            "queue_depth": QUEUE_DEPTH,
            "rate_of_storage_alone": found,
            "paced": paces,
            "memory_over_subgroup": grown / (16 * subgroup),
            "deepspeed": other if isinstance(other, str) else other["version"],
        },
    )
    table = Table(title=f"{elements / 1e6:.1f} million parameters on {cards} drives; {written}")
    for column in ("", "s a step", "all"):
        table.add_column(column, justify="right")
    for name, each in seconds.items():
        table.add_row(name, f"{medians[name]:.3f}", " ".join(f"{one:.2f}" for one in each))
    console.print(table)
    console.print(said(found))
    if paces is not None:
        console.print(f"on a drive of {paced_gb:g} GB/s {said(paces['rate'])}")
    console.print(f"memory: {grown / (16 * subgroup):.2f} x D x 16 bytes")
    console.print({key: round(value, 3) for key, value in per_step.items()}, "bytes a parameter")


if __name__ == "__main__":
    typer.run(main)
