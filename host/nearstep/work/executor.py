"""Runs a graph: on opened devices, on models of what there is none of, or on both."""

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
    """Run a graph, and return when each operation was under way.

    An operation is started as soon as what it needs has ended and its resources are free; of
    several that compete, by priority, then in program order. Where nothing can be started, time
    passes as far as the next end. So the same graph on the same devices always takes the same
    course, unless something works without any clock. Such a thing, as a drive, goes on meanwhile:
    where nothing else is under way, the first that was started is waited for. Beside a device
    without a clock it is looked at before time passes, too, and given more to do ahead of what
    keeps this thread. Whatever else is raised meanwhile, such as by Ctrl-C, ends the operations
    under way and has a note of what was not run.

    Parameters
    ----------
    graph : `nearstep.work.graph.Graph`.
    clock : of the devices. None: all is modelled.

    Raises
    ------
    ArgumentError : an operation is modelled beside a device on a clock without `hertz`, or two
        transfers disagree on the rate of what they share. Nothing was started.
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
    due : cycle at which it ends by its model.
    place : of all that were started.
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
        """Whether it takes longer than it can."""
        bound = None if self.completion is None else self.completion.bound
        return bound is not None and now - self.started > bound


Key = tuple[int, int]
"""Priority and number of an operation: of several the lowest goes first."""


class Execution:
    """A graph that runs, and may grow meanwhile; `execute` says how.

    Parameters
    ----------
    graph : operations may be added at its end.
    """

    def __init__(self, graph: Sequence[Operation], clock: Clock) -> None:
        self._graph = graph
        self._clock = clock
        self._users: list[list[int]] = []  # of each operation that has been admitted
        self._missing: list[int] = []
        self._ended: set[int] = set()
        self._ready: list[Key] = []
        self._parked: defaultdict[str, list[Key]] = defaultdict(list)
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
        """Of what has ended."""
        entries = [entry for entry in self._entries if entry is not None]
        return Timeline(entries, self._clock.hertz, self._clock.unit)

    def admit(self) -> None:
        """Take operations that have been added to the graph, and start what can be.

        Raises
        ------
        ArgumentError : as of `execute`; none of them was taken.
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
        """Let time pass until these have ended.

        Raises
        ------
        WorkError : any operation failed. None is under way then, and none is started any more.
        """
        wanted = {each.index for each in operations}
        self._guarded(lambda: self._pass_until(lambda: wanted <= self._ended))
        assert wanted <= self._ended, "nothing waits for what is not in the graph"

    def finish(self) -> None:
        """Let time pass until all have ended. Raises as `wait`."""
        self._guarded(lambda: self._pass_until(lambda: False))

    @contextmanager
    def growing(self) -> Iterator[None]:
        """While operations are added and admitted: whatever is raised meanwhile, such as by Ctrl-C,
        ends the operations under way and has a note of what was not run."""
        try:
            yield
        except WorkError:
            raise  # none is
        except BaseException as error:
            if not self._is_aborted:
                self._is_aborted = True
                self._abort(error)
            raise

    def _guarded(self, work: Callable[[], None]) -> None:
        """End what is under way if anything but an operation fails."""
        with self.growing():
            work()

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
        """Start what can be.

        An operation that is ready waits at one resource that is not free. When one gets free the
        first that waits there is tried; if it has to wait at another, the next is.
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
        under_way = _InFlight(operation, len(self._entries) - 1, clock.now)
        self._starting = under_way  # nobody else knows of it yet
        unclocked = False
        try:
            if operation.action is not None:
                before = self._completions()
                under_way.start = clock.level(before)
                under_way.completion = completion = operation.action()
                if completion is not None:
                    clock.check(completion)
                    unclocked = completion.backend is None and not completion.ended
                clock.after(under_way.start, before)
                under_way.started = clock.now
        except Exception as error:
            self._fail(under_way, error)
            self._starting = None
            return
        timed = under_way.completion is not None and under_way.completion.backend is not None
        if operation.transfer is not None:
            self._modelled[index] = under_way
            self._flows.start(index, operation.transfer, under_way.start)
            if timed:
                self._running[index] = under_way
        elif operation.seconds is not None:
            under_way.due = under_way.start + clock.cycles(operation.seconds)
            self._modelled[index] = under_way
            heapq.heappush(self._due, (under_way.due, index))
        elif timed:
            self._running[index] = under_way
        elif unclocked:
            self._unclocked[index] = under_way
        else:
            self._end(under_way)
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
        """A device failed: so did what says so when it is looked at; if nothing does, all."""
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
        """End what has ended."""
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
                del self._running[each.operation.index]  # its transfer goes on
            elif ended:
                self._end(each)
            elif each.overdue(now):
                self._end(each, 0)

    def _end_unclocked(self) -> bool:
        """End what has ended of what has no clock; whether anything had, or failed."""
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
        """Of what has no clock, what is to be waited for."""
        every = self._unclocked.values()
        wanted = (e for e in every if e.completion is None or not e.completion.is_background)
        return next(wanted, next(iter(every)))

    def _end_modelled(self, each: _InFlight) -> None:
        """Its time by a model is over, and with it what it is, unless a device goes on."""
        if each.operation.index in self._running:
            del self._modelled[each.operation.index]
            each.due = None
        else:
            self._end(each)

    def _end(self, each: _InFlight, max_cycles: int | None = None) -> None:
        """It has ended, or is to within `max_cycles`: take what became of it."""
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
        """The error of a wait for what is overdue, with the cycles that went by since its start."""
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
                each.completion.abort()  # if it has ended, too: it may have more to end
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
        """End all that is under way, whatever happens meanwhile."""
        every = self._running | self._unclocked | self._modelled
        if self._starting is not None and self._starting.completion is not None:
            every.setdefault(self._starting.operation.index, self._starting)
        for each in every.values():
            while each.completion is not None:
                try:
                    each.completion.abort()
                except BaseException as second:  # Ctrl-C once more: the others still have to end
                    error.add_note(f"then, when {each.operation} was to be ended: {second!r}")
                    if isinstance(second, KeyboardInterrupt) and each.completion.backend is None:
                        continue  # nobody else keeps a drive from memory that is used next
                break
        names = [str(each.operation) for each in every.values()]
        error.add_note(f"under way: {some(names)}; not run: {some(self._not_run())}")

    def _not_run(self) -> list[str]:
        return [str(self._graph[index]) for index in sorted(self._left)]

    def _completions(self) -> list[Completion]:
        return [each.completion for each in self._running.values() if each.completion is not None]
