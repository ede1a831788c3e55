"""A running collective."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from nearstep.torch.distributed.untraced import untraced

GRACE_S = 1e-4
"""Time in which a thread that waits at once can run the work itself."""

THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that the process waits for at its end: C++ code may call them."""


def begin(name: str, action: Callable[..., object], *given: object) -> None:
    """Run an action in a thread of its own; the process ends after it, and after its groups."""
    thread = threading.Thread(target=action, args=given, name=name, daemon=True)
    THREADS.add(thread)
    thread.start()


def join() -> None:
    """Wait for these threads, and for those that they begin."""
    while running := [each for each in THREADS if each.is_alive()]:
        running[0].join()


@untraced
class CoarseWork(Work):
    """A collective that runs in another thread.

    C++ code such as DDP's reducer reads the future's value as tensors, so the future of a failed
    work must hold an error of C++. `Future.set_exception` stores the exception as a value; only
    what a callback of `then` raises becomes an error of C++ (a RuntimeError with its text).
    """

    def __init__(self, what: str, result: Any, lane: Lane) -> None:
        super().__init__()
        self._lane = lane
        self._what = what
        self._result = [result] if isinstance(result, Tensor) else result
        self._completed: Future[None] | None = None  # made on request: slow
        self._future: Future[Any] | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._asked = False

    @property
    def is_over(self) -> bool:
        """Whether the work has ended and its end was requested."""
        return self._asked and self._ended.is_set()

    def run(self, action: Callable[[], None]) -> None:
        """Run the work in this thread."""
        try:
            with torch.inference_mode():  # values of tensors alone, even of such of this mode
                action()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._ended.set()
        if self._completed is not None:
            # In another thread, since a callback of the future may wait for another work.
            begin("coarse completion", self._completed.set_result, None)

    def _outcome(self, _: Future[None]) -> Any:
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}")
        return self._result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end; raise the work's error, or `TimeoutError` after a `timeout` above 0."""
        self._asked = True
        self._lane.wake() if timeout else self._lane.help(self)
        if not self._ended.wait(timeout.total_seconds() or None):
            raise TimeoutError(f"{self._what} did not end within {timeout}")
        if self._error is not None:
            raise self._error
        if self._completed is not None:
            self._completed.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if ended := self._ended.is_set():
            self._asked = True
        else:
            self._lane.wake()
        return ended

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        self._lane.wake()
        with self._lock:
            self._asked = True
            if self._future is None:
                completed: Future[None] = Future()
                self._future = completed.then(self._outcome)
                if self._ended.is_set():
                    completed.set_result(None)
                else:
                    self._completed = completed
            return self._future


class StridedReceive(Work):
    """Gloo's receive of a dense copy, which `wait` copies to the strided tensor.

    No thread waits for it: when C++ code comes back to Python after the interpreter's end, the
    process aborts.
    """

    def __init__(self, received: Work, given: Tensor, place: Tensor) -> None:
        super().__init__()
        self._received = received
        self._copy: tuple[Tensor, Tensor] | None = place, given

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._received.wait(timeout)
        if self._copy is not None:
            with torch.inference_mode():
                self._copy[0].copy_(self._copy[1])
            self._copy = None
        return True

    def is_completed(self) -> bool:
        return self._received.is_completed()

    def _source_rank(self) -> int:
        return self._received._source_rank()


@untraced
class Lane:
    """Runs works in order: in a thread of its own, or in the caller that waits for the next work.

    Parameters
    ----------
    name : name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: deque[tuple[CoarseWork, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: CoarseWork, action: Callable[[], None], *, awaited: bool) -> None:
        """Append a work; do not wake the thread for a work that the caller waits for at once."""
        with self._changed:
            self._queue.append((work, action))
            if not awaited or len(self._queue) > 1 or self._busy:
                self._changed.notify_all()

    def wake(self) -> None:
        """Wake the thread."""
        with self._changed:
            self._changed.notify_all()

    def help(self, work: CoarseWork) -> None:
        """Run a work in this thread, if it is the next one and has not started."""
        with self._changed:
            if self._busy or not self._queue or self._queue[0][0] is not work:
                return
            action = self._take()
        action()

    def end(self) -> None:
        """Tell the thread to end after all works."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, and join it."""
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _take(self) -> Callable[[], None]:
        self._busy = True
        return partial(self._carry_out, *self._queue.popleft())

    def _carry_out(self, work: CoarseWork, action: Callable[[], None]) -> None:
        try:
            work.run(action)
        finally:
            with self._changed:
                self._busy = False
                if self._queue or self._closing:
                    self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._can_go_on)
                if not self._closing:
                    self._changed.wait(GRACE_S)
                    if not self._can_go_on():
                        continue
                if not self._queue:
                    return
                action = self._take()
            action()
            del action

    def _can_go_on(self) -> bool:
        return not self._busy and bool(self._queue or self._closing)
