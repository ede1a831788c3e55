"""`nearstep bitstream`: a bitstream for a board."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from nearstep.cli.outcome import FAILED
from nearstep_sim.bitstream.watch import Watch
from nearstep_spec.boards.board import BOARDS
from nearstep_spec.boards.coarse_board import CoarseBoardConfig
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.codec import from_text, texts_of, to_json

__all__ = ["command", "folder_of"]

FOLDER = Path("build", "boards")
SHOWN = 48  # characters of a line of a program
PHASE = re.compile(r"^(?:Info: (?P<info>\S.*)|[\d.]+ Executing (?P<yosys>\S+ \S+).*)$")


Config = BoardConfig | CoarseBoardConfig
DESIGNS: Mapping[str, type[Config]] = MappingProxyType(
    {"updater": BoardConfig, "coarse": CoarseBoardConfig}
)
"""Configuration of each design; the first is the default."""


def _variant(config: Config) -> str:
    """Return the variant of a design: `coarse`, or the memory of an updater."""
    return "coarse" if isinstance(config, CoarseBoardConfig) else config.memory


def folder_of(config: Config) -> Path:
    """Return the default folder of a configuration's results."""
    variant = _variant(config)
    return FOLDER / (config.board + ("" if variant == "dram" else f"-{variant}"))


def command(
    context: typer.Context,
    board: Annotated[
        str,
        typer.Argument(
            help=f"Board, one of: {', '.join(BOARDS)}; options of its design follow: "
            "ulx3s_85f --memory blockram --rules sgd.",
            autocompletion=lambda: list(BOARDS),
        ),
    ],
    design: Annotated[
        str,
        typer.Option(
            help=f"What the board holds, one of: {', '.join(DESIGNS)}.",
            autocompletion=lambda: list(DESIGNS),
        ),
    ] = "updater",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the results (default: build/boards/BOARD)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="First seed of the placer.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; the best is used.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Seeds placed at once.")] = 1,
) -> None:
    """Make a bitstream: top.bit, report.json, summary.md and pictures of the chip.

    Exit status 1 if the design does not fit, a clock is too slow, or a program is missing or fails.
    """
    try:
        if design not in DESIGNS:
            raise ValueError(f"design must be one of {', '.join(DESIGNS)}, not {design!r}")
        kind = DESIGNS[design]
        config = from_text(kind, {"board": board, **texts_of(kind, context.args)})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _make(config, output or folder_of(config), range(seed, seed + seeds), jobs)


# Options unknown to Typer are options of the design.
cast(Any, command).context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}


def _make(config: Config, folder: Path, seeds: Sequence[int], jobs: int) -> None:
    # Amaranth and matplotlib are loaded when they are needed.
    from nearstep_hw.boards.plan import plan
    from nearstep_sim.bitstream.errors import BitstreamError, TimingError
    from nearstep_sim.bitstream.flow import build

    console = Console()
    title = f"{config.described.title}, {_variant(config)}"
    failure: BitstreamError | None = None
    with _Steps(console) as steps:
        try:
            steps.begin("elaboration")
            planned = plan(config, seed=seeds[0])
            steps.end("elaboration")
            build(
                planned,
                folder,
                title=title,
                configuration=to_json(config),
                seeds=seeds,
                jobs=jobs,
                dfu=config.described.dfu,
                watch=steps,
            )
        except BitstreamError as error:
            failure = error
    text = folder / "summary.md"
    if text.exists() and (failure is None or isinstance(failure, TimingError)):  # of this run
        summary = text.read_text(encoding="utf-8")
        if console.is_terminal:
            console.print(Markdown(summary))
        else:
            typer.echo(summary)
    if failure is not None:
        typer.echo(f"error: {failure}", err=True)
        raise typer.Exit(FAILED)
    typer.echo(f"written: {folder / 'top.bit'}, report.json, summary.md, pictures")


class _Steps(Watch):
    """Shows the steps of a flow on a console, with the current output of their programs."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[said]}", style="dim"),
            console=console,
            transient=True,
        )
        self.tasks: dict[str, tuple[TaskID, float]] = {}

    def __enter__(self) -> "_Steps":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begin(self, step: str) -> None:
        """A step begins."""
        self.tasks[step] = self.progress.add_task(step, total=None, said=""), time.monotonic()

    def line(self, step: str, text: str) -> None:
        """Show a line of the step's program."""
        if match := PHASE.match(text):
            said = (match["info"] or match["yosys"])[:SHOWN].replace("[", r"\[")
            self.progress.update(self.tasks[step][0], said=said)

    def end(self, step: str) -> None:
        """A step has ended."""
        task, began = self.tasks.pop(step)
        self.progress.remove_task(task)
        self.console.print(f"{step}: {time.monotonic() - began:.0f} s")
