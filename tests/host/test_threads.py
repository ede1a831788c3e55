"""Calls that are made at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress

import pytest

from nearstep import threads
from nearstep.errors import ArgumentError
from nearstep.threads import VARIABLE, at_once, shared, simulation_threads

from ..interrupts import Interrupts


@pytest.fixture(autouse=True)
def _two(monkeypatch):
    monkeypatch.setenv(VARIABLE, "2")


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_every_call_is_made_once_and_the_first_error_is_raised(count, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(count))
    made: list[int] = []

    def call(number):
        made.append(number)
        if number in (3, 5):
            raise ValueError(f"call {number}")

    at_once([])
    at_once([lambda n=n: call(n) for n in range(3)])
    assert sorted(made) == [0, 1, 2]
    with pytest.raises(ValueError, match="call 3"):
        at_once([lambda n=n: call(n) for n in range(3, 8)])
    assert sorted(made) == list(range(8))


def test_calls_are_made_at_the_same_time():
    both = threading.Barrier(2, timeout=60)
    at_once([both.wait, both.wait])


def test_who_calls_beside_others_has_a_share_of_the_threads(monkeypatch):
    monkeypatch.setenv(VARIABLE, "4")
    shares: list[int] = []
    assert shared(4) == 4
    at_once([lambda: shares.append(shared(4))] * 2)
    at_once([lambda: shares.append(shared(4))])
    at_once([lambda: shares.append(shared(4))] * 9)
    assert shares == [2, 2, 4, *[1] * 9]
    assert (shared(4), shared(1)) == (4, 1)


def test_ctrl_c_at_any_bytecode_leaves_the_share_of_the_caller(monkeypatch):
    monkeypatch.setenv(VARIABLE, "4")
    monkeypatch.setattr(threads, "_lock", nullcontext())  # Python takes a lock and enters at once
    raised = 0
    for at in range(1, 300):
        interrupts = Interrupts(at)
        with suppress(KeyboardInterrupt), interrupts.armed():
            at_once([lambda: None] * 2)
        raised += interrupts.where is not None
        assert shared(4) == 4, interrupts.where
    assert raised > 50


def test_ctrl_c_waits_for_the_calls_that_go_on():
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    both, made = threading.Barrier(2, timeout=60), list[str]()

    def call():
        both.wait()
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            time.sleep(60)
        else:
            time.sleep(0.3)
            made.append("beside")

    try:
        with pytest.raises(KeyboardInterrupt):
            at_once([call, call, lambda: made.append("later")])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert made[0] == "beside"


FORKING = """
import os, signal
from nearstep.threads import at_once

at_once([lambda: None] * 2)
child = os.fork()
if child == 0:
    signal.alarm(60)
    made = []
    at_once([lambda: made.append(1)] * 5)
    os._exit(len(made))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""In a process of its own: one that has run other tests may map more than the system forks."""


def test_a_child_after_fork_has_threads_of_its_own():
    ended = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "5\n"), ended.stderr


def test_the_number_of_threads_is_that_of_the_cores_unless_it_is_given(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert simulation_threads() == len(os.sched_getaffinity(0))
    monkeypatch.setenv(VARIABLE, "3")
    assert simulation_threads() == 3
    for wrong in ("", "0", "-1", "1.5", "two", "1025", "²"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ArgumentError, match="NEARSTEP_THREADS must be a whole number"):
            simulation_threads()
