"""An all-reduce by the memory devices' service on this machine, beside gloo's, in one run."""

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from harness import option, report, script, track
from measuring import timed
from torch._C._distributed_c10d import AllreduceOptions
from torch.multiprocessing.spawn import spawn

from nearstep.coarse.service import Spawned
from nearstep.coarse.service.client import TIMEOUT_S
from nearstep.torch.distributed.hook import group_beside
from nearstep.torch.distributed.rendezvous import ADDRESS, TOKEN_FILE


def worker(
    rank: int, processes: int, sizes: list[int], rounds: int, exact: bool, dtype: str, out: str
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(processes), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}.store", rank=rank, world_size=processes
    )
    state = group_beside(None, "fp32", TIMEOUT_S, exact=exact)
    kind: torch.dtype = getattr(torch, dtype)
    options = AllreduceOptions()
    options.asyncOp = False  # as of dist.all_reduce
    reduce: dict[str, Any] = {
        "gloo": dist.all_reduce,
        "coarse": lambda tensor: state.allreduce([tensor], options).wait(),
    }
    found: dict[str, Any] = {}
    for size in sizes:
        given = torch.randn(size // kind.itemsize, generator=torch.Generator().manual_seed(rank))
        given = given.to(kind)
        seconds: dict[str, list[float]] = {name: [] for name in reduce}
        results = {}
        for _ in range(rounds + 2):
            for name, action in reduce.items():
                results[name] = tensor = given.clone()
                dist.barrier()
                took = timed(lambda action=action, tensor=tensor: action(tensor)).wall
                spent = torch.tensor([took], dtype=torch.float64)
                dist.all_reduce(spent, dist.ReduceOp.MAX)
                seconds[name].append(float(spent))
        near = 1e-5 if kind == torch.float32 else 0.05
        torch.testing.assert_close(results["gloo"], results["coarse"], rtol=near, atol=near)
        found[str(size)] = {name: each[2:] for name, each in seconds.items()}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    state.shutdown()
    dist.destroy_process_group()


WAYS = {
    "unix": ("--listen", "unix:"),
    "tcp": ("--listen", "tcp:127.0.0.1:0"),
    "tcp, payloads on the wire": ("--listen", "tcp:127.0.0.1:0", "--no-share-memory"),
}
"""Options of the service: without the last one clients on its machine share memory with it."""
SUMS = {
    **dict.fromkeys(WAYS, (False, "float32")),
    "unix, exact": (True, "float32"),
    "unix, exact, bf16": (True, "bfloat16"),
    "unix, exact, fp16": (True, "float16"),
}
"""Of each row: whether sums are exact, and the tensors' dtype."""


def measure(
    device: str,
    way: Sequence[str],
    processes: int,
    sizes: list[int],
    rounds: int,
    exact: bool,
    dtype: str,
) -> tuple[dict[str, Any], int]:
    """Return the seconds of each size in bytes, and the peak of the service's memory in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        out, token = f"{folder}/found", Path(folder) / "token"
        with Spawned(device, *way) as service:
            token.touch(0o600)
            token.write_text(service.token)
            os.environ.update({ADDRESS: service.address, TOKEN_FILE: str(token)})
            spawn(worker, (processes, sizes, rounds, exact, dtype, out), nprocs=processes)
            status = Path(f"/proc/{service.pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return json.loads(Path(out).read_text()), 1024 * int(resident.split()[1])


@script
def main(
    processes: Annotated[str, option("numbers of processes, by commas")] = "2,4",
    device: Annotated[
        str, option("memory devices")
    ] = "golden:coarse?devices={processes}&groups=2&memory_bytes=1GiB",
    mib: Annotated[str, option("sizes of tensors, MiB, by commas")] = "0.0625,1,4,16,64",
    rounds: Annotated[int, option("that are measured, after two that are not", min=3)] = 15,
) -> None:
    """Measure each way, number and size, and write build/bench/coarse_service.json."""
    sizes = [int(float(each) * (1 << 20)) for each in mib.split(",")]
    rows, peak = [], 0
    for name, count in track(product(SUMS, map(int, processes.split(","))), "measured"):
        exact, dtype = SUMS[name]
        given = device.format(processes=count) + ("&exact=fp32,bf16,fp16" if exact else "")
        way = WAYS[name.partition(", exact")[0]]
        found, nbytes = measure(given, way, count, sizes, rounds, exact, dtype)
        peak = max(peak, nbytes)
        for size, seconds in found.items():
            size_mib = int(size) / 2**20
            rows.append(
                {
                    "name": f"{count} processes, {name}, {size_mib:g} MiB",
                    "processes": count,
                    "way": name,
                    "mib": size_mib,
                    "seconds": {each: statistics.median(seconds[each]) for each in seconds},
                    "coarse_over_gloo": statistics.median(
                        a / b for a, b in zip(seconds["coarse"], seconds["gloo"], strict=True)
                    ),
                }
            )
    options = {"device": device.format(processes="N"), "rounds": rounds}
    report("coarse_service", options=options, rows=rows, service_bytes=peak)
