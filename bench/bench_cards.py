"""A step of AdamW whose state lies on files, the drives of golden cards, beside what else does it.

All in turn in one run, on the same folder:

- `golden:smartssd?drive=`: subgroups are read, updated and written back, and a generation is
  committed.
- storage alone: the same bytes, in the same pieces, read and written by `nearstep.storage`, and a
  generation. It is what the drive and the CRCs take.
- torch's fused AdamW with its moments on files that are mapped into memory, flushed after each
  step.
- with `--deepspeed PYTHON`, an interpreter that has it: DeepSpeed's ZeRO-3, its states on NVMe,
  updated by its CPU Adam. It runs by itself before the others.

Memory is what the process holds beyond the parameters and gradients: subgroups in the cards' DRAM,
and arrays that are on their way.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
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
from nearstep.storage.store import Store

console = Console()

DEEPSPEED = """
import json, os, sys, time, torch, deepspeed
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1",
                  LOCAL_RANK="0")
folder, layers, width, steps, subgroup = sys.argv[1], *map(int, sys.argv[2:])
model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
aio = {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True, "single_submit": False}
nvme = {"device": "nvme", "nvme_path": folder, "buffer_count": 4, "pipeline_read": True,
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

    def __init__(self, places: list[Path], source: Store, subgroup: int) -> None:
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


def by_deepspeed(
    python: Path | None, folder: Path, elements: int, steps: int, subgroup: int
) -> dict[str, Any] | None:
    if python is None:
        return None
    width = 1024
    arguments = [elements // (width * width), width, steps, subgroup]
    done = subprocess.run(
        [str(python), "-c", DEEPSPEED, str(folder), *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    folder: Annotated[Path, typer.Option(help="of the files, on a drive")] = report.FOLDER,
    elements: Annotated[int, typer.Option(help="parameters")] = 1 << 26,
    subgroup: Annotated[int, typer.Option(help="elements of a subgroup, D")] = 1 << 22,
    cards: Annotated[int, typer.Option(help="cards, a file each")] = 1,
    steps: Annotated[int, typer.Option(help="that are measured, after one that is not")] = 7,
    deepspeed: Annotated[Path | None, typer.Option(help="an interpreter that has it")] = None,
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
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    alone.step()
    mapped.step()
    before = optimizer.traffic.as_dict()
    for _ in range(steps):
        for name, action in jobs.items():
            seconds[name].append(timed(action))
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
    ratios = [s / c for s, c in zip(seconds["storage"], seconds["cards"], strict=True)]
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    if other is not None:
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
            "rate_of_storage_alone": statistics.median(ratios),
            "memory_over_subgroup": grown / (16 * subgroup),
            "deepspeed": None if other is None else other["version"],
        },
    )
    table = Table(title=f"{elements / 1e6:.1f} million parameters on {cards} drives; {written}")
    for column in ("", "s a step", "all"):
        table.add_column(column, justify="right")
    for name, found in seconds.items():
        table.add_row(name, f"{medians[name]:.3f}", " ".join(f"{each:.2f}" for each in found))
    console.print(table)
    console.print(f"{statistics.median(ratios):.1%} of the rate of storage alone")
    console.print(f"memory: {grown / (16 * subgroup):.2f} x D x 16 bytes")
    console.print({key: round(value, 3) for key, value in per_step.items()}, "bytes a parameter")


if __name__ == "__main__":
    typer.run(main)
