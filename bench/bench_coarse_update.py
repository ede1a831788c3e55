"""A step of AdamW where the parameters are stored, on the RTL: COARSE has a device for each client,
DENSE one device for all."""

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from harness import Results, option, report, script, track
from measuring import differ

from nearstep.coarse import CoarsePool
from nearstep.coarse.stored import StoredParameters
from nearstep.updater.accelerated import AcceleratedRuns

URL = "{}:coarse?devices={}&memory_bytes=16MiB&rules=adam,sgd"
SHAPES = ((2, 2), (2, 1), (4, 4), (4, 1))  # clients, and devices
HYPER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
PHASES = ("push", "sum", "update", "pull")


def step(kind: str, clients: int, devices: int, elements: int) -> tuple[Results, np.ndarray]:
    rng = np.random.default_rng(1)
    values = rng.standard_normal(elements, np.float32)
    gradients = [rng.standard_normal(elements, np.float32) for _ in range(clients)]
    native = "&fu=native" if kind == "sim" else ""
    spent, found = dict.fromkeys(PHASES, 0), []
    with CoarsePool.open(URL.format(kind, devices) + native) as pool:

        def spend(phase: str, action: Callable[[], Any]) -> None:
            begun = pool.device.cycles or 0
            action()
            took = (pool.device.cycles or 0) - begun
            spent[phase] = spent[phase] + took if devices == 1 else max(spent[phase], took)

        stored = StoredParameters.make(pool, "adamw", values, **HYPER)
        if devices == 1:
            given = [[pool.device.alloc(elements) for _ in gradients]]
            for buffer, each in zip(given[0], gradients, strict=True):
                spend("push", lambda buffer=buffer, each=each: buffer.write(each))
        else:
            tensor = pool.tensor((elements,))
            for device, each in enumerate(gradients):
                spend("push", lambda device=device, each=each: tensor.write(device, each))
            pool.all_reduce(tensor)
            cores = [core for each in pool.counters().devices for core in each.cores]
            spent["sum"] = max(core.cycles for core in cores)
            given = [[tensor.front(device)] for device in range(devices)]
        for part in stored.start(given, step=1, scale=1 / clients).wait().parts:
            assert isinstance(part, AcceleratedRuns)
            *adding, last = [run.cycles or 0 for run in part.runs]
            spent["sum"] = max(spent["sum"], sum(adding))
            spent["update"] = max(spent["update"], last)
        for client in range(clients):
            p = stored.tensors["p"]
            spend("pull", lambda client=client, p=p: found.append(p.read(client % devices)))
    return spent, np.concatenate(found)


@script
def main(kib: Annotated[int, option("of parameters, KiB", min=1)] = 1024) -> None:
    """Measure each shape, and write build/bench/coarse_update.json."""
    rows: list[Results] = []
    for clients, devices in track(SHAPES, "steps"):
        spent, found = step("sim", clients, devices, 256 * kib)
        _, golden = step("golden", clients, devices, 256 * kib)
        total = sum(spent.values())
        coarse = total if clients == devices else rows[-1]["total"]
        rows.append(
            {
                "clients": clients, "devices": devices,
                "design": "DENSE" if devices == 1 else "COARSE", **spent, "total": total,
                "of_coarse": total / coarse, "elements": found.size,
                "elements_differ": differ(found, golden)})  # fmt: skip
    report(
        "coarse_update",
        lambda results: {
            "compared": sum(row["elements"] for row in results["rows"]),
            "wrong": sum(row["elements_differ"] for row in results["rows"]),
        },
        kib=kib, rows=rows)  # fmt: skip
