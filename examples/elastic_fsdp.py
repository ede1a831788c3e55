"""Train a GPT sharded over processes that are killed, and go on with as many, or with fewer.

    python examples/elastic_fsdp.py                             # of four one is killed; then three
    python examples/elastic_fsdp.py --resume-with 0 --kills 20 --steps 60            # always four
    torchrun --nproc-per-node 4 --max-restarts 9 examples/elastic_fsdp.py  # the training by itself

Each process has its shards of `fully_shard`, and their state, on a drive in a folder of its own.
torchrun's engine starts them, again after each kill but the last. Then others, `--resume-with` of
them, go on from the last generation that all drives have. The same is done without a kill: both
must have the same losses and the same bits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from gpt import SIZES, Gpt, sized
from stdlib_text import Batches, load_text
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor

import nearstep
import nearstep.torch.distributed
from nearstep.torch.checkpoint import GenerationReader

LOCAL = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else gloo finds addresses of the life before
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the processes do.

    Attributes
    ----------
    folder : of drives, in a folder for each rank.
    source : folders of other drives to go on from, if `folder` has none yet.
    steps : of the optimizer, in all.
    kills : lives in which a process is killed.
    resumes : the life after the last kill is that of other processes: a generation must be there.
    """

    folder: Path
    source: tuple[Path, ...] = ()
    steps: int
    size: str
    batch: int
    context: int
    backend: str
    kills: int = 0
    resumes: bool = False
    seed: int


@dataclass(frozen=True)
class Ended:
    """What a process says at its end.

    Attributes
    ----------
    began : steps that had been made when its life began.
    life : number of lives before.
    digest : SHA-256 of all parameters and state, whole.
    """

    began: int
    life: int
    digest: str


@dataclass(frozen=True)
class Kill:
    """When a process of a life is killed: after a share of the time of a step, or of a second
    before the first one."""

    rank: int
    steps: int
    share: float

    def __str__(self) -> str:
        return f"rank {self.rank} is killed {self.share:.3f} of a step after {self.steps} steps"

    @classmethod
    def drawn(cls, task: Task, life: int, steps: int, ranks: int) -> Kill:
        """Draw one for a life that has so many steps left."""
        choose = random.Random(1000 * task.seed + life)
        left = task.kills - life
        least = int(task.resumes and left == 1)
        most = max(least, min(steps - 1, max(1, 2 * steps // left - 1)))
        return cls(choose.randrange(ranks), choose.randint(least, most), choose.random())

    def expect(self, task: Task, seconds: float) -> None:
        """Have this process killed after some time."""

        def kill() -> None:
            with (task.folder / "kills").open("a", encoding="ascii") as file:
                print(self, file=file)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(seconds, kill).start()


def train(task: Task) -> Ended:
    """One process, from its start to its end."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    dist.init_process_group(task.backend)
    model, optimizer, done = begun(task, rank, ranks)
    kill = Kill.drawn(task, life, task.steps - done, ranks) if life < task.kills else None
    is_killed = kill is not None and rank == kill.rank
    if is_killed:
        print(f"life {life} begins at step {done}: {kill}", flush=True)
    batches = Batches(load_text().training, batch=task.batch, context=task.context, seed=task.seed)
    for _ in range(done):
        batches.draw()
    seconds = 1.0
    for step in range(done, task.steps):
        began = time.monotonic()
        if kill is not None and is_killed and step == done + kill.steps:
            kill.expect(task, kill.share * seconds)  # in the step, in its commit, or after it
        loss = model.loss(batches.draw()[rank::ranks])
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(mean := loss.detach().clone())
        if rank == 0:
            with (task.folder / "losses").open("a", encoding="ascii") as file:
                print(json.dumps([step, mean.item() / ranks]), file=file)
        optimizer.step()
        seconds = min(seconds, time.monotonic() - began)
    if kill is not None:
        if is_killed and done + kill.steps >= task.steps:
            kill.expect(task, 0.0)
        signal.pause()
    ended = Ended(done, life, digest(model, optimizer))
    optimizer.store.close()
    dist.destroy_process_group()
    return ended


def begun(task: Task, rank: int, ranks: int) -> tuple[Any, Any, int]:
    """Model and optimizer after the last step that all drives have, and its number."""
    torch.manual_seed(task.seed)
    mesh, model = init_device_mesh("cpu", (ranks,)), Gpt(sized(task.size, context=task.context))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = task.folder / f"rank{rank}"
    own.mkdir(parents=True, exist_ok=True)
    optimizer = nearstep.optim.AdamW(
        model.named_parameters(), lr=3e-3, drives=[own], memory="50%", resume="if-any"
    )
    if task.source and not optimizer.state:
        keys = ("model", "optim")
        state = dict(zip(keys, get_state_dict(model, optimizer), strict=True))
        dcp.load(state, storage_reader=GenerationReader(task.source))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
    return (
        model,
        optimizer,
        max((int(each["step"]) for each in optimizer.state.values()), default=0),
    )


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of whole parameters and state, by their names."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter, **optimizer.state[parameter]}.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(f"{name}.{key}".encode() + whole.detach().numpy().tobytes())
    return found.hexdigest()


def launched(ranks: int, task: Task, restarts: int = 0) -> dict[int, Ended]:
    """Run processes as torchrun does; what each says at its end, by rank."""
    multiprocessing.set_forkserver_preload(["__main__", "torch._dynamo"])
    config = LaunchConfig(
        1, 1, ranks, max_restarts=restarts, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=task.folder.name, start_method="forkserver",
    )  # fmt: skip
    try:
        found: dict[int, Ended] = elastic_launch(config, train)(task)
    except ChildFailedError:
        if not (task.resumes and killed(task) == task.kills):
            raise
        return {}
    if killed(task) != task.kills:
        raise SystemExit(f"{killed(task)} processes were killed, not {task.kills}")
    return found


def killed(task: Task) -> int:
    """How many processes were killed."""
    found = task.folder / "kills"
    return len(found.read_text("ascii").splitlines()) if found.exists() else 0


def losses(*tasks: Task) -> dict[int, float]:
    """The loss of each step.

    A step that as many processes made twice must have one loss. Of a step that fewer made again
    the last loss counts: they add in another order.
    """
    found: dict[int, float] = {}
    for file in (each.folder / "losses" for each in tasks):
        own: dict[int, float] = {}
        for line in file.read_text("ascii").splitlines() if file.exists() else ():
            step, loss = json.loads(line)
            if own.setdefault(step, loss) != loss:
                raise SystemExit(f"step {step} has the losses {own[step]} and {loss}")
        found |= own
    return found


def main(
    folder: Annotated[Path, typer.Option(help="Of drives, with O_DIRECT.")] = Path("elastic-gpt"),
    ranks: Annotated[int, typer.Option(min=2, help="Processes that are killed.")] = 4,
    resume_with: Annotated[
        int, typer.Option(min=0, help="Processes that go on after the last kill; 0: the same.")
    ] = 3,
    kills: Annotated[int, typer.Option(min=1, help="Processes killed, one after the other.")] = 1,
    steps: Annotated[int, typer.Option(min=2, help="Steps of the optimizer.")] = 10,
    size: Annotated[str, typer.Option(help=f"Model; one of: {', '.join(SIZES)}.")] = "tiny",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of all processes.")] = 12,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 16,
    backend: Annotated[str, typer.Option(help="gloo, coarse, cpu:coarse.")] = "gloo",
    seed: Annotated[int, typer.Option(min=0, help="Of weights, batches, and kills.")] = 1,
) -> None:
    """Train with kills and without; with torchrun, train."""
    if size not in SIZES:
        raise typer.BadParameter(f"--size must be one of {', '.join(SIZES)}, not {size!r}")
    task = Task(
        folder=folder.absolute(), steps=steps, size=size, batch=batch, context=context,
        backend=backend, seed=seed,
    )  # fmt: skip
    own = "RANK" in os.environ
    for number in {int(os.environ["WORLD_SIZE"])} if own else {ranks, resume_with} - {0}:
        if batch % number:
            raise typer.BadParameter(f"--batch must be a multiple of {number}, not {batch}")
    if own:
        print(train(task))
        return
    if folder.exists():
        raise typer.BadParameter(f"--folder must be a new folder, not {folder}")
    os.environ |= LOCAL
    logging.disable(logging.ERROR)  # of torchrun: a report of each kill
    try:
        compare(task, ranks, resume_with, kills)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(task: Task, ranks: int, others: int, kills: int) -> None:
    """Train with kills and without; both must end alike."""
    print(f"{ranks} processes, seed {task.seed}", flush=True)
    killed = replace(task, folder=task.folder / "killed", kills=kills, resumes=others > 0)
    alone = replace(task, folder=task.folder / "alone")
    ended = launched(ranks, killed, restarts=kills - (others > 0))
    if others:
        ended = launched(others, followed(killed, task, ranks))
        alone = replace(alone, steps=ended[0].began)
    print(f"{others or ranks} processes went on to the end from step {ended[0].began}", flush=True)
    expected = launched(ranks, alone)
    if others:
        expected = launched(others, followed(alone, task, ranks))
    curves = []
    for each, found in ((killed, ended), (alone, expected)):
        name, curve = f"{each.folder.name + ':':7}", losses(each, followed(each, task, ranks))
        digests = sorted({each.digest for each in found.values()})
        print(f"{name} losses {' '.join(f'{curve[step]:.4f}' for step in sorted(curve))}")
        print(f"{name} sha256 {' '.join(digests)}")
        curves.append((curve, digests))
    if curves[0] != curves[1] or len(digests) != 1 or len(curve) != task.steps:
        raise SystemExit("losses or bits differ")
    print(f"{task.steps} losses and all bits of parameters and state are equal")


def followed(first: Task, task: Task, ranks: int) -> Task:
    """What others do, who go on from the drives of so many ranks."""
    source = tuple(first.folder / f"rank{rank}" for rank in range(ranks))
    return replace(task, folder=task.folder / f"{first.folder.name}-others", source=source)


if __name__ == "__main__":
    typer.run(main)
