"""Training whose optimizer state is in the host's memory, beside a GPU: needs CUDA."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from harness import Results, option, report, script, track
from measuring import differ
from torch.nn.functional import linear
from training import Gpt, GptConfig

import nearstep
from nearstep.measure.host import Sizes, measure
from nearstep.memferry import planner
from nearstep.memferry.profile import Profile
from nearstep.torch.budget import budget_bytes
from nearstep.torch.memferry import profile
from nearstep.torch.offload.mapped import mapped
from nearstep_spec.platform.machine import Platform

GPU = torch.device("cuda")
WARM_UP = 3
PRODUCTS = [(4096, 1024, 4096), (4096, 4096, 1024), (4096, 1024, 1024), (4096, 1024, 3072),
    (1024, 1024, 4096), (16384, 1024, 4096)]  # fmt: skip
"""Rows, inputs and outputs of linear layers whose matrix is read in place."""
OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


class Masters:
    """torch alone: parameters and state in the host's memory, copies before and after a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.own = list(model.parameters())
        self.masters = [each.detach().cpu().pin_memory().requires_grad_() for each in self.own]
        self.gradients = [torch.empty_like(each).pin_memory() for each in self.masters]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **OPTIONS)

    def zero_grad(self) -> None:
        for each in self.own:
            each.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for own, master, gradient in zip(self.own, self.masters, self.gradients, strict=True):
            gradient.copy_(own.grad, non_blocking=True)
            master.grad = gradient
        torch.cuda.synchronize()
        self.optimizer.step()
        for own, master in zip(self.own, self.masters, strict=True):
            own.copy_(master, non_blocking=True)


def trained(
    model_of: Callable[[], Gpt], tokens: torch.Tensor, steps: int, way: str, **offload: Any
) -> tuple[Results, list[np.ndarray]]:
    """Train one way; figures, and the parameters."""
    model = model_of()
    optimizer: Any
    if way == "torch, all in GPU memory":
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    elif way == "torch, state in the host's memory":
        optimizer = Masters(model)
    else:
        optimizer = nearstep.optim.AdamW(model.parameters(), device="host:", **OPTIONS)
    row: Results = {"way": way}
    with nearstep.offload(model, optimizer, **offload) if offload else nullcontext() as engine:
        seconds = []
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            optimizer.zero_grad()
            model.loss(tokens).backward()
            optimizer.step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        row["s"] = statistics.median(seconds[WARM_UP:])
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        if engine is not None:
            row["budget"], row["charged"] = engine.budget, engine.report().peak
            modes = [] if engine.plan is None else [*engine.plan.layers.values()]
            row["modes"] = {
                mode: sum(each.mode.name == mode for each in modes)
                for mode in ("GFGB", "DHA", "DFGB")
            }
    return row, [each.detach().cpu().numpy().copy() for each in model.parameters()]


def in_place(link_bytes_per_s: float) -> list[Results]:
    """Products with a matrix in GPU memory, and in pinned memory of the host (DHA)."""
    rows = []
    for count, inputs, outputs in PRODUCTS:
        x, g = (torch.randn(count, size, device=GPU) for size in (inputs, outputs))
        there = torch.randn(outputs, inputs).pin_memory()
        matrices = there.to(GPU), mapped(there, GPU)
        forward, backward = (
            [seconds(partial(of, each)) for each in matrices]
            for of in (partial(linear, x), partial(torch.mm, g))
        )
        read_s = there.nbytes / link_bytes_per_s
        rows.append({"rows": count, "inputs": inputs, "outputs": outputs,
            "forward_s": forward[0], "forward_dha_s": forward[1],
            "forward_reads": (forward[1] - forward[0]) / read_s,
            "backward_s": backward[0], "backward_dha_s": backward[1],
            "backward_reads": (backward[1] - backward[0]) / read_s})  # fmt: skip
    return rows


def seconds(action: Callable[[], object], times: int = 5) -> float:
    for count in (2, times):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            action()
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / times


def machine() -> Platform:
    """This machine, measured."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), Sizes(file_bytes=1 << 26, copy_bytes=1 << 27, matrix=1024))


def profiled(model: Gpt, tokens: torch.Tensor, here: Platform) -> Profile:
    rate = here.processors["cpu"].adam_params_per_s
    assert rate is not None, "it was measured"
    return profile(model, lambda: model.loss(tokens).backward(), platform=here, gpu="gpu0",
        source="measured", host_params_per_s=rate.value)  # fmt: skip


@script
def main(
    layers: Annotated[int, option("of the GPT")] = 24,
    width: Annotated[int, option("of the GPT")] = 1024,
    batch: Annotated[int, option("sequences")] = 8,
    sequence: Annotated[int, option("tokens")] = 512,
    budget: Annotated[str, option("of parameters and gradients in GPU memory")] = "50%",
    steps: Annotated[int, option("measured, after the first three")] = 5,
) -> None:
    """Measure each way, and write build/bench/gpu.json; without CUDA, say so."""
    if not torch.cuda.is_available():
        print("bench_gpu: torch finds no CUDA here: nothing was measured")
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would be measured
    config = GptConfig(layers=layers, heads=width // 64, width=width, context=sequence)

    def model_of() -> Gpt:
        torch.manual_seed(1)
        return Gpt(config).to(GPU)

    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(256, (batch, sequence + 1), generator=generator).to(GPU)
    here = machine()
    parameters = sum(each.numel() for each in model_of().parameters())
    found = profiled(model_of(), tokens, here)
    fits = budget_bytes(budget, 4 * parameters)
    planned = planner.make(found, budget=fits)
    train = partial(trained, model_of, tokens, steps)
    ways = [
        partial(train, "torch, all in GPU memory"),
        partial(train, "torch, state in the host's memory"),
        *(
            partial(train, f"{policy}, {updates}", policy=policy, updates=updates, budget=budget,
                **({"profile": found} if policy == "memferry" else {}))
            for policy in ("prefetch", "memferry")
            for updates in ("at-step", "in-backward")
        ),
    ]  # fmt: skip
    rows, reference = [], None
    for way in track(ways, "ways to train"):
        row, values = way()
        if row["way"].startswith("torch, state"):
            reference = values
        row["bits"] = None if reference is None else sum(map(differ, values, reference))
        rows.append(row)
        torch.cuda.empty_cache()
    link = here.links["pcie0"].bytes_per_s.value
    report("gpu", parameters=parameters, batch=batch, sequence=sequence, rows=rows,
        gpu=here.processors["gpu0"].title, threads=torch.get_num_threads(),
        link_bytes_per_s=link, products=in_place(link),
        host_params_per_s=here.processors["cpu"].adam_params_per_s.value,
        planned_s=planned.total / 1e12, budget=fits,
        compute_s=sum(each.forward_s + each.backward_s for each in found.layers))  # fmt: skip
