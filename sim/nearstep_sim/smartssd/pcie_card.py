"""`sim:smartssd?bus=pcie`: the card as it is shipped, Verilated, behind a model of a PCIe block."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.endpoint import EndpointBackend
from nearstep.errors import ArgumentError
from nearstep_sim.smartssd.array import CardArray
from nearstep_sim.smartssd.bar import MAX_PAYLOAD, MAX_READ_REQUEST, BarBackend
from nearstep_sim.smartssd.card import STATUS, CardBackend, cards_of
from nearstep_sim.smartssd.library import pcie_card_library
from nearstep_sim.smartssd.options import PcieCardOptions, SimulatedCardOptions
from nearstep_sim.verilate.abi import structure, values
from nearstep_spec.pcie import REGISTER_BYTES

REGISTER_BASE = 0xE000_0000
MEMORY_BASE = 1 << 40
"""Bus addresses of the BARs."""

FIRST_REQUESTER = 0x0300
"""IDs of requesters below are those of host and drive."""

MOST_DWORDS = 3 + 1024
COMPLETED_BY = 8
"""A status of the harness from here on is that of a completion."""

COMPLETION_STATUS = {1: "UNSUPPORTED REQUEST", 4: "COMPLETER ABORT"}
"""Ref: PCIe Base Specification, table 2-34."""

_Shape = structure("models/pcie/host.hpp", "PcieShape")


_Counters = structure("models/pcie/host.hpp", "PcieCounters")


@dataclass(frozen=True)
class Answer:
    """A completion, as received by its requester.

    Attributes
    ----------
    requester, tag : of the request.
    status : 0 successful, 1 Unsupported Request, 4 Completer Abort.
    lower_address, byte_count, traffic_class, attributes : of the header.
    payload : dwords.
    request : with an error of the card, the copy of the request: byte enables and descriptor.
    """

    requester: int
    tag: int
    status: int
    lower_address: int
    byte_count: int
    traffic_class: int
    attributes: int
    payload: tuple[int, ...]
    request: tuple[int, ...]

    @property
    def ends(self) -> bool:
        """Whether this is the last completion of its request."""
        left = self.byte_count - 4 * len(self.payload) + (self.lower_address & 3)
        return self.status != 0 or left <= 0


def open_pcie_card(options: PcieCardOptions) -> BarBackend | CardArray:
    """Open the RTL of a card with its endpoint, or of several.

    Raises
    ------
    OptionError : a trace of several cards.
    """
    return cards_of(options, PcieCardBackend)


class PcieCardBackend(CardBackend, EndpointBackend):
    """A card of which every cycle is simulated, from its PCIe streams to the port of its DRAM.

    The PCIe block is a model: it forwards packets of host and drive to the card and checks the
    responses. Writes of registers are followed by reads without an enabled byte, not in `traffic`,
    whose completion shows that the write is done.

    Parameters
    ----------
    max_payload, max_read_request : of the link; powers of two, the first from 128 to 1024.
    bar_bytes : size of the memory BAR, which may be larger than the memory; None: as large.

    Raises
    ------
    ArgumentError : a size that a link cannot have.
    """

    source = "smartssd/pcie_card.cpp"
    _library = staticmethod(pcie_card_library)

    def __init__(
        self,
        options: SimulatedCardOptions,
        *,
        max_payload: int = MAX_PAYLOAD,
        max_read_request: int = MAX_READ_REQUEST,
        bar_bytes: int | None = None,
    ) -> None:
        if max_payload not in (128, 256, 512, 1024):
            raise ArgumentError(f"max_payload must be 128, 256, 512 or 1024, not {max_payload!r}")
        if max_read_request not in (128, 256, 512, 1024, 2048, 4096):
            raise ArgumentError(
                f"max_read_request must be a power of two from 128 to 4096, not "
                f"{max_read_request!r}"
            )
        bytes_ = options.memory_bytes if bar_bytes is None else bar_bytes
        if bytes_ < options.memory_bytes or bytes_ & (bytes_ - 1):
            raise ArgumentError(
                f"bar_bytes must be a power of two, at least {options.memory_bytes}, not {bytes_!r}"
            )
        self._shape = _Shape(
            memory_bytes=options.memory_bytes,
            bar_bytes=bytes_,
            beat_bytes=options.config().kernel.beat_bytes,
            register_bytes=REGISTER_BYTES,
            reorder=int(getattr(options, "reorder", False)),
            stall=round(options.stall * 65536),
            seed=options.seed,
        )
        super().__init__(options, max_payload=max_payload, max_read_request=max_read_request)

    def _more_parts(self) -> Sequence[ctypes.Structure]:
        return (self._shape,)

    @property
    def pcie_counters(self) -> dict[str, int]:
        """Return the block's counters since the device was opened.

        `passed` posted requests passed others, which were `held` so many cycles for want of the
        card's credits; requests `waited` so many cycles for those of the link. `messages` of MSI-X
        were sent, and `failed_messages` were not. `flushes` are reads without a byte. Of others
        the block dropped `malformed` packets and `unexpected` completions, and kept
        `configuration` requests and `unclaimed` ones, of no BAR, from the card.
        """
        counters = _Counters()
        self._lib.card_pcie_counters(self._device, ctypes.byref(counters))
        return dict(values(counters))

    @property
    def endpoint_counters(self) -> tuple[int, int, int]:
        """Outputs of the card: posted requests dropped, writes that failed, completions that say
        so; since its reset, up to 0xFFFE or 0xFFFF."""
        found = [ctypes.c_uint32() for _ in range(3)]
        self._lib.card_endpoint_counters(self._device, *map(ctypes.byref, found))
        dropped, writes, reads = (each.value for each in found)
        return dropped, writes, reads

    @property
    def messages(self) -> int:
        return self.pcie_counters["messages"]

    def allow_messages(self, *, enabled: bool, masked: bool) -> None:
        self._lib.card_allow_messages(self._device, enabled, masked)

    def send(self, words: NDArray[np.uint32]) -> None:
        """Send a packet of another device over the link, with any contents.

        Parameters
        ----------
        words : header as the standard draws it, byte 0 highest, and payload, lowest address lowest.
            A request has a requester of `FIRST_REQUESTER` or higher.

        Raises
        ------
        ArgumentError : the requester is one of host and drive.
        """
        packet = np.ascontiguousarray(words, np.uint32)
        if packet.size > 1 and int(packet[1]) >> 16 < FIRST_REQUESTER:
            raise ArgumentError(
                f"requester must be at least {FIRST_REQUESTER:#x}, not {int(packet[1]) >> 16:#x}"
            )
        self._lib.card_other(self._device, packet.ctypes.data, packet.size)

    def settle(self) -> None:
        """Run until every packet of `send` has been accepted, and completed if non-posted.

        Raises
        ------
        CompletionError : a request is not completed.
        """
        self._check(self._carry_out(self._lib.card_settle_others), "packets of others")

    def answers(self) -> list[Answer]:
        """Completions of packets of `send` since the last call."""
        buffer = np.empty(MOST_DWORDS, np.uint32)
        found = []
        while count := self._lib.card_completion(self._device, buffer.ctypes.data, buffer.size):
            found.append(_answer([int(word) for word in buffer[:count]]))
        return found

    @staticmethod
    def _status(code: int) -> str:
        if code < COMPLETED_BY:
            return STATUS[code]
        return COMPLETION_STATUS.get(code - COMPLETED_BY, f"STATUS {code - COMPLETED_BY}")


def _answer(words: Sequence[int]) -> Answer:
    status = words[1] >> 11 & 7
    rest = tuple(words[3:])
    return Answer(
        requester=words[1] >> 16,
        tag=words[2] & 0xFF,
        status=status,
        lower_address=words[0] & 0x7F,
        byte_count=words[0] >> 16 & 0x1FFF,
        traffic_class=words[2] >> 25 & 7,
        attributes=words[2] >> 28 & 7,
        payload=() if status else rest,
        request=rest if status else (),
    )
