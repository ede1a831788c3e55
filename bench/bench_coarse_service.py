"""An all-reduce by the memory devices' service on this machine, beside gloo's, in one run."""

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from harness import option, report, script
from measuring import timed
from torch._C._distributed_c10d import AllreduceOptions
from torch.multiprocessing.spawn import spawn

import nearstep.torch.distributed
from nearstep.coarse.service import Spawned
from nearstep.torch.distributed.rendezvous import ADDRESS, TOKEN_FILE


def worker(rank: int, processes: int, sizes: list[int], rounds: int, out: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(processes), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}.store", rank=rank, world_size=processes
    )
    state, _ = nearstep.torch.distributed.ddp_hook()
    options = AllreduceOptions()
    options.asyncOp = False  # as of dist.all_reduce
    reduce: dict[str, Any] = {
        "gloo": dist.all_reduce,
        "coarse": lambda tensor: state.allreduce([tensor], options).wait(),
    }
    found: dict[str, Any] = {}
    for size in sizes:
        given = torch.randn(size, generator=torch.Generator().manual_seed(rank))
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
        torch.testing.assert_close(results["gloo"], results["coarse"], rtol=1e-5, atol=1e-5)
        found[str(4 * size)] = {name: each[2:] for name, each in seconds.items()}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    state.shutdown()
    dist.destroy_process_group()


@script
def main(
    processes: Annotated[int, option("processes", min=2)] = 4,
    device: Annotated[
        str, option("memory devices")
    ] = "golden:coarse?devices={processes}&groups=2&memory_bytes=256MiB",
    listen: Annotated[str, option("unix: or tcp:127.0.0.1:0")] = "unix:",
    share_memory: Annotated[bool, option("with clients of TCP on this machine")] = True,
    mib: Annotated[str, option("sizes of tensors, MiB, by commas")] = "1,4,16",
    rounds: Annotated[int, option("that are measured, after two that are not", min=3)] = 15,
) -> None:
    """Measure each size, and write build/bench/coarse_service.json."""
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
    rows = {
        nbytes: {
            "mib": int(nbytes) / 2**20,
            "seconds": {name: statistics.median(each) for name, each in seconds.items()},
            "gloo_over_coarse": statistics.median(
                a / b for a, b in zip(seconds["gloo"], seconds["coarse"], strict=True)
            ),
        }
        for nbytes, seconds in found.items()
    }
    asked = {"processes": processes, "device": device, "listen": listen, "rounds": rounds}
    options = {**asked, "share_memory": share_memory}
    nbytes = 1024 * int(resident.split()[1])
    report("coarse_service", options=options, rows=rows, service_bytes=nbytes)
