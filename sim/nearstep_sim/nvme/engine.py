"""`nvme_card` in Verilator, a call at a time."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nearstep.linux.pci import DmaError
from nearstep_hw.generate import build, verilog
from nearstep_hw.nvme import layout
from nearstep_hw.nvme.layout import OrderKind
from nearstep_hw.verilog import flat_ports
from nearstep_sim.verilate.abi import load
from nearstep_sim.verilate.build import Model, stored, verilate_library, verilog_of
from nearstep_spec.nvme import COMPLETION_BYTES, MSIX_TABLE, NvmeConfig

HARNESS = Path(__file__).with_name("card.cpp")
BEAT_BYTES = layout.BEAT_BITS // 8
SLVERR = 2
MESSAGES = 0xFEE00000
QUIET = 32
"""Cycles without anything to be seen, after which nothing is under way."""

SHOWN = (
    "m_axi__arvalid", "m_axi__awvalid", "m_axi__wvalid", "o_command__valid", "o_answer__valid",
    "o_part__valid", "o_report__valid", "csr__ack", "cfg_interrupt_msix__int",
)  # fmt: skip
"""Outputs that are looked at when they rise."""

ALWAYS = (
    "m_axi__arready", "m_axi__awready", "m_axi__wready", "o_command__ready", "o_answer__ready",
    "o_part__ready", "o_report__ready", "cfg_interrupt_msix__enable", "cfg_interrupt_msix__sent",
)  # fmt: skip
"""Inputs that are 1."""


class Host(Protocol):
    """Memory of the host and the firmware, as the engine sees them."""

    def dma_read(self, address: int, nbytes: int) -> bytes:
        """As `nearstep.linux.pci.PciFunction.dma_read`."""

    def dma_write(self, address: int, data: bytes) -> None:
        """As `nearstep.linux.pci.PciFunction.dma_write`."""

    def completed(self) -> None:
        """Count a completion that was written."""

    def interrupt(self, vector: int) -> None:
        """Send a vector of MSI-X."""

    def arrived(self, queue: int, entry: bytes) -> None:
        """Take a command."""

    def wrong_doorbell(self, information: int) -> None:
        """Take the report of a wrong doorbell."""

    def shuts_down(self) -> None:
        """Learn that caches must be flushed."""


class _Place(NamedTuple):
    first: int
    width: int


@cache
def _built() -> tuple[Path, dict[str, _Place], dict[str, _Place]]:
    """The library, and the places of inputs and outputs."""
    places: dict[str, dict[str, _Place]] = {"input": {}, "output": {}}
    sizes = {"input": 0, "output": 0}
    for name, way, width in flat_ports(build("nvme_card")):
        if name not in ("clk", "rst"):
            places[way][name] = _Place(sizes[way], width)
            sizes[way] += -(-width // 32)
    lines = ["#pragma once", f"#define OUT_WORDS {sizes['output']}"]
    for way, macro in (("input", "INPUTS"), ("output", "OUTPUTS")):
        ports = (
            f"PORT({name.replace('__', '___05F')}, {place.first}, {place.width})"
            for name, place in places[way].items()
        )
        lines.append(f"#define {macro} {' '.join(ports)}")
    text = HARNESS.read_text(encoding="utf-8")
    folder = stored("design", {"ports.hpp": "\n".join(lines) + "\n", "card.cpp": text})
    top = verilog_of("generator nvme_card", lambda: verilog("nvme_card"))
    model = Model(top="nvme_card", verilog=top, prefix="Vcard")
    library = verilate_library("nvme_card", [model], [folder / "card.cpp"])
    return library, places["input"], places["output"]


class CardPorts:
    """Ports of a card, by the names that they have in Verilog."""

    def __init__(self) -> None:
        library, self._inputs, self._outputs = _built()
        self._library = load(library, HARNESS)
        self._in = (ctypes.c_uint32 * sum(-(-p.width // 32) for p in self._inputs.values()))()
        count = sum(-(-p.width // 32) for p in self._outputs.values())
        self._out, self._until = (ctypes.c_uint32 * count)(), (ctypes.c_uint32 * count)()
        self._bytes = {"in": memoryview(self._in).cast("B"), "out": memoryview(self._out).cast("B")}
        for name in SHOWN:
            self._until[self._outputs[name].first] = 1
        self._card = self._library.card_open()
        weakref.finalize(self, self._library.card_close, self._card)

    def get(self, name: str) -> int:
        """The value of an output behind the last clock edge."""
        first, width = self._outputs[name]
        if width <= 32:
            return self._out[first]
        at = 4 * first
        return int.from_bytes(self._bytes["out"][at : at + 4 * -(-width // 32)], "little")

    def set(self, name: str, value: int) -> None:
        """Drive an input from now on."""
        first, width = self._inputs[name]
        if width <= 32:
            self._in[first] = value
            return
        nbytes = 4 * -(-width // 32)
        self._bytes["in"][4 * first : 4 * first + nbytes] = value.to_bytes(nbytes, "little")

    def clock(self, most: int) -> int:
        """Clock until one of `SHOWN` is 1, and at most so many cycles; return the cycles."""
        return int(self._library.card_run(self._card, self._in, self._out, self._until, most))


class RtlEngine:
    """The engine as firmware and a bridge of its PCIe block see it.

    Each call returns when nothing is under way in the engine: all accesses of the host's memory
    that it makes are made in the call. Calls that the host's methods make are carried out with the
    call that is under way. Callers hold one lock.

    Parameters
    ----------
    host : the other side.

    Attributes
    ----------
    cycles : since the reset.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._ports = CardPorts()
        self.cycles = 0
        queues = NvmeConfig().io_queues + 1
        self._command = layout.CommandLayout(queues)
        self._layouts: dict[str, Any] = {
            "i_done": layout.DoneLayout,
            "i_event": layout.EventLayout,
            "i_walk": layout.WalkLayout,
            "i_order": layout.OrderLayout(queues=queues, vectors=queues),
        }
        self._waiting: dict[str, deque[int]] = {name: deque() for name in self._layouts}
        self._beats: deque[tuple[int, bytes, int, int]] = deque()
        self._addresses: deque[int] = deque()
        self._data: deque[tuple[int, bytes]] = deque()
        self._responses: deque[int] = deque()
        self._answers: list[int] = []
        self._parts: list[tuple[int, int]] = []
        self._walked: int | None = None
        self._word: int | None = None
        self._shutting = self._inside = False
        for name in ALWAYS:
            self._ports.set(name, 1)
        self._ports.set("csr__write_mask", 0xF)
        for vector in range(queues):
            for index, value in enumerate((MESSAGES, 0, vector, 0)):
                self.write(MSIX_TABLE + 16 * vector + 4 * index, value)

    def read(self, offset: int) -> int:
        """Read a word of BAR 0."""
        return self._access(offset, "csr__read")

    def write(self, offset: int, value: int) -> None:
        """Write a word of BAR 0."""
        self._ports.set("csr__write_data", value)
        self._access(offset, "csr__write")

    def done(self, io: bool, status: int, result: int, *, complete: bool) -> None:
        """End a command, with a completion or without."""
        self._offer("i_done", io=io, complete=complete, status=status, result=result)

    def complete_later(self, identifier: int, result: int) -> None:
        """Complete an admin command that was ended without a completion."""
        self._offer("i_event", identifier=identifier, result=result)

    def order(self, kind: OrderKind, number: int, **fields: int) -> bool:
        """Create or delete a queue; return whether that was carried out."""
        self._offer("i_order", kind=kind, number=number, **fields)
        (answer,) = self._answers
        self._answers.clear()
        return bool(answer)

    def walk(
        self, io: bool, prp1: int, prp2: int, nbytes: int
    ) -> tuple[list[tuple[int, int]], int]:
        """Walk over PRP entries; return parts and status."""
        self._parts, self._walked = [], None
        self._offer("i_walk", io=io, prp1=prp1, prp2=prp2, nbytes=nbytes)
        assert self._walked is not None
        return self._parts, self._walked

    def flushed(self) -> None:
        """Report that caches are flushed."""
        self._pulse("i_flushed")

    def fail(self) -> None:
        """Stop the controller."""
        self._pulse("i_fail")

    def _pulse(self, name: str) -> None:
        self._ports.set(name, 1)
        self._step(1)
        self._ports.set(name, 0)
        self._settle()

    def _access(self, offset: int, strobe: str) -> int:
        self._ports.set("csr__address", offset)
        self._ports.set(strobe, 1)
        self._word = None
        self._step(1)
        self._ports.set(strobe, 0)
        self._settle()
        assert self._word is not None
        return self._word

    def _offer(self, name: str, **fields: int) -> None:
        self._waiting[name].append(self._layouts[name].const(fields).as_value().value)
        self._settle()

    def _settle(self) -> None:
        """Clock until nothing is under way; what waits for room in a queue of the host waits."""
        if self._inside:
            return
        self._inside = True
        try:
            quiet = 0
            while quiet < QUIET or self._is_shown():
                if self._drive():
                    quiet = 0
                else:  # an offer must be seen to be taken
                    quiet += self._step(1 if any(self._waiting.values()) else QUIET)
        finally:
            self._inside = False

    def _step(self, most: int) -> int:
        cycles = self._ports.clock(most)
        self.cycles += cycles
        return cycles

    def _drive(self) -> bool:
        """Answer what is shown, clock once, and return whether there was anything."""
        get, shown = self._ports.get, self._is_shown()
        offers = self._offers()
        answers = self._answer()
        if get("csr__ack"):
            self._word = get("csr__read_data")
        if get("cfg_interrupt_msix__int"):
            self._host.interrupt(get("cfg_interrupt_msix__data"))
        if get("o_command__valid"):
            found = self._command.from_bits(get("o_command__payload"))
            self._host.arrived(int(found.queue), int(found.entry).to_bytes(64, "little"))
        if get("o_answer__valid"):
            self._answers.append(get("o_answer__payload"))
        if get("o_part__valid"):
            part = layout.PartLayout.from_bits(get("o_part__payload"))
            if part.end:
                self._walked = int(part.status)
            else:
                self._parts.append((int(part.address), int(part.nbytes)))
        if get("o_report__valid"):
            self._host.wrong_doorbell(get("o_report__payload"))
        shutting = bool(get("o_shutting"))
        if shutting and not self._shutting:
            self._host.shuts_down()
        self._shutting = shutting
        if shown or offers or answers:
            self._step(1)
            return True
        return False

    def _is_shown(self) -> bool:
        return any(self._ports.get(name) for name in SHOWN)

    def _offers(self) -> bool:
        """Offer to the engine what firmware says; return whether anything was taken."""
        taken = False
        for name, values in self._waiting.items():
            self._ports.set(f"{name}__valid", bool(values))
            if values:
                self._ports.set(f"{name}__payload", values[0])
                if self._ports.get(f"{name}__ready"):
                    values.popleft()
                    taken = True
        return taken

    def _answer(self) -> bool:
        """Answer reads and writes of the host's memory; return whether there was an answer."""
        ports = self._ports
        answers = bool(self._beats or self._responses)
        ports.set("m_axi__rvalid", bool(self._beats))
        if self._beats:
            values = self._beats.popleft()
            ports.set("m_axi__rid", values[0])
            ports.set("m_axi__rdata", int.from_bytes(values[1], "little"))
            ports.set("m_axi__rresp", values[2])
            ports.set("m_axi__rlast", values[3])
        ports.set("m_axi__bvalid", bool(self._responses))
        if self._responses:
            ports.set("m_axi__bresp", self._responses.popleft())
        if ports.get("m_axi__arvalid"):
            self._read(ports.get("m_axi__arid"), ports.get("m_axi__araddr"),
                       ports.get("m_axi__arlen") + 1)  # fmt: skip
        if ports.get("m_axi__awvalid"):
            self._addresses.append(ports.get("m_axi__awaddr"))
        if ports.get("m_axi__wvalid"):
            data = ports.get("m_axi__wdata").to_bytes(BEAT_BYTES, "little")
            self._data.append((ports.get("m_axi__wstrb"), data))
        while self._addresses and self._data:
            self._write(self._addresses.popleft(), *self._data.popleft())
        return answers

    def _read(self, number: int, address: int, beats: int) -> None:
        data, response = bytes(BEAT_BYTES * beats), 0
        try:
            data = self._host.dma_read(address, BEAT_BYTES * beats)
        except DmaError:
            response = SLVERR
        for beat in range(beats):
            part = data[BEAT_BYTES * beat : BEAT_BYTES * (beat + 1)]
            self._beats.append((number, part, response, int(beat == beats - 1)))

    def _write(self, address: int, strobes: int, data: bytes) -> None:
        first, end = (strobes & -strobes).bit_length() - 1, strobes.bit_length()
        try:
            self._host.dma_write(address + first, data[first:end])
            if end == COMPLETION_BYTES:
                self._host.completed()
            self._responses.append(0)
        except DmaError:
            self._responses.append(SLVERR)
