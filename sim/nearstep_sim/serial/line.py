"""A line that loses and damages bytes, and a link to a board in this process over such lines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nearstep.serial.errors import PortLostError
from nearstep.serial.transport import BITS_A_BYTE
from nearstep_sim.serial.endpoint import Endpoint


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Faults of a line, independent for each byte.

    Attributes
    ----------
    loss : probability that a byte is lost.
    corruption : probability that a bit of a byte is inverted.
    repetition : probability that a byte is repeated.
    """

    loss: float = 0.0
    corruption: float = 0.0
    repetition: float = 0.0

    def __post_init__(self) -> None:
        for name in ("loss", "corruption", "repetition"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to below 1, not {getattr(self, name)}")


class NoisyLine:
    """One direction of a line.

    Attributes
    ----------
    lost, corrupted, repeated : numbers of bytes.
    """

    def __init__(self, noise: Noise, seed: int) -> None:
        self._noise = noise
        self._random = np.random.default_rng(seed)
        self.lost = self.corrupted = self.repeated = 0

    def carry(self, data: bytes) -> bytes:
        """Return the bytes that arrive."""
        noise = self._noise
        if noise == Noise() or not data:
            return data
        array = np.frombuffer(data, np.uint8).copy()
        hit = self._random.random(array.size) < noise.corruption
        array[hit] ^= np.uint8(1) << self._random.integers(0, 8, int(hit.sum()), dtype=np.uint8)
        lost = self._random.random(array.size) < noise.loss
        twice = self._random.random(array.size) < noise.repetition
        self.corrupted += int(hit.sum())
        self.lost += int(lost.sum())
        self.repeated += int(twice.sum())
        return np.repeat(array, np.where(lost, 0, np.where(twice, 2, 1))).tobytes()


class Loopback:
    """A transport to a board in this process. Its time is that of the transmitted bytes.

    Parameters
    ----------
    baud : 0 if bytes take no time.
    noise, seed : of both directions.
    reset_after : bytes after which the board is reset repeatedly, even inside a frame. None: never.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        baud: int = 0,
        noise: Noise | None = None,
        seed: int = 1,
        reset_after: int | None = None,
    ) -> None:
        self.port = "loopback"
        self.baud = baud
        self.down = NoisyLine(noise or Noise(), seed)
        self.up = NoisyLine(noise or Noise(), seed + 1)
        self._server = ResettingEndpoint(endpoint, reset_after)
        self._now = 0.0
        self._arrived = bytearray()
        self._closed = False

    @property
    def now(self) -> float:
        return self._now

    def write(self, data: bytes) -> None:
        self._check()
        self._take_time(len(data))
        answer = self._server.receive(self.down.carry(data))
        self._take_time(len(answer))
        self._arrived += self.up.carry(answer)

    def read(self, seconds: float) -> bytes:
        self._check()
        if not self._arrived:
            self._now += seconds
        data = bytes(self._arrived)
        self._arrived.clear()
        return data

    def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise PortLostError(self.port, "it is closed")

    def _take_time(self, nbytes: int) -> None:
        if self.baud:
            self._now += nbytes * BITS_A_BYTE / self.baud


class ResettingEndpoint:
    """An endpoint that is reset after so many bytes, again and again.

    Parameters
    ----------
    reset_after : bytes. None: never.
    """

    def __init__(self, endpoint: Endpoint, reset_after: int | None) -> None:
        if reset_after is not None and reset_after < 1:
            raise ValueError(f"reset_after must be at least 1, not {reset_after}")
        self._endpoint = endpoint
        self._after = reset_after
        self._left = reset_after or 0
        self.resets = 0

    def receive(self, data: bytes) -> bytes:
        """As `Endpoint.receive`."""
        if self._after is None:
            return self._endpoint.receive(data)
        answer = b""
        while len(data) >= self._left:
            answer += self._endpoint.receive(data[: self._left])
            data = data[self._left :]
            self._endpoint.reset()
            self.resets += 1
            self._left = self._after
        self._left -= len(data)
        return answer + self._endpoint.receive(data)
