"""One memory channel of a device with update kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nearstep.backends.base import Backend
from nearstep.registers import BlockRegisters
from nearstep.updater.run import KernelRun
from nearstep.updater.turns import CommandLock, Region


class KernelChannel:
    """A channel whose kernel may be started, and whose memory the host may access, at any time.

    Families whose channels belong either to the host or to the kernel refine the class.

    Parameters
    ----------
    base : device address of its first byte.

    Attributes
    ----------
    run : the last run that was started.
    region : the last use of the channel in acceleration mode.
    has_modes : whether host and kernel have exclusive access to memory.
    lock : held during a command, a wait for it, and the read of its results.
    """

    has_modes = False

    def __init__(self, backend: Backend, number: int, base: int, kernel: BlockRegisters) -> None:
        self.number = number
        self.base = base
        self.kernel = kernel
        self.run: KernelRun | None = None
        self.region: Region | None = None
        self.lock = CommandLock()
        self.backend = backend

    def check_reach(self, action: Callable[[], str]) -> None:
        """Raise `ModeError` unless the host may access the memory now."""

    def check_ready(self, action: str) -> None:
        """Raise `ModeError` unless the kernel can be started now."""

    def check_enter(self) -> None:
        """Raise `ModeError` if the kernel has the memory already."""

    def enter(self) -> None:
        """Give the memory to the kernel."""

    def leave(self, *, failed: bool) -> None:
        """Take the memory back: wait for the run, or abort it if the region `failed`.

        Raises
        ------
        KernelError, WaitTimeoutError, MemoryFaultError, ProtocolError : as `nearstep.run.Run.wait`.
        """
        run = self.run
        if run is None or (run.thread is not threading.current_thread() and not self.has_modes):
            return
        if run.ended:
            return
        if failed:
            run.abort()
            return
        try:
            run.wait()
        except BaseException:
            run.abort()  # does nothing if it has ended
            raise

    def reset_kernel(self) -> None:
        """Reset the kernel in any state: here with the whole device."""
        if self.run is not None:
            self.run.forget("the kernel was reset")
        self.backend.reset()

    def forget(self, reason: str) -> None:
        """Mark the run as lost by a reset of the device."""
        with self.lock:
            if self.run is not None:
                self.run.forget(reason)
                self.run = None
