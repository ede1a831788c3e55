"""Train a GPT to the same bits with any number of processes.

    torchrun --nproc-per-node 4 examples/coarse_exact.py

Every sequence of a step is a microbatch, whose gradient is computed alone and is an addend of an
exact average in COARSE's memory devices. So the parameters after each step depend on the batch, and
not on the number of processes that divide it. The last line is the SHA-256 of the parameters.
"""

from __future__ import annotations

import hashlib
import os
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from gpt import SIZES, Gpt, sized
from rich.console import Console
from stdlib_text import Batches, load_text
from torch import Tensor
from torch.nn import functional

import nearstep.torch.distributed as coarse
from nearstep.coarse.service.errors import ServiceError
from nearstep.errors import NearstepError


def gradients(model: Gpt, sequence: Tensor) -> Tensor:
    """The gradients of one sequence, in one dimension."""
    logits = model(sequence[None, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), sequence[1:])
    found = torch.autograd.grad(loss, [*model.parameters()])
    return torch.cat([each.reshape(-1) for each in found])


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer.")] = 6,
    size: Annotated[str, typer.Option(help=f"Model; one of: {', '.join(SIZES)}.")] = "tiny",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of all processes in a step.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 32,
    wire: Annotated[str, typer.Option(help="Format of the sums: fp32, fp16, bf16.")] = "fp32",
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 1,
) -> None:
    """Train data parallel; started by torchrun."""
    if size not in SIZES:
        raise typer.BadParameter(f"--size must be one of {', '.join(SIZES)}, not {size!r}")
    if "RANK" not in os.environ:
        raise typer.BadParameter("torchrun starts it: torchrun --nproc-per-node 4 examples/...")
    os.environ |= {"NEARSTEP_COARSE_EXACT": "1", "NEARSTEP_COARSE_WIRE": wire}
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if batch % workers:
        raise typer.BadParameter(f"--batch must be a multiple of {workers}, not {batch}")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    console = Console(highlight=False)
    try:
        dist.init_process_group("coarse")
        group = dist.group.WORLD
        assert isinstance(group, coarse.CoarseProcessGroup)
        model = Gpt(sized(size, context=context))
        parameters = [*model.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=3e-3)
        batches = Batches(load_text().training, batch=batch, context=context, seed=seed)
        for _ in range(steps):
            own = batches.draw()[rank::workers]
            rows = torch.stack([gradients(model, sequence) for sequence in own])
            average = torch.empty_like(rows[0])
            group.reduce_addends(rows, average, "average").wait()
            parts = average.split([each.numel() for each in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
            optimizer.step()
        flat = torch.cat([each.detach().reshape(-1) for each in parameters])
        if rank == 0:
            console.print(f"parameters {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}")
        dist.destroy_process_group()
    except (ServiceError, NearstepError) as error:
        console.print(f"[red]worker {rank}: {type(error).__name__}: {error}[/]")
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
