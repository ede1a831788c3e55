"""What the memory devices give: sums, stored optimizers, snapshots and dual synchronization.

A row uses the public interface, so that it holds for every way to carry it out.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nearstep.coarse import CoarsePool, StorageOptimizer
from nearstep.coarse.dual import DualInputs, best_split
from nearstep.coarse.iteration import Block, Paths, iterate, pipeline
from nearstep.coarse.pipeline import push_sync_pull
from nearstep.coarse.service import Client, Server
from nearstep.coarse.service.stored import ServiceStore
from nearstep.torch import distributed
from nearstep.torch.distributed import dual_hook
from nearstep.torch.distributed.rendezvous import DEVICE

from ..host.coarse.update_devices import RTL
from ..host.distributed.processes import on_processes
from .rows import Layers

SMALL = "entry_phits=8&buffer_entries=4&chunks_ahead=2&queue_jobs=4&memory_bytes=4MiB"
RULES = "rules=adam,sgd,sgd_momentum"
SIZES = (1, 17, 5003)
STEPS = 3
TOKEN = "of the journal"
HYPER: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
}
MIB = 1 << 20


@dataclass(frozen=True)
class CoarseRow:
    """One case.

    Attributes
    ----------
    run : gives what is recorded.
    is_slow : whether only a deep test runs it.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    is_slow: bool = False


def url(devices: int, more: str = "") -> str:
    return f"golden:coarse?devices={devices}&groups=2&{SMALL}{more}"


def drawn(count: int, size: int, seed: int = 0) -> list[np.ndarray]:
    """Whole numbers scaled by powers of two; sums of them round."""
    rng = np.random.default_rng([20231, seed, count, size])
    whole = rng.integers(-(1 << 20), 1 << 20, (count, size)).astype(np.float32)
    return [*np.ldexp(whole, rng.integers(-40, -16, (count, size))).astype(np.float32)]


def digest(arrays: Iterable[np.ndarray], **more: Any) -> dict[str, Any]:
    found, count = hashlib.sha256(), 0
    for each in arrays:
        found.update(each.tobytes())
        count += each.size
    return {"sha256": found.hexdigest(), "elements": count, **more}


def pool_sums(devices: int, op: str, wire: str) -> dict[str, Any]:
    """By all rings together, and by each alone."""
    results = []
    with CoarsePool.open(url(devices)) as pool:
        for size in SIZES:
            for group in (None, 0, 1):
                tensor = pool.tensor(drawn(devices, size))
                pool.all_reduce(tensor, op, wire, group=group)
                results += [tensor.read(device) for device in range(devices)]
                tensor.free()
    return digest(results)


def in_jobs(
    service: str, clients: int, action: Callable[[Client], list[np.ndarray]]
) -> list[np.ndarray]:
    """Results of clients of a job on a service of its own, in the order of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"unix:{folder}/socket"
        pool = CoarsePool.open(service)
        with Server(pool, place, TOKEN, shard_bytes=4096, snapshots=Path("/")):

            def one(rank: int) -> list[np.ndarray]:
                with Client(place, TOKEN, job="a", rank=rank, clients=clients) as client:
                    return action(client)

            with ThreadPoolExecutor(clients) as threads:
                return [each for found in threads.map(one, range(clients)) for each in found]


def service_sums(clients: int, devices: int, op: str, wire: str) -> dict[str, Any]:
    def action(client: Client) -> list[np.ndarray]:
        results = []
        for size in SIZES:
            exchange = client.exchange(size, op, wire)  # type: ignore[arg-type]
            for seed in range(2):
                out = np.empty(size, np.float32)
                exchange.reduce(drawn(clients, size, seed)[client.rank], out)
                results.append(out)
            exchange.close()
        return results

    return digest(in_jobs(url(devices), clients, action))


def in_shards(shard_bytes: int | None) -> dict[str, Any]:
    """Pushed, summed and pulled at the same time."""
    with CoarsePool.open(url(4)) as pool:
        given = drawn(4, 20_000)
        results = [np.empty_like(each) for each in given]
        done = push_sync_pull(pool, given, results, shard_bytes=shard_bytes)
        names = sorted(entry.operation.name for entry in done.timeline.entries)
    return digest(
        results, operations=len(names), names=hashlib.sha256(repr(names).encode()).hexdigest()
    )


def modelled() -> dict[str, Any]:
    """Timelines of transfers, and of iterations with dual synchronization."""
    blocks = [Block(nbytes=(1 + i) * MIB, forward_s=1e-3, backward_s=2e-3) for i in range(4)]
    inputs = DualInputs(
        workers=4,
        nbytes=10 * MIB,
        forward_s=4e-3,
        backward_s=8e-3,
        proxy_bytes_per_s=1e9,
        worker_bytes_per_s=2e9,
    )
    splits = (0, best_split(inputs), 5 * MIB + 64, 10 * MIB)
    timelines = [
        iterate(blocks, inputs, m, client_bytes_per_s=2e9, shard=MIB).timeline for m in splits
    ]
    for shard in (None, MIB):
        paths = Paths(client_bytes_per_s=12.5e9, sync_bytes_per_s=9e9, shard_bytes=shard)
        timelines.append(pipeline((4 * MIB, 40 * MIB, 0, 18 * MIB), paths))
    said = [
        (entry.operation.name, entry.start, entry.end)
        for each in timelines
        for entry in each.entries
    ]
    return {"sha256": hashlib.sha256(repr(said).encode()).hexdigest(), "operations": len(said)}


def pool_stored(
    devices: int, clients: int, name: str, service: str | None = None
) -> dict[str, Any]:
    """Steps, a snapshot after the first, and again from there in another pool."""
    size = SIZES[-1] if service is None else 700
    first = drawn(1, size, 9)[0]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for resumed in (False, True):
            with CoarsePool.open(service or url(devices, f"&{RULES}")) as pool:
                begun = pool.device.cycles or 0
                with StorageOptimizer(pool, first, name, clients=clients, **HYPER[name]) as one:
                    if resumed:
                        one.restore(Path(folder) / "state")
                    for step in range(one.steps, STEPS):
                        one.step(drawn(clients, size, step), lr=0.5 ** (step + 3))
                        if not resumed and step == 0:
                            one.snapshot(Path(folder) / "state")
                    names = ("p", "m", "v") if name == "adamw" else ("p",)
                    results += [one.state(each, d) for each in names for d in range(devices)]
                cycles = (pool.device.cycles or 0) - begun
    return digest(results, cycles=cycles)


def service_stored(clients: int, devices: int, behind: int, name: str) -> dict[str, Any]:
    """The same by clients of a service, and again on another number of devices."""
    size = SIZES[-1]
    first = drawn(1, size, 9)[0]

    def action(path: str, resumed: bool, client: Client) -> list[np.ndarray]:
        one = StorageOptimizer(ServiceStore(client, "model"), first, name, **HYPER[name])
        results = []
        if resumed:
            if client.rank == 0:
                client.load(path)
            client.barrier()
            one.restore()
            results.append(one.read())
        for step in range(one.steps, STEPS):
            one.step([drawn(clients, size, step)[client.rank]], lr=0.5 ** (step + 3))
            results.append(one.read())
            client.barrier()
            if not resumed and step == 0 and client.rank == 0:
                one.snapshot(path)
            client.barrier()
        return results

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/state"
        results = in_jobs(url(devices, f"&{RULES}"), clients, partial(action, path, False))
        results += in_jobs(url(behind, f"&{RULES}"), clients, partial(action, path, True))
    return digest(results)


SHAPES = ((40, 16), (7,), (64, 33), (1,))
"""Of a model in torch."""


def tensors(count: int, seed: int) -> list[Tensor]:
    """Values of these shapes for a process of `count`, at its rank."""
    given = drawn(count, sum(map(math.prod, SHAPES)), seed)[dist.get_rank()]
    parts = torch.from_numpy(given).split([math.prod(each) for each in SHAPES])
    return [each.view(shape) for each, shape in zip(parts, SHAPES, strict=True)]


def averaged_by_both(m: int) -> list[np.ndarray]:
    """Gradients of DDP, whose first m bytes go to the devices, in one of two processes."""
    model = DistributedDataParallel(
        Layers([nn.Parameter(torch.ones(shape)) for shape in SHAPES]), bucket_cap_mb=0.004
    )
    dual, hook = dual_hook(m=m)
    model.register_comm_hook(dual, hook)
    found = []
    for step in range(STEPS):
        model.zero_grad()
        model(tensors(2, step)).backward()
        found += [p.grad.numpy().copy() for p in model.parameters() if p.grad is not None]
    dual.group.shutdown()
    return found


def trained_in_devices(device: str, folder: str, resumed: bool) -> list[np.ndarray]:
    """Parameters after each step, in one of two processes."""
    os.environ[DEVICE] = device
    parameters = [nn.Parameter(each.clone()) for each in tensors(2, 9)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}]
    optimizer = distributed.StorageOptimizer(groups, "adamw", **HYPER["adamw"])
    if resumed:
        optimizer.load(f"{folder}/state")
    found = []
    for step in range(int(resumed), STEPS):
        optimizer.param_groups[0]["lr"] = 0.5 ** (step + 3)
        for p, gradient in zip(parameters, tensors(2, step), strict=True):
            p.grad = gradient
        optimizer.step()
        found += [p.detach().numpy().copy() for p in parameters]
        if not resumed and step == 0:
            optimizer.save(f"{folder}/state")
    return found


def torch_dual(m: int) -> dict[str, Any]:
    found = on_processes(2, averaged_by_both, m, backend="gloo")
    return digest(array for each in found for array in each)


def torch_stored() -> dict[str, Any]:
    """Two devices, and from the snapshot after the first step on a single one."""
    with tempfile.TemporaryDirectory() as folder:
        results: list[np.ndarray] = []
        for devices, resumed in ((2, False), (1, True)):
            place = f"golden:coarse?devices={devices}&groups=2&memory_bytes=8MiB&rules=adam,sgd"
            found = on_processes(2, trained_in_devices, place, folder, resumed, backend="gloo")
            results += [array for each in found for array in each]
    return digest(results)


def coarse_rows() -> Iterator[CoarseRow]:
    """The table."""

    def row(name: str, run: Callable[..., Any], *given: Any, is_slow: bool = False) -> CoarseRow:
        words = " ".join(map(str, given))
        return CoarseRow(f"coarse | {name} | {words}", partial(run, *given), is_slow)

    for devices, op, wire in ((2, "sum", "fp32"), (3, "average", "bf16"), (8, "max", "fp16")):
        yield row("pool sums", pool_sums, devices, op, wire)
    for clients, devices, op, wire in (
        (1, 2, "sum", "fp32"),
        (3, 2, "average", "fp32"),
        (5, 4, "sum", "bf16"),
        (2, 4, "max", "fp32"),
    ):
        yield row("service sums", service_sums, clients, devices, op, wire)
    for shard_bytes in (None, 8192):
        yield row("in shards", in_shards, shard_bytes)
    yield row("modelled", modelled)
    for devices, clients, name in ((4, 3, "adamw"), (1, 3, "adamw"), (2, 2, "sgd")):
        yield row("pool stored", pool_stored, devices, clients, name)
    yield CoarseRow("coarse | pool stored | rtl", partial(pool_stored, 2, 2, "adamw", RTL))
    for clients, devices, behind, name in (
        (2, 2, 4, "adamw"),
        (3, 1, 1, "adamw"),
        (5, 2, 2, "sgd"),
    ):
        yield row("service stored", service_stored, clients, devices, behind, name)
    yield row("torch dual", torch_dual, 7000, is_slow=True)
    yield row("torch stored", torch_stored, is_slow=True)
