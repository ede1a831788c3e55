"""An AXI4 memory in Python, for benches: stalls, reordering, errors, silence."""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.bench.axi_sample import (
    Address,
    AxiSample,
    ReadBeat,
    WriteBeat,
    WriteResponse,
)

OKAY, SLVERR, DECERR = 0, 2, 3


class MemoryAccessError(AssertionError):
    """An access outside the memory."""


@dataclass(frozen=True, kw_only=True)
class BurstError:
    """How the memory treats one burst: the `nth` (from 0) read or write, of one ID if given.

    `response` is that of the last beat (reads) or of the burst (writes, which then change no
    memory); None withholds the response, and all later ones of that direction.
    """

    write: bool
    nth: int
    response: int | None
    id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Probability of a stall, by channel and in each cycle."""

    ar: float = 0.0
    r: float = 0.0
    aw: float = 0.0
    w: float = 0.0
    b: float = 0.0


STALL_MODES = {
    "free": Stalls(),
    "source": Stalls(r=0.5, b=0.5),
    "sink": Stalls(ar=0.5, aw=0.5, w=0.5),
    "both": Stalls(ar=0.5, r=0.4, aw=0.5, w=0.4, b=0.5),
}


@dataclass(slots=True)
class _Read:
    burst: Address
    ready_at: int
    error: BurstError | None
    beat: int = 0


@dataclass(slots=True)
class _Write:
    burst: Address
    error: BurstError | None
    beats: list[WriteBeat] = field(default_factory=list)


class AxiMemory:
    """Memory on an AXI4 port, advanced one clock edge at a time.

    Bursts of one ID are answered in order; with `reorder`, beats and responses of different IDs are
    in any order, beats of different bursts interleaved, as AXI4 allows.

    Parameters
    ----------
    data : bytes of the memory, changed in place.
    beat_bytes : bytes of a beat.
    base : address of `data[0]`.
    stalls : see `Stalls`.
    latency : cycles from AR to the first beat, at least.
    seed : of stalls and order.
    reorder : see above.
    address_after_data : takes AW only when WVALID is high, as AXI4 allows.
    errors : see `BurstError`.

    Attributes
    ----------
    r, b : outputs of the port, or None.
    ready : channels of `ar`, `aw`, `w` that are ready.
    writes : (id, address, beats) of each burst written, in the order of AW.
    """

    def __init__(
        self,
        data: NDArray[np.uint8],
        *,
        beat_bytes: int,
        base: int = 0,
        stalls: Stalls | None = None,
        latency: int = 1,
        seed: int = 0,
        reorder: bool = False,
        address_after_data: bool = False,
        errors: tuple[BurstError, ...] = (),
    ) -> None:
        self.data = data
        self.beat_bytes = beat_bytes
        self.base = base
        self.stalls = stalls or Stalls()
        self.latency = latency
        self.reorder = reorder
        self.address_after_data = address_after_data
        self.errors = errors
        self.random = random.Random(seed)
        self.cycle = 0
        self.writes: list[tuple[int, int, int]] = []
        self._seen: dict[tuple[bool, int | None], int] = {}
        self.reset()

    def reset(self) -> None:
        """Drop outstanding bursts."""
        self._reads: deque[_Read] = deque()
        self._writes: deque[_Write] = deque()
        self._responses: deque[WriteResponse] = deque()
        self._silent = {False: False, True: False}
        self.r: ReadBeat | None = None
        self.b: WriteResponse | None = None
        self.ready: frozenset[str] = frozenset()

    def step(self, sample: AxiSample) -> None:
        """Advance one clock edge with `sample` at the port; update `r`, `b` and `ready`.

        Raises
        ------
        MemoryAccessError
        """
        self.cycle += 1
        if sample.fires("r"):
            self.r = None
        if sample.fires("b"):
            self.b = None
        if sample.fires("aw"):
            self._writes.append(_Write(sample.aw, self._error(True, sample.aw)))
        if sample.fires("w"):
            self._take(sample.w)
        if sample.fires("ar"):
            error = self._error(False, sample.ar)
            self._reads.append(_Read(sample.ar, self.cycle + self.latency, error))
        if self.r is None and self._goes("r"):
            self.r = self._next_beat()
        if self.b is None and self._goes("b"):
            self.b = self._next_response()
        ready = {channel for channel in ("ar", "aw", "w") if self._goes(channel)}
        if not self._writes:
            ready.discard("w")
        if self.address_after_data and (sample.w is None or sample.fires("w")):
            ready.discard("aw")
        self.ready = frozenset(ready)

    def _goes(self, channel: str) -> bool:
        chance = getattr(self.stalls, channel)
        return not chance or self.random.random() >= chance

    def _error(self, write: bool, burst: Address) -> BurstError | None:
        hit = None
        for key in ((write, None), (write, burst.id)):
            nth = self._seen.get(key, 0)
            self._seen[key] = nth + 1
            for error in self.errors:
                if (error.write, error.id, error.nth) == (*key, nth):
                    hit = error
        return hit

    def _offset(self, address: int) -> int:
        offset = address - self.base
        if not 0 <= offset <= self.data.size - self.beat_bytes:
            raise MemoryAccessError(
                f"access at {address:#x}, memory is {self.base:#x} to "
                f"{self.base + self.data.size:#x}"
            )
        return offset

    def _pick(self, queue: deque, id_of: object) -> int | None:
        """Return the index of an entry that may be answered: the first of its ID."""
        firsts: dict[int, int] = {}
        for index, entry in enumerate(queue):
            firsts.setdefault(id_of(entry), index)
        if not firsts:
            return None
        return self.random.choice(list(firsts.values())) if self.reorder else 0

    def _next_beat(self) -> ReadBeat | None:
        index = self._pick(self._reads, lambda read: read.burst.id)
        if index is None or self._silent[False]:
            return None
        read = self._reads[index]
        if read.ready_at > self.cycle:
            return None
        last = read.beat == read.burst.len
        response = OKAY
        if read.error is not None:
            if read.error.response is None:
                self._silent[False] = True
                return None
            response = read.error.response if last else OKAY
        at = self._offset(read.burst.addr + read.beat * self.beat_bytes)
        value = int.from_bytes(self.data[at : at + self.beat_bytes].tobytes(), "little")
        read.beat += 1
        if last:
            del self._reads[index]
        return ReadBeat(read.burst.id, value, response, int(last))

    def _take(self, beat: WriteBeat) -> None:
        write = self._writes[0]
        write.beats.append(beat)
        if len(write.beats) <= write.burst.len:
            return
        self._writes.popleft()
        self.writes.append((write.burst.id, write.burst.addr, len(write.beats)))
        response = OKAY if write.error is None else write.error.response
        if response is None:
            self._silent[True] = True
        elif not self._silent[True]:
            if response == OKAY:
                self._store(write)
            self._responses.append(WriteResponse(write.burst.id, response))

    def _store(self, write: _Write) -> None:
        for index, beat in enumerate(write.beats):
            at = self._offset(write.burst.addr + index * self.beat_bytes)
            value = beat.data.to_bytes(self.beat_bytes, "little")
            for byte in range(self.beat_bytes):
                if beat.strb >> byte & 1:
                    self.data[at + byte] = value[byte]

    def _next_response(self) -> WriteResponse | None:
        index = self._pick(self._responses, lambda response: response.id)
        if index is None:
            return None
        response = self._responses[index]
        del self._responses[index]
        return response
