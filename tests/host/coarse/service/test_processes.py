"""Processes that are killed, or stopped for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nearstep.coarse.service import Client, Spawned
from nearstep.coarse.service.errors import ClientLostError, ServiceLostError

from .conftest import SMALL, TOKEN
from .dying import beside

BOUND_S = 60.0
"""Of what must end, on a machine that has other work."""

URL = f"golden:coarse?devices=2&groups=2&{SMALL}"

CLIENT = """
import sys
import numpy as np
from nearstep.coarse.service import Client
from nearstep.coarse.service.errors import JobError
address, token = sys.argv[1:]
with Client(address, token, job="a", rank=1, clients=2, silence_s=30) as c:
    exchange = c.exchange(8)
    out = np.empty(8, np.float32)
    try:
        while True:
            exchange.reduce(np.ones(8, np.float32), out)
            print("sum", flush=True)
            c.barrier()
    except JobError as error:
        print(type(error).__name__, flush=True)
"""


def ended(action: Callable[[], Any], bound_s: float) -> BaseException | None:
    """What an action that does not return fails with, in bounded time."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(bound_s)
    assert not thread.is_alive(), f"it did not end in {bound_s} s"
    return found[0] if found else None


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_service_that_is_gone_is_found_in_bounded_time(number) -> None:
    with Spawned(URL) as service:
        client = Client(service.address, service.token, job="a", rank=0, clients=1, silence_s=1.5)
        try:
            client.barrier()
            os.kill(service.pid, number)
            error = ended(lambda: client.get("never", np.empty(8, np.uint8)), BOUND_S)
            assert isinstance(error, ServiceLostError), error
        finally:
            client.close(leave=False)
            os.kill(service.pid, signal.SIGKILL)


@pytest.mark.deep
@pytest.mark.parametrize("lost", [False, True])
def test_a_client_that_stops_is_lost_after_the_silence_alone(serve, lost) -> None:
    service = serve(2, beat_s=0.2, silence_s=2.0 if lost else BOUND_S)
    command = [sys.executable, "-c", CLIENT, service.server.bound, TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with Client(service.server.bound, TOKEN, job="a", rank=0, clients=2) as client:
            exchange = client.exchange(8)
            out = np.empty(8, np.float32)

            def once() -> None:
                exchange.reduce(np.ones(8, np.float32), out)
                assert (out == 2).all()
                client.barrier()

            once()
            assert process.stdout.readline() == "sum\n"
            os.kill(process.pid, signal.SIGSTOP)
            service.wait_idle = lambda: None
            if lost:
                error = ended(once, BOUND_S)
                assert isinstance(error, ClientLostError), error
                assert error.ranks == (1,)
                with beside(service) as sums:  # while it is still stopped
                    time.sleep(0.2)
                    assert sums() > 0
                os.kill(process.pid, signal.SIGCONT)
            else:
                waker = threading.Timer(0.7, os.kill, (process.pid, signal.SIGCONT))
                waker.start()
                assert ended(once, BOUND_S) is None
                once()
                waker.join()
        said = process.stdout.read().split()
        assert said[-1] == "ClientLostError"
    assert process.returncode == 0
