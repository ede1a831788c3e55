"""`golden:smartssd`: registers, results and BARs of a card, without its cycles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Poll
from nearstep.backends.emulated import Injection
from nearstep.errors import RESPONSES, CompletionError, PostedWriteError
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


def open_golden(options: GoldenCardOptions) -> BarBackend | CardArray:
    """A card without a clock, or several."""
    return array_of(options, lambda: GoldenCard(options))


class GoldenCard(GoldenBackend, BarBackend):
    """A card without a clock. A posted write is in memory at once."""

    family = "smartssd"
    config: SmartssdConfig

    def __init__(self, options: GoldenCardOptions) -> None:
        self.config = options.config()
        self._engines = make_engines(self.config.kernel, options.engine)
        self._bulk = make_bulk(options.engine)
        self._traffic = BarTraffic()
        self._armed: list[ArmedInjection] = []
        self._failed: PostedWriteError | None = None
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
        if not self._armed:
            super().read_memory(address, out)
            self._traffic.count_read(address, out.size)
            return
        failed = None
        for first, size in cut(address, out.size, MAX_READ_REQUEST):
            response = self._response(first, size, write=False)
            if response is None:
                super().read_memory(first, out[first - address :][:size])
                self._traffic.count_read(first, size)
                continue
            self._traffic.read_tlps += 1
            self._traffic.completion_tlps += 1
            failed = failed or CompletionError(first, response, transactions=self.transactions())
        if failed is not None:
            raise failed

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self.check_memory("write", address, data.size)
        self._check_memory_fault()
        self._traffic.count_write(address, data.size)
        if not self._armed:
            super().write_memory(address, data)
            return
        for first, size in cut(address, data.size, MAX_PAYLOAD):
            response = self._response(first, size, write=True)
            if response is None:
                super().write_memory(first, data[first - address :][:size])
            elif self._failed is None:
                transactions = self.transactions()
                self._failed = PostedWriteError(first, response, transactions=transactions)

    def fill_memory(self, address: int, nbytes: int, element: NDArray[np.uint8]) -> None:
        if self._armed:
            Backend.fill_memory(self, address, nbytes, element)
            return
        self.check_memory("write", address, nbytes)
        self._check_memory_fault()
        self._traffic.count_write(address, nbytes)
        super().fill_memory(address, nbytes, element)

    def lend_memory(self, address: int, data: NDArray[np.uint8], *, writes: bool) -> bool:
        if self._armed or writes:  # what the kernel writes crosses the link when it is read
            return False
        self.check_memory("write", address, data.size)
        self._check_memory_fault()
        if not super().lend_memory(address, data, writes=writes):
            return False
        self._traffic.count_write(address, data.size)  # nobody can tell it from a write
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

    def inject(self, injection: Injection) -> None:
        if injection.host:
            self._armed.append(ArmedInjection(injection))
        else:
            super().inject(injection)

    def heal(self) -> None:
        super().heal()
        self._armed.clear()

    def _response(self, address: int, nbytes: int, *, write: bool) -> str | None:
        """What a request is answered with other than OKAY; whole beats are accessed."""
        beat = self.config.kernel.beat_bytes
        first, limit = address // beat * beat, -(-(address + nbytes) // beat) * beat
        if self._armed:
            self._log.append(f"{'write' if write else 'read'} HOST {first:#x}..{limit:#x}")
        answer = None
        for armed in self._armed:
            if not armed.hits(write, first, limit):
                continue
            kind = armed.injection.kind
            if kind in CODES:
                answer = RESPONSES[CODES[kind]]
            elif kind == "never":
                answer = "timeout"
        return answer
