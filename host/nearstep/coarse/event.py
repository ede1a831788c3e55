"""A tensor that is being summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from nearstep.backends.base import Backend, Poll
from nearstep.coarse.errors import RingError
from nearstep.coarse.split import Part
from nearstep.coarse.tensor import PoolTensor
from nearstep.completion import Completion

if TYPE_CHECKING:
    from nearstep.coarse.rings import RingJob, Rings


class Event(Completion):
    """The end of a reduction that was begun by :meth:`CoarsePool.submit`.

    Attributes
    ----------
    tensor: PoolTensor
    parts: tuple[Part, ...]
        Which ring sums which elements. The order of additions follows from it.
    """

    backend: Backend

    def __init__(self, rings: Rings, tensor: PoolTensor, jobs: Sequence[RingJob]) -> None:
        self.tensor = tensor
        self.parts: tuple[Part, ...] = tuple(job.part for job in jobs)
        self.jobs = tuple(jobs)
        self.backend = rings.device.backend
        self._rings = rings
        self._begun = self.backend.cycles
        self._cycles: int | None = None
        self._ended = False
        self._error: RingError | None = None

    @property
    def ended(self) -> bool:
        """Whether it has ended, well or not. Looks at the devices, does not wait."""
        if not self._ended:
            self._rings.look()
        return self._ended

    @property
    def error(self) -> RingError | None:
        """What it failed with; None while it has not."""
        return self._error

    @property
    def cycles(self) -> int | None:
        """Device cycles from its submission to where the host found that it had ended."""
        return self._cycles

    @property
    def polls(self) -> Sequence[Poll]:
        return self._rings.polls(self)

    @property
    def bound(self) -> int:
        return self._rings.bound()

    def wait(self, max_cycles: int | None = None) -> Self:
        """Let the devices run until it has ended on all of them, and return self.

        Parameters
        ----------
        max_cycles: int | None
            Bound in device cycles (steps, on devices without a clock). None: enough for all that is
            queued before it if each beat took 64 cycles, and for a peer to be found dead.

        Raises
        ------
        RingError
            All jobs were ended; the tensor has its old values. :class:`SilentLinkError`,
            :class:`JobMismatchError`, :class:`MemoryResponseError` and others say why.
        RingTimeoutError
            Not in that time; says who waits for whom. It still runs.
        ArgumentError
            ``max_cycles`` is no integer, or negative.
        ClosedDeviceError
        """
        if not self._ended:
            self._rings.wait(self, max_cycles)
        if self._error is not None:
            raise self._error
        return self

    def result(self, max_cycles: int | None = None) -> PoolTensor:
        """The tensor, when it has been summed. Raises as :meth:`wait` does."""
        return self.wait(max_cycles).tensor

    def end(self, error: RingError | None) -> None:
        """It has ended; called by the pool."""
        now = self.backend.cycles
        self._cycles = None if now is None or self._begun is None else now - self._begun
        self._ended = True
        self._error = error
        self.tensor.end(well=error is None)

    def __repr__(self) -> str:
        state = "ended" if self._ended else "in work"
        return f"<reduction of {self.tensor!r}, {state}>"
