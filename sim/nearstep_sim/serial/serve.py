"""`nearstep serve`: an emulated device behind a pseudo-terminal, as a board is behind a port."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated, cast

import typer

from nearstep.backends.base import Backend
from nearstep.backends.emulated import EmulatedBackend
from nearstep.cli.devices import complete
from nearstep.cli.outcome import reported, working
from nearstep.device import open_backend
from nearstep.serial.ring import BoardRing
from nearstep_sim.serial.endpoint import WINDOW, Endpoint
from nearstep_sim.serial.line import Loopback, Noise
from nearstep_sim.serial.pty_server import PtyServer, Wire


def wire_of(
    backend: Backend, url: str, *, window: int = WINDOW, reset_after: int | None = None
) -> tuple[Wire, Endpoint | None]:
    """The board's end of a line: that of the device itself, its `wire`, or one in software.

    Raises
    ------
    ValueError : the device is not emulated, is several boards, or has a wire of its own, which
        takes no options.
    """
    if isinstance(backend, BoardRing):
        raise ValueError(f"{url} is {len(backend.boards)} boards: a terminal is the line of one")
    wire = getattr(backend, "wire", None)
    if wire is not None:
        if window != WINDOW or reset_after is not None:
            raise ValueError(f"{url} has an end of the line of its own: no --window, --reset-after")
        return cast(Wire, wire), None
    if not isinstance(backend, EmulatedBackend):
        raise ValueError(f"{url} is no emulated device")
    endpoint = Endpoint(backend, url, window=window)
    return Loopback(endpoint, reset_after=reset_after), endpoint


def command(
    url: Annotated[
        str,
        typer.Argument(
            help='Device name, such as "golden:smartssd?lanes=4"; in quotes, because of ? and &.',
            autocompletion=complete,
        ),
    ],
    link: Annotated[
        Path | None, typer.Option(help="Make a symbolic link to the terminal there.")
    ] = None,
    loss: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Probability that a byte is lost.")
    ] = 0.0,
    corruption: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Probability that a bit of a byte is inverted.")
    ] = 0.0,
    repetition: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Probability that a byte is repeated.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of these faults.")] = 1,
    reset_after: Annotated[
        int | None,
        typer.Option(min=1, help="Reset the board after so many bytes, again and again."),
    ] = None,
    window: Annotated[
        int, typer.Option(min=1, max=128, help="Reported capacity of the request queue.")
    ] = WINDOW,
) -> None:
    """Put an emulated device behind a pseudo-terminal, until Ctrl-C.

    Prints the device name, serial:/dev/pts/N, for `--device` and nearstep.open(). Clients can
    connect one after the other.
    """
    with reported(wrong=(ValueError, OSError)), ExitStack() as failing:
        with working(f"opening {url}"):
            backend = open_backend(url)
        failing.callback(backend.close)
        wire, endpoint = wire_of(backend, url, window=window, reset_after=reset_after)
        noise = Noise(loss=loss, corruption=corruption, repetition=repetition)
        server = PtyServer(wire, noise=noise, seed=seed, link=link)
        failing.pop_all()
    with server:
        _serve(server, url, link)
    if endpoint is not None and endpoint.fault is not None:
        typer.echo(f"the device had stopped: {endpoint.fault}", err=True)
    for name, line in (("to", server.down), ("from", server.up)):
        if noise != Noise():
            counts = f"{line.lost} lost, {line.corrupted} corrupted, {line.repeated} repeated"
            typer.echo(f"bytes {name} the board: {counts}", err=True)
    backend.close()


def _serve(server: PtyServer, url: str, link: Path | None) -> None:
    """Serve until a signal asks for the end."""

    def stop(number: int, frame: FrameType | None) -> None:
        server.stop()

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        typer.echo(f"{url} is served until Ctrl-C", err=True)
        typer.echo(f"serial:{link or server.path}")
        server.serve()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
