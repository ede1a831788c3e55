"""Updates in backward on this machine's processor, beside updates at the step, and in a thread."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
from harness import Results, option, report, script
from measuring import differ, in_turn
from training import Gpt, GptConfig

import nearstep

OPTIONS: dict[str, Any] = {"lr": 1e-3}


class Beside:
    """An optimizer for each parameter; a thread updates while backward goes on."""

    def __init__(self, model: Gpt) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.updates: list[Future[None]] = []
        for parameter in model.parameters():
            optimizer = nearstep.optim.AdamW([parameter], **OPTIONS)
            parameter.register_post_accumulate_grad_hook(partial(self._submit, optimizer))

    def _submit(self, optimizer: Any, parameter: torch.Tensor) -> None:
        self.updates.append(self.pool.submit(self._update, optimizer, parameter))

    @staticmethod
    def _update(optimizer: Any, parameter: torch.Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    def zero_grad(self) -> None:
        """Gradients are gone."""

    def step(self) -> None:
        while self.updates:
            self.updates.pop().result()


WAYS: Mapping[str, Callable[[Gpt], Any]] = {
    "torch fused, at the step": lambda m: torch.optim.AdamW(m.parameters(), fused=True, **OPTIONS),
    "at the step": lambda m: nearstep.optim.AdamW(m.parameters(), **OPTIONS),
    "in backward's hooks": lambda m: nearstep.optim.AdamW(
        m.parameters(), updates="in-backward", **OPTIONS
    ),
    "in a thread beside backward": Beside,
}


def iteration(model: Gpt, optimizer: Any, tokens: torch.Tensor) -> None:
    optimizer.zero_grad()
    model.loss(tokens).backward()
    optimizer.step()


@script
def main(
    layers: Annotated[int, option("of the GPT")] = 6,
    width: Annotated[int, option("of the GPT")] = 512,
    batch: Annotated[int, option("sequences")] = 4,
    sequence: Annotated[int, option("tokens")] = 128,
    steps: Annotated[int, option("measured, in turn")] = 9,
) -> None:
    """Measure each way, and write build/bench/in_backward.json."""
    config = GptConfig(layers=layers, heads=8, width=width, context=sequence)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(256, (batch, sequence + 1), generator=generator)
    jobs, models = {}, []
    for way, made in WAYS.items():
        torch.manual_seed(1)
        model = Gpt(config)
        models.append(model)
        jobs[way] = partial(iteration, model, made(model), tokens)
    in_turn(jobs, 2)
    taken = in_turn(jobs, steps)
    first = [each.detach().numpy() for each in models[0].parameters()]
    rows: list[Results] = []
    for way, model in zip(WAYS, models, strict=True):
        bits = sum(map(differ, (each.detach().numpy() for each in model.parameters()), first))
        rows.append({"way": way, "s": median(taken[way]), "bits": bits})
    report("in_backward", rows=rows, parameters=sum(each.size for each in first), batch=batch,
        sequence=sequence, threads=torch.get_num_threads(), cores=os.cpu_count())  # fmt: skip
