"""`sim:smartssd`: the RTL of a card, Verilated, behind emulated BARs, in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion, Ended, Poll
from nearstep.backends.peer import HostLinks, PeerTraffic
from nearstep.errors import CompletionError, OptionError, PostedWriteError
from nearstep_hw.smartssd.card import HOST_ID_WIDTH
from nearstep_sim.smartssd.array import CardArray, array_of
from nearstep_sim.smartssd.bar import MAX_PAYLOAD, MAX_READ_REQUEST, BarBackend, BarTraffic
from nearstep_sim.smartssd.library import card_library, whole_card_library
from nearstep_sim.smartssd.options import SimulatedCardOptions, VerilatedCardOptions
from nearstep_sim.updater.in_flight import STATUS, InFlight
from nearstep_sim.updater.shell import ShellBackend, ShellOptions
from nearstep_sim.updater.transfer import DeviceTransfer
from nearstep_sim.verilate.abi import structure, values
from nearstep_sim.verilate.harness import FAILED, CPoll

_Limits = structure("models/bar_host.hpp", "BarLimits")


_Failure = structure("models/bar_host.hpp", "BarFailure")


_Traffic = structure("models/bar_host.hpp", "BarCounters")


_Pacing = structure("models/peer_dma.hpp", "PeerPacing")


def open_card(options: VerilatedCardOptions) -> BarBackend | CardArray:
    """Open the RTL of a card, or of several.

    Raises
    ------
    OptionError : a trace of several cards.
    """
    return cards_of(options, CardBackend if options.top == "parts" else WholeCardBackend)


def cards_of(
    options: SimulatedCardOptions, backend: Callable[[SimulatedCardOptions], BarBackend]
) -> BarBackend | CardArray:
    """Open one card, or as many as the options specify, each made by `backend`.

    Raises
    ------
    OptionError : a trace of several cards.
    """
    if options.cards > 1 and options.trace is not None:
        raise OptionError("sim:smartssd", "trace", options.trace, "it is of one card")
    made = array_of(options, lambda: backend(options))
    made.links = HostLinks(
        options.uplink_bytes_per_s, options.link_bytes_per_s, options.uplink_duplex
    )
    made.hertz = float(options.clock_hz)
    return made


class CardBackend(ShellBackend, BarBackend):
    """A card of which every cycle is simulated.

    Accesses of memory take cycles too: accesses of the host's processor while the processor waits,
    those of the drive and of the host's DMA engine whenever cycles pass.

    Parameters
    ----------
    max_payload, max_read_request : of the link.
    """

    source = "smartssd/card.cpp"
    _library = staticmethod(card_library)

    def __init__(
        self,
        options: SimulatedCardOptions,
        *,
        max_payload: int = MAX_PAYLOAD,
        max_read_request: int = MAX_READ_REQUEST,
    ) -> None:
        self.config = options.config()
        self._limits = _Limits(max_payload, max_read_request)
        self._pacing = _Pacing(
            options.clock_hz,
            options.drive_read_bytes_per_s or 0,
            options.drive_write_bytes_per_s or 0,
            round(options.drive_latency_s * options.clock_hz),
            options.drive_duplex == "half",
        )
        self._under_way = InFlight(self._status)
        path = partial(self._library, self.config, trace=options.trace is not None)
        super().__init__(path, options, options.memory_bytes, host_ids=1 << HOST_ID_WIDTH)

    def _open(self, options: ShellOptions) -> int:
        lib = self._lib
        parts = (options, self._limits, self._pacing, *self._more_parts())
        return int(lib.card_open(*map(ctypes.byref, parts)))

    def _more_parts(self) -> Sequence[ctypes.Structure]:
        """Return further parameters of `card_open`."""
        return ()

    @property
    def traffic(self) -> BarTraffic:
        counters = _Traffic()
        self._lib.card_counters(self._device, ctypes.byref(counters))
        return BarTraffic(**values(counters))

    @property
    def peer_traffic(self) -> PeerTraffic:
        counters = _Traffic()
        self._lib.card_peer_counters(self._device, ctypes.byref(counters))
        return PeerTraffic(**values(counters))

    def submit_peer_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        return self._submit(address, out, write=False)

    def submit_peer_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        return self._submit(address, data, write=True)

    def submit_host_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        return self._submit(address, out, write=False, host=True)

    def submit_host_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        return self._submit(address, data, write=True, host=True)

    def look_at_transfers(self) -> None:
        """Complete the transfers of the drive, and of the host's engine, that have ended.

        No time passes and no error is raised.
        """
        self._under_way.look(partial(self._lib.card_peer_ended, self._device))

    def advance(self, max_cycles: int, polls: Sequence[Poll] = ()) -> None:
        array = (CPoll * len(polls))(*((p.address, p.mask, p.value) for p in polls))
        end = self._lib.device_cycle(self._device) + max_cycles

        def go(device: int) -> int:
            left = max(0, end - self._lib.device_cycle(device))
            return int(self._lib.card_advance(device, array, len(polls), left))

        self._check(self._carry_out(go), "advance")

    def reset(self) -> None:
        super().reset()
        self.look_at_transfers()

    def close(self) -> None:
        super().close()
        self._under_way.close(self._name)

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

    def _submit(
        self, address: int, data: NDArray[np.uint8], *, write: bool, host: bool = False
    ) -> Completion:
        kind = "write" if write else "read"
        self.check_memory(kind, address, data.size)
        begun = int(self._lib.device_cycle(self._device))
        if not data.size:
            return Ended(0)
        what = f"{'host' if host else 'drive'}'s {kind} of {data.size} bytes at {address:#x}"
        transfer = DeviceTransfer(self, what, begun, data, host=host)
        number = self._under_way.add(transfer)
        submit = self._lib.card_submit_write if write else self._lib.card_submit_read
        submit(self._device, number, address, data.ctypes.data, data.size, host)
        return transfer

    @staticmethod
    def _status(code: int) -> str:
        """Return the status of a request as text."""
        return STATUS[code]

    def _check(self, status: int, action: str) -> None:
        if status == FAILED:
            failure = _Failure()
            self._lib.card_failure(self._device, ctypes.byref(failure))
            kind = PostedWriteError if failure.write else CompletionError
            response = self._status(failure.response)
            raise kind(failure.address, response, transactions=self.transactions())
        super()._check(status, action)


class WholeCardBackend(CardBackend):
    """`CardBackend` with the shipped Verilog, which includes the functional units."""

    _library = staticmethod(whole_card_library)
