"""Train a small GPT on real text, with every optimizer step on a near-memory device.

The same model is trained beside it with torch's fused optimizer on the same seeds and batches.
Ends with a table, `report.json` and `loss.png`.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import shlex
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from gpt import SIZES, Gpt, sized
from offloading import POLICIES, UPDATES, check_options, drawn, offloaded, show_plan
from optimizers import (
    DEVICE,
    KINDS,
    ROUNDINGS,
    Choice,
    Kind,
    NoDrivesError,
    begun,
    kind_named,
    new_drives,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from run_figures import figures, sha256
from run_report import Report, plot_loss
from stdlib_text import Batches, Text, load_text
from torch import Tensor
from trainer import OtherTaskError, Trainer

import nearstep
from nearstep.errors import ArgumentError, NearstepError, OutOfDeviceMemoryError
from nearstep.storage.drive_errors import StorageError
from nearstep.torch.homes.errors import MemoryTooSmallError, NothingToResumeError
from nearstep.torch.offload import Engine
from nearstep.torch.offload.errors import BudgetError

OUTPUT = Path(__file__).resolve().parents[1] / "build" / "run"

REPORT = "report.json"
PLOT = "loss.png"

MAX_LR = 10.0
MAX_SEED = 2**63 - 1
"""Largest seed of a `torch.Generator`."""

Size = Annotated[str, typer.Option(help=f"Model: {', '.join(SIZES)}.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device name, such as sim:axdimm?memory=ideal or golden:axdimm. "
        f"Without one: {DEVICE}, and what the other options need."
    ),
]
Optimizer = Annotated[str, typer.Option(help=f"{', '.join(KINDS)}, or FILE.py:NAME.")]
Lr = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Peak learning rate; "
        + ", ".join(f"{kind.lr:g} for {name}" for name, kind in KINDS.items())
        + ".",
    ),
]
Share = Annotated[
    float | None,
    typer.Option(
        help="Send this share of each gradient, its largest elements: above 0, at most 1."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on what, on a device and beside it.

    Attributes
    ----------
    size : of the model.
    steps
    batch, context : sequences, and bytes of each.
    weight_decay : of matrices.
    seed : of weights and batches.
    """

    size: str
    steps: int
    batch: int
    context: int
    weight_decay: float
    seed: int

    def batches(self, tokens: Tensor) -> Batches:
        """Batches of a text, the same each time.

        Raises
        ------
        ValueError : it is too short.
        """
        return Batches(tokens, batch=self.batch, context=self.context, seed=self.seed)

    def trainer(self, choice: Choice, device: nearstep.Device | None) -> Trainer:
        """A trainer on `device`, or with torch's optimizer; equal seeds make equal models."""
        torch.manual_seed(self.seed)
        model = Gpt(sized(self.size, context=self.context))
        groups = model.decay_groups(self.weight_decay)
        if device is None:
            return Trainer(model, choice.in_torch(groups), self.steps, choice.max_grad_norm)
        words = [f"{name} {value}" for name, value in asdict(self).items()]
        task = ", ".join([*words, f"lr {choice.lr}"])
        return Trainer(model, choice.on(device, groups), self.steps, task=task)


def main(
    device: Device = None,
    size: Size = "small",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 30,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Bytes in a sequence.")] = 128,
    optimizer: Optimizer = "adamw",
    lr: Lr = None,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Of matrices.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of weights and batches.")] = 1,
    compression: Share = None,
    error_feedback: Annotated[
        bool, typer.Option(help="Add what was not sent to the next gradient.")
    ] = True,
    max_grad_norm: Annotated[
        float | None, typer.Option(min=0.0, help="Clip gradients to this norm, on the device.")
    ] = None,
    offload: Annotated[
        bool, typer.Option(help="Keep parameters on the device, and fetch them as they are used.")
    ] = False,
    budget: Annotated[
        str, typer.Option(help="With --offload: memory of parameters and gradients on the host.")
    ] = "40%",
    policy: Annotated[
        str, typer.Option(help=f"With --offload: {', '.join(POLICIES)}.")
    ] = "prefetch",
    updates: Annotated[
        str, typer.Option(help="With --offload: " + ", ".join(UPDATES) + ".")
    ] = "at-step",
    timeline: Annotated[
        Path | None,
        typer.Option(help="With --offload: draw the last iteration, in the time of a machine."),
    ] = None,
    drives: Annotated[
        Path | None,
        typer.Option(
            help="Keep state in two new files of this folder, as far as --memory does not hold it."
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option(help="With --drives: of the device, for parameters, gradients and state.")
    ] = "25%",
    resume: Annotated[
        bool,
        typer.Option(
            help="Go on from the last step on the drives, if there are any: of --drives, or of "
            "cards with drive=."
        ),
    ] = False,
    rounding: Annotated[
        str, typer.Option(help="Of states in bf16: nearest, or stochastic.")
    ] = "nearest",
    baseline: Annotated[
        bool, typer.Option(help="Train the same model with torch's fused optimizer.")
    ] = True,
    output: Annotated[Path, typer.Option(help="Folder of the report.")] = OUTPUT,
) -> None:
    """Train a small GPT on Python's standard library, its optimizer steps on a device."""
    console = Console()
    kind = _kind(optimizer)
    choice = Choice(
        kind=kind,
        lr=kind.lr if lr is None else lr,
        compression=compression,
        error_feedback=error_feedback,
        max_grad_norm=max_grad_norm,
        drives=drives,
        memory=memory if drives is not None else None,
        resume=resume,
        rounding=rounding,
    )
    _check(size, choice, offload=offload)
    check_options(policy, updates, timeline, offload=offload)
    task = Task(
        size=size, steps=steps, batch=batch, context=context, weight_decay=weight_decay, seed=seed
    )
    device = choice.device if device is None else device
    _prepare(output)
    started = time.perf_counter()
    text = load_text()
    batches = _batches(task, text)
    with console.status(f"opening {device} (built on first use)"):
        near_memory = _opened(device)
    opened = time.perf_counter()

    with near_memory:
        how = (budget if offload else None, policy, updates)
        ours, engine = _on_device(task, choice, near_memory, *how)
        theirs = task.trainer(choice, None) if baseline and kind.in_torch else None
        parameters = sum(p.numel() for p in ours.model.parameters())
        if ours.done >= steps:
            found = f"the drives have {ours.done} steps already, not fewer than {steps}"
            raise typer.BadParameter(found, param_hint="--resume")
        console.print(
            f"GPT of {parameters:,} parameters, {steps} steps on {device}; text: {text.source}, "
            f"{text.files} files, {len(text.training) + len(text.validation):,} bytes"
        )
        try:
            _train(console, ours, theirs, batches, steps, engine, timeline)
        except BudgetError as error:
            raise typer.BadParameter(str(error), param_hint="--budget") from error
        if engine is not None:
            show_plan(engine)
        report = Report(
            configuration={
                "command": shlex.join(["python", *sys.argv]),
                "device": device,
                "parameters": parameters,
                "optimizer": optimizer,
                **asdict(task),
                **_options(choice, ours),
                "budget": budget if offload else None,
                "policy": policy if offload else None,
                "updates": updates if offload else None,
                "baseline": choice.baseline if theirs else None,
            },
            environment=_environment(text),
            loss=ours.losses,
            baseline_loss=theirs.losses[ours.done :] if theirs else None,
            first_step=ours.done,
        )
        report.figures = figures(choice, ours, theirs, task.batches(text.validation), engine)
        report.sha256 = sha256(ours)
    report.environment["open_device_s"] = round(opened - started, 3)
    report.environment["total_s"] = round(time.perf_counter() - started, 3)
    _write(console, report, output, timeline)


def _kind(optimizer: str) -> Kind:
    try:
        return kind_named(optimizer)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--optimizer") from error


def _options(choice: Choice, ours: Trainer) -> dict[str, object]:
    """The configuration of our optimizer."""
    defaults = ours.optimizer.defaults
    return {
        "lr": choice.lr,
        **{name: defaults[name] for name in ("betas", "eps", "momentum") if name in defaults},
        "compression": choice.compression,
        "error_feedback": None if choice.compression is None else choice.error_feedback,
        "max_grad_norm": choice.max_grad_norm,
        "rounding": choice.rounding,
        "memory": choice.memory,
    }


def _check(size: str, choice: Choice, *, offload: bool) -> None:
    """Refuse options that are out of bounds, or that do not go together."""
    lr, compression, max_grad_norm = choice.lr, choice.compression, choice.max_grad_norm
    if compression is not None and not 0.0 < compression <= 1.0:
        raise typer.BadParameter(
            f"{compression} is not above 0 and at most 1", param_hint="--compression"
        )
    if max_grad_norm is not None and not math.isfinite(max_grad_norm):
        raise typer.BadParameter(f"{max_grad_norm} is not finite", param_hint="--max-grad-norm")
    if offload and compression is not None:
        raise typer.BadParameter(
            "gradients of an offloaded model are sent whole", param_hint="--compression"
        )
    if not 0.0 <= lr <= MAX_LR:
        raise typer.BadParameter(f"{lr} is not between 0 and {MAX_LR:g}", param_hint="--lr")
    if choice.rounding not in ROUNDINGS:
        known = " or ".join(ROUNDINGS)
        raise typer.BadParameter(f"{choice.rounding!r} is not {known}", param_hint="--rounding")
    if size not in SIZES:
        raise typer.BadParameter(f"{size!r} is not one of {', '.join(SIZES)}", param_hint="--size")


def _opened(device: str) -> nearstep.Device:
    """The device, or an end of the program that says what is wrong."""
    try:
        return nearstep.open(device)
    except (OSError, RuntimeError) as error:  # of the tools that build a simulated device
        typer.echo(f"cannot open {device}: {error}", err=True)
        typer.echo("Run `nearstep doctor`: it lists the tools and what is missing.", err=True)
        raise typer.Exit(2) from error
    except NearstepError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error


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


def _batches(task: Task, text: Text) -> Batches:
    """What is trained on; there is enough text for that, and for validation."""
    try:
        task.batches(text.validation)
        return task.batches(text.training)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--context") from error


def _on_device(
    task: Task,
    choice: Choice,
    device: nearstep.Device,
    budget: str | None,
    policy: str,
    updates: str,
) -> tuple[Trainer, Engine | None]:
    """The trainer on `device`, offloaded where there is a budget; or an
    end of the program that says which option is wrong, and leaves no drives."""
    try:
        if choice.resume and not begun(choice.drives, device):
            choice = replace(choice, resume=False)
        with new_drives(choice.drives):
            ours = _resumed(task, choice, device)
            if budget is None:
                return ours, None
            return ours, offloaded(ours, budget, policy, updates)  # type: ignore[arg-type]
    except (StorageError, FileExistsError, PermissionError) as error:
        hint = "--device" if choice.drives is None else "--drives"
        raise typer.BadParameter(str(error), param_hint=hint) from error
    except (OtherTaskError, NoDrivesError) as error:
        raise typer.BadParameter(str(error), param_hint="--resume") from error
    except MemoryTooSmallError as error:
        raise typer.BadParameter(str(error), param_hint="--memory") from error
    except (ArgumentError, OutOfDeviceMemoryError) as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error


def _resumed(task: Task, choice: Choice, device: nearstep.Device) -> Trainer:
    """The trainer on `device`: from the start if the run before was cut off before the drives had
    anything."""
    try:
        return task.trainer(choice, device)
    except NothingToResumeError as error:
        print(f"{error}; begun anew", flush=True)
        for place in reversed(error.places):
            place.unlink()
        return task.trainer(replace(choice, resume=False), device)


def _train(
    console: Console,
    ours: Trainer,
    theirs: Trainer | None,
    batches: Batches,
    steps: int,
    engine: Engine | None,
    timeline: Path | None,
) -> None:
    """Train both on the same batches, in turn; `timeline` is a picture of our last step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loss", total=steps)
        for step in range(steps):
            tokens = batches.draw()
            if step < ours.done:
                progress.update(task, advance=1)
                if theirs:
                    theirs.train(tokens)
                continue
            draws = engine is not None and timeline is not None and step == steps - 1
            with drawn(engine, timeline) if draws else nullcontext():
                loss = ours.train(tokens)
            description = f"loss {loss:.4f}"
            if theirs:
                description += f" (torch {theirs.train(tokens):.4f})"
            if not math.isfinite(loss):
                raise SystemExit(f"the loss became {loss} after {step + 1} steps")
            progress.update(task, advance=1, description=description)
            if not console.is_terminal:
                print(f"step {step + 1} of {steps}: {description}", flush=True)


def _write(console: Console, report: Report, output: Path, timeline: Path | None) -> None:
    """Write the report and its plot, and print it; the picture of the last step is there."""
    report.write_json(output / REPORT)
    plot_loss(report, output / PLOT)
    print(f"sha256: {report.sha256} of parameters and state")
    console.print(report.table())
    console.print(f"sha256: {report.sha256} of parameters and state")
    console.print(f"report: {output / REPORT}\nplot:   {output / PLOT}")
    if timeline is not None:
        console.print(f"timeline: {timeline}")


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
