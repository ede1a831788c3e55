"""An all-reduce by the memory devices' service on this machine, beside gloo's, in one run.

Processes take turns: gloo, then the service, on the same tensors. A time is that of the slowest
process, from a barrier on. Copies are counted for each byte of a tensor: those of the client into
and out of shared memory, and what golden devices read and write there.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import report
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import AllreduceOptions
from torch.multiprocessing.spawn import spawn

import nearstep.torch.distributed
from nearstep.coarse.service import Spawned
from nearstep.torch.distributed.rendezvous import ADDRESS, TOKEN_FILE

console = Console()


def worker(rank: int, processes: int, sizes: list[int], rounds: int, out: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(processes), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}.store", rank=rank, world_size=processes
    )
    state, _ = nearstep.torch.distributed.ddp_hook()
    options = AllreduceOptions()
    options.asyncOp = False  # as of dist.all_reduce
    found: dict[str, Any] = {}
    for size in sizes:
        generator = torch.Generator().manual_seed(rank)
        given = torch.randn(size, generator=generator)
        seconds: dict[str, list[float]] = {"gloo": [], "coarse": []}
        results = {}
        for number in range(rounds + 2):
            for name in seconds:
                tensor = given.clone()
                dist.barrier()
                begun = time.perf_counter()
                if name == "gloo":
                    dist.all_reduce(tensor)
                else:
                    state.allreduce([tensor], options).wait()
                spent = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
                dist.all_reduce(spent, dist.ReduceOp.MAX)
                if number >= 2:
                    seconds[name].append(float(spent))
                results[name] = tensor
        torch.testing.assert_close(results["gloo"], results["coarse"], rtol=1e-5, atol=1e-5)
        found[str(4 * size)] = seconds
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    state.shutdown()
    dist.destroy_process_group()


def main(
    processes: Annotated[int, typer.Option(min=2, help="processes")] = 4,
    device: Annotated[
        str, typer.Option(help="memory devices")
    ] = "golden:coarse?devices={processes}&groups=2&memory_bytes=256MiB",
    listen: Annotated[str, typer.Option(help="unix: or tcp:127.0.0.1:0")] = "unix:",
    share_memory: Annotated[
        bool, typer.Option(help="with clients of TCP; without: bytes cross the wire")
    ] = True,
    mib: Annotated[str, typer.Option(help="sizes of tensors, MiB, by commas")] = "1,4,16",
    rounds: Annotated[
        int, typer.Option(min=3, help="that are measured, after two that are not")
    ] = 15,
) -> None:
    sizes = [int(float(each) * (1 << 18)) for each in mib.split(",")]
    device = device.format(processes=processes)
    shared = "--share-memory" if share_memory else "--no-share-memory"
    with tempfile.TemporaryDirectory() as folder:
        out, token = f"{folder}/found", Path(folder) / "token"
        with Spawned(device, "--listen", listen, shared) as service:
            token.touch(0o600)
            token.write_text(service.token)
            os.environ.update({ADDRESS: service.address, TOKEN_FILE: str(token)})
            spawn(worker, (processes, sizes, rounds, out), nprocs=processes)
            status = Path(f"/proc/{service.pid}/status").read_text()
        found = json.loads(Path(out).read_text())
    resident = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    service_bytes = 1024 * int(resident.split()[1])
    rows = {
        nbytes: {
            **{f"{name}_s": statistics.median(each) for name, each in seconds.items()},
            "gloo_over_coarse": statistics.median(
                a / b for a, b in zip(seconds["gloo"], seconds["coarse"], strict=True)
            ),
        }
        for nbytes, seconds in found.items()
    }
    table = Table("tensor", "gloo, ms", "coarse, ms", "gloo / coarse")
    for nbytes, row in rows.items():
        table.add_row(
            f"{int(nbytes) / (1 << 20):g} MiB",
            f"{1e3 * row['gloo_s']:.1f}",
            f"{1e3 * row['coarse_s']:.1f}",
            f"{row['gloo_over_coarse']:.2f}",
        )
    console.print(table)
    options = {"processes": processes, "device": device, "listen": listen, "rounds": rounds}
    options["share_memory"] = share_memory
    results = {"options": options, "rows": rows, "service_bytes": service_bytes}
    console.print(report.write("coarse_service", results))


if __name__ == "__main__":
    typer.run(main)
