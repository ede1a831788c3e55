"""Loss curves by the formats of parameters and moments in memory, and how they are rounded.

The small GPT of the example trains with AdamW on the functional model of a kernel. Each curve is
the mean of some seeds; the spread is the largest less the smallest.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import report
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import Gpt, sized
from stdlib_text import Batches, Text, load_text
from trainer import Trainer

import nearstep

DEVICE = "golden:axdimm?gradient_formats=fp32,bf16"
SIZE = "tiny"
BATCH, CONTEXT = 8, 64
VALIDATION_BATCHES = 16
LAST_STEPS = 50
LR, WEIGHT_DECAY = 2e-3, 0.1

console = Console()


@dataclass(frozen=True)
class Case:
    """What is trained with.

    Attributes
    ----------
    name
    options : of the device.
    dtype : of the parameters.
    rounding
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


def train(case: Case, text: Text, steps: int, seed: int) -> dict[str, Any]:
    """Losses of one training run."""
    torch.manual_seed(seed)
    model = Gpt(sized(SIZE, context=CONTEXT)).to(case.dtype)
    with nearstep.open(DEVICE + case.options) as device:
        groups = model.decay_groups(WEIGHT_DECAY)
        optimizer = nearstep.optim.AdamW(
            groups, lr=LR, device=device, rounding=case.rounding, rounding_seed=seed
        )
        trainer = Trainer(model, optimizer, steps)
        batches = Batches(text.training, batch=BATCH, context=CONTEXT, seed=seed)
        for _ in range(steps):
            trainer.train(batches.draw())
        unseen = Batches(text.validation, batch=BATCH, context=CONTEXT, seed=seed)
        validation = trainer.validate([unseen.draw() for _ in range(VALIDATION_BATCHES)])
    return {
        "seed": seed,
        "losses": trainer.losses,
        "training_loss": statistics.mean(trainer.losses[-LAST_STEPS:]),
        "validation_loss": validation,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def summary(case: Case, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over the seeds."""
    row: dict[str, Any] = {"formats": case.name, "runs": runs}
    for name in ("training_loss", "validation_loss"):
        values = [run[name] for run in runs]
        row[name] = statistics.mean(values)
        row[f"{name}_spread"] = max(values) - min(values)
    return row


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean training loss over steps, and its difference from fp32, both smoothed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def smooth(values: Any, width: int = 25) -> Any:
        return np.convolve(values, np.ones(width) / width, mode="valid")

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    curves = [np.array([run["losses"] for run in row["runs"]]) for row in rows]
    base = curves[0]
    for case, losses in zip(CASES, curves, strict=True):
        mean = smooth(losses.mean(0))
        steps = np.arange(mean.size) + losses.shape[1] - mean.size
        left.plot(steps, mean, color=case.color, label=case.name, linewidth=1.2)
        apart = np.array([smooth(each) for each in losses - base])
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
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(
    steps: Annotated[int, typer.Option(min=100, help="Steps of each training run.")] = 500,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each case.")] = 3,
) -> None:
    """Train, print, and write build/bench/state_losses.json and state_losses.png."""
    torch.set_num_threads(1)
    text = load_text()
    begun = time.perf_counter()
    rows = []
    for case in track(CASES, "training", console=console):
        rows.append(summary(case, [train(case, text, steps, 1 + seed) for seed in range(seeds)]))
    table = Table("in memory", "training", "spread", "validation", "spread")
    for row in rows:
        table.add_row(
            row["formats"],
            f"{row['training_loss']:.4f}",
            f"{row['training_loss_spread']:.4f}",
            f"{row['validation_loss']:.4f}",
            f"{row['validation_loss_spread']:.4f}",
        )
    console.print(table)
    results = {
        "label": "measured (this machine)",
        "device": DEVICE,
        "size": SIZE,
        "parameters": rows[0]["runs"][0]["parameters"],
        "batch": BATCH,
        "context": CONTEXT,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "steps": steps,
        "seeds": seeds,
        "text": text.source,
        "text_sha256": text.sha256,
        "aten_capability": torch.backends.cpu.get_cpu_capability(),
        "seconds": time.perf_counter() - begun,
        "rows": rows,
    }
    console.print(f"written: {report.write('state_losses', results)}")
    plot(rows, report.FOLDER / "state_losses.png")


if __name__ == "__main__":
    typer.run(main)
