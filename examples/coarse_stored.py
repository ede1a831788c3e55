"""Train a GPT in several processes whose parameters and optimizer state are in memory devices.

    torchrun --nproc-per-node 4 examples/coarse_stored.py

Gradients go up, the devices average them and run AdamW where the parameters are stored, and
parameters come down: no process holds state of the optimizer, and there is no DDP. One device is
the DENSE baseline: `golden:coarse?devices=1&rules=adam,sgd`. The last line is the SHA-256 of the
parameters.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from gpt import SIZES, Gpt, sized
from rich.console import Console
from stdlib_text import Batches, load_text
from torch.nn import functional

from nearstep.coarse.service.errors import ServiceError
from nearstep.errors import NearstepError
from nearstep.storage.snapshot_file import generations
from nearstep.torch.distributed import StorageOptimizer


def main(
    device: Annotated[
        str, typer.Option(help="Memory devices with an update kernel each (rules=).")
    ] = "golden:coarse?devices=4&rules=adam",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer.")] = 12,
    begin: Annotated[int, typer.Option(min=0, help="Steps made before; of --snapshots.")] = 0,
    size: Annotated[str, typer.Option(help=f"Model; one of: {', '.join(SIZES)}.")] = "tiny",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of all workers in a step.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 32,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate.")] = 3e-3,
    snapshots: Annotated[
        Path | None, typer.Option(help="Go on from the newest of this name, and write one.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 1,
) -> None:
    """Train data parallel; started by torchrun."""
    if size not in SIZES:
        raise typer.BadParameter(f"--size must be one of {', '.join(SIZES)}, not {size!r}")
    if "RANK" not in os.environ:
        raise typer.BadParameter("torchrun starts it: torchrun --nproc-per-node 4 examples/...")
    os.environ["NEARSTEP_COARSE_DEVICE"] = device
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    console = Console(highlight=False)
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if batch % workers:
        raise typer.BadParameter(f"--batch must be a multiple of {workers}, not {batch}")
    if begin and (snapshots is None or not generations(snapshots)):
        raise typer.BadParameter(f"--begin {begin} needs a snapshot to go on from")
    dist.init_process_group("gloo")
    model = Gpt(sized(size, context=context))
    try:
        optimizer = StorageOptimizer(model.parameters(), "adamw", lr=lr)
        if snapshots is not None and generations(snapshots):
            optimizer.load(str(snapshots))
        batches = Batches(load_text().training, batch=batch, context=context, seed=seed)
        for _ in range(begin):
            batches.draw()
        for step in range(begin, steps):
            own = batches.draw()[rank::workers]
            logits = model(own[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(mean := loss.detach().clone())
            if rank == 0:
                console.print(f"step {step + 1:3}  loss {float(mean) / workers:.4f}")
        if snapshots is not None:
            optimizer.save(str(snapshots))
        flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
        digests = [""] * workers
        dist.all_gather_object(digests, hashlib.sha256(flat.numpy().tobytes()).hexdigest())
        dist.barrier()
    except (ServiceError, NearstepError) as error:
        console.print(f"[red]worker {rank}: {type(error).__name__}: {error}[/]")
        raise typer.Exit(1) from None
    dist.destroy_process_group()
    if len(set(digests)) != 1 or optimizer.state:
        console.print("[red]parameters of the workers are NOT equal, or one holds state[/]")
        raise typer.Exit(1)
    if rank == 0:
        console.print(f"parameters {digests[0]}")


if __name__ == "__main__":
    typer.run(main)
