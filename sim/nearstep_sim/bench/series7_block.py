"""A model of the 7-series integrated block for PCI Express in cocotbext-pcie: Gen2 x4, 128 bits."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import cocotb
from cocotb.clock import Clock
from cocotb.handle import HierarchyObject
from cocotb.queue import Queue
from cocotb.triggers import ClockCycles, RisingEdge
from cocotbext.pcie.core import Device
from cocotbext.pcie.core.caps import MsixCapability
from cocotbext.pcie.core.endpoint import Endpoint
from cocotbext.pcie.core.tlp import CplStatus, Tlp, TlpType
from cocotbext.pcie.core.utils import PcieId

from nearstep_sim.bench.cc_monitor import RCB_BYTES, StreamError

LANES = 4
DWORD_BYTES = 4
USER_CLOCK_NS = 8  # 125 MHz
RESET_CYCLES = 12
BOTH_OF_64_BITS = 3  # bits of bar_hit of a BAR that takes two
EXTRA_NON_POSTED = 2
"""Requests that may still be delivered while rx_np_ok is low (release notes of the core, 1.2)."""

ALL_BYTES = 0xFFFF
FORMS = ("free", "aligned", "dense")
"""Packing of packets: random, each at lane 0, or as dense as possible."""

PLAIN_COMPLETIONS = (TlpType.CPL, TlpType.CPL_LOCKED)
REQUESTS = frozenset(
    {
        TlpType.MEM_READ, TlpType.MEM_READ_64, TlpType.MEM_WRITE, TlpType.MEM_WRITE_64,
        TlpType.MEM_READ_LOCKED, TlpType.MEM_READ_LOCKED_64, TlpType.IO_READ, TlpType.IO_WRITE,
    }
)  # fmt: skip


class SentPacket(Tlp):
    """A packet of the transmit stream."""

    @property
    def locked(self) -> bool:
        """Whether the completion is of a locked read."""
        return self.fmt_type in (TlpType.CPL_LOCKED, TlpType.CPL_LOCKED_DATA)


@dataclass
class _Shown:
    """A packet queued for the receive stream."""

    dwords: list[int]
    bar_hit: int


class Pausable:
    """A side of a stream that stalls on command or by a generator."""

    def __init__(self) -> None:
        self.pause = False
        self._generator: Iterator[bool] | None = None

    def set_pause_generator(self, generator: Iterator[bool]) -> None:
        """Stall in the cycles for which `generator` yields True."""
        self._generator = generator

    def stalls(self) -> bool:
        """Whether the stream stalls in this cycle."""
        return self.pause or (self._generator is not None and next(self._generator))


class Series7Function(Endpoint):  # type: ignore[misc]
    """Capabilities at the block's offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_capability(self.pm_cap, offset=0x40 // 4)
        self.register_capability(self.pcie_cap, offset=0x60 // 4)
        self.msix_cap = MsixCapability()
        self.register_capability(self.msix_cap, offset=0x9C // 4)


class Series7PcieDevice(Device):  # type: ignore[misc]
    """The block below a switch or root complex: streams and configuration outputs.

    Packets are encoded and decoded by `cocotbext.pcie.core.tlp`. On the receive stream packets
    begin at lane 0 or in the middle of a beat, with or without the end of another packet before
    them, and invalid lanes are random. While rx_np_ok is low, after a reset too, up to two
    non-posted requests are still delivered; the others wait, and posted ones pass them. Packets on
    the transmit stream are checked: `StreamError` if TVALID falls or a beat changes before it is
    taken, if a packet's length contradicts its header, if a completion is split at an illegal
    address, or if the ID is wrong.

    Parameters
    ----------
    dut : design with the ports of `Series7Adapter`.
    clock, reset : of the block.
    max_payload : supported payload in bytes.
    vectors : of MSI-X.
    table, pending : BAR and offset of the table and of the pending bits.
    seed : seed of the packing and of invalid lanes.

    Attributes
    ----------
    cq_source, cc_sink : stalls of the receive and the transmit stream.
    cq_queue : requests to deliver; `bar_id` is the BAR.
    form : see `FORMS`.
    digests : whether a digest is appended to packets.
    packets : packets sent by the design.
    checks : packets checked.
    max_payload : bytes that the host allows.
    middles, straddles, held_back : packets that began in the middle of a beat, packets after the
        end of another one in the same beat, and requests that waited for rx_np_ok.
    """

    def __init__(
        self,
        dut: HierarchyObject,
        *,
        clock: object,
        reset: object,
        max_payload: int,
        vectors: int,
        table: tuple[int, int],
        pending: tuple[int, int],
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.dut, self.clock, self.reset = dut, clock, reset
        self.append_function(Series7Function())
        function = self.functions[0]
        function.pcie_cap.max_payload_size_supported = (max_payload // 128 - 1).bit_length()
        cap = function.msix_cap
        cap.msix_table_size = vectors - 1
        cap.msix_table_bar_indicator_register, cap.msix_table_offset = table
        cap.msix_pba_bar_indicator_register, cap.msix_pba_offset = pending
        self.cq_source, self.cc_sink = Pausable(), Pausable()
        self.cq_queue: Queue[Tlp] = Queue()
        self.form = "free"
        self.digests = False
        self.packets: list[SentPacket] = []
        self.checks = 0
        self.max_payload = 128
        self.middles = self.straddles = self.held_back = 0
        self._random = random.Random(f"{seed} series7")
        self._held: deque[Tlp] = deque()
        self._under_way: _Shown | None = None
        self._extra = 0
        self._non_posted_ok = False
        self._sent: Queue[SentPacket] = Queue()
        for name in ("m_axis_rx__tvalid", "m_axis_rx__tuser", "s_axis_tx__tready"):
            getattr(dut, name).value = 0
        dut.cfg_to_turnoff.value = 0
        for task in (self._reset(), self._configure(), self._receive(), self._transmit()):
            cocotb.start_soon(task)
        cocotb.start_soon(self._forward())
        cocotb.start_soon(Clock(clock, USER_CLOCK_NS, unit="ns").start())

    async def upstream_recv(self, tlp: Tlp) -> None:
        """Accept a packet from the link: requests of a BAR are queued for the receive stream."""
        if tlp.fmt_type in REQUESTS:
            function = self.functions[0]
            io = tlp.fmt_type in (TlpType.IO_READ, TlpType.IO_WRITE)
            if bar := function.match_bar(tlp.address, io):
                tlp.release_fc()
                tlp.bar_id = bar[0]
                self.cq_queue.put_nowait(tlp)
                return
        await super().upstream_recv(tlp)

    async def _reset(self) -> None:
        self.reset.value = 1
        await ClockCycles(self.clock, RESET_CYCLES)
        self.reset.value = 0

    async def _configure(self) -> None:
        function, dut = self.functions[0], self.dut
        while True:
            own = function.pcie_id
            dut.cfg_bus_number.value = own.bus
            dut.cfg_device_number.value = own.device
            dut.cfg_function_number.value = own.function
            dut.cfg_command.value = (await function.read_config_register(1)) & 0xFFFF
            dut.cfg_dcommand.value = function.pcie_cap.max_payload_size << 5
            dut.cfg_interrupt_msixenable.value = int(function.msix_cap.msix_enable)
            dut.cfg_interrupt_msixfm.value = int(function.msix_cap.msix_function_mask)
            await RisingEdge(self.clock)

    # Receive stream

    async def _receive(self) -> None:
        dut = self.dut
        shown = False
        while True:
            await RisingEdge(self.clock)
            if self.reset.value:
                continue
            self._non_posted_ok = bool(dut.rx_np_ok.value)
            if self._non_posted_ok:
                self._extra = 0
            if shown and not dut.m_axis_rx__tready.value:
                continue
            beat = None if self.cq_source.stalls() else self._beat()
            shown = beat is not None
            dut.m_axis_rx__tvalid.value = int(shown)
            data, user = beat or (None, self._random.getrandbits(22))
            lanes = data or [None] * LANES
            words = [self._random.getrandbits(32) if word is None else word for word in lanes]
            dut.m_axis_rx__tdata.value = sum(word << 32 * i for i, word in enumerate(words))
            dut.m_axis_rx__tuser.value = user

    def _beat(self) -> tuple[list[int | None], int] | None:
        """Return the next beat: dwords by lane, TUSER; None if there is none."""
        lanes: list[int | None] = [None] * LANES
        start = end = None
        lane = 0
        packet = self._under_way
        hit = 0
        if packet is None:
            packet = self._next()
            if packet is None:
                return None
            lane = 0 if self.form != "free" or self._random.random() < 0.5 else LANES // 2
            start, hit = lane, packet.bar_hit
            self.middles += lane > 0
        hit = packet.bar_hit
        lane, done = self._fill(lanes, lane, packet)
        if done:
            end = lane - 1
            packet = None
            near = {"free": self._random.random() < 0.7, "aligned": False, "dense": True}
            if lane <= LANES // 2 and start is None and near[self.form]:
                packet = self._next()
                if packet is not None:
                    start, hit = LANES // 2, packet.bar_hit
                    self.middles += 1
                    self.straddles += 1
                    self._fill(lanes, start, packet)
        self._under_way = packet
        user = hit << 2 | self._random.getrandbits(2) << 15
        if start is not None:
            user |= 1 << 14 | DWORD_BYTES * start << 10
        if end is not None:
            user |= 1 << 21 | (DWORD_BYTES * end + 3) << 17
        return lanes, user

    @staticmethod
    def _fill(lanes: list[int | None], lane: int, packet: _Shown) -> tuple[int, bool]:
        """Put dwords of a packet into lanes; return the next lane, and whether the packet has
        ended.
        """
        while lane < LANES and packet.dwords:
            lanes[lane] = packet.dwords.pop(0)
            lane += 1
        return lane, not packet.dwords

    def _next(self) -> _Shown | None:
        tlp = self._choose()
        if tlp is None:
            return None
        tlp.td = tlp.td or self.digests
        raw = bytes(tlp.pack())
        dwords = [int.from_bytes(raw[i : i + 4], "big") for i in range(0, len(raw), 4)]
        if tlp.td:
            dwords.append(self._random.getrandbits(32))
        wide = bool(self.functions[0].bar[tlp.bar_id] & 4) if tlp.bar_id < 6 else False
        return _Shown(dwords, (BOTH_OF_64_BITS if wide else 1) << tlp.bar_id)

    def _choose(self) -> Tlp | None:
        """Return the next packet in PCIe order, non-posted ones only if allowed."""
        if self._held and self._may_show():
            return self._held.popleft()
        while not self.cq_queue.empty():
            tlp = self.cq_queue.get_nowait()
            if not tlp.is_nonposted() or (not self._held and self._may_show()):
                return tlp
            self._held.append(tlp)
            self.held_back += 1
        return None

    def _may_show(self) -> bool:
        """Return whether a non-posted request may be delivered now."""
        if self._non_posted_ok:
            return True
        self._extra += 1
        return self._extra <= EXTRA_NON_POSTED

    # Transmit stream

    async def _transmit(self) -> None:
        dut = self.dut
        names = ("tdata", "tkeep", "tlast", "tuser")
        ready = False
        shown: tuple[int, ...] | None = None
        words: list[int] = []
        while True:
            await RisingEdge(self.clock)
            if self.reset.value:
                continue
            beat = None
            if dut.s_axis_tx__tvalid.value:
                beat = tuple(int(getattr(dut, f"s_axis_tx__{name}").value) for name in names)
            if shown is not None and beat != shown:
                raise StreamError(f"a beat changed from {shown} to {beat}")
            shown = None if ready else beat
            if ready and beat is not None:
                words = self.take(words, beat)
            ready = not self.cc_sink.stalls()
            dut.s_axis_tx__tready.value = int(ready)

    def take(self, words: list[int], beat: tuple[int, ...]) -> list[int]:
        """Append a beat (TDATA, TKEEP, TLAST, TUSER) to the dwords of its packet.

        Returns
        -------
        list[int] : the dwords of the packet until now; none if it has ended.

        Raises
        ------
        StreamError
        """
        data, keep, last, user = beat
        count = keep.bit_count() // DWORD_BYTES
        if keep != (1 << DWORD_BYTES * count) - 1 or not count:
            raise StreamError(f"TKEEP {keep:#x} has a hole, or a part of a dword")
        if user:
            raise StreamError(f"TUSER must be 0, not {user:#x}")
        if not last and keep != ALL_BYTES:
            raise StreamError(f"a packet continues behind TKEEP {keep:#x}")
        words = [*words, *(data >> 32 * index & 0xFFFF_FFFF for index in range(count))]
        if not last:
            return words
        self._finish(words)
        return []

    def _finish(self, words: list[int]) -> None:
        raw = b"".join(word.to_bytes(4, "big") for word in words)
        packet = SentPacket.unpack(bytearray(raw))
        own: PcieId = self.functions[0].pcie_id
        payload = packet.length if packet.has_data() else 0
        expected = packet.get_header_size_dw() + payload
        if len(words) != expected:
            raise StreamError(f"a packet of {len(words)} dwords, expected {expected}")
        if packet.is_completion():
            if packet.completer_id != own:
                raise StreamError(f"completer {packet.completer_id}, expected {own}")
            self._check_completion(packet, payload)
        else:
            if packet.requester_id != own:
                raise StreamError(f"requester {packet.requester_id}, expected {own}")
            kinds = (TlpType.MEM_WRITE, TlpType.MEM_WRITE_64)
            if packet.fmt_type not in kinds or payload != 1 or packet.first_be != 0xF:
                raise StreamError(f"{packet!r} is no message")
            if (packet.fmt_type is TlpType.MEM_WRITE_64) != (packet.address >= 1 << 32):
                raise StreamError(f"{packet!r} has the wrong length of header")
        if not packet.check():
            raise StreamError(f"{packet!r} is malformed")
        self.packets.append(packet)
        self.checks += 1
        self._sent.put_nowait(packet)

    def _check_completion(self, packet: SentPacket, payload: int) -> None:
        if packet.status != CplStatus.SC:
            if packet.fmt_type not in PLAIN_COMPLETIONS:
                raise StreamError(f"status {packet.status} with {payload} dwords of payload")
            return
        if DWORD_BYTES * payload > self.max_payload:
            raise StreamError(f"{payload} dwords, at most {self.max_payload} bytes")
        start = packet.lower_address
        end = (start & ~3) + DWORD_BYTES * payload
        if packet.byte_count > end - start and end % RCB_BYTES:
            raise StreamError(f"cut at {end % RCB_BYTES:#x} of {RCB_BYTES:#x} bytes")

    async def _forward(self) -> None:
        while True:
            await self.send(Tlp(await self._sent.get()))
