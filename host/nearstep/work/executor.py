"""Execution of a graph: on opened devices, on models, or on both."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from nearstep.backends.base import Completion
from nearstep.errors import WaitTimeoutError
from nearstep.work.clock import Clock
from nearstep.work.errors import WorkError, some
from nearstep.work.flow import Flows
from nearstep.work.operation import Operation
from nearstep.work.timeline import Entry, Timeline


def execute(graph: Sequence[Operation], clock: Clock | None = None) -> Timeline:
    """Run a graph, and return the times of its operations.

    An operation starts as soon as its dependencies have ended and its resources are free; competing
    ones by priority, then in program order. If no operation can start, time advances to the next
    end. So the same graph on the same devices always has the same schedule, unless some work has no
    clock. Such work, e.g. of a drive, proceeds concurrently: if nothing else is in flight, the
    first one started is waited for. Beside a device without a clock it is also polled before time
    advances, and gets new work before operations that block this thread. Any other exception, such
    as of Ctrl-C, ends the operations in flight and has a note of those not run.

    Parameters
    ----------
    graph : `nearstep.work.graph.Graph`.
    clock : of the devices. None: all is modelled.

    Raises
    ------
    ArgumentError : an operation is modelled beside a device on a clock without `hertz`, or two
        transfers have different rates of a shared link. Nothing was started.
    WorkError : an operation failed, when it was started or later.
    """
    execution = Execution(graph, Clock() if clock is None else clock)
    execution.admit()
    execution.finish()
    return execution.timeline


class _InFlight:
    """An operation that has been started.

    Attributes
    ----------
    start, started : cycles before and after the commands that start it.
    due : cycle of its modelled end.
    place : in the order of starts.
    """

    __slots__ = ("completion", "due", "operation", "place", "start", "started")

    def __init__(self, operation: Operation, place: int, start: int) -> None:
        self.operation = operation
        self.place = place
        self.start = self.started = start
        self.completion: Completion | None = None
        self.due: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.completion is None or self.completion.ended

    def overdue(self, now: int) -> bool:
        """Whether it exceeds its bound."""
        bound = None if self.completion is None else self.completion.bound
        return bound is not None and now - self.started > bound


Order = tuple[int, int]
"""Priority and number of an operation; the lowest is started first."""


class Execution:
    """A running graph, which may grow; see `execute`.

    Parameters
    ----------
    graph : operations may be added at its end.
    begun : completions of actions; an abort ends those as well, since an exception can be raised
        before an action returns.
    """

    def __init__(
        self, graph: Sequence[Operation], clock: Clock, begun: Sequence[Completion] = ()
    ) -> None:
        self._graph = graph
        self._clock = clock
        self._begun = begun
        self._users: list[list[int]] = []  # of each operation that has been admitted
        self._missing: list[int] = []
        self._ended: set[int] = set()
        self._ready: list[Order] = []
        self._parked: defaultdict[str, list[Order]] = defaultdict(list)
        self._held: set[str] = set()
        self._modelled: dict[int, _InFlight] = {}
        self._due: list[tuple[int, int]] = []  # of those: cycle and number
        self._running: dict[int, _InFlight] = {}  # on devices
        self._unclocked: dict[int, _InFlight] = {}  # the others, in the order of their starts
        self._starting: _InFlight | None = None
        self._flows = Flows(clock)
        self._left: set[int] = set()
        self._done: list[str] = []
        self._failed: dict[str, Exception] = {}
        self._entries: list[Entry | None] = []
        self._is_aborted = False

    @property
    def timeline(self) -> Timeline:
        """Timeline of ended operations."""
        entries = [entry for entry in self._entries if entry is not None]
        return Timeline(entries, self._clock.hertz, self._clock.unit)

    def admit(self) -> None:
        """Admit operations that were added to the graph, and start those that can.

        Raises
        ------
        ArgumentError : as of `execute`; none of them was admitted.
        """
        first = len(self._missing)
        new = self._graph[first:]
        for operation in new:
            if operation.seconds is not None:
                self._clock.cycles(operation.seconds)  # raises if it cannot
        self._flows.announce([each.transfer for each in new if each.transfer is not None])
        for operation in new:
            needs = [need for need in operation.needs if need not in self._ended]
            self._users.append([])
            self._missing.append(len(needs))
            self._left.add(operation.index)
            for need in needs:
                self._users[need].append(operation.index)
            if not needs:
                heapq.heappush(self._ready, (operation.priority, operation.index))
        with self.growing():
            self._start_all()

    def wait(self, operations: Iterable[Operation]) -> None:
        """Advance time until these have ended.

        Raises
        ------
        WorkError : any operation failed. No operation is in flight then, and none is started.
        """
        wanted = {each.index for each in operations}
        with self.growing():
            self._pass_until(lambda: wanted <= self._ended)
        assert wanted <= self._ended, "only operations of the graph are waited for"

    def finish(self) -> None:
        """Advance time until all have ended; errors as of `wait`."""
        with self.growing():
            self._pass_until(lambda: False)

    @contextmanager
    def growing(self) -> Iterator[None]:
        """Guard the growth and the run of the graph: any exception other than an operation's
        failure, such as of Ctrl-C, ends the operations in flight and has a note of those not run.
        """
        try:
            yield
        except WorkError:
            raise  # none is
        except BaseException as error:
            if not self._is_aborted:
                self._is_aborted = True
                self._abort(error)
            raise

    def _pass_until(self, met: Callable[[], bool]) -> None:
        while (self._modelled or self._running or self._unclocked) and (self._failed or not met()):
            if self._clock.is_timed or not self._end_unclocked():
                if self._modelled or self._running:
                    self._pass_time()
                    self._look()
                elif self._unclocked:
                    self._end(self._first_unclocked())
            self._start_all()
        if self._failed:
            first = next(iter(self._failed.values()))
            raise WorkError(self._failed, self._done, self._not_run()) from first

    def _start_all(self) -> None:
        """Start operations that can start.

        A ready operation waits at one busy resource. When a resource is released, its first waiter
        is tried; if that has to wait at another resource, the next one.
        """
        while self._ready and not self._failed:
            key = heapq.heappop(self._ready)
            operation = self._graph[key[1]]
            taken = next((each for each in operation.holds if each in self._held), None)
            if taken is None:
                self._start(operation)
            else:
                heapq.heappush(self._parked[taken], key)
                self._try_next(each for each in operation.holds if each not in self._held)

    def _try_next(self, resources: Iterable[str]) -> None:
        for resource in resources:
            if self._parked[resource]:
                heapq.heappush(self._ready, heapq.heappop(self._parked[resource]))

    def _start(self, operation: Operation) -> None:
        clock, index = self._clock, operation.index
        self._held.update(operation.holds)
        self._left.discard(index)
        self._entries.append(None)
        in_flight = _InFlight(operation, len(self._entries) - 1, clock.now)
        self._starting = in_flight  # no other reference exists yet
        unclocked = False
        try:
            if operation.action is not None:
                before = self._completions()
                in_flight.start = clock.level(before)
                in_flight.completion = completion = operation.action()
                if completion is not None:
                    clock.check(completion)
                    unclocked = completion.backend is None and not completion.ended
                clock.after(in_flight.start, before)
                in_flight.started = clock.now
        except Exception as error:
            self._fail(in_flight, error)
            self._starting = None
            return
        timed = in_flight.completion is not None and in_flight.completion.backend is not None
        if operation.transfer is not None:
            self._modelled[index] = in_flight
            self._flows.start(index, operation.transfer, in_flight.start)
            if timed:
                self._running[index] = in_flight
        elif operation.seconds is not None:
            in_flight.due = in_flight.start + clock.cycles(operation.seconds)
            self._modelled[index] = in_flight
            heapq.heappush(self._due, (in_flight.due, index))
        elif timed:
            self._running[index] = in_flight
        elif unclocked:
            self._unclocked[index] = in_flight
        else:
            self._end(in_flight)
        self._starting = None

    def _pass_time(self) -> None:
        limits = [self._due[0][0]] if self._due else []
        if self._flows.next is not None:
            limits.append(self._flows.next)
        try:
            self._clock.advance(min(limits, default=None), self._completions())
        except Exception as error:
            self._blame(error)

    def _blame(self, error: Exception) -> None:
        """Handle a device's failure: operations that report an error failed; if none does, all."""
        known = len(self._failed)
        for each in list(self._running.values()):
            try:
                _ = each.has_ended
            except Exception as own:
                self._fail(each, own)
        if len(self._failed) == known:
            for each in list(self._running.values()):
                self._fail(each, error)

    def _look(self) -> None:
        """Retire ended operations."""
        now = self._clock.now
        for index, end in self._flows.advance(now):
            self._modelled[index].due = end
            heapq.heappush(self._due, (end, index))
        while self._due and self._due[0][0] <= now:
            self._end_modelled(self._modelled[heapq.heappop(self._due)[1]])
        for each in list(self._running.values()):
            try:
                ended = each.has_ended
            except Exception as error:
                self._fail(each, error)
                continue
            if ended and each.operation.index in self._modelled:
                del self._running[each.operation.index]  # its transfer continues
            elif ended:
                self._end(each)
            elif each.overdue(now):
                self._end(each, 0)

    def _end_unclocked(self) -> bool:
        """Retire ended operations without a clock; return whether any ended or failed."""
        known = len(self._unclocked)
        for each in list(self._unclocked.values()):
            try:
                ended = each.has_ended
            except Exception as error:
                self._fail(each, error)
                continue
            if ended:
                self._end(each)
        return len(self._unclocked) < known

    def _first_unclocked(self) -> _InFlight:
        """Select the operation without a clock to wait for."""
        every = self._unclocked.values()
        wanted = (e for e in every if e.completion is None or not e.completion.is_background)
        return next(wanted, next(iter(every)))

    def _end_modelled(self, each: _InFlight) -> None:
        """Note the end of its modelled time; the operation has ended unless its device
        continues.
        """
        if each.operation.index in self._running:
            del self._modelled[each.operation.index]
            each.due = None
        else:
            self._end(each)

    def _end(self, each: _InFlight, max_cycles: int | None = None) -> None:
        """Retire an operation that has ended, or must end within `max_cycles`, with its outcome."""
        try:
            if each.completion is not None:
                each.completion.wait(max_cycles)
        except WaitTimeoutError as late:
            self._fail(each, late if max_cycles is None else self._waited(each, late))
            return
        except Exception as error:
            self._fail(each, error)
            return
        end = self._clock.now if each.due is None else max(each.due, each.start)
        cycles = None if each.completion is None else each.completion.cycles
        self._entries[each.place] = Entry(each.operation, each.start, end, cycles)
        self._done.append(str(each.operation))
        self._ended.add(each.operation.index)
        self._leave(each)
        for user in self._users[each.operation.index]:
            self._missing[user] -= 1
            if not self._missing[user]:
                heapq.heappush(self._ready, (self._graph[user].priority, user))

    def _waited(self, each: _InFlight, late: WaitTimeoutError) -> WaitTimeoutError:
        """Make the error of a wait for an overdue operation, with the cycles since its start."""
        return WaitTimeoutError(
            late.waited_for,
            self._clock.now - each.started,
            unit=late.unit,
            registers=late.registers,
            transactions=late.transactions,
        )

    def _fail(self, each: _InFlight, error: Exception) -> None:
        index = each.operation.index
        known = index in self._running or index in self._unclocked or each is self._starting
        if each.completion is not None and known:
            try:
                each.completion.abort()  # even if it has ended: it may have more to end
            except Exception as second:
                if str(second) != str(error):
                    error.add_note(f"then, when it was to be ended: {second}")
        self._failed[str(each.operation)] = error
        self._leave(each)

    def _leave(self, each: _InFlight) -> None:
        self._modelled.pop(each.operation.index, None)
        self._running.pop(each.operation.index, None)
        self._unclocked.pop(each.operation.index, None)
        self._held.difference_update(each.operation.holds)
        self._try_next(each.operation.holds)

    def _abort(self, error: BaseException) -> None:
        """End all operations in flight, despite any exception."""
        every = self._running | self._unclocked | self._modelled
        if self._starting is not None and self._starting.completion is not None:
            every.setdefault(self._starting.operation.index, self._starting)
        known = [(str(each.operation), each.completion) for each in every.values()]
        for name, completion in [*known, *(("a run", each) for each in self._begun)]:
            while completion is not None:
                try:
                    completion.abort()
                except BaseException as second:  # a second Ctrl-C: the others still have to end
                    error.add_note(f"then, when {name} was to be ended: {second!r}")
                    if isinstance(second, KeyboardInterrupt):
                        continue  # else a drive or a kernel could access memory that is used next
                break
        names = [name for name, _ in known]
        error.add_note(f"under way: {some(names)}; not run: {some(self._not_run())}")

    def _not_run(self) -> list[str]:
        return [str(self._graph[index]) for index in sorted(self._left)]

    def _completions(self) -> list[Completion]:
        return [each.completion for each in self._running.values() if each.completion is not None]
