"""Accuracy of Adam: bits that differ from torch's fused kernel, and error against float64."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import torch
from harness import Results, option, report, script
from measuring import differ

from nearstep_sim.golden.rule_cpp import kernel
from nearstep_spec.rule.adam import ORDERS

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
SEED = 0

State = dict[str, np.ndarray]


def gradients(count: int, steps: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(SEED + 1)
    scale = (1e-3 * 10.0 ** rng.uniform(-2, 1, count)).astype(np.float32)
    for _ in range(steps):
        yield rng.standard_normal(count, np.float32) * scale


def parameters(count: int) -> np.ndarray:
    return np.random.default_rng(SEED).standard_normal(count, np.float32) * np.float32(0.02)


def reference(count: int, steps: int, decoupled: bool) -> State:
    p = parameters(count).astype(np.float64)
    m, v = np.zeros(count), np.zeros(count)
    (b1, b2), lr, decay = HYPER["betas"], HYPER["lr"], HYPER["weight_decay"]
    for step, gradient in enumerate(gradients(count, steps), 1):
        g = gradient.astype(np.float64)
        if decoupled:
            p = p * (1 - lr * decay)
        else:
            g = g + decay * p
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        p = p - lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + HYPER["eps"])
    return {"p": p, "m": m, "v": v}


def nearstep(order: str) -> Callable[[int, int, bool], State]:
    rule, scalars = ORDERS[order]

    def run(count: int, steps: int, decoupled: bool) -> State:
        zeros = np.zeros(count, np.float32)
        state = {"p": parameters(count), "m": zeros, "v": zeros.copy()}
        for step, gradient in enumerate(gradients(count, steps), 1):
            values = scalars(step=step, decoupled_weight_decay=decoupled, **HYPER)
            kernel(rule)(state | {"g": gradient}, values)
        return state

    return run


def torch_adam(**options: bool) -> Callable[[int, int, bool], State]:
    def run(count: int, steps: int, decoupled: bool) -> State:
        parameter = torch.nn.Parameter(torch.from_numpy(parameters(count)))
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer = kind([parameter], **HYPER, **options)
        for gradient in gradients(count, steps):
            parameter.grad = torch.from_numpy(gradient)
            optimizer.step()
        moments = optimizer.state[parameter]
        state = {"p": parameter.detach(), "m": moments["exp_avg"], "v": moments["exp_avg_sq"]}
        return {name: each.numpy() for name, each in state.items()}

    return run


IMPLEMENTATIONS = {
    "nearstep order=default": nearstep("default"),
    "torch fused=True": torch_adam(fused=True),
    "torch foreach=False": torch_adam(foreach=False),
    "nearstep order=paper": nearstep("paper"),
}


def ulps(value: np.ndarray, exact: np.ndarray) -> np.ndarray:
    _, exponent = np.frexp(exact)
    spacing = np.ldexp(1.0, np.maximum(exponent, -125) - 24)
    return np.abs(value.astype(np.float64) - exact) / spacing


def measure(count: int, steps: int, decoupled: bool) -> Iterator[Results]:
    exact = reference(count, steps, decoupled)
    states = {name: run(count, steps, decoupled) for name, run in IMPLEMENTATIONS.items()}
    oracle = states["torch fused=True"]
    for name, state in states.items():
        for array in "pmv":
            changed = state[array].view(np.uint32) ^ oracle[array].view(np.uint32)
            error = ulps(state[array], exact[array])
            yield {"optimizer": "AdamW" if decoupled else "Adam", "implementation": name,
                "array": array,
                "values_that_differ_from_torch_fused": differ(state[array], oracle[array]),
                "bits_that_differ_from_torch_fused": int(np.bitwise_count(changed).sum()),
                "mean_ulp": float(error.mean()), "median_ulp": float(np.median(error)),
                "max_ulp": float(error.max()),
                "max_absolute": float(np.abs(state[array] - exact[array]).max())}  # fmt: skip


@script
def main(
    count: Annotated[int, option("Parameters, a multiple of 16.")] = 1 << 20,
    steps: Annotated[int, option("Optimizer steps.")] = 10,
) -> None:
    """Measure, print, and write build/bench/accuracy.json."""
    report(
        "accuracy", parameters=count, steps=steps, seed=SEED, hyper_parameters=HYPER,
        aten_capability=torch.backends.cpu.get_cpu_capability(),
        rows=[row for decoupled in (False, True) for row in measure(count, steps, decoupled)],
    )  # fmt: skip
