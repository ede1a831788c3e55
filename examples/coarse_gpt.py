"""Train a small GPT with several workers, whose gradients are averaged near memory.

Each worker is a thread with a model of its own; there is a memory device for each. Before every
step of the optimizers all workers write their gradients to their devices, the pool averages them,
and each reads the average back: data parallelism, with the pool in the place of an all-reduce
between GPUs. What the pool gives is compared with the golden arithmetic, bit for bit.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any

import numpy as np
import torch
import typer
from gpt import SIZES, Gpt, GptConfig, sized
from numpy.typing import NDArray
from rich.console import Console
from stdlib_text import Batches, load_text
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from trainer import Trainer

from nearstep.coarse import CoarsePool
from nearstep.errors import NearstepError, OutOfDeviceMemoryError
from nearstep_sim.golden.coarse import ring_all_reduce

DEVICE = "golden:coarse?devices=8&groups=2"
MAX_LR = 10.0
MAX_SEED = (1 << 32) - 1
ELEMENT_BYTES = 4


class GradientPool:
    """Gradients of all workers, averaged on the devices of a pool.

    Parameters
    ----------
    pool : with a device for each worker.
    elements : of all gradients of a model.
    wire : format of elements on the links.

    Attributes
    ----------
    compared, different : bits of averages that were compared with the golden arithmetic, and
        those that differed.
    seconds : in which the pool was averaging.
    """

    def __init__(self, pool: CoarsePool, elements: int, wire: str) -> None:
        self.pool = pool
        self.wire = wire
        self.gradients = pool.tensor(elements)
        self.compared = 0
        self.different = 0
        self.seconds = 0.0
        self._all = threading.Barrier(pool.devices, self._average)

    def attach(self, worker: int, model: Gpt, optimizer: torch.optim.Optimizer) -> None:
        """Before each step of `optimizer`, put the average in the place of its gradients."""
        parameters = list(model.parameters())

        def exchange(*_: Any) -> None:
            gradients = [parameter.grad for parameter in parameters]
            flat = parameters_to_vector(gradients)
            self.gradients.write(worker, flat)
            self._all.wait()
            self.gradients.read(worker, flat)
            vector_to_parameters(flat, gradients)

        optimizer.register_step_pre_hook(exchange)

    def stop(self) -> None:
        """Let no worker wait for one that failed."""
        self._all.abort()

    def _average(self) -> None:
        """All workers have written: one of them does this, the others wait."""
        before = [self.gradients.read(device) for device in range(self.pool.devices)]
        start = time.perf_counter()
        self.pool.all_reduce(self.gradients, "average", self.wire)
        self.seconds += time.perf_counter() - start
        expected = self._golden(before)
        for device in range(self.pool.devices):
            bits = self.gradients.read(device).view(np.uint32) ^ expected.view(np.uint32)
            self.compared += 32 * bits.size
            self.different += int(np.bitwise_count(bits).sum())

    def _golden(self, gradients: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        """The average in the order of additions that follows from the pool's split."""
        return np.concatenate(
            [
                ring_all_reduce(
                    [each[part.start : part.stop] for each in gradients],
                    operation="average",
                    wire=self.wire,
                    config=self.pool.device.config,
                    reverse=part.reverse,
                )
                for part in self.pool.split(gradients[0].size, self.wire)
            ]
        )


def main(
    device: Annotated[str, typer.Option(help="Pool, with a device for each worker.")] = DEVICE,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 10,
    size: Annotated[str, typer.Option(help=f"Model; one of: {', '.join(SIZES)}.")] = "tiny",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of each worker and step.")] = 2,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 32,
    wire: Annotated[str, typer.Option(help="Format on the links: fp32, fp16, bf16.")] = "fp32",
    lr: Annotated[float, typer.Option(min=0.0, max=MAX_LR, help="Peak learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of weights and batches.")] = 1,
) -> None:
    """Train with a worker for each device of the pool, and compare every average."""
    if size not in SIZES:
        raise typer.BadParameter(f"--size must be one of {', '.join(SIZES)}, not {size!r}")
    console = Console()
    try:
        with CoarsePool.open(device) as pool:
            trainers = make_trainers(pool.devices, sized(size, context=context), lr, steps, seed)
            elements = parameters_to_vector(trainers[0].model.parameters()).numel()
            gradients = GradientPool(pool, elements, wire)
            for worker, trainer in enumerate(trainers):
                gradients.attach(worker, trainer.model, trainer.optimizer)
            tokens = load_text().training
            batches = [
                Batches(tokens, batch=batch, context=context, seed=seed * pool.devices + worker)
                for worker in range(pool.devices)
            ]
            console.print(
                f"{pool.devices} workers, {elements:,} gradients each, rings: {pool.groups}"
            )
            train(trainers, batches, gradients, steps, console)
    except OutOfDeviceMemoryError as error:
        need = 1 << (2 * ELEMENT_BYTES * elements).bit_length()
        console.print(f"[red]{error}; give each device memory_bytes={need}[/]", highlight=False)
        raise typer.Exit(1) from None
    except NearstepError as error:
        console.print(f"[red]{error}[/]", highlight=False)
        raise typer.Exit(1) from None
    weights = [parameters_to_vector(trainer.model.parameters()) for trainer in trainers]
    equal = all(torch.equal(each, weights[0]) for each in weights)
    console.print(f"weights of all workers are {'equal' if equal else 'NOT equal'}")
    console.print(
        f"{gradients.different} of {gradients.compared:,} bits differ from the golden arithmetic; "
        f"the pool took {gradients.seconds / steps:.3f} s a step",
        highlight=False,
        soft_wrap=True,
    )
    if gradients.different or not equal:
        sys.exit(1)


def make_trainers(
    workers: int, config: GptConfig, lr: float, steps: int, seed: int
) -> list[Trainer]:
    """A trainer for each worker, all with the same weights."""
    trainers = []
    for _ in range(workers):
        torch.manual_seed(seed)
        model = Gpt(config)
        optimizer = torch.optim.AdamW(model.decay_groups(0.1), lr=lr)
        trainers.append(Trainer(model, optimizer, steps))
    return trainers


def train(
    trainers: Sequence[Trainer],
    batches: Sequence[Batches],
    gradients: GradientPool,
    steps: int,
    console: Console,
) -> None:
    """Train all workers; prints the mean of their losses at each step."""

    def work(trainer: Trainer, tokens: Tensor) -> float:
        try:
            return trainer.train(tokens)
        except BaseException:
            gradients.stop()
            raise

    with ThreadPoolExecutor(len(trainers)) as threads:
        for step in range(steps):
            running = [
                threads.submit(work, trainer, each.draw())
                for trainer, each in zip(trainers, batches, strict=True)
            ]
            losses = finished(running)
            console.print(f"step {step + 1:3}  loss {sum(losses) / len(losses):.4f}")


def finished(running: Sequence[Future[float]]) -> list[float]:
    """Results of all workers, or the error of the one that failed rather than of those it left."""
    errors = [error for each in running if (error := each.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [each.result() for each in running]


if __name__ == "__main__":
    typer.run(main)
