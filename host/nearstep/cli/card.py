"""`nearstep card`: a card for a virtual machine."""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from nearstep.cli.devices import DeviceName
from nearstep.cli.outcome import group, reported, working
from nearstep.errors import MismatchError
from nearstep.linux.nvme.card import IN_PYTHON, controller_kind, open_controller
from nearstep.linux.vfio_user import Server

app = group("A card for a virtual machine, as an NVMe device.")

MIB = 1 << 20


@app.command()
def serve(
    url: DeviceName,
    socket: Annotated[Path, typer.Option(help="UNIX socket, which is made.")],
    drive: Annotated[
        Path | None,
        typer.Option(help="File of the NVM namespace; made if missing. Default: a temporary file."),
    ] = None,
    drive_mib: Annotated[int, typer.Option(min=1, help="Size of a new file.")] = 64,
    memory_mib: Annotated[
        int, typer.Option(min=1, help="Memory of the card that is the SLM namespace.")
    ] = 16,
    serial: Annotated[
        str, typer.Option(help="Serial number; different for each card of a guest.")
    ] = "1",
    queues: Annotated[
        str, typer.Option(help="Registers and queues of the controller: python, or rtl.")
    ] = IN_PYTHON,
) -> None:
    """Serve a card to a virtual machine over vfio-user, until Ctrl-C.

    The guest has an NVMe controller with three namespaces: the drive, the card's memory, and its
    update rules as programs.
    """
    with reported(wrong=(MismatchError, OSError)), ExitStack() as failing:
        temporary = ExitStack()
        kind = controller_kind(queues)
        if drive is None:
            drive = Path(temporary.enter_context(TemporaryDirectory())) / "drive"
            failing.push(temporary)
        elif not drive.exists():
            failing.callback(drive.unlink, missing_ok=True)
        if not drive.exists():
            with drive.open("xb") as file:
                file.truncate(drive_mib * MIB)
        with working(f"opening {url}"):
            controller = open_controller(url, drive, memory_mib * MIB, serial, kind)
        failing.callback(controller.close)
        server = Server(controller, socket)
        failing.pop_all()
    with temporary, closing(controller):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        typer.echo(f"{url} is served at {socket} until Ctrl-C", err=True)
        server.serve()
    counts = controller.counters
    typer.echo(
        f"{counts.commands} commands, {counts.mmio_writes} writes and {counts.mmio_reads} reads of "
        f"registers, {counts.interrupts} interrupts",
        err=True,
    )
