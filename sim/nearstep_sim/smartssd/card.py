"""`sim:smartssd`: the RTL of a card, Verilated, behind emulated BARs, in this process."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion
from nearstep.backends.peer import PeerTraffic
from nearstep.errors import (
    RESPONSES,
    CompletionError,
    DeviceError,
    OptionError,
    PostedWriteError,
)
from nearstep_hw.smartssd.card import HOST_ID_WIDTH
from nearstep_sim.smartssd.array import CardArray, array_of
from nearstep_sim.smartssd.bar import MAX_PAYLOAD, MAX_READ_REQUEST, BarBackend, BarTraffic
from nearstep_sim.smartssd.library import card_library
from nearstep_sim.smartssd.options import VerilatedCardOptions
from nearstep_sim.updater.shell import ShellBackend, ShellOptions
from nearstep_sim.verilate.abi import structure
from nearstep_sim.verilate.harness import FAILED

STATUS = (*RESPONSES, "timeout")
"""How a request through the memory BAR ended, by code."""


_Limits = structure("models/bar_host.hpp", "BarLimits")


_Failure = structure("models/bar_host.hpp", "BarFailure")


_Traffic = structure("models/bar_host.hpp", "BarCounters")


def open_card(options: VerilatedCardOptions) -> BarBackend | CardArray:
    """The RTL of a card, or of several.

    Raises
    ------
    OptionError : a trace of several cards.
    """
    if options.cards > 1 and options.trace is not None:
        raise OptionError("sim:smartssd", "trace", options.trace, "it is of one card")
    return array_of(options, lambda: CardBackend(options))


class CardBackend(ShellBackend, BarBackend):
    """A card of which every cycle is simulated. Accesses of its memory take cycles, too.

    Parameters
    ----------
    options
    max_payload, max_read_request : of the link.
    """

    def __init__(
        self,
        options: VerilatedCardOptions,
        *,
        max_payload: int = MAX_PAYLOAD,
        max_read_request: int = MAX_READ_REQUEST,
    ) -> None:
        self.config = options.config()
        self._limits = _Limits(max_payload, max_read_request)
        path = partial(card_library, self.config, trace=options.trace is not None)
        super().__init__(path, options, options.memory_bytes, host_ids=1 << HOST_ID_WIDTH)

    def _open(self, options: ShellOptions) -> int:
        lib = self._lib
        device, address = ctypes.c_void_p, ctypes.c_uint64
        lib.card_open.restype = device
        for name in ("read", "write"):
            getattr(lib, f"card_{name}").argtypes = [device, address, device, ctypes.c_uint64]
        for name in ("flush", "failure", "counters"):
            more = [] if name == "flush" else [ctypes.c_void_p]
            getattr(lib, f"card_{name}").argtypes = [device, *more]
        return int(lib.card_open(ctypes.byref(options), ctypes.byref(self._limits)))

    @property
    def traffic(self) -> BarTraffic:
        counters = _Traffic()
        self._lib.card_counters(self._device, ctypes.byref(counters))
        return BarTraffic(**{name: getattr(counters, name) for name, _ in _Traffic._fields_})

    @property
    def peer_traffic(self) -> PeerTraffic:
        return PeerTraffic()

    def submit_peer_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        raise DeviceError("the drive's side of the simulated card is not there yet")

    def submit_peer_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        raise DeviceError("the drive's side of the simulated card is not there yet")

    def read_register(self, address: int) -> int:
        self.check_register(address)
        return super().read_register(address)

    def write_register(self, address: int, value: int) -> None:
        self.check_register(address)
        super().write_register(address, value)

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        self.check_memory("read", address, out.size)
        status = self._carry_out(self._lib.card_read, address, out.ctypes.data, out.size)
        self._check(status, "memory read")

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self.check_memory("write", address, data.size)
        status = self._carry_out(self._lib.card_write, address, data.ctypes.data, data.size)
        self._check(status, "memory write")

    def flush(self) -> None:
        self._check(self._carry_out(self._lib.card_flush), "flush of posted writes")

    def _check(self, status: int, action: str) -> None:
        if status == FAILED:
            failure = _Failure()
            self._lib.card_failure(self._device, ctypes.byref(failure))
            kind = PostedWriteError if failure.write else CompletionError
            response = STATUS[failure.response]
            raise kind(failure.address, response, transactions=self.transactions())
        super()._check(status, action)
