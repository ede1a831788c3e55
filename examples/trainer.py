"""A model, its optimizer and its learning rate schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from gpt import Gpt
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR


def warm_up_then_cosine(step: int, steps: int) -> float:
    """Factor of the learning rate: a tenth of the steps up, then down to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


DONE, TASK = "steps_done", "task"
"""Options of groups: steps that were made, and of what."""


class OtherTaskError(ValueError):
    """Drives with steps of another task: they would be gone on from with other batches or another
    schedule."""


class Trainer:
    """Trains one model and keeps its losses.

    With `max_grad_norm` it clips the gradients before each step. Options of the optimizer's groups
    say how many steps were made, and what is trained; so drives that keep them do.

    Parameters
    ----------
    model, optimizer
    steps : in all.
    max_grad_norm
    task : what is trained, in words.

    Attributes
    ----------
    done : steps that were made before, of an optimizer that was resumed.
    losses : training loss in nats before each step.
    step_seconds, model_seconds : time of each `optimizer.step()`, and of each forward and backward
        pass.
    """

    def __init__(
        self,
        model: Gpt,
        optimizer: torch.optim.Optimizer,
        steps: int,
        max_grad_norm: float | None = None,
        task: str = "",
    ) -> None:
        self.model = model
        self.max_grad_norm = max_grad_norm
        self.optimizer = optimizer
        self.done = int(optimizer.param_groups[0].get(DONE, 0))
        for group in optimizer.param_groups:
            found = group.setdefault(TASK, task)
            if found != task:
                raise OtherTaskError(f"the drives must hold a step of {task}, not of {found}")
        self.scheduler = LambdaLR(
            optimizer, lambda step: warm_up_then_cosine(step, steps), self.done - 1
        )
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.model_seconds: list[float] = []

    def train(self, tokens: Tensor) -> float:
        """One training step on `tokens`, (batch, context + 1); returns the loss before it."""
        start = time.perf_counter()
        loss = self.model.loss(tokens)
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:  # before updates in backward
            group[DONE] = self.done + len(self.losses) + 1
        loss.backward()
        middle = time.perf_counter()
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.step_seconds.append(time.perf_counter() - middle)
        self.model_seconds.append(middle - start)
        self.scheduler.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    @torch.no_grad()
    def validate(self, batches: Sequence[Tensor]) -> float:
        """Mean loss in nats over `batches`."""
        return sum(self.model.loss(tokens).item() for tokens in batches) / len(batches)
