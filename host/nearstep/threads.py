"""Threads for independent simulations."""

from __future__ import annotations

import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial

from nearstep.errors import ArgumentError

VARIABLE = "NEARSTEP_THREADS"
"""Environment variable with the largest number of threads that simulate at once; default: the cores
of this process. Bits and cycles do not depend on it."""


_share: ContextVar[int | None] = ContextVar("share", default=None)
"""Threads that the current thread may use while others simulate."""
_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def simulation_threads() -> int:
    """Return how many threads may simulate at once.

    Raises
    ------
    ArgumentError : the variable is no whole number from 1 to 1024.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        of_process = getattr(os, "sched_getaffinity", None)  # Linux has it
        return len(of_process(0)) if of_process is not None else os.cpu_count() or 1
    if not given.isascii() or not given.isdecimal() or not 1 <= int(given) <= 1024:
        raise ArgumentError(f"{VARIABLE} must be a whole number from 1 to 1024, not {given!r}")
    return int(given)


def shared(threads: int) -> int:
    """`threads`, or fewer if the current thread may use fewer."""
    share = _share.get()
    return threads if share is None else min(threads, share)


def once(call: Callable[[], object]) -> Callable[[], object]:
    """Return a function that makes a call the first time, and does nothing afterwards.

    If the call is of compiled code, Ctrl-C cannot separate the call and the record of it: an
    interrupted sequence of such functions is completed by calling all of them again.
    """
    return partial(next, map(operator.call, [call]), None)


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Make independent calls in parallel, and return when all have returned.

    All are made even if one raises; the first error, in the order of the calls, is raised
    afterwards. After Ctrl-C no further call is made, and those that run are waited for.
    """
    total = simulation_threads()
    threads = max(1, min(total, len(calls)))
    waiting = deque(enumerate(calls))
    errors: dict[int, Exception] = {}

    def work() -> None:
        _share.set(max(1, total // threads))
        while waiting:
            try:
                index, call = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                call()
            except Exception as error:
                errors[index] = error

    helpers: list[Future[None]] = []
    try:
        for _ in range(threads - 1):
            helpers.append(_helpers().submit(copy_context().run, work))
        copy_context().run(work)  # Ctrl-C at any bytecode leaves the caller's share as it is
    finally:
        waiting.clear()
        for each in helpers:
            if not each.cancel():
                each.result()
    if errors:
        raise errors[min(errors)]


def _helpers() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(thread_name_prefix="nearstep")
        return _pool


def _forget() -> None:
    """Start afresh in a child after `fork()`, which has no threads, and maybe a lock held."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()
    _share.set(None)


os.register_at_fork(after_in_child=_forget)
