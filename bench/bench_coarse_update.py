"""A step of AdamW where the parameters are stored, on the RTL.

COARSE has a device for each client, DENSE one device for all.

Cycles are those of the RTL of every device and its update kernel, phase by phase, one after the
other. Transfers of clients go through the window of their device: those of one device follow each
other, those of several devices are of links of their own.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import report
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nearstep.buffer import Buffer
from nearstep.coarse import CoarsePool
from nearstep.coarse.stored import StoredParameters
from nearstep.updater.accelerated import AcceleratedRuns

URL = "{}:coarse?devices={}&memory_bytes=16MiB&rules=adam,sgd"
SHAPES = ((2, 2), (2, 1), (4, 4), (4, 1))
"""Clients, and devices."""

HYPER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}

console = Console()
Floats = NDArray[np.float32]


def cycles(pool: CoarsePool) -> int:
    return pool.device.cycles or 0


def step(kind: str, clients: int, devices: int, elements: int) -> tuple[dict[str, int], Floats]:
    """Cycles of each phase, and the parameters of all devices afterwards."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal(elements, np.float32)
    gradients = [rng.standard_normal(elements, np.float32) for _ in range(clients)]
    native = "&fu=native" if kind == "sim" else ""
    with CoarsePool.open(URL.format(kind, devices) + native) as pool:
        stored = StoredParameters.make(pool, "adamw", values, **HYPER)
        given: list[list[Buffer]]
        spent = {"push": 0, "sum": 0, "update": 0, "pull": 0}
        if devices == 1:
            given = [[pool.device.alloc(elements) for _ in gradients]]
            for buffer, each in zip(given[0], gradients, strict=True):
                begun = cycles(pool)
                buffer.write(each)
                spent["push"] += cycles(pool) - begun
        else:
            tensor = pool.tensor((elements,))
            for device, each in enumerate(gradients):
                begun = cycles(pool)
                tensor.write(device, each)
                spent["push"] = max(spent["push"], cycles(pool) - begun)
            pool.all_reduce(tensor)
            cores = [core for each in pool.counters().devices for core in each.cores]
            spent["sum"] = max(core.cycles for core in cores)
            given = [[tensor.front(device)] for device in range(devices)]
        updating = stored.start(given, step=1, scale=1 / clients).wait()
        for part in updating.parts:
            assert isinstance(part, AcceleratedRuns)
            *adding, last = [run.cycles or 0 for run in part.runs]
            spent["sum"] = max(spent["sum"], sum(adding))
            spent["update"] = max(spent["update"], last)
        found = []
        for client in range(clients):
            begun = cycles(pool)
            found.append(stored.tensors["p"].read(client % devices))
            pulled = cycles(pool) - begun
            spent["pull"] = spent["pull"] + pulled if devices == 1 else max(spent["pull"], pulled)
        return spent, np.concatenate(found)


def main(kib: Annotated[int, typer.Option(help="of parameters, KiB", min=1)] = 1024) -> None:
    """Measure each shape, and write build/bench/coarse_update.json."""
    rows = []
    for clients, devices in track(SHAPES, "steps", console=console):
        spent, found = step("sim", clients, devices, 256 * kib)
        _, golden = step("golden", clients, devices, 256 * kib)
        rows.append(
            {
                "label": "measured (RTL cycles)",
                "clients": clients,
                "devices": devices,
                **spent,
                "total": sum(spent.values()),
                "elements": found.size,
                "elements_differ": int(np.count_nonzero(found.view("u4") != golden.view("u4"))),
            }
        )
    table = Table("clients", "devices", "push", "sum", "update", "pull", "total", "differ")
    for row in rows:
        phases = [f"{row[name]:,}" for name in ("push", "sum", "update", "pull", "total")]
        table.add_row(
            str(row["clients"]), str(row["devices"]), *phases, str(row["elements_differ"])
        )
    console.print(table)
    console.print(report.write("coarse_update", {"kib": kib, "rows": rows}))


if __name__ == "__main__":
    typer.run(main)
