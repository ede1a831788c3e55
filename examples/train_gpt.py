"""Train a small GPT on real text, with every optimizer step on a near-memory device.

The same model is trained beside it with ``torch.optim.AdamW(fused=True)`` on the same seeds and
batches. Ends with a table, ``report.json`` and ``loss.png``.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from gpt import SIZES, Gpt, sized
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from run_figures import figures
from run_report import Report, plot_loss
from stdlib_text import Batches, Text, load_text
from trainer import Trainer

import nearstep
from nearstep.errors import NearstepError, OutOfDeviceMemoryError

OUTPUT = Path(__file__).resolve().parents[1] / "build" / "run"

REPORT = "report.json"
PLOT = "loss.png"

MAX_LR = 10.0
MAX_SEED = 2**63 - 1
"""Largest seed of a ``torch.Generator``."""

Size = Annotated[str, typer.Option(help=f"Model: {', '.join(SIZES)}.")]
Device = Annotated[
    str,
    typer.Option(help="Device name, such as sim:axdimm?memory=ideal or golden:axdimm."),
]


def main(
    device: Device = "sim:axdimm?memory=ddr4-1600&channels=2",
    size: Size = "small",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 30,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Bytes in a sequence.")] = 128,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 2e-3,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Of matrices.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of weights and batches.")] = 1,
    baseline: Annotated[
        bool, typer.Option(help="Train the same model with torch.optim.AdamW(fused=True).")
    ] = True,
    output: Annotated[Path, typer.Option(help="Folder of the report.")] = OUTPUT,
) -> None:
    """Train a small GPT on Python's standard library, its optimizer steps on a device."""
    console = Console()
    if not 0.0 <= lr <= MAX_LR:
        raise typer.BadParameter(f"{lr} is not between 0 and {MAX_LR:g}", param_hint="--lr")
    if size not in SIZES:
        raise typer.BadParameter(f"{size!r} is not one of {', '.join(SIZES)}", param_hint="--size")
    _prepare(output)
    started = time.perf_counter()
    text = load_text()
    try:
        batches = Batches(text.training, batch=batch, context=context, seed=seed)
        Batches(text.validation, batch=batch, context=context, seed=seed)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--context") from error

    with console.status(f"opening {device} (built on first use)"):
        try:
            near_memory = nearstep.open(device)
        except NearstepError as error:
            raise typer.BadParameter(str(error), param_hint="--device") from error
        except (OSError, RuntimeError) as error:  # of the tools that build a simulated device
            typer.echo(f"cannot open {device}: {error}", err=True)
            typer.echo("Run `nearstep doctor`: it lists the tools and what is missing.", err=True)
            raise typer.Exit(2) from error
    opened = time.perf_counter()

    with near_memory:
        try:
            ours = _trainer(size, context, seed, steps, lr, weight_decay, near_memory)
        except OutOfDeviceMemoryError as error:
            raise typer.BadParameter(str(error), param_hint="--device") from error
        theirs = _trainer(size, context, seed, steps, lr, weight_decay, None) if baseline else None
        parameters = sum(p.numel() for p in ours.model.parameters())
        console.print(
            f"GPT of {parameters:,} parameters, {steps} steps on {device}; text: {text.source}, "
            f"{text.files} files, {len(text.training) + len(text.validation):,} bytes"
        )
        _train(console, ours, theirs, batches, steps)
        report = Report(
            configuration={
                "command": shlex.join(["python", *sys.argv]),
                "device": device,
                "size": size,
                "parameters": parameters,
                "steps": steps,
                "batch": batch,
                "context": context,
                "lr": lr,
                "weight_decay": weight_decay,
                "betas": list(ours.optimizer.defaults["betas"]),
                "eps": ours.optimizer.defaults["eps"],
                "seed": seed,
                "baseline": "torch.optim.AdamW(fused=True)" if baseline else None,
            },
            environment=_environment(text),
            loss=ours.losses,
            baseline_loss=theirs.losses if theirs else None,
        )
        validation = Batches(text.validation, batch=batch, context=context, seed=seed)
        report.figures = figures(ours, theirs, validation)
    report.environment["open_device_s"] = round(opened - started, 3)
    report.environment["total_s"] = round(time.perf_counter() - started, 3)

    report.write_json(output / REPORT)
    plot_loss(report, output / PLOT)
    console.print(report.table())
    console.print(f"report: {output / REPORT}\nplot:   {output / PLOT}")


def _prepare(output: Path) -> None:
    """Make the report's folder, and see that its files can be written once training has ended."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
        for path in (output / REPORT, output / PLOT):
            if path.exists():
                path.open("r+b").close()
    except OSError as error:
        raise typer.BadParameter(f"cannot write there: {error}", param_hint="--output") from error


def _trainer(
    size: str,
    context: int,
    seed: int,
    steps: int,
    lr: float,
    weight_decay: float,
    device: nearstep.Device | None,
) -> Trainer:
    """A trainer on ``device``, or with torch's fused AdamW; equal seeds make equal models."""
    torch.manual_seed(seed)
    model = Gpt(sized(size, context=context))
    groups = model.decay_groups(weight_decay)
    optimizer: torch.optim.Optimizer
    if device is None:
        optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
    else:
        optimizer = nearstep.optim.AdamW(groups, lr=lr, device=device)
    return Trainer(model, optimizer, steps)


def _train(
    console: Console, ours: Trainer, theirs: Trainer | None, batches: Batches, steps: int
) -> None:
    """Train both on the same batches, in turn."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loss", total=steps)
        for _ in range(steps):
            tokens = batches.draw()
            loss = ours.train(tokens)
            description = f"loss {loss:.4f}"
            if theirs:
                description += f" (torch {theirs.train(tokens):.4f})"
            if not math.isfinite(loss):
                raise SystemExit(f"the loss became {loss} after {len(ours.losses)} steps")
            progress.update(task, advance=1, description=description)


def _environment(text: Text) -> dict[str, object]:
    """What the losses depend on besides the configuration."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nearstep": importlib.metadata.version("nearstep"),
        "machine": platform.machine(),
        "aten_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "text": text.source,
        "text_files": text.files,
        "text_sha256": text.sha256,
    }


if __name__ == "__main__":
    typer.run(main)
