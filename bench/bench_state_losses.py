"""Loss curves by the formats of parameters and moments in memory, and how they are rounded."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from harness import Results, option, plot, report, script
from training import Text, summary, train, trained

import nearstep

DEVICE = "golden:axdimm?gradient_formats=fp32,bf16"
LAST_STEPS = 50
LR, WEIGHT_DECAY = 2e-3, 0.1


@dataclass(frozen=True)
class Case:
    """What is trained with.

    Attributes
    ----------
    options : of the device.
    dtype : of the parameters.
    color : of the curve.
    """

    name: str
    options: str = ""
    dtype: torch.dtype = torch.float32
    rounding: str = "nearest"
    color: str = "#444444"


MOMENTS = "&state_format=bf16&stochastic_rounding=yes"
ALL = f"{MOMENTS}&parameter_format=bf16"
CASES = (
    Case("fp32"),
    Case("m, v bf16, nearest", MOMENTS, color="#d62728"),
    Case("m, v bf16, stochastic", MOMENTS, rounding="stochastic", color="#1f77b4"),
    Case("p, m, v bf16, nearest", ALL, torch.bfloat16, color="#ff7f0e"),
    Case("p, m, v bf16, stochastic", ALL, torch.bfloat16, "stochastic", "#2ca02c"),
    Case("m, v 8 bits", "&state_format=dynamic8", color="#9467bd"),
)


def row(case: Case, text: Text, steps: int, seeds: int) -> Results:
    runs = []
    for seed in range(1, seeds + 1):
        with nearstep.open(DEVICE + case.options) as device:

            def made(model: Any, seed: int = seed) -> Any:
                groups = model.decay_groups(WEIGHT_DECAY)
                options = {"rounding": case.rounding, "rounding_seed": seed}
                return nearstep.optim.AdamW(groups, lr=LR, device=device, **options)

            found, _ = train(made, text, steps=steps, seed=seed, last=LAST_STEPS, dtype=case.dtype)
        runs.append(found)
    return {"formats": case.name, **summary(runs)}


def draw(rows: list[Results]) -> None:
    def smooth(values: Any, width: int = 25) -> Any:
        return np.convolve(values, np.ones(width) / width, mode="valid")

    curves = [np.array([run["losses"] for run in row["runs"]]) for row in rows]
    with plot("state_losses.png", 1, 2, figsize=(10, 3.8), dpi=150) as (_, (left, right)):
        for case, losses in zip(CASES, curves, strict=True):
            mean = smooth(losses.mean(0))
            steps = np.arange(mean.size) + losses.shape[1] - mean.size
            left.plot(steps, mean, color=case.color, label=case.name, linewidth=1.2)
            apart = np.array([smooth(each) for each in losses - curves[0]])
            right.plot(steps, apart.mean(0), color=case.color, linewidth=1.2)
            right.fill_between(steps, apart.min(0), apart.max(0), color=case.color, alpha=0.12)
        left.set_title("training loss, mean of the seeds", loc="left", fontsize=11)
        right.set_title("less that of fp32; band: all seeds", loc="left", fontsize=11)
        right.set_ylim(-0.05, 0.1)
        left.set_ylabel("nats per byte")
        for axis in (left, right):
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
        left.legend(frameon=False)


@script
def main(
    steps: Annotated[int, option("Steps of each training run.", min=100)] = 500,
    seeds: Annotated[int, option("Runs of each case.", min=1)] = 3,
) -> None:
    """Train, print, and write build/bench/state_losses.json and state_losses.png."""
    found = trained(CASES, lambda case, text: row(case, text, steps, seeds), steps, seeds)
    for each in found["rows"]:
        each["above_fp32"] = each["validation_loss"] - found["rows"][0]["validation_loss"]
    draw(found["rows"])
    report("state_losses", device=DEVICE, lr=LR, weight_decay=WEIGHT_DECAY, **found)
