"""Several processes of one group of `torch.distributed`."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]


class Gone:
    """A process that ended without a word."""


def on_processes(
    count: int,
    function: Callable[..., Any],
    *args: Any,
    backend: Callable[[], str],
    preloaded: Sequence[str],
    timeout_s: float,
) -> list[Any]:
    """What a function returns in each process; `Gone` in one that ended without a word.

    `backend` is called in each process, and gives the name of the group's backend; `preloaded`
    are modules that all processes share; `timeout_s` bounds a collective, 5 times that everything
    after these modules are imported, which can take minutes on a loaded machine. What one raises is
    raised at once, whatever the others wait for, and ends them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preloaded])
    end = math.inf
    with TemporaryDirectory() as folder, _importable():
        pairs = [context.Pipe(duplex=False) for _ in range(count)]
        processes = [
            context.Process(
                target=_work,
                args=(rank, count, f"{folder}/store", send, backend, timeout_s, function, args),
            )
            for rank, (_, send) in enumerate(pairs)
        ]
        try:
            for process, (_, send) in zip(processes, pairs, strict=True):
                process.start()  # the first one returns when the modules are imported
                send.close()
            end = time.monotonic() + 5 * timeout_s
            return _hear([receive for receive, _ in pairs], end)
        except BaseException:
            for process in processes:
                if process.is_alive():
                    process.kill()
            raise
        finally:
            for process in processes:
                process.join(max(0.0, min(10.0, end - time.monotonic())))
                if process.is_alive():
                    process.kill()
                    process.join()


def _hear(connections: list[Connection], end: float) -> list[Any]:
    """What each says, whoever speaks first: an error is known while others still wait for it."""
    ranks = {connection: rank for rank, connection in enumerate(connections)}
    said: dict[int, Any] = {}
    while ranks:
        ready = wait(list(ranks), max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"processes {sorted(ranks.values())} say nothing")
        for connection in ready:
            rank = ranks.pop(connection)
            try:
                ok, said[rank] = connection.recv()
            except EOFError:
                ok, said[rank] = True, Gone()
            assert ok, f"process {rank}:\n{said[rank]}"
    return [said[rank] for rank in range(len(connections))]


@contextmanager
def _importable() -> Iterator[None]:
    """Have processes import what tests import."""
    sys.path.insert(0, str(ROOT))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT))


def _work(
    rank: int,
    count: int,
    store: str,
    send: Connection,
    backend: Callable[[], str],
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend(),
            init_method=f"file://{store}",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=timeout_s),
        )
        send.send((True, function(*args)))
    except BaseException:
        send.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
