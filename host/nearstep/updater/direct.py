"""Devices without registers, whose runs have ended when the call that starts them returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from nearstep.backends.base import Backend
from nearstep.buffer import Buffer
from nearstep.errors import DeviceError
from nearstep.registers import Registers
from nearstep.run import Run
from nearstep.updater.device import KernelDevice
from nearstep_spec.updater.config import UpdateKernelConfig


class EndedRun(Run):
    """A run of a rule, which has ended."""

    channel = 0

    def __init__(self, count: int) -> None:
        self.count = count

    @property
    def ended(self) -> bool:
        return True

    @property
    def committed(self) -> int:
        return self.count

    @property
    def error(self) -> DeviceError | None:
        return None

    @property
    def cycles(self) -> int | None:
        return None

    @property
    def counters(self) -> Mapping[str, int]:
        return {}

    def wait(self, max_cycles: int | None = None) -> Self:
        return self

    def abort(self, max_cycles: int | None = None) -> None:
        """Return: the run has ended."""


class DirectDevice(KernelDevice):
    """A device of one channel without registers: a run is one call.

    The host can access memory at any time. Classes derive from it, and define `_update`.

    Parameters
    ----------
    config : rules, and formats of the arrays.
    """

    def __init__(self, backend: Backend, url: str, config: UpdateKernelConfig) -> None:
        super().__init__(backend, url, config, Registers(backend, {}), ())

    @contextmanager
    def acceleration(self, *channels: int) -> Iterator[None]:
        self.check_open("run")
        yield

    @contextmanager
    def reach(self, buffer: Buffer, action: str) -> Iterator[None]:
        yield
