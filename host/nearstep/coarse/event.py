"""A tensor that is being summed."""

from __future__ import annotations

from collections.abc import Sequence

from nearstep.coarse.errors import RingError
from nearstep.coarse.rings import Pending, RingJob, Rings
from nearstep.coarse.tensor import PoolTensor


class Event(Pending):
    """The end of a reduction that was begun by `CoarsePool.submit`."""

    def __init__(self, rings: Rings, tensor: PoolTensor, jobs: Sequence[RingJob]) -> None:
        super().__init__(rings, jobs)
        self.tensor = tensor

    def result(self, max_cycles: int | None = None) -> PoolTensor:
        """The tensor, when it has been summed. Raises as `wait` does."""
        return self.wait(max_cycles).tensor

    def begin(self) -> None:
        self.tensor.begin(self)

    def end(self, error: RingError | None) -> None:
        super().end(error)
        self.tensor.end(succeeded=error is None)

    def __repr__(self) -> str:
        state = "ended" if self._ended else "in work"
        return f"<reduction of {self.tensor!r}, {state}>"
