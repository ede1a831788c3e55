"""Train a small GPT with several workers, each with a part of every batch, under a budget.

Each worker is a process with a device, an optimizer and an offloaded model of its own; torch's
DistributedDataParallel wraps the model, and gradients are averaged before they go to the device.
Beside it the same model is trained by DistributedDataParallel alone: bits are compared.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import torch.distributed as dist
import typer
from gpt import SIZES, Gpt, sized
from offloading import machine, show_plan
from rich.console import Console
from rich.table import Table
from stdlib_text import Batches, load_text
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import nearstep
from nearstep.errors import NearstepError
from nearstep.torch.offload import Engine
from nearstep.torch.offload.engine import Policy

TIMEOUT = timedelta(seconds=120)
"""Of the longest wait of a worker for the others."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all workers do."""

    workers: int
    size: str
    steps: int
    batch: int
    context: int
    budget: str
    policy: Policy
    device: str
    seed: int


def main(
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    size: Annotated[str, typer.Option(help=f"Model: {', '.join(SIZES)}.")] = "tiny",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch, of all workers.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Bytes in a sequence.")] = 64,
    budget: Annotated[
        str, typer.Option(help="Memory of a worker for parameters and gradients.")
    ] = "60%",
    policy: Annotated[str, typer.Option(help=", ".join(get_args(Policy)) + ".")] = "memferry",
    device: Annotated[str, typer.Option(help="Of each worker.")] = "golden:axdimm",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights and batches.")] = 1,
) -> None:
    """Train a small GPT with several workers, its parameters on the device of each."""
    for name, value, known in (("size", size, SIZES), ("policy", policy, get_args(Policy))):
        if value not in known:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=name)
    if batch % workers:
        raise typer.BadParameter(f"{batch} is no multiple of {workers} workers", param_hint="batch")
    options = Options(
        workers=workers,
        size=size,
        steps=steps,
        batch=batch,
        context=context,
        budget=budget,
        policy=policy,  # type: ignore[arg-type]
        device=device,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        try:
            torch.multiprocessing.spawn(work, (options, f"file://{store}"), workers)  # type: ignore[no-untyped-call]
        except ProcessExitedException as error:
            if error.signal_name is not None:
                raise
            raise typer.Exit(1) from None  # the worker has said why


def work(rank: int, options: Options, store: str) -> None:
    """One worker, from its start to its end."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # workers are on one machine
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=options.workers, timeout=TIMEOUT
    )
    try:
        train(rank, options)
    except (NearstepError, ValueError) as error:
        raise SystemExit(f"worker {rank}: {error}") from error
    finally:
        dist.destroy_process_group()


def train(rank: int, options: Options) -> None:
    """Train both models, and compare; the first worker prints what all of them have found."""
    text = load_text()
    batches = Batches(
        text.training, batch=options.batch, context=options.context, seed=options.seed
    )
    share = slice(rank, None, options.workers)
    with nearstep.open(options.device) as own, nearstep.open(options.device) as other:
        ours, optimizer = made(options, own)
        theirs, baseline = made(options, other)
        engine = nearstep.offload(
            ours,
            optimizer,
            budget=options.budget,
            policy=options.policy,
            profile=machine(options.policy),
        )
        losses = []
        for _ in range(options.steps):
            tokens = batches.draw()[share]
            step(theirs, baseline, tokens)
            losses.append(step(ours, optimizer, tokens))
        if rank == 0:
            show_plan(engine)
        show(rank, options, engine, losses, different_bits(ours, theirs))
        engine.close()


def made(
    options: Options, device: nearstep.Device
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A wrapped model and its optimizer: equal on all workers.

    Torch alone has a bucket for each gradient: the order of a sum of three depends on buckets.
    """
    torch.manual_seed(options.seed)
    model = Gpt(sized(options.size, context=options.context))
    optimizer = nearstep.optim.AdamW(model.decay_groups(0.1), lr=1e-3, device=device)
    return DistributedDataParallel(model, bucket_cap_mb_list=[1e-6]), optimizer


def step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """One step on this worker's part of a batch; its loss before."""
    optimizer.zero_grad()
    logits = ddp(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def different_bits(ours: DistributedDataParallel, theirs: DistributedDataParallel) -> int:
    """Of all parameters of this worker, between the two models, and to the first worker's."""
    count = 0
    for one, other in zip(
        ours.module.state_dict().values(), theirs.module.state_dict().values(), strict=True
    ):
        first = other.clone()
        dist.broadcast(first, src=0)
        for each in (other, first):
            changed = one.view(torch.int32) ^ each.view(torch.int32)
            count += sum(int(((changed >> bit) & 1).sum()) for bit in range(32))
    return count


def show(rank: int, options: Options, engine: Engine, losses: list[float], different: int) -> None:
    """Print what all workers have, once."""
    own: Any = (losses, different, engine.report())
    rows: list[Any] = [None] * options.workers
    dist.all_gather_object(rows, own)
    if rank:
        return
    table = Table(title=f"{options.workers} workers, {options.steps} steps, {options.policy}")
    for name in ("worker", "first loss", "last loss", "peak", "of", "bits different"):
        table.add_column(name, justify="right")
    for number, (found, count, report) in enumerate(rows):
        figures = (report.peak, report.budget, count)
        row = [f"{found[0]:.4f}", f"{found[-1]:.4f}", *(f"{each:,}" for each in figures)]
        table.add_row(str(number), *row)
    console = Console()
    console.print(table)
    parameters = rows[0][2].parameters
    total = sum(row[1] for row in rows)
    console.print(f"{parameters:,} bytes of parameters; {total} bits different from DDP alone")
    if total:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
