"""`nearstep card`: a card for a virtual machine."""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from nearstep.cli.devices import DeviceName
from nearstep.cli.outcome import group, reported, working
from nearstep.errors import ArgumentError, MismatchError
from nearstep.linux.bars import open_card
from nearstep.linux.nvme.card import IN_PYTHON, controller_kind, open_controller
from nearstep.linux.vfio_user import Server

app = group("A card for a virtual machine: as an NVMe device, or with its own BARs.")

MIB = 1 << 20


@app.command()
def serve(
    url: DeviceName,
    socket: Annotated[Path, typer.Option(help="UNIX socket, which is made.")],
    front: Annotated[
        Literal["nvme", "bars"],
        typer.Option(help="What the guest drives: an NVMe controller, or the card's own BARs."),
    ] = "nvme",
    drive: Annotated[
        Path | None,
        typer.Option(help="File of the NVM namespace; made if missing. Default: a temporary file."),
    ] = None,
    drive_mib: Annotated[
        int | None, typer.Option(min=1, help="Size of a new file. Default: 64.")
    ] = None,
    memory_mib: Annotated[
        int | None,
        typer.Option(min=1, help="Memory of the card that is the SLM namespace. Default: 16."),
    ] = None,
    serial: Annotated[
        str | None,
        typer.Option(help="Serial number; different for each card of a guest. Default: 1."),
    ] = None,
    queues: Annotated[
        str | None,
        typer.Option(
            help="Registers and queues of the controller: python, or rtl. Default: python."
        ),
    ] = None,
) -> None:
    """Serve a card to a virtual machine over vfio-user, until Ctrl-C.

    The guest has an NVMe controller with three namespaces: the drive, the card's memory, and its
    update rules as programs; or, with --front bars, the card as it ships: registers and memory.
    """
    with reported(wrong=(MismatchError, OSError)), ExitStack() as failing:
        temporary = ExitStack()
        kind = controller_kind(queues or IN_PYTHON)
        if front == "bars":
            of_nvme = {"--drive": drive, "--drive-mib": drive_mib, "--memory-mib": memory_mib,
                       "--serial": serial, "--queues": queues}  # fmt: skip
            given = [name for name, value in of_nvme.items() if value is not None]
            if given:
                raise ArgumentError(f"{given[0]} is an option of --front nvme, not of bars")
        elif drive is None:
            drive = Path(temporary.enter_context(TemporaryDirectory())) / "drive"
            failing.push(temporary)
        elif not drive.exists():
            failing.callback(drive.unlink, missing_ok=True)
        if drive is not None and drive.exists():
            size = drive.stat().st_size
            if drive_mib is not None and size != drive_mib * MIB:
                raise ArgumentError(
                    f"--drive-mib must be left out, or the {size} bytes of {drive}, not {drive_mib}"
                )
        elif drive is not None:
            with drive.open("xb") as file:
                file.truncate((drive_mib or 64) * MIB)
        with working(f"opening {url}"):
            function = (
                open_card(url)
                if drive is None
                else open_controller(url, drive, (memory_mib or 16) * MIB, serial or "1", kind)
            )
        failing.callback(function.close)
        server = Server(function, socket)
        failing.pop_all()
    with temporary, closing(function):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        typer.echo(f"{url} is served at {socket} until Ctrl-C", err=True)
        server.serve()
    typer.echo(str(function.counters), err=True)
