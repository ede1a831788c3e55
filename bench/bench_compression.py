"""Loss after training with compressed gradients: shares that are kept, with error feedback or not.

The small GPT of the example trains on the functional model of a kernel, whose steps on what is kept
equal torch's bit for bit. Each loss is the mean of some seeds; the spread is the largest less the
smallest.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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

DEVICE = "golden:axdimm?compression=fused&rules=adam,sgd"
SHARES = (0.005, 0.01, 0.025, 0.05)
OPTIMIZERS: dict[str, dict[str, float]] = {
    "AdamW": {"lr": 2e-3, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "weight_decay": 0.0},
}
SIZE = "tiny"
BATCH, CONTEXT = 8, 64
VALIDATION_BATCHES = 16
LAST_STEPS = 20

console = Console()


@dataclass(frozen=True)
class Case:
    """What is trained with. A share of None is whole gradients."""

    optimizer: str
    share: float | None
    error_feedback: bool


def cases() -> Iterator[Case]:
    for optimizer in OPTIMIZERS:
        yield Case(optimizer, None, False)
        for share, feedback in itertools.product(SHARES, (True, False)):
            yield Case(optimizer, share, feedback)


def train(case: Case, text: Text, device: nearstep.Device, steps: int, seed: int) -> dict[str, Any]:
    """Losses of one training run, and what a step sent."""
    torch.manual_seed(seed)
    model = Gpt(sized(SIZE, context=CONTEXT))
    hyper = dict(OPTIMIZERS[case.optimizer])
    optimizer = getattr(nearstep.optim, case.optimizer)(
        model.decay_groups(hyper.pop("weight_decay")),
        **hyper,
        device=device,
        compression=case.share,
        error_feedback=case.error_feedback,
    )
    trainer = Trainer(model, optimizer, steps)
    batches = Batches(text.training, batch=BATCH, context=CONTEXT, seed=seed)
    for _ in range(steps):
        trainer.train(batches.draw())
    unseen = Batches(text.validation, batch=BATCH, context=CONTEXT, seed=seed)
    traffic = optimizer.traffic
    return {
        "seed": seed,
        "training_loss": statistics.mean(trainer.losses[-LAST_STEPS:]),
        "validation_loss": trainer.validate([unseen.draw() for _ in range(VALIDATION_BATCHES)]),
        "gradient_bytes_per_step": traffic.gradients_down / traffic.steps,
        "parameters": traffic.elements // traffic.steps,
    }


def summary(case: Case, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over the seeds."""
    row: dict[str, Any] = {
        "optimizer": case.optimizer,
        "share": case.share,
        "error_feedback": case.error_feedback,
        "gradient_bytes_per_step": runs[0]["gradient_bytes_per_step"],
        "runs": runs,
    }
    for name in ("training_loss", "validation_loss"):
        values = [run[name] for run in runs]
        row[name] = statistics.mean(values)
        row[f"{name}_spread"] = max(values) - min(values)
    return row


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("optimizer", "kept", "feedback", "B/step", "training", "validation", "spread")
    for row in rows:
        share = row["share"]
        table.add_row(
            row["optimizer"],
            "all" if share is None else f"{100 * share:g} %",
            "" if share is None else ("yes" if row["error_feedback"] else "no"),
            f"{row['gradient_bytes_per_step']:,.0f}",
            f"{row['training_loss']:.4f}",
            f"{row['validation_loss']:.4f}",
            f"{row['validation_loss_spread']:.4f}",
        )
    console.print(table)


def plot(rows: list[dict[str, Any]]) -> None:
    """Validation loss over the share that is kept, a panel for each optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(OPTIMIZERS), figsize=(8, 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, optimizer in zip(axes[0], OPTIMIZERS, strict=True):
        mine = [row for row in rows if row["optimizer"] == optimizer]
        whole = next(row for row in mine if row["share"] is None)
        axis.axhline(whole["validation_loss"], color="#888888", label="whole gradients")
        for feedback, style in ((True, "o-"), (False, "s--")):
            line = [r for r in mine if r["share"] is not None and r["error_feedback"] == feedback]
            values = [[run["validation_loss"] for run in row["runs"]] for row in line]
            means = [row["validation_loss"] for row in line]
            below = [m - min(v) for m, v in zip(means, values, strict=True)]
            above = [max(v) - m for m, v in zip(means, values, strict=True)]
            axis.errorbar(
                [100 * row["share"] for row in line],
                means,
                yerr=[below, above],
                fmt=style,
                capsize=3,
                label=f"{'with' if feedback else 'without'} error feedback",
            )
        axis.set_xscale("log")
        axis.set_xticks([100 * share for share in SHARES], [f"{100 * s:g}" for s in SHARES])
        axis.minorticks_off()
        axis.set_xlabel("elements kept, %")
        axis.set_title(optimizer, loc="left", fontsize=11)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("validation loss, nats per byte")
    axes[0][-1].legend(frameon=False)
    report.FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(report.FOLDER / "compression.png", dpi=150)
    pyplot.close(figure)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training run.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each case.")] = 3,
) -> None:
    """Train, print, and write build/bench/compression.json and compression.png."""
    torch.set_num_threads(1)
    text = load_text()
    begun = time.perf_counter()
    rows = []
    with nearstep.open(DEVICE) as device:
        for case in track(list(cases()), "training", console=console):
            runs = [train(case, text, device, steps, seed) for seed in range(1, seeds + 1)]
            rows.append(summary(case, runs))
    show(rows)
    plot(rows)
    results = {
        "label": "measured (this machine)",
        "device": DEVICE,
        "optimizers": OPTIMIZERS,
        "size": SIZE,
        "parameters": rows[0]["runs"][0]["parameters"],
        "batch": BATCH,
        "context": CONTEXT,
        "steps": steps,
        "seeds": seeds,
        "text": text.source,
        "text_sha256": text.sha256,
        "aten_capability": torch.backends.cpu.get_cpu_capability(),
        "seconds": time.perf_counter() - begun,
        "rows": rows,
    }
    console.print(f"written: {report.write('compression', results)}")


if __name__ == "__main__":
    typer.run(main)
