"""Threads that share a device: ownership of its channels."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nearstep.errors import ForkedDeviceError, ModeError

STALL_SECONDS = 60.0
"""Seconds that a thread waits for a channel of another after the last use of a kernel."""


class CommandLock:
    """Makes several accesses of a kernel's registers one command; the lock is reentrant.

    In a child after `fork()` it raises `ForkedDeviceError`.

    Attributes
    ----------
    used : changes with every command, and is unique during a command.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = 0
        self._count = 0
        self._process = os.getpid()

    @property
    def used(self) -> object:
        return object() if self._inside else self._count

    def __enter__(self) -> None:
        if os.getpid() != self._process:  # a thread of the parent process may hold it
            raise ForkedDeviceError("of this kernel", "give it a command", self._process)
        self._lock.acquire()
        self._inside += 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        self._count += 1
        self._lock.release()


@dataclass(eq=False)
class Region:
    """A thread's use of channels that are, or may be, in acceleration mode.

    Attributes
    ----------
    over : whether it has ended.
    """

    thread: threading.Thread
    over: bool = False


class Turns:
    """Ensures that one thread at a time accelerates channels, and not during another's copy.

    All channels of a region are acquired at once. A circular wait, directly or through other
    threads, is an error at once.

    Parameters
    ----------
    used : returns a value that differs after each use of a kernel.
    """

    def __init__(self, used: Callable[[], object]) -> None:
        self._used = used
        self._changed = threading.Condition()
        self._regions: dict[int, Region] = {}
        self._copies: dict[object, tuple[int, threading.Thread]] = {}
        self._begun = 0  # copies
        self._waiting: dict[threading.Thread, frozenset[int]] = {}

    @contextmanager
    def region(self, channels: Iterable[int], action: str) -> Iterator[Region]:
        """Acquire channels for this thread when no other thread has one of them or copies.

        The thread may acquire some of them again for a nested region.

        Raises
        ------
        ModeError : another thread has one and waits for this one, or is idle.
        """
        region = Region(threading.current_thread())
        wanted = frozenset(channels)
        outer: dict[int, Region | None] = {}
        try:
            with self._changed:
                self._wait(wanted, action, lambda: self._is_copied(wanted, region.thread))
                outer = {each: self._regions.get(each) for each in wanted}
                self._regions |= dict.fromkeys(wanted, region)
            yield region
        finally:
            region.over = True  # even if Ctrl-C ends the wait for the lock
            with self._changed:
                for each, before in outer.items():
                    if not self.holds(region, each):
                        continue
                    if before is None or before.over:
                        del self._regions[each]
                    else:
                        self._regions[each] = before
                self._changed.notify_all()

    def begin_copy(self, copy: object, channel: int, action: Callable[[], str]) -> None:
        """Begin a copy of the host when no other thread has the channel, as `region`."""
        with self._changed:
            if channel in self._regions:
                self._wait(frozenset({channel}), action(), lambda: False)
            self._copies[copy] = channel, threading.current_thread()
            self._begun += 1

    def end_copy(self, copy: object) -> None:
        """End a copy, if it has begun."""
        with self._changed:
            self._copies.pop(copy, None)
            if self._waiting:
                self._changed.notify_all()

    def holds(self, region: Region, channel: int) -> bool:
        """Whether a channel still belongs to a region."""
        return self._regions.get(channel) is region

    def forget(self) -> None:
        """Release all channels after a reset of the device."""
        with self._changed:
            self._regions.clear()
            self._changed.notify_all()

    def _is_copied(self, channels: frozenset[int], thread: threading.Thread) -> bool:
        """Whether another thread copies to or from one of the channels.

        A copy of the same thread has ended, with an exception if its end was not noted.
        """
        return any(
            channel in channels and other is not thread and other.is_alive()
            for channel, other in self._copies.values()
        )

    def _wait(self, wanted: frozenset[int], action: str, copied: Callable[[], bool]) -> None:
        me = threading.current_thread()
        self._waiting[me] = wanted
        try:
            while (other := self._other(me)) is not None or copied():
                if other is not None and self._waits_for(other[1], me):
                    raise self._error(action, other, "waits for a channel of this one")
                used = self._used(), self._begun
                changed = self._changed.wait(STALL_SECONDS)
                if not changed and other is not None and (self._used(), self._begun) == used:
                    raise self._error(action, other, f"did nothing for {STALL_SECONDS:g} s")
        finally:
            del self._waiting[me]

    def _other(self, thread: threading.Thread) -> tuple[int, threading.Thread] | None:
        """Return a channel that a thread waits for, and the thread that has it."""
        for channel in sorted(self._waiting.get(thread, ())):
            region = self._regions.get(channel)
            if region is not None and region.thread is not thread and not region.over:
                return channel, region.thread
        return None

    def _waits_for(self, thread: threading.Thread, target: threading.Thread) -> bool:
        """Whether a thread waits for a channel of `target`, directly or through others."""
        seen, left = {thread}, [thread]
        while left:
            waiting = left.pop()
            for channel in self._waiting.get(waiting, ()):
                region = self._regions.get(channel)
                if region is None or region.thread is waiting or region.over:
                    continue
                if region.thread is target:
                    return True
                if region.thread not in seen:
                    seen.add(region.thread)
                    left.append(region.thread)
        return False

    @staticmethod
    def _error(action: str, other: tuple[int, threading.Thread], why: str) -> ModeError:
        channel, thread = other
        reason = f"thread {thread.name!r} has it, and {why}"
        return ModeError(action, channel, "normal", "acceleration", reason=reason)
