"""The adapter to the 7-series block by itself, against what cocotbext-pcie makes of its inputs.

The packets of the link are those of `cocotbext.pcie.core.tlp`, the frames of CQ and CC those of
its UltraScale+ model; neither was written here.
"""

import os
import random

import cocotb
import pytest
from cocotb.triggers import ClockCycles, RisingEdge
from cocotbext.axi import AxiStreamBus
from cocotbext.pcie.core import Device
from cocotbext.pcie.core.tlp import CplStatus, Tlp, TlpAttr, TlpType
from cocotbext.pcie.core.utils import PcieId
from cocotbext.pcie.xilinx.us.interface import CcSource, CqSink, UsPcieFrame
from cocotbext.pcie.xilinx.us.tlp import Tlp_us

from nearstep_sim.bench.cc_monitor import StreamError
from nearstep_sim.bench.cocotb_pcie import STALLS, pauses
from nearstep_sim.bench.series7_block import FORMS, Series7PcieDevice
from nearstep_spec.pcie import MEMORY_BAR, REGISTER_BAR

SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
COUNT = int(os.environ.get("NEARSTEP_COUNT", "150"))
APERTURES = {REGISTER_BAR: 13, MEMORY_BAR: 34}
REQUESTS = 16
OWN = PcieId(0x5A, 0x11, 3)
READS = (TlpType.MEM_READ, TlpType.MEM_READ_64)
WRITES = (TlpType.MEM_WRITE, TlpType.MEM_WRITE_64)
OTHERS = (
    TlpType.MEM_READ_LOCKED, TlpType.MEM_READ_LOCKED_64, TlpType.IO_READ, TlpType.IO_WRITE,
    TlpType.FETCH_ADD, TlpType.FETCH_ADD_64, TlpType.SWAP, TlpType.SWAP_64, TlpType.CAS,
    TlpType.CAS_64,
)  # fmt: skip
WITH_DATA = (*WRITES, *OTHERS[3:])
LENGTHS = (1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 64, 127, 1024)


class Message(Tlp_us):
    """A packet that no TLP class packs: power management, or with a payload."""

    words: tuple[int, ...] = ()

    def pack(self) -> bytes:
        return b"".join(word.to_bytes(4, "big") for word in self.words)

    def is_nonposted(self) -> bool:
        return False


class Unlinked(Series7PcieDevice):
    """The block without a link behind it."""

    async def send(self, tlp: Tlp) -> None:
        """Nothing is sent on: `packets` has it."""


class AdapterBench:
    """The adapter between the model of the block and those of a user of the UltraScale+ block."""

    def __init__(self, dut: object, *, mode: str = "free", form: str = "free") -> None:
        self.dut = dut
        self.random = random.Random(f"{SEED} {mode} {form}")
        self.device = Unlinked(
            dut, clock=dut.clk, reset=dut.rst, max_payload=512, vectors=1,
            table=(0, 0x1000), pending=(0, 0x1800), seed=SEED,
        )  # fmt: skip
        self.device.connect(Device().upstream_port)  # a port must be linked to something
        self.device.form = form
        function = self.device.functions[0]
        function.configure_bar(REGISTER_BAR, 1 << APERTURES[REGISTER_BAR])
        function.configure_bar(MEMORY_BAR, 1 << APERTURES[MEMORY_BAR], ext=True, prefetch=True)
        function.pcie_id = OWN
        bus = {
            name: AxiStreamBus.from_prefix(dut, name, bus_separator="__") for name in ("cq", "cc")
        }
        self.sink = CqSink(bus["cq"], dut.clk, dut.rst)
        self.source = CcSource(bus["cc"], dut.clk, dut.rst)
        chance = STALLS[mode]
        if mode in ("source", "both"):
            self.device.cq_source.set_pause_generator(pauses(chance, self.random))
            self.source.set_pause_generator(pauses(chance, self.random))
        if mode in ("sink", "both"):
            self.device.cc_sink.set_pause_generator(pauses(chance, self.random))
            self.sink.set_pause_generator(pauses(chance, self.random))
        self.credits = REQUESTS  # that the endpoint would give
        self.space = REQUESTS  # for requests that are not posted
        self.checks = 0
        dut.i_np_req.value = 0
        dut.msix__int.value = 0

    async def begin(self, *, late: int = 0) -> None:
        """Wait for the end of the reset; the first credit comes `late` cycles after it."""
        await RisingEdge(self.dut.rst)
        while self.dut.rst.value:
            await RisingEdge(self.dut.clk)
        cocotb.start_soon(self._give(late))

    async def _give(self, late: int) -> None:
        if late:
            await ClockCycles(self.dut.clk, late)
        while True:
            give = self.credits > 0
            self.credits -= give
            self.dut.i_np_req.value = int(give)
            await RisingEdge(self.dut.clk)

    async def _finish_request(self) -> None:
        """A request that is not posted has been dealt with, some time later."""
        await ClockCycles(self.dut.clk, self.random.randrange(1, 60))
        self.space += 1
        self.credits += 1

    def request(self, kind: TlpType, dwords: int) -> Tlp_us:
        rng = self.random
        tlp = Tlp_us()
        tlp.fmt_type = kind
        tlp.bar_id = rng.choice((REGISTER_BAR, MEMORY_BAR))
        tlp.bar_aperture = APERTURES[tlp.bar_id]
        tlp.requester_id = PcieId.from_int(rng.getrandbits(16))
        tlp.tag = rng.getrandbits(8)
        tlp.tc = rng.getrandbits(3)
        tlp.attr = TlpAttr(rng.getrandbits(3))
        tlp.td = rng.random() < 0.2
        tlp.address = 4 * rng.getrandbits(62 if tlp.get_header_size_dw() == 4 else 30)
        tlp.first_be = rng.getrandbits(4)
        tlp.last_be = rng.getrandbits(4) if dwords > 1 else 0
        tlp.length = dwords
        if kind in WITH_DATA:
            tlp.set_data(rng.randbytes(4 * dwords))
        if kind in WRITES and rng.random() < 0.1:
            tlp.ep = tlp.discontinue = True
        return tlp

    def any_request(self) -> Tlp_us:
        rng = self.random
        kind = rng.choice((*READS, *WRITES, *WRITES, rng.choice(OTHERS)))
        dwords = rng.choice(LENGTHS) if kind in (*READS, *WRITES) else rng.choice((1, 2, 4))
        tlp = self.request(kind, dwords)
        if kind in (*READS, *WRITES) and rng.random() < 0.1:
            tlp.th, tlp.ph = True, rng.getrandbits(2)
        return tlp

    def unwanted(self) -> Tlp_us:
        """A packet that no endpoint answers."""
        rng = self.random
        if rng.random() < 0.5:
            tlp = Tlp_us()
            tlp.fmt_type = rng.choice((TlpType.CPL, TlpType.CPL_DATA))
            if tlp.has_data():
                tlp.set_data(rng.randbytes(4 * rng.choice(LENGTHS)))
            return tlp
        size = rng.choice((0, 0, 1, 4, 5))
        head = (0x34 if size == 0 else 0x74) << 24 | size | rng.randrange(5) << 24
        message = Message()
        message.fmt_type = TlpType.MSG_TO_RC
        message.words = (head, *(rng.getrandbits(32) for _ in range(3 + size)))
        return message

    def same(self, got: UsPcieFrame, tlp: Tlp_us) -> None:
        """A frame of CQ against that of the UltraScale+ model."""
        wanted = Tlp_us(tlp)
        for name in ("bar_id", "bar_aperture", "discontinue"):
            setattr(wanted, name, getattr(tlp, name))
        if tlp.th and tlp.fmt_type in READS:
            wanted.first_be, wanted.last_be = 0xF, 0xF if tlp.length > 1 else 0
        frame = wanted.pack_us_cq()
        assert got.data == frame.data, f"{tlp!r}: {got!r}"
        assert (got.first_be, got.last_be) == (frame.first_be, frame.last_be)
        assert got.byte_en == frame.byte_en, f"{tlp!r}: {got!r}"
        assert got.discontinue == frame.discontinue
        self.checks += 1

    async def receive(self, requests: list[Tlp_us]) -> None:
        """Compare frames as they come with requests, each of which must come once.

        Posted ones come in their order, the others in theirs and behind the posted ones that were
        in front of them; never more of those than there is space for.
        """
        places = {True: [], False: []}
        for place, tlp in enumerate(requests):
            places[tlp.is_posted()].append(place)
        posted = 0
        while any(places.values()):
            frame = await self.sink.recv()
            is_posted = frame.data[2] >> 11 & 0xF == 1
            assert places[is_posted], f"one too many: {frame!r}"
            place = places[is_posted].pop(0)
            self.same(frame, requests[place])
            if is_posted:
                posted = place
            else:
                in_front = [each for each in range(place) if requests[each].is_posted()]
                assert not in_front or in_front[-1] <= posted
                self.space -= 1
                assert self.space >= 0, "more requests than there is space for"
                cocotb.start_soon(self._finish_request())

    def completion(self) -> tuple[UsPcieFrame, Tlp]:
        """A frame of CC, and the packet that it must become."""
        rng = self.random
        tlp = Tlp_us()
        locked = rng.random() < 0.2
        tlp.fmt_type = TlpType.CPL_LOCKED if locked else TlpType.CPL
        tlp.requester_id = PcieId.from_int(rng.getrandbits(16))
        tlp.tag, tlp.tc, tlp.attr = rng.getrandbits(8), rng.getrandbits(3), rng.getrandbits(3)
        tlp.lower_address = rng.getrandbits(7)
        extra: list[int] = []
        if rng.random() < 0.7:
            tlp.fmt_type = TlpType.CPL_LOCKED_DATA if locked else TlpType.CPL_DATA
            tlp.set_data(rng.randbytes(4 * rng.choice(LENGTHS)))
            low = tlp.lower_address & 3
            tlp.byte_count = 4 * tlp.length - (low if tlp.length > 1 else 3)
            tlp.ep = rng.random() < 0.1
        else:
            tlp.status = rng.choice((CplStatus.UR, CplStatus.CA))
            tlp.byte_count = rng.randrange(1, 4097)
            extra = [rng.getrandbits(32) for _ in range(5)]
        frame = tlp.pack_us_cc()
        frame.data += extra
        frame.update_parity()
        packet = Tlp(tlp)
        packet.completer_id = OWN
        return frame, packet

    async def interrupt(self, address: int, word: int) -> Tlp:
        """Offer a message, and wait until it is sent; the packet that it must become."""
        dut = self.dut
        dut.msix__address.value, dut.msix__data.value, dut.msix__int.value = address, word, 1
        await RisingEdge(dut.clk)
        dut.msix__int.value = 0
        while True:
            await RisingEdge(dut.clk)
            assert not dut.msix__fail.value
            if dut.msix__sent.value:
                break
        packet = Tlp()
        packet.fmt_type = TlpType.MEM_WRITE_64 if address >> 32 else TlpType.MEM_WRITE
        packet.requester_id = OWN
        packet.set_addr_be_data(address, word.to_bytes(4, "little"))
        return packet

    def report(self, name: str) -> None:
        assert self.checks > 0
        device = self.device
        cocotb.log.info(
            "%s: %d checks, %d in the middle, %d straddles, %d held back",
            name, self.checks, device.middles, device.straddles, device.held_back,
        )  # fmt: skip


@cocotb.test()
@cocotb.parametrize(mode=list(STALLS), form=list(FORMS))
async def requests_become_frames(dut: object, mode: str, form: str) -> None:
    """All types, lengths and headers, with packets among them that are to be forgotten."""
    bench = AdapterBench(dut, mode=mode, form=form)
    await bench.begin()
    requests = []
    for _ in range(COUNT):
        if bench.random.random() < 0.15:
            bench.device.cq_queue.put_nowait(bench.unwanted())
        tlp = bench.any_request()
        requests.append(tlp)
        bench.device.cq_queue.put_nowait(tlp)
    await bench.receive(requests)
    await ClockCycles(dut.clk, 100)
    assert bench.sink.empty()
    if form != "aligned":
        assert bench.device.straddles > COUNT // 10
    bench.report(f"requests {mode} {form}")


@cocotb.test()
async def every_length_and_alignment(dut: object) -> None:
    """As writes, 1 to 40 dwords with both headers, a digest or not, close behind each other."""
    bench = AdapterBench(dut, form="dense")
    await bench.begin()
    requests = [
        bench.request(kind, dwords) for dwords in range(1, 41) for kind in WRITES for _ in range(2)
    ]
    for index, tlp in enumerate(requests):
        tlp.td = bool(index & 1)
        bench.device.cq_queue.put_nowait(tlp)
    await bench.receive(requests)
    bench.report("lengths")


@cocotb.test()
@cocotb.parametrize(late=[0, 40])
async def reads_are_held_back_and_writes_pass_them(dut: object, late: int) -> None:
    """With nothing answered, no more reads come than there is space for, and every write does.

    Not even if the block shows reads before it has been told that it may.
    """
    bench = AdapterBench(dut, form="dense")
    await bench.begin(late=late)
    reads = [bench.request(TlpType.MEM_READ, 4) for _ in range(3 * REQUESTS)]
    writes = [bench.request(TlpType.MEM_WRITE_64, 3) for _ in range(30)]
    for tlp in (*reads, *writes):
        bench.device.cq_queue.put_nowait(tlp)
    await ClockCycles(dut.clk, 500)
    seen = {True: 0, False: 0}
    while not bench.sink.empty():
        frame = bench.sink.recv_nowait()
        seen[frame.data[2] >> 11 & 0xF == 1] += 1
    assert seen[True] == len(writes)
    assert REQUESTS // 2 <= seen[False] <= REQUESTS, seen
    bench.checks += 2
    for _ in range(len(reads) - seen[False]):
        bench.credits += 1
        await ClockCycles(dut.clk, 12)
    bench.credits += REQUESTS
    await ClockCycles(dut.clk, 100)
    while not bench.sink.empty():
        bench.sink.recv_nowait()
        seen[False] += 1
    assert seen[False] == len(reads)
    bench.checks += 1
    bench.report(f"order {late}")


@cocotb.test()
@cocotb.parametrize(mode=list(STALLS))
async def completions_and_messages_become_packets(dut: object, mode: str) -> None:
    """Both at once; each in its own order."""
    bench = AdapterBench(dut, mode=mode)
    await bench.begin()
    device, rng = bench.device, bench.random
    device.max_payload = 4096
    pairs = [bench.completion() for _ in range(COUNT)]
    for frame, _ in pairs:
        bench.source.send_nowait(frame)
    messages = []
    for _ in range(COUNT // 4):
        await ClockCycles(dut.clk, rng.randrange(1, 40))
        high = rng.choice((0, rng.getrandbits(32)))
        address = high << 32 | rng.getrandbits(30) << 2
        messages.append(await bench.interrupt(address, rng.getrandbits(32)))
    while len(device.packets) < len(pairs) + len(messages):
        await ClockCycles(dut.clk, 10)
    await ClockCycles(dut.clk, 50)
    sent = {True: [], False: []}
    for packet in device.packets:
        sent[packet.is_completion()].append(bytes(packet.pack()))
    assert sent[True] == [bytes(packet.pack()) for _, packet in pairs]
    assert sent[False] == [bytes(packet.pack()) for packet in messages]
    bench.checks += len(device.packets)
    bench.report(f"completions {mode}")


@cocotb.test()
async def what_the_host_has_configured(dut: object) -> None:
    """The largest payload, MSI-X only of a bus master, and power off."""
    bench = AdapterBench(dut)
    await bench.begin()
    function = bench.device.functions[0]
    for code in range(6):
        function.pcie_cap.max_payload_size = code
        await ClockCycles(dut.clk, 3)
        assert dut.o_max_payload.value == min(code, 3)
        bench.checks += 1
    for master in (False, True):
        for enable in (False, True):
            for mask in (False, True):
                function.bus_master_enable = master
                function.msix_cap.msix_enable = enable
                function.msix_cap.msix_function_mask = mask
                await ClockCycles(dut.clk, 3)
                assert dut.msix__enable.value == (master and enable)
                assert dut.msix__mask.value == mask
                bench.checks += 2
    for value in (1, 0):
        dut.cfg_to_turnoff.value = value
        await ClockCycles(dut.clk, 3)
        assert dut.cfg_turnoff_ok.value == value
        bench.checks += 1
    bench.report("configuration")


@cocotb.test()
async def the_checkers_are_heard(dut: object) -> None:
    """Each rule of the transmit stream broken once, and a frame that is not as expected."""
    bench = AdapterBench(dut)
    await bench.begin()
    device = bench.device
    _, packet = bench.completion()
    while packet.status != CplStatus.SC or packet.length != 2:
        _, packet = bench.completion()

    def beats(tlp: Tlp, *, extra: int = 0) -> list[tuple[int, ...]]:
        raw = bytes(tlp.pack()) + bytes(4 * extra)
        words = [int.from_bytes(raw[i : i + 4], "big") for i in range(0, len(raw), 4)]
        parts = [words[i : i + 4] for i in range(0, len(words), 4)]
        return [
            (sum(w << 32 * i for i, w in enumerate(part)), (1 << 4 * len(part)) - 1,
             int(part is parts[-1]), 0)
            for part in parts
        ]  # fmt: skip

    def play(shown: list[tuple[int, ...]]) -> None:
        words: list[int] = []
        for beat in shown:
            words = device.take(words, beat)
        assert not words

    def changed(**fields: object) -> list[tuple[int, ...]]:
        other = Tlp(packet)
        for name, value in fields.items():
            setattr(other, name, value)
        return beats(other)

    good = beats(packet)
    play(good)
    message = Tlp()
    message.fmt_type, message.requester_id = TlpType.MEM_WRITE_64, OWN
    message.set_addr_be_data(0x1000, bytes(4))
    cases = {
        "hole": [(good[0][0], 0xF0FF, 1, 0)],
        "part of a dword": [(good[0][0], 0x7FFF, 1, 0)],
        "TUSER": [(*good[0][:3], 1)],
        "continues behind": [(good[0][0], 0x0FFF, 0, 0)],
        "dwords, expected": beats(packet, extra=1),
        "completer": changed(completer_id=PcieId(1, 2, 3)),
        "cut at": changed(byte_count=2000, lower_address=4),
        "of payload": changed(status=CplStatus.UR),
        "length of header": beats(message),
    }
    for text, shown in cases.items():
        with pytest.raises(StreamError, match=text):
            play(shown)
        bench.checks += 1
    device.max_payload = 4
    with pytest.raises(StreamError, match="at most 4 bytes"):
        play(good)
    message.requester_id = PcieId(0, 0, 0)
    with pytest.raises(StreamError, match="requester"):
        play(beats(message))
    message.requester_id = OWN
    message.set_addr_be_data(1 << 40, bytes(8))
    with pytest.raises(StreamError, match="no message"):
        play(beats(message))
    tlp = bench.request(TlpType.MEM_WRITE, 5)
    bench.device.cq_queue.put_nowait(tlp)
    frame = await bench.sink.recv()
    bench.same(frame, tlp)
    for name in ("first_be", "tag", "address"):
        other = Tlp_us(tlp)
        other.bar_id, other.bar_aperture = tlp.bar_id, tlp.bar_aperture
        other.discontinue = tlp.discontinue
        setattr(other, name, getattr(tlp, name) ^ 4)
        with pytest.raises(AssertionError):
            bench.same(frame, other)
    bench.checks += 6
    bench.report("checkers")
