"""Files that a command writes, checked before the work begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nearstep.work.timeline import Timeline
from nearstep.work.trace import picture, write_trace

TraceFile = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="JSON for Perfetto and chrome://tracing."),
]
PictureFile = Annotated[
    Path | None,
    typer.Option("--picture", "-p", help="Picture: .png, .svg, or another format of matplotlib."),
]


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written, by option, with `typer.BadParameter`.

    The kinds of `--picture` and `--bars` are checked before the other files, whose check creates
    folders.
    """
    for option in ("--picture", "--bars"):
        image = paths.get(option)
        if image is not None:
            check_picture(image, option)
    for option, path in paths.items():
        if path is not None:
            check_writable(option, path)


def write_timeline(
    timeline: Timeline, trace: Path | None, image: Path | None, title: str, **options: Any
) -> None:
    """Write a timeline as a Chrome trace and as a picture, to the files that are given."""
    if trace is not None:
        write_trace(timeline, trace)
    if image is not None:
        picture(timeline, image, title, **options)


def check_writable(option: str, path: Path) -> None:
    """Create the folder, and refuse a path that cannot be written.

    No file is left behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        with path.open("ab"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise typer.BadParameter(f"{path} {reason}", param_hint=option) from None


def check_picture(path: Path, option: str = "--picture") -> None:
    """Refuse a picture format that matplotlib does not support."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in known:
        names = ", ".join(f".{each}" for each in sorted(known))
        raise typer.BadParameter(
            f"must end in one of {names}, not {path.suffix!r}", param_hint=option
        )
