"""Work that runs concurrently with the submitting program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nearstep.errors import ArgumentError
from nearstep.work.clock import Clock
from nearstep.work.errors import QueueThreadError, WorkError
from nearstep.work.executor import Execution
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Range
from nearstep.work.timeline import Timeline


class Queue:
    """Operations that a program adds one by one, and waits for when it needs a result.

    An added operation is started at once if possible. Device time advances only in `wait` and
    `finish`, together with modelled operations such as computation.

    Parameters
    ----------
    failed : called before an error is raised, when nothing is in flight.
    overlaps : False: wait for each operation at once.
    """

    def __init__(
        self,
        clock: Clock,
        failed: Callable[[BaseException], None] = lambda _: None,
        *,
        overlaps: bool = True,
    ) -> None:
        self.clock = clock
        self._failed = failed
        self._overlaps = overlaps
        self._timelines: list[Timeline] = []
        self._inside = False
        self._thread = threading.get_ident()
        self._lock = threading.Lock()  # for hazards, which other threads look for
        self._begin()

    def _begin(self) -> None:
        self._graph = Graph()
        self._execution = Execution(self._graph, self.clock)

    def add(
        self, name: str, *holds: str, after: Iterable[Operation] = (), **options: Any
    ) -> Operation:
        """Add an operation, as `nearstep.work.graph.Graph.add` does.

        Parameters
        ----------
        after : operations of this queue; ended ones are ignored.
        **options : `reads`, `writes`, `action`, `seconds`, `transfer`, `priority`.

        Raises
        ------
        ArgumentError : the operation is invalid; the operations in the queue have ended.
        QueueThreadError : called by another thread.
        Exception : without overlap, the operation's error.
        """
        self.check_thread()
        with self._lock:
            operation = self._graph.add(name, *holds, after=self._here(after), **options)
        with self._work():
            try:
                self._execution.admit()
            except ArgumentError:
                self._execution.finish()  # what there was before
                raise
        if not self._overlaps:
            self.wait([operation])
        return operation

    def wait(self, operations: Iterable[Operation]) -> None:
        """Advance time until these have ended.

        Raises
        ------
        Exception : of the operation that failed first, with a note on the others; the queue is
            empty then.
        """
        here = self._here(operations)
        if here:
            with self._work():
                self._execution.wait(here)

    def wait_for_one(self, groups: Iterable[Sequence[Operation]]) -> None:
        """Advance time until all of one of these groups have ended.

        Raises
        ------
        Exception : as of `wait`.
        """
        here = [self._here(group) for group in groups]
        if here:
            with self._work():
                self._execution.wait_for_one(here)

    def has_ended(self, operations: Iterable[Operation]) -> bool:
        """Whether these have ended, without advancing time."""
        return self._execution.has_ended(self._here(operations))

    def finish(self) -> Timeline:
        """Advance time until all have ended.

        Returns
        -------
        Timeline : of the operations since the last call.

        Raises
        ------
        Exception : as of `wait`.
        """
        with self._work():
            self._execution.finish()
        found = self._execution.timeline
        self.keep(found)
        self._begin()
        return found

    def keep(self, timeline: Timeline) -> None:
        """Add operations that ran on the same clock to `timeline`."""
        if timeline.entries:
            self._timelines.append(Timeline.joined([timeline]))

    def settle(self, where: Range, *, changes: bool) -> None:
        """Wait for the operations that an access to bytes outside of the queue depends on.

        On devices with a clock these are all operations: a kernel may own their channels.

        Raises
        ------
        Exception : as of `wait`.
        QueueThreadError : called by another thread, while the queue works on these bytes.
        """
        if self._is_others:
            if not self.has_ended(self._conflicts(where, changes=changes)):
                self.check_thread()
            return
        if self._inside:
            return
        if self.clock.has_devices:
            self.settle_all()
            return
        self.wait(self._conflicts(where, changes=changes))

    def _conflicts(self, where: Range, *, changes: bool) -> Sequence[Operation]:
        with self._lock:
            return self._graph.conflicts([] if changes else [where], [where] if changes else [])

    def settle_all(self) -> None:
        """Wait for all operations, unless called by an operation of the queue, or by another
        thread, which is serialised with it.

        Raises
        ------
        Exception : as of `wait`.
        """
        if not (self._inside or self._is_others):
            self.wait(self._graph)

    def check_thread(self) -> None:
        """Raise `QueueThreadError` unless this is the thread that made the queue."""
        if self._is_others:
            raise QueueThreadError(self._thread, threading.get_ident())

    @property
    def _is_others(self) -> bool:
        """Whether another thread calls."""
        return threading.get_ident() != self._thread

    @property
    def timeline(self) -> Timeline:
        """Timeline of all operations ended before the last `finish`."""
        if not self._timelines:
            return Timeline([], self.clock.hertz, self.clock.unit)
        return Timeline.joined(self._timelines)

    def _here(self, operations: Iterable[Operation]) -> list[Operation]:
        graph = self._graph
        return [
            each for each in operations if each.index < len(graph) and graph[each.index] is each
        ]

    @contextmanager
    def _work(self) -> Iterator[None]:
        self.check_thread()
        before, self._inside = self._inside, True
        try:
            yield
        except BaseException as error:
            cause = error
            if isinstance(error, WorkError):
                cause = next(iter(error.failed.values()))
                cause.add_note(str(error))
            self._failed(cause)
            self._begin()
            if cause is error:
                raise
            raise cause from None
        finally:
            self._inside = before
