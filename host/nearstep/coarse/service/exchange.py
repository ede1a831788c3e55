"""A tensor that all clients of a job sum: a client's side."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.service.errors import FullError, refusal
from nearstep.coarse.service.messages import Push
from nearstep.coarse.service.plan import Layout
from nearstep.coarse.service.replies import Replies, Sums
from nearstep.errors import ArgumentError, ShapeError
from nearstep.scalars import is_whole


class Exchange:
    """A tensor that all clients of a job sum, as often as they like; `Client.exchange` makes it.

    Each client pushes every shard, in any order, and pulls it when it has been summed. The bits
    depend on the numbers of clients, devices and rings, the size of shards and the wire alone.

    Attributes
    ----------
    shards : elements [start, stop) of each.
    version : how often it was pushed.
    """

    def __init__(
        self,
        replies: Replies,
        number: int,
        elements: int,
        layout: Layout,
        memory: NDArray[np.uint8],
        *,
        queue_shards: int,
        release: Callable[[], None],
    ) -> None:
        self.number = number
        self.elements = elements
        self.version = 0
        self._step, self._hyper, self._turn = 0, "", 0
        self._sent: set[int] = set()  # shards of this version
        self.queue_shards = queue_shards
        self.shards = layout.shards
        self._layout = layout
        self._memory = memory
        self._replies = replies
        self._release = release
        places = [self.pulled(shard).view(np.uint8) for shard in range(len(self.shards))]
        self._sums = replies.sums[number] = Sums(places)

    def pushed(self, shard: int) -> NDArray[np.float32]:
        """What goes to the devices of a shard.

        A shard has the place of one before it, whose array it changes: see `Layout`.
        """
        return self._layout.pushed(self._memory, shard)

    def pulled(self, shard: int) -> NDArray[np.float32]:
        """What has come back of a shard; another one, that is pushed behind it, has its place."""
        return self._layout.pulled(self._memory, shard)

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the parameters and states that it updates."""
        return self._sums.kept

    def begin(self, step: int = 0, hyper: str = "", turn: int = 0) -> None:
        """The next version: all shards are to be pushed once.

        Parameters
        ----------
        step, hyper : of an update: t, from 1, and hyper-parameters as JSON.
        turn : number of this sum, from 1, if all clients make the same sums one after the other: if
            one sums something else, the job ends at once (`OrderError`). 0: they do not.

        Raises
        ------
        ArgumentError : shards of the version before were not pushed, or have not come back: other
            clients wait for them. Nothing was sent.
        """
        if self._missing():
            self._replies.poll()
        if missing := self._missing():
            raise ArgumentError(
                f"shards {missing[:8]} of version {self.version} of exchange {self.number} must be "
                f"pushed and have come back before the next version; or close() the exchange"
            )
        self.version += 1
        self._sent.clear()
        self._step, self._hyper, self._turn = step, hyper, turn

    def _missing(self) -> list[int]:
        """Shards of this version that were not pushed, or have not come back."""
        shards = range(len(self.shards)) if self.version else ()
        return [each for each in shards if not (each in self._sent and self._is_back(each))]

    def push(self, shard: int) -> None:
        """Have the service take a shard that is in `pushed`.

        Raises
        ------
        ArgumentError : no version was begun, there is no such shard, or it was pushed before.
        FullError : the client's queue at the proxy is full, or the shard before it in its place has
            not come back; nothing was sent.
        """
        if not is_whole(shard) or not 0 <= shard < len(self.shards):
            raise ArgumentError(f"shard must be from 0 to {len(self.shards) - 1}, not {shard!r}")
        if not self.version or shard in self._sent:
            raise ArgumentError(
                f"shard {shard} of exchange {self.number} must be pushed once after begin()"
            )
        before = shard - self._layout.places
        if before >= 0 and not (before in self._sent and self.ready(before)):
            raise FullError(FullError.__name__, f"shard {before} has the place of shard {shard}")
        if not self._take_place():
            raise FullError(
                FullError.__name__, f"all {self.queue_shards} places of the queue are taken"
            )
        self._push(shard)
        self._sent.add(shard)

    def _take_place(self) -> bool:
        return self._replies.take_place(self.queue_shards)

    def _push(self, shard: int) -> None:
        data = self.pushed(shard).view(np.uint8)
        nbytes = 0 if self._replies.is_shared else data.size
        said = Push(self.number, self.version, shard, nbytes, self._step, self._hyper, self._turn)
        self._replies.send(said, data)

    def ready(self, shard: int) -> bool:
        """Whether a shard of this version is in `pulled`."""
        self._replies.poll()
        return self._is_back(shard)

    def _is_back(self, shard: int) -> bool:
        return self._sums.versions[shard] == self.version

    def wait(self, shard: int) -> None:
        """Wait until it is."""
        self._wait(lambda: self._is_back(shard), f"shard {shard} of exchange {self.number}")

    def wait_opened(self) -> None:
        """Wait until all clients have opened it."""
        self._wait(lambda: self._sums.opened, f"all clients to open exchange {self.number}")

    def _wait(self, found: Callable[[], bool], what: str) -> None:
        refused = self._replies.refused
        self._replies.wait(lambda: found() or self.number in refused, what)
        if self.number in refused:
            message = refused.pop(self.number)
            raise refusal(message.kind, message.detail)

    def reduce(self, array: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Push an array, and pull what all clients' arrays are summed to.

        Parameters
        ----------
        array, out : float32, of `elements` elements, contiguous; they may be one.

        Raises
        ------
        ShapeError
        """
        for each in (array, out):
            if each.shape != (self.elements,) or each.dtype != np.float32:
                raise ShapeError("array", (self.elements,), each.shape)
        self.run(
            lambda part, start, stop: np.copyto(part, array[start:stop]),
            lambda part, start, stop: np.copyto(out[start:stop], part),
        )

    def run(
        self,
        fill: Callable[[NDArray[np.float32], int, int], object],
        take: Callable[[NDArray[np.float32], int, int], object],
        *,
        step: int = 0,
        hyper: str = "",
        turn: int = 0,
    ) -> None:
        """One version, shard by shard: what has come back is taken while others are on their way.

        Where there is no place, it waits for one. What `take` raises it raises at the
        end: other clients wait for the shards behind.

        Parameters
        ----------
        fill : puts elements [start, stop) into an array.
        take : takes them from one.
        step, hyper, turn : as of `begin`.
        """
        self.begin(step, hyper, turn)
        taken, failed = 0, None

        def take_one(number: int) -> Exception | None:
            try:
                take(self.pulled(number), *self.shards[number])
            except Exception as error:
                return failed or error
            return failed

        for shard, (start, stop) in enumerate(self.shards):
            if taken <= shard - self._layout.places:
                self.wait(taken)
                failed = take_one(taken)
                taken += 1
            fill(self.pushed(shard), start, stop)
            self._replies.wait(self._take_place, "a place in the queue")
            self._push(shard)
            self._sent.add(shard)
            while taken < shard and self.ready(taken):
                failed = take_one(taken)
                taken += 1
        for shard in range(taken, len(self.shards)):
            self.wait(shard)
            failed = take_one(shard)
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Give its memory back, here and, when all clients have, on the devices."""
        self._release()
