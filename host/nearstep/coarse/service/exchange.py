"""The client's side of an exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.service.arena import Allocation, Arena
from nearstep.coarse.service.errors import FullError, RefusedError, refusal
from nearstep.coarse.service.messages import Close, Open, Push
from nearstep.coarse.service.plan import Layout
from nearstep.coarse.service.replies import Replies, Sums
from nearstep.errors import ArgumentError, ShapeError
from nearstep.scalars import is_whole


class Exchange:
    """A tensor that all clients of a job sum repeatedly; made by `Client.exchange`.

    Each client pushes every shard, in any order, and pulls it when it has been summed. The bits
    depend only on the numbers of clients, devices and rings, the clients' devices, the size of
    shards and the wire format.

    Parameters
    ----------
    memory : allocation in `arena` for pushed shards and results; freed by `close`.
    rank, clients : of the client.

    Attributes
    ----------
    shards : elements [start, stop) of each.
    version : number of `begin` calls.
    """

    def __init__(
        self,
        replies: Replies,
        arena: Arena,
        memory: Allocation,
        opened: Open,
        rank: int,
        clients: int,
    ) -> None:
        self._rank = rank
        self.number, self.elements = opened.exchange, opened.elements
        self.version = 0
        self._step, self._hyper, self._turn = 0, "", 0
        self._sent: set[int] = set()  # shards of this version
        self._layout = Layout.opened(opened, clients)
        self.shards = self._layout.shards
        self._replies, self._arena, self._memory = replies, arena, memory
        results = [
            self._layout.pulled(memory.data, shard).view(np.uint8)
            for shard in range(len(self.shards))
        ]
        self._sums = replies.sums[self.number] = Sums(results)
        try:
            replies.send(opened)
            self._wait(lambda: self._sums.opened, f"all clients to open exchange {self.number}")
        except RefusedError:
            del replies.sums[self.number]
            arena.give(memory)
            raise

    def pushed(self, shard: int) -> NDArray[Any]:
        """Return the memory to fill before `push`: float32, patterns of uint16, or bytes.

        Of several addends its shape is (addends, elements of the shard). Shards share places:
        filling one overwrites an earlier shard (see `Layout`).
        """
        if self._sums.common is not None:
            own: NDArray[Any] = self.pulled(shard)[self._rank]
            return own
        return self._layout.pushed(self._memory.data, shard)

    def pulled(self, shard: int) -> NDArray[Any]:
        """Return the memory of a shard's result; a later shard that shares its place overwrites it.

        Of a gather it is read only, of shape (clients, bytes), and overwritten after this client's
        push of a later shard or version.
        """
        if self._sums.common is not None:
            return self._layout.slot(self._sums.common, self.version, shard)
        return self._layout.pulled(self._memory.data, shard)

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the parameters and states that the exchange updates."""
        return self._sums.kept

    def begin(self, step: int = 0, hyper: str = "", turn: int = 0) -> None:
        """Start the next version: each shard must then be pushed once.

        Parameters
        ----------
        step, hyper : of an update: step number t, from 1, and hyper-parameters as JSON.
        turn : number of this sum, from 1, if all clients make the same sums in the same order: a
            client that sums a different tensor ends the job (`OrderError`). 0: no such check.

        Raises
        ------
        ArgumentError : shards of the version before were not pushed, which other clients wait for,
            or were not returned. Nothing was sent.
        """
        if self._missing():
            self._replies.poll()
        if missing := self._missing():
            raise ArgumentError(
                f"shards {missing[:8]} of version {self.version} of exchange {self.number} must be "
                f"pushed and returned before the next version; or close() the exchange"
            )
        self.version += 1
        self._sent.clear()
        self._step, self._hyper, self._turn = step, hyper, turn

    def _missing(self) -> list[int]:
        """Return the shards of this version that were not pushed, or not returned."""
        shards = range(len(self.shards)) if self.version else ()
        return [each for each in shards if not (each in self._sent and self._is_back(each))]

    def push(self, shard: int) -> None:
        """Send a shard, which is in `pushed`, to the service.

        Raises
        ------
        ArgumentError : `begin` was not called, no such shard, or the shard was pushed before.
        FullError : the client's queue is full, or the earlier shard in the same place was not
            returned. Nothing was sent.
        """
        if not is_whole(shard) or not 0 <= shard < len(self.shards):
            raise ArgumentError(f"shard must be from 0 to {len(self.shards) - 1}, not {shard!r}")
        if not self.version or shard in self._sent:
            raise ArgumentError(
                f"shard {shard} of exchange {self.number} must be pushed once after begin()"
            )
        before, reason = shard - self._layout.places, None
        if before >= 0 and not (before in self._sent and self.ready(before)):
            reason = f"shard {before} has the place of shard {shard}"
        elif not self._replies.take_place():
            reason = f"all {self._replies.queue_shards} places of the queue are taken"
        if reason is not None:
            raise FullError(FullError.__name__, reason)
        self._push(shard)
        self._sent.add(shard)

    def _push(self, shard: int) -> None:
        data = self._layout.payload(self._memory.data, shard)
        nbytes = 0 if self._replies.is_shared else data.size
        said = Push(self.number, self.version, shard, nbytes, self._step, self._hyper, self._turn)
        self._replies.send(said, data)

    def ready(self, shard: int) -> bool:
        """Return whether the result of a shard of this version is in `pulled`."""
        self._replies.poll()
        return self._is_back(shard)

    def _is_back(self, shard: int) -> bool:
        return self._sums.versions[shard] == self.version

    def wait(self, shard: int) -> None:
        """Wait until the result of a shard is in `pulled`."""
        self._wait(lambda: self._is_back(shard), f"shard {shard} of exchange {self.number}")

    def _wait(self, found: Callable[[], bool], what: str) -> None:
        self._replies.wait(lambda: found() or self._sums.refused, what)
        if (refused := self._sums.refused) is not None:
            self._sums.refused = None
            raise refusal(refused.kind, refused.detail)

    def reduce(self, array: NDArray[Any], out: NDArray[Any]) -> None:
        """Push an array, and pull the sum of all clients' arrays.

        Parameters
        ----------
        array, out : float32, or patterns of uint16 of a format of 16 bits, of shape (elements,),
            contiguous; may be the same array. Of several addends `array` has the shape (addends,
            elements).

        Raises
        ------
        ShapeError : another shape or dtype.
        """
        addends = self._layout.addends
        given = (addends, self.elements) if addends > 1 else (self.elements,)
        for each, shape in ((array, given), (out, (self.elements,))):
            if each.shape != shape or each.dtype != self._layout.dtype:
                raise ShapeError("array", shape, each.shape)
        self.run(
            lambda part, start, stop: np.copyto(part, array[..., start:stop]),
            lambda part, start, stop: np.copyto(out[start:stop], part),
        )

    def run(
        self,
        fill: Callable[[NDArray[Any], int, int], object],
        take: Callable[[NDArray[Any], int, int], object],
        *,
        step: int = 0,
        hyper: str = "",
        turn: int = 0,
    ) -> None:
        """Sum one version shard by shard: results are taken while later shards are in flight.

        The call waits for places and for space in the queue. An error of `take` is raised at the
        end, because other clients wait for the remaining shards.

        Parameters
        ----------
        fill : writes elements [start, stop) to an array: `fill(array, start, stop)`.
        take : reads the results [start, stop) from an array.
        step, hyper, turn : as in `begin`.
        """
        self.begin(step, hyper, turn)
        taken, failed = 0, None

        def pull() -> None:
            nonlocal taken, failed
            self.wait(taken)
            try:
                take(self.pulled(taken), *self.shards[taken])
            except Exception as error:
                failed = failed or error
            taken += 1

        for shard, (start, stop) in enumerate(self.shards):
            if taken <= shard - self._layout.places:
                pull()
            fill(self.pushed(shard), start, stop)
            self._replies.wait(self._replies.take_place, "a place in the queue")
            self._push(shard)
            self._sent.add(shard)
            while taken < shard and self.ready(taken):
                pull()
        while taken < len(self.shards):
            pull()
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Free the memory, here and, once all clients have closed the exchange, on the devices."""
        del self._replies.sums[self.number]
        self._replies.send(Close(self.number))
        self._arena.give(self._memory)
