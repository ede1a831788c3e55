"""`golden:smartssd`: registers, results and BARs of a card, without its cycles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import FILLED_BYTES, Backend, Completion, Ended, Poll
from nearstep.backends.emulated import Injection
from nearstep.backends.endpoint import EndpointBackend
from nearstep.backends.peer import FailedPeerTransfer, PeerTraffic
from nearstep.errors import (
    RESPONSES,
    CompletionError,
    MemoryBarError,
    PeerReadError,
    PeerWriteError,
    PostedWriteError,
)
from nearstep_sim.smartssd.array import CardArray, array_of
from nearstep_sim.smartssd.bar import (
    MAX_PAYLOAD,
    MAX_READ_REQUEST,
    BarBackend,
    BarTraffic,
    cut,
)
from nearstep_sim.smartssd.options import GoldenCardOptions
from nearstep_sim.updater.golden import GoldenBackend, make_bulk, make_engines, make_taker
from nearstep_sim.updater.golden_channel import GoldenChannel
from nearstep_sim.updater.golden_port import RESPONSES as CODES
from nearstep_sim.updater.golden_port import ArmedInjection
from nearstep_spec.smartssd.config import SmartssdConfig

Failed = TypeVar("Failed", bound=MemoryBarError)


def open_golden(options: GoldenCardOptions) -> BarBackend | CardArray:
    """Open a card without a clock, or several."""
    return array_of(options, lambda: GoldenCard(options))


class GoldenCard(GoldenBackend, BarBackend, EndpointBackend):
    """A card without a clock. A posted write is in memory at once."""

    family = "smartssd"
    config: SmartssdConfig

    def __init__(self, options: GoldenCardOptions) -> None:
        self.config = options.config()
        self._engines = make_engines(self.config.kernel, options.engine)
        self._bulk = make_bulk(options.engine)
        self._traffic = BarTraffic()
        self._peer_traffic = BarTraffic()
        self._armed: list[ArmedInjection] = []
        self._failed: PostedWriteError | None = None
        self._sent, self._pending, self._ends, self._may_send = 0, False, 0, True
        super().__init__(self.config.memory_bytes, make_taker(options.engine))

    def _make_channels(self) -> Sequence[GoldenChannel]:
        kernel, memory_bytes = self.config.kernel, self.config.memory_bytes
        registers = self.config.maps()["updater0"]
        log = self._log.append
        engines, end = self._engines, memory_bytes
        return [GoldenChannel(kernel, 0, memory_bytes, registers, engines, log, end, self._bulk)]

    @property
    def traffic(self) -> BarTraffic:
        return self._traffic

    @property
    def peer_traffic(self) -> PeerTraffic:
        return PeerTraffic(**vars(self._peer_traffic))

    @property
    def messages(self) -> int:
        self._send_messages()
        return self._sent

    def _send_messages(self) -> None:
        """Count the messages of the runs that ended since the last call, or keep one pending."""
        ends = self._channels[0].kernel.ends
        new, self._ends = ends - self._ends, ends
        if self._may_send:
            self._sent += new + self._pending
        self._pending = not self._may_send and (self._pending or new > 0)

    def allow_messages(self, *, enabled: bool, masked: bool) -> None:
        self._send_messages()  # those until now, as was allowed
        self._may_send = enabled and not masked

    def read_register(self, address: int) -> int:
        self.check_register(address)
        self.flush()
        self._traffic.count_register(write=False)
        return super().read_register(address)

    def write_register(self, address: int, value: int) -> None:
        self.check_register(address)
        self.flush()
        self._traffic.count_register(write=True)
        super().write_register(address, value)

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        self.check_memory("read", address, out.size)
        self.flush()
        failed = self._read(address, out, CompletionError)
        if failed is not None:
            raise failed

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self.check_memory("write", address, data.size)
        self._check_memory_fault()
        failed = self._write(address, data, PostedWriteError)
        self._failed = self._failed or failed

    def submit_peer_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        self._check_peer("read", address, out.size)
        failed = self._read(address, out, PeerReadError)
        return Ended() if failed is None else FailedPeerTransfer(failed)

    def submit_peer_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        self._check_peer("write", address, data.size)
        failed = self._write(address, data, PeerWriteError)
        return Ended() if failed is None else FailedPeerTransfer(failed)

    def peer_window(self, address: int, nbytes: int) -> NDArray[np.uint8] | None:
        self._check_peer("window", address, nbytes)
        if any(armed.injection.peer for armed in self._armed):
            return None
        return self._channels[0].memory.window(address, nbytes)

    def end_peer_write(self, address: int, nbytes: int) -> None:
        self.check_memory("write", address, nbytes)
        self._peer_traffic.count_write(address, nbytes)
        if nbytes:
            self._channels[0].memory.touch(address, nbytes)

    def end_peer_read(self, address: int, nbytes: int) -> None:
        self.check_memory("read", address, nbytes)
        self._peer_traffic.count_read(address, nbytes)

    def fill_memory(self, address: int, nbytes: int, element: NDArray[np.uint8]) -> None:
        if self._armed:
            Backend.fill_memory(self, address, nbytes, element)
            return
        self.check_memory("write", address, nbytes)
        self._check_memory_fault()
        part = FILLED_BYTES // element.size * element.size
        for at in range(0, nbytes, part):  # as the writes of `Backend.fill_memory`
            self._traffic.count_write(address + at, min(part, nbytes - at))
        super().fill_memory(address, nbytes, element)

    def lend_memory(self, address: int, data: NDArray[np.uint8], *, writes: bool) -> bool:
        if self._armed or writes:  # what the kernel writes crosses the link when it is read
            return False
        self.check_memory("write", address, data.size)
        self._check_memory_fault()
        if not super().lend_memory(address, data, writes=writes):
            return False
        self._traffic.count_write(address, data.size)  # as for the write that it replaces
        return True

    def memory_holds(self, address: int, data: NDArray[np.uint8]) -> bool | None:
        if self._failed is not None:
            return None
        return super().memory_holds(address, data)

    def flush(self) -> None:
        self._check_open()
        self._check_memory_fault()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        self.flush()
        super().wait(polls, max_cycles)

    def reset(self) -> None:
        super().reset()
        self._failed = None
        self._pending, self._ends = False, self._channels[0].kernel.ends

    def inject(self, injection: Injection) -> None:
        if injection.host or injection.peer:
            self._armed.append(ArmedInjection(injection))
        else:
            super().inject(injection)

    def heal(self) -> None:
        super().heal()
        self._armed.clear()

    def _check_peer(self, what: str, address: int, nbytes: int) -> None:
        self._check_open()
        self.check_memory(what, address, nbytes)
        self._check_memory_fault()

    def _read(self, address: int, out: NDArray[np.uint8], error: type[Failed]) -> Failed | None:
        """Carry out and count the requests of a read; return the error of the first that failed."""
        peer = error is PeerReadError
        traffic = self._peer_traffic if peer else self._traffic
        if not self._armed:
            super().read_memory(address, out)
            traffic.count_read(address, out.size)
            return None
        failed = None
        for first, size in cut(address, out.size, MAX_READ_REQUEST):
            response = self._response(first, size, write=False, peer=peer)
            if response is None:
                super().read_memory(first, out[first - address :][:size])
                traffic.count_read(first, size)
                continue
            traffic.read_tlps += 1
            traffic.completion_tlps += 1
            failed = failed or error(first, response, transactions=self.transactions())
        return failed

    def _write(self, address: int, data: NDArray[np.uint8], error: type[Failed]) -> Failed | None:
        """Carry out and count the requests of a write, as `_read`."""
        peer = error is PeerWriteError
        traffic = self._peer_traffic if peer else self._traffic
        traffic.count_write(address, data.size)
        if not self._armed:
            super().write_memory(address, data)
            return None
        failed = None
        for first, size in cut(address, data.size, MAX_PAYLOAD):
            response = self._response(first, size, write=True, peer=peer)
            if response is None:
                super().write_memory(first, data[first - address :][:size])
            else:
                failed = failed or error(first, response, transactions=self.transactions())
        return failed

    def _response(self, address: int, nbytes: int, *, write: bool, peer: bool) -> str | None:
        """Return the response to a request if other than OKAY; whole beats are accessed."""
        beat = self.config.kernel.beat_bytes
        first, limit = address // beat * beat, -(-(address + nbytes) // beat) * beat
        who = "DRIVE" if peer else "HOST"
        self._log.append(f"{'write' if write else 'read'} {who} {first:#x}..{limit:#x}")
        answer = None
        for armed in self._armed:
            if armed.injection.peer != peer or not armed.hits(write, first, limit):
                continue
            kind = armed.injection.kind
            if kind in CODES:
                answer = RESPONSES[CODES[kind]]
            elif kind == "never":
                answer = "timeout"
        return answer
