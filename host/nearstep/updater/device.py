"""Devices with update kernels on all memory channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nearstep.backends.base import Backend
from nearstep.buffer import Buffer
from nearstep.errors import (
    ArgumentError,
    DeviceError,
    MemoryFaultError,
    MismatchError,
    ProtocolError,
)
from nearstep.registers import Registers
from nearstep.run import Run
from nearstep.updater.accelerated import AcceleratedRuns
from nearstep.updater.channel import KernelChannel
from nearstep.updater.turns import Region, Turns
from nearstep.updater.updating import UpdatingDevice, reset_needed
from nearstep_spec.blockwise import BlockLayout
from nearstep_spec.updater.config import UpdateKernelConfig


class KernelDevice(UpdatingDevice):
    """A device with one update kernel for each memory channel. Families derive from it.

    Parameters
    ----------
    config : of each kernel.

    Raises
    ------
    MismatchError : the kernel has fewer windows than a run can have arrays.
    """

    def __init__(
        self,
        backend: Backend,
        url: str,
        config: UpdateKernelConfig,
        regs: Registers,
        channels: Sequence[KernelChannel],
    ) -> None:
        super().__init__(backend, url)
        self.config = config
        self.regs = regs
        self.channels = tuple(channels)
        locks = [channel.lock for channel in self.channels]
        self._turns = Turns(lambda: [lock.used for lock in locks])  # not self: that is a cycle
        arrays = len(config.arrays) + bool(config.compression) + bool(config.copy_out_formats)
        if config.window_count < arrays:
            raise MismatchError("windows", f"at least {arrays}", config.window_count)

    @property
    def kernel_config(self) -> UpdateKernelConfig:
        return self.config

    @property
    def stripe_bytes(self) -> int:
        return self.config.block_bytes

    @property
    def block_layout(self) -> BlockLayout | None:
        return self.config.block_layout if self.config.blockwise else None

    @contextmanager
    def acceleration(self, *channels: int) -> Iterator[None]:
        """Give the memory of these channels (default: all) to their kernels for the body of a
        `with` statement: acceleration mode, on a device with modes.

        At the end of the statement runs in progress are waited for, or aborted after an exception;
        then the channels are returned to the host. Other threads may start runs on the channels; to
        accelerate a channel, or to copy from or to a channel with modes, they wait for the end.

        Raises
        ------
        ArgumentError : there is no such channel, or one is named twice.
        ModeError : one is in acceleration mode already; or another thread has one, and waits for
            this thread, or is idle.
        WaitTimeoutError : a change of mode, or a run, did not end.
        KernelError, MemoryFaultError, ProtocolError : from a run that was waited for at the end.
        """
        self.check_open("enter acceleration mode")
        for number in channels:
            self.check_channel(number)
        if len(set(channels)) != len(channels):
            raise ArgumentError(f"channels must be named once, not {channels}")
        chosen = [self.channels[number] for number in channels] or list(self.channels)
        action = "enter acceleration mode"
        with self._turns.region([channel.number for channel in chosen], action) as region:
            for channel in chosen:
                channel.check_enter()
            self.check_no_transfer((c.number for c in chosen if c.has_modes), action)
            try:
                for channel in chosen:
                    channel.region = region
                    channel.enter()
                yield
                self._leave(chosen, region, None)
            except BaseException as error:  # of that, too: channels that are left stay so
                self._leave(chosen, region, error)
                raise

    def accelerated(self, channel: int, start: Callable[[], Run]) -> AcceleratedRuns:
        """Give a channel to its kernel, start a run there, and return at once; a wait for the run
        returns the channel to the host.

        Parameters
        ----------
        start : starts the run, by a method of this device.

        Raises
        ------
        ArgumentError, ModeError, WaitTimeoutError, KernelError, MemoryFaultError, ProtocolError,
            ClosedDeviceError : as `acceleration`, and as `start`.
        """
        return AcceleratedRuns([start], self.acceleration(channel)).start()

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Reserve all channels for this thread, in a `with` statement.

        The thread may copy to one channel while the kernel of another runs; copies and
        `acceleration` of other threads wait for the end, without deadlocks.

        Raises
        ------
        ModeError : another thread has a channel and waits for this one, or is idle.
        """
        self.check_open("reserve channels")
        numbers = [channel.number for channel in self.channels]
        with self._turns.region(numbers, "reserve channels"):
            yield

    def _leave(
        self, channels: Sequence[KernelChannel], region: Region, failed: BaseException | None
    ) -> None:
        """Leave acceleration mode on every channel; the first error is raised at the end."""
        if self.closed:
            return
        first: BaseException | None = None
        left = [each for each in channels if self._turns.holds(region, each.number)]  # no reset
        while left:
            try:
                interrupted = not isinstance(first, DeviceError | None)
                left[0].leave(failed=failed is not None or interrupted)
                left.pop(0)
            except BaseException as error:  # Ctrl-C too: the channels still have to leave
                first = first or error
                if not isinstance(error, KeyboardInterrupt):
                    left.pop(0)
        if failed is not None and first is not None:
            failed.add_note(f"then, on the way back to normal mode: {first}")
        elif first is not None:
            raise first

    @contextmanager
    def reach(self, buffer: Buffer, action: str) -> Iterator[None]:
        channel, copy = self.channels[self.channel_of(buffer)], object()
        try:
            if channel.has_modes:  # formatting takes as long as all else here
                self._turns.begin_copy(copy, channel.number, lambda: f"{action} {buffer!r}")
                channel.check_reach(lambda: f"{action} {buffer!r}")
            yield
        except (MemoryFaultError, ProtocolError) as fault:
            raise reset_needed(f"{action} {buffer!r}", fault) from fault
        finally:
            if channel.has_modes:
                self._turns.end_copy(copy)

    def reset(self) -> None:
        """Hard reset of the kernels and of their paths to memory.

        Runs in progress are lost, and every channel is in normal mode.
        """
        super().reset()
        self._turns.forget()
