"""Train a GPT in several processes, its gradients averaged near memory.

    torchrun --nproc-per-node 4 examples/coarse_ddp.py --device "sim:coarse?devices=4&window=direct"

Each process is a worker. DDP's gradients go to COARSE's memory devices, which are a service that
the first process starts, and come back averaged. After each epoch the state of the training is kept
in the devices and written to a snapshot; `--resume` goes on from the newest one, with any number of
processes. With `--hook` the group of the processes is gloo's, and a communication hook takes the
gradients alone. The last line is the SHA-256 of the parameters.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from gpt import SIZES, Gpt, sized
from rich.console import Console
from stdlib_text import Batches, load_text
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import nearstep.torch.distributed as coarse
from nearstep.coarse.dual import best_split
from nearstep.coarse.service.errors import ServiceError
from nearstep.errors import NearstepError
from nearstep.storage.snapshot_file import generations


class Training:
    """What a worker trains, and its state.

    Parameters
    ----------
    size : of the model.
    context : tokens of a sequence.
    lr
    seed : of the weights.

    Attributes
    ----------
    step : steps that were made.
    """

    def __init__(self, size: str, context: int, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Gpt(sized(size, context=context))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)
        self.step = 0

    def state(self) -> dict[str, Tensor]:
        """All that decides how the training goes on."""
        found = {"step": torch.tensor([self.step])}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}/{key}"] = value.detach().reshape(-1)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from that state."""
        self.step = int(state["step"])
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state[name])
                keys = [each for each in state if each.startswith(f"{name}/")]
                self.optimizer.state[parameter] = {
                    key.removeprefix(f"{name}/"): state[key]
                    .clone()
                    .view(() if key.endswith("/step") else parameter.shape)
                    for key in keys
                }

    def digest(self) -> str:
        """SHA-256 of the parameters."""
        flat = torch.cat([each.detach().reshape(-1) for each in self.model.parameters()])
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def main(
    device: Annotated[
        str, typer.Option(help="Memory devices; without: golden ones, one for each process.")
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer.")] = 12,
    epoch: Annotated[int, typer.Option(min=1, help="Steps of an epoch.")] = 4,
    size: Annotated[str, typer.Option(help=f"Model; one of: {', '.join(SIZES)}.")] = "tiny",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of all workers in a step.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 32,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate.")] = 3e-3,
    wire: Annotated[str, typer.Option(help="Format on the links: fp32, fp16, bf16.")] = "fp32",
    hook: Annotated[bool, typer.Option("--hook", help="A group of gloo, and the hook.")] = False,
    snapshots: Annotated[
        Path | None, typer.Option(help="Write a snapshot of this name after each epoch.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest snapshot, if there is one.")
    ] = False,
    kill: Annotated[
        str, typer.Option(help="RANK:STEP: this worker kills itself in that step.")
    ] = "",
    routing: Annotated[
        str,
        typer.Option(help="`rank`: the device of the worker's rank; `measured`: by a profile."),
    ] = "rank",
    dual: Annotated[
        str,
        typer.Option(
            help="Bytes of the gradients for the devices, the workers sum the rest; `auto`: the "
            "closed form's, of what is measured."
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 1,
) -> None:
    """Train data parallel; started by torchrun."""
    if size not in SIZES:
        raise typer.BadParameter(f"--size must be one of {', '.join(SIZES)}, not {size!r}")
    if "RANK" not in os.environ:
        raise typer.BadParameter("torchrun starts it: torchrun --nproc-per-node 4 examples/...")
    if routing not in ("rank", "measured"):
        raise typer.BadParameter(f"--routing must be rank or measured, not {routing!r}")
    if dual and dual != "auto" and not dual.isdecimal():
        raise typer.BadParameter(f"--dual must be auto or a number of bytes, not {dual!r}")
    if not re.fullmatch(r"(\d+:\d+)?", kill):
        raise typer.BadParameter(f"--kill must be RANK:STEP, not {kill!r}")
    if resume and snapshots is None:
        raise typer.BadParameter("--resume needs --snapshots")
    if device:
        os.environ["NEARSTEP_COARSE_DEVICE"] = device
    os.environ["NEARSTEP_COARSE_WIRE"] = wire
    torch.set_num_threads(1)
    console = Console(highlight=False)
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if batch % workers:
        raise typer.BadParameter(f"--batch must be a multiple of {workers}, not {batch}")
    try:
        dist.init_process_group("gloo" if hook else "coarse")
        training = Training(size, context, lr, seed)
        model = DistributedDataParallel(training.model)
        state, average = coarse.ddp_hook(wire=wire)
        if routing == "measured":
            state.measure_routing(every=100)
        if dual:
            m = int(dual) if dual != "auto" else best_m(model, training, state, context, batch)
            model.register_comm_hook(*coarse.dual_hook(state, m=m))
        else:
            model.register_comm_hook(state, average)
        settle_buckets(model, training, context)
        if resume and snapshots is not None and generations(snapshots):
            training.load(coarse.restore_snapshot(state, str(snapshots)))
        tokens = load_text().training
        batches = Batches(tokens, batch=batch, context=context, seed=seed)
        for _ in range(training.step):
            batches.draw()
        if rank == 0:
            console.print(f"{workers} workers, {state.client.device}, from step {training.step}")
        while training.step < steps:
            own = batches.draw()[rank::workers]
            logits = model(own[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
            training.optimizer.zero_grad()
            if kill == f"{rank}:{training.step + 1}":
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            training.optimizer.step()
            training.step += 1
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                console.print(f"step {training.step:3}  loss {float(mean) / workers:.4f}")
            if snapshots is not None and training.step % epoch == 0:
                name = coarse.save_snapshot(state, str(snapshots), training.state())
                if rank == 0:
                    console.print(f"snapshot {name}")
        digests = [""] * workers
        dist.all_gather_object(digests, training.digest())
        state.shutdown()
        dist.destroy_process_group()
    except (ServiceError, NearstepError) as error:
        console.print(f"[red]worker {rank}: {type(error).__name__}: {error}[/]")
        raise typer.Exit(1) from None
    if len(set(digests)) != 1:
        console.print("[red]parameters of the workers are NOT equal[/]")
        raise typer.Exit(1)
    if rank == 0:
        console.print(f"parameters {digests[0]}")


def settle_buckets(model: DistributedDataParallel, training: Training, context: int) -> None:
    """One backward pass whose gradients nobody uses.

    DDP divides its buckets anew after the first one. Where a gradient lies in a bucket decides the
    order of its sum, so a training that goes on has to begin with the same buckets.
    """
    for _ in range(2):
        model(torch.zeros(1, context, dtype=torch.int64)).mean().backward()
    training.optimizer.zero_grad()


def best_m(
    model: DistributedDataParallel,
    training: Training,
    group: coarse.CoarseProcessGroup,
    context: int,
    batch: int,
) -> int:
    """Bytes of gradients for the devices, by the closed form; the same in all workers."""
    tokens = torch.zeros(batch // group.size(), context, dtype=torch.int64)
    with model.no_sync():
        for _ in range(2):
            began = time.perf_counter()
            mean = model(tokens).mean()
            middle = time.perf_counter()
            mean.backward()
            end = time.perf_counter()
    training.optimizer.zero_grad()
    nbytes = 4 * sum(each.numel() for each in model.parameters())
    inputs = coarse.measure_dual(group, nbytes, forward_s=middle - began, backward_s=end - middle)
    m = best_split(inputs)
    if group.rank() == 0:
        print(f"{m:,} of {nbytes:,} bytes of gradients go to the devices")
    return m


if __name__ == "__main__":
    typer.run(main)
