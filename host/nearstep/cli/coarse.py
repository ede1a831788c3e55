"""`nearstep coarse`: memory devices as a service."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, cast

import typer

from nearstep.cli.outcome import group, reported, working
from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.service.dispatcher import Scheduling
from nearstep.coarse.service.folder import temporary_folder
from nearstep.coarse.service.server import BEAT_S, QUEUE_SHARDS, SHARD_BYTES, SILENCE_S, Server
from nearstep.coarse.service.spawn import token_of
from nearstep.errors import MismatchError

app = group("Memory devices that sum tensors of several processes.")

LEAVE_S = 60.0
"""Seconds that a service waits for clients to leave after its input has ended."""


@app.command()
def serve(
    device: Annotated[str, typer.Option(help="Device name, such as golden:coarse?devices=4.")],
    listen: Annotated[
        str,
        typer.Option(
            help="unix:PATH, tcp:HOST:PORT, tcp:[HOST]:PORT; no PATH, or port 0: a free one."
        ),
    ],
    token_file: Annotated[
        Path | None, typer.Option(help="File with the clients' token; default: print a new token.")
    ] = None,
    shard_bytes: Annotated[
        int, typer.Option(help="Least size of a shard, in bytes.")
    ] = SHARD_BYTES,
    queue_shards: Annotated[int, typer.Option(help="Length of a client's queue.")] = QUEUE_SHARDS,
    beat_s: Annotated[float, typer.Option(help="Seconds between heartbeats.")] = BEAT_S,
    silence_s: Annotated[
        float, typer.Option(help="Seconds without a heartbeat after which a client is lost.")
    ] = SILENCE_S,
    scheduler: Annotated[
        str,
        typer.Option(
            help="queues, or fcfs: first come, first served, with detection of deadlocks."
        ),
    ] = "queues",
    snapshots: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which clients may save and load, and working directory of the "
            "service; default: none."
        ),
    ] = None,
    share_memory: Annotated[
        bool, typer.Option(help="Share memory with TCP clients on this machine.")
    ] = True,
    until_eof: Annotated[
        bool,
        typer.Option(
            "--until-eof", help="Read the token from standard input, and end when the input ends."
        ),
    ] = False,
) -> None:
    """Serve until interrupted.

    The first line is JSON: `address`, `device`, `devices`, `pid`, and a new `token`, if any. Exit
    status: 1 if the devices fail, 2 if an argument is invalid.
    """
    made: dict[str, object] = {}
    with ExitStack() as stack:
        with reported(wrong=(MismatchError, OSError)):  # of the device's name, a file, an address
            if snapshots is not None and not snapshots.is_dir():
                raise NotADirectoryError(f"snapshots must be a folder, not {snapshots}")
            if until_eof:
                token = sys.stdin.readline().strip()
            elif token_file is not None:
                token = token_of(token_file)
            else:
                made["token"] = token = secrets.token_hex(16)
            with working(f"opening {device}"):
                pool = stack.enter_context(CoarsePool.open(device))
            if listen == "unix:":
                listen = f"unix:{stack.enter_context(temporary_folder())}/socket"
            server = Server(
                pool,
                listen,
                token,
                shard_bytes=shard_bytes,
                queue_shards=queue_shards,
                beat_s=beat_s,
                silence_s=silence_s,
                scheduler=cast("Scheduling", scheduler),  # `Server` checks it
                snapshots=None if snapshots is None else snapshots.resolve(),
                share_memory=share_memory,
            )
            if snapshots is not None and not Path.cwd().is_relative_to(snapshots.resolve()):
                os.chdir(snapshots)
        _serve(server, pool.devices, device, made, until_eof)


def _serve(
    server: Server, devices: int, device: str, made: dict[str, object], until_eof: bool
) -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with server:
        line = {"address": server.bound, "device": device, "devices": devices}
        print(json.dumps({**line, "pid": os.getpid(), **made}), flush=True)
        if until_eof:
            threading.Thread(target=_read_to_end, args=(ended,), daemon=True).start()
        ended.wait()
        deadline = time.monotonic() + LEAVE_S
        while until_eof and server.dispatcher.jobs and time.monotonic() < deadline:
            time.sleep(0.05)


def _read_to_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()
