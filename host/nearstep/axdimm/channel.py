"""One memory channel of an AXDIMM: its kernel, its mode and its run."""

from __future__ import annotations

from collections.abc import Callable

from nearstep.backends.base import Backend
from nearstep.errors import LostCommandError, ModeError, ModeRegisterError, WaitTimeoutError
from nearstep.registers import BlockRegisters
from nearstep.updater.channel import KernelChannel
from nearstep_spec.axdimm.hand_over import HAND_OVER_CYCLES

NORMAL, ACCELERATION = "normal", "acceleration"


class Channel(KernelChannel):
    """A channel, initially in normal mode; a device without arbiters has the mode only here.

    Parameters
    ----------
    base : device address of its first byte.

    Attributes
    ----------
    accelerated : whether the kernel has the memory.
    run : the last `KernelRun` that was started, or None.

    Ref: AXDIMM, sections 3.1 and 3.2.
    """

    has_modes = True

    def __init__(
        self,
        backend: Backend,
        number: int,
        base: int,
        kernel: BlockRegisters,
        arbiter: BlockRegisters | None,
    ) -> None:
        super().__init__(backend, number, base, kernel)
        self.arbiter = arbiter
        self.accelerated = False
        self._lost = 0  # commands that have been reported

    @property
    def mode(self) -> str:
        """Name of the channel's mode."""
        return ACCELERATION if self.accelerated else NORMAL

    def check_mode(self, action: str, mode: str) -> None:
        """Raise `ModeError` unless the channel is in `mode`; leave acceleration mode first if
        Ctrl-C prevented the last region from leaving it.
        """
        if self.accelerated and self.region is not None and self.region.over:
            self.leave(failed=True)
        if self.mode != mode:
            registers = {} if self.arbiter is None else self.arbiter.dump()
            raise ModeError(action, self.number, mode, self.mode, registers=registers)

    def check_reach(self, action: Callable[[], str]) -> None:
        if self.accelerated:
            self.check_mode(action(), NORMAL)

    def check_ready(self, action: str) -> None:
        if self.arbiter is not None:
            self.check_mode(action, ACCELERATION)

    def check_enter(self) -> None:
        self.check_mode("enter acceleration mode", NORMAL)

    def enter(self) -> None:
        """Give the memory to the kernel.

        Raises
        ------
        ModeRegisterError, WaitTimeoutError
        """
        if self.arbiter is not None:
            self._check_status(self.arbiter)
        self.accelerated = True  # set early, so that `leave` undoes an interrupted change
        if self.arbiter is not None:
            self.arbiter.mode.set(acceleration=1)
            try:
                self._await("acceleration")
            except WaitTimeoutError:
                self.arbiter.mode.set(acceleration=0)
                self.accelerated = False
                raise

    def leave(self, *, failed: bool) -> None:
        """Take the memory back: wait for the run, or abort it if something `failed`.

        Raises
        ------
        KernelError, WaitTimeoutError, MemoryFaultError, ProtocolError : as `nearstep.run.Run.wait`.
            The mode is normal nevertheless if the device still answers.
        LostCommandError : commands of the host's memory controller were lost. The run is complete.
        """
        with self.lock:  # no thread starts a run in between
            if not self.accelerated:
                return
            try:
                super().leave(failed=failed)
            finally:
                if self.accelerated:
                    self._to_normal()
            if self.arbiter is not None and not failed:
                self._check_lost(self.arbiter)

    def reset_kernel(self) -> None:
        """Reset the kernel in any state, and take the memory from it.

        The mode is normal afterwards; other channels are not affected, except on a device without
        arbiters, which is reset as a whole.

        Raises
        ------
        WaitTimeoutError
        """
        if self.arbiter is None:
            super().reset_kernel()
        else:
            if self.run is not None:
                self.run.forget("the kernel was reset")
            self.arbiter.mode.set(acceleration=0)
            self.arbiter.control.set(kernel_reset=1)
            self._await("normal")
        self.accelerated = False

    def forget(self, reason: str) -> None:
        """Note a reset of the device: the run is lost, the mode is normal."""
        self.accelerated = False
        super().forget(reason)

    def _to_normal(self) -> None:
        if self.arbiter is not None:
            self.arbiter.mode.set(acceleration=0)
            self._await("normal")
        self.accelerated = False

    def _check_status(self, arbiter: BlockRegisters) -> None:
        """Raise `ModeRegisterError` for unsupported modes; forget cleared losses of commands."""
        status = arbiter.status.get()
        self._lost = min(self._lost, arbiter.lost_count.value) if status["lost_command"] else 0
        if status["unsupported_mode"]:
            bits = arbiter.mode_registers.unsupported
            numbers = (number for number in range(bits.bit_length()) if bits >> number & 1)
            raise ModeRegisterError(self.number, numbers, registers=arbiter.dump())

    def _check_lost(self, arbiter: BlockRegisters) -> None:
        count = arbiter.lost_count.value if arbiter.status.lost_command else 0
        seen, self._lost = self._lost, count
        if count > seen:
            first = arbiter.lost_command
            raise LostCommandError(
                self.number,
                count,
                pins=first.pins,
                bank=first.bank,
                registers=arbiter.dump(),
            )

    def _await(self, mode: str) -> None:
        arbiter = self.arbiter
        if arbiter is None:
            return
        try:
            self.backend.wait([arbiter.status.poll(**{mode: 1})], HAND_OVER_CYCLES)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"channel {self.number} to be in {mode} mode",
                HAND_OVER_CYCLES,
                unit=error.unit,
                registers=arbiter.dump(),
                transactions=self.backend.transactions(),
            ) from error
