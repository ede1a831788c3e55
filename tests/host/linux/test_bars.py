"""A card's own BARs behind vfio-user, and the driver for a card in a slot on the other side."""

from __future__ import annotations

import errno
import os
import random
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import nearstep
from nearstep import cli
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.backends.options import DeviceUrl
from nearstep.backends.pci import (
    DEVICES,
    FUNCTIONS,
    PciBackend,
    ResourceSlot,
    SilentCardError,
    open_device,
)
from nearstep.device import drive
from nearstep.errors import DeviceError, KernelError, MismatchError, UrlError, WaitTimeoutError
from nearstep.linux import bars
from nearstep.linux.bars import CardFunction, open_card
from nearstep.linux.vfio_user import Server
from nearstep.smartssd.device import SmartssdDevice
from nearstep_spec.pcie import MEMORY_BAR, MSIX_PBA_OFFSET, MSIX_TABLE_OFFSET, REGISTER_BAR
from nearstep_spec.smartssd.config import SmartssdConfig

from ..optim.conftest import like_torch
from . import client as vfio
from .client import Client

CONFIG_REGION = 7
SHAPE = "lanes=4&chunk_bytes=512&memory_bytes=4MiB"
MEMORY_BYTES = 4 << 20
URLS = {"golden": f"golden:smartssd?{SHAPE}", "pcie": f"sim:smartssd?{SHAPE}&bus=pcie"}
each_card = pytest.mark.parametrize(
    "served", ["golden", pytest.param("pcie", marks=pytest.mark.deep)], indirect=True
)
"""For a test of the model, and in depth of the RTL with its endpoint."""


class ClientSlot:
    """A slot whose function a client of vfio-user accesses, as QEMU does: writes are posted."""

    def __init__(self, path: Path) -> None:
        self.client = Client(path)
        self.client.write(CONFIG_REGION, 4, b"\x06\x00")

    def read(self, bar: int, offset: int, nbytes: int) -> bytes:
        cuts = range(offset, offset + nbytes, bars.ACCESS_BYTES)
        most = bars.ACCESS_BYTES
        return b"".join(self.client.read(bar, at, min(most, offset + nbytes - at)) for at in cuts)

    def write(self, bar: int, offset: int, data: bytes) -> None:
        for at in range(0, len(data), bars.ACCESS_BYTES):
            part = data[at : at + bars.ACCESS_BYTES]
            body = struct.pack("<QII", offset + at, bar, len(part)) + part
            self.client.send(vfio.WRITE, body, flags=1 << 4)

    def reset(self) -> None:
        assert self.client.call(vfio.RESET).error == 0
        self.client.write(CONFIG_REGION, 4, b"\x06\x00")

    def sleep(self) -> None:
        pass

    def listen(self) -> int:
        """Enable the vector; return its eventfd."""
        event = self.client.eventfd()
        irqs = struct.pack("<IIIII", 20, 4 | 32, 2, 0, 1)
        assert self.client.call(vfio.SET_IRQS, irqs, (event,)).error == 0
        self.client.write(CONFIG_REGION, 0x42, b"\x00\x80")
        return event

    def close(self) -> None:
        self.client.close()


class Served:
    """A function that a server offers at a path.

    Attributes
    ----------
    card : the device below it.
    """

    def __init__(self, function: CardFunction, path: Path) -> None:
        self.function, self.path = function, path
        card = function._card
        assert isinstance(card, EmulatedBackend)
        self.card = card

    @contextmanager
    def opened(self) -> Iterator[SmartssdDevice]:
        """The driver for a card in a slot."""
        config = self.function._card.config
        device = drive(PciBackend(ClientSlot(self.path), config), "pci:test")
        assert isinstance(device, SmartssdDevice)
        with device:
            yield device


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    function = open_card(URLS[getattr(request, "param", "golden")])
    server = Server(function, tmp_path / "s")
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield Served(function, tmp_path / "s")
    server.stop()
    thread.join(60)
    assert not thread.is_alive()
    function.close()


def train(device: SmartssdDevice, count: int, steps: int) -> int:
    """Train beside torch, and return the number of equal tensors."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(count, generator=generator)
    mine, theirs = (torch.nn.Parameter(values.clone()) for _ in range(2))
    optimizer = nearstep.optim.AdamW([mine], lr=1e-2, weight_decay=0.1, device=device)
    torchs = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, fused=True)
    equal = 0
    for _ in range(steps):
        mine.grad = torch.randn(count, generator=generator)
        theirs.grad = mine.grad.clone()
        optimizer.step()
        torchs.step()
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
        equal += 1
    states = optimizer.state_dict()["state"][0], torchs.state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        first, second = (each[name].view(torch.int32) for each in states)
        assert torch.equal(first, second)
        equal += 1
    return equal


@like_torch
@each_card
def test_ten_steps_have_torchs_bits(served: Served) -> None:
    with served.opened() as device:
        assert train(device, 1040, 10) == 12
    counters = served.function.counters
    assert (counters.refused, counters.unanswered) == (0, 0), counters
    assert counters.reads > 10


@each_card
def test_configuration_space_is_that_of_the_card(served: Served) -> None:
    client = ClientSlot(served.path).client
    config = client.read(CONFIG_REGION, 0, 256)
    assert struct.unpack_from("<HH", config) == (0x10EE, 0x9034)
    assert config[9:12] == b"\x00\x80\x05"
    client.write(CONFIG_REGION, 0x10, b"\xff" * 24)
    sizes = struct.unpack("<6I", client.read(CONFIG_REGION, 0x10, 24))
    assert sizes == (0xFFFFE000, 0, 0xFFC0000C, 0xFFFFFFFF, 0, 0)
    assert struct.unpack_from("<BBHII", config, 0x40) == (
        0x11, 0, 0, MSIX_TABLE_OFFSET, MSIX_PBA_OFFSET,
    )  # fmt: skip
    info = client.call(vfio.IRQ, struct.pack("<IIII", 16, 0, 2, 0)).body
    assert struct.unpack("<IIII", info)[3] == 1
    client.close()


@each_card
def test_memory_is_accessed_in_every_size_and_alignment(served: Served) -> None:
    slot = ClientSlot(served.path)
    draw = random.Random(7)
    expected = bytearray(draw.randbytes(8192))
    slot.write(MEMORY_BAR, 0, bytes(expected))
    for _ in range(60):
        at, nbytes = draw.randrange(4096), draw.choice([1, 2, 3, 4, 8, 8, 8, 17, 256, 4096])
        data = draw.randbytes(nbytes)
        slot.write(MEMORY_BAR, at, data)
        expected[at : at + nbytes] = data
        at = draw.randrange(4096)
        assert slot.read(MEMORY_BAR, at, nbytes) == expected[at : at + nbytes]
    assert slot.read(MEMORY_BAR, 0, 8192) == expected
    slot.write(MEMORY_BAR, MEMORY_BYTES - 8, b"lastword")
    assert slot.read(MEMORY_BAR, MEMORY_BYTES - 8, 8) == b"lastword"
    body = struct.pack("<QII", 0, MEMORY_BAR, bars.ACCESS_BYTES + 1)
    assert slot.client.call(vfio.READ, body).error == errno.EINVAL
    slot.close()


@each_card
def test_what_the_card_refuses_reads_as_ones_and_does_no_harm(served: Served) -> None:
    slot = ClientSlot(served.path)
    ident = slot.read(REGISTER_BAR, 0, 4)
    assert ident == (0x55504454).to_bytes(4, "little")
    assert slot.read(REGISTER_BAR, 0, 8)[:4] == ident
    refused = [(0, 1), (1, 4), (2, 2), (0, 16), (0xFFC, 4)]
    for offset, nbytes in refused:
        assert slot.read(REGISTER_BAR, offset, nbytes) == b"\xff" * nbytes
        slot.write(REGISTER_BAR, offset, bytes(nbytes))
    assert slot.read(REGISTER_BAR, 0, 4) == ident  # after the writes
    assert served.function.counters.refused == 2 * len(refused)
    for offset in (MSIX_TABLE_OFFSET, MSIX_PBA_OFFSET):
        slot.write(REGISTER_BAR, offset, b"\xff" * 4)
        assert slot.read(REGISTER_BAR, offset, 4) == bytes(4)
    slot.close()


def run_once(device: SmartssdDevice, count: int = 256) -> nearstep.Run:
    """Start a step of Adam on fresh arrays."""
    arrays = {name: device.alloc(count) for name in "pgmv"}
    for buffer in arrays.values():
        buffer.write(np.zeros(count, np.float32))
    return device.update("adam", arrays, step=1)


def slot_of(device: SmartssdDevice) -> ClientSlot:
    slot = device.backend._slot
    assert isinstance(slot, ClientSlot)
    return slot


def wait_for(event: int) -> int:
    """Wait for an eventfd, without an access of the card, and return its count."""
    assert select.select([event], [], [], 60)[0]
    return os.eventfd_read(event)


@each_card
def test_the_end_of_a_run_is_an_interrupt_while_nobody_looks(served: Served) -> None:
    with served.opened() as device:
        slot = slot_of(device)
        event = slot.listen()
        for _ in range(3):
            run = run_once(device)
            assert wait_for(event) == 1
            assert run.ended
            run.check_done()
        assert served.function.counters.interrupts == 3


@each_card
def test_a_masked_vector_is_pending_and_sent_once(served: Served) -> None:
    with served.opened() as device:
        slot = slot_of(device)
        event = slot.listen()
        count = 0
        for control, command in ((0xC000, 6), (0, 6), (0x8000, 2)):
            slot.client.write(CONFIG_REGION, 0x42, struct.pack("<H", control))
            slot.client.write(CONFIG_REGION, 4, struct.pack("<H", command))
            for _ in range(2):
                run_once(device).wait()
            assert served.function.counters.interrupts == count
            slot.client.write(CONFIG_REGION, 0x42, b"\x00\x80")
            slot.client.write(CONFIG_REGION, 4, b"\x06\x00")
            assert wait_for(event) == 1
            count += 1
            slot.read(REGISTER_BAR, 0, 4)
            assert served.function.counters.interrupts == count
    assert count == 3


@each_card
def test_a_reset_ends_a_run_without_an_interrupt(served: Served) -> None:
    with served.opened() as device:
        slot = slot_of(device)
        event = slot.listen()
        served.card.inject(Injection(kind="never", write=False))
        run = run_once(device)
        device.reset()
        served.card.heal()
        with pytest.raises(DeviceError):
            run.wait()
        assert slot.read(REGISTER_BAR, 0, 4) != b"\xff" * 4
        assert not select.select([event], [], [], 0.2)[0]
        slot.client.write(CONFIG_REGION, 0x42, b"\x00\x80")
        run_once(device).wait()
        assert wait_for(event) == 1


@like_torch
@each_card
def test_clients_disappear_at_random_and_the_next_one_trains(served: Served) -> None:
    draw = random.Random(11)
    gone = 0
    for _ in range(6):
        slot = ClientSlot(served.path)
        slot.listen()
        for _ in range(draw.randrange(40)):
            slot.write(MEMORY_BAR, 8 * draw.randrange(4096), draw.randbytes(8))
        ends = draw.randrange(3)
        if ends == 0:  # behind a request whose answer nobody takes
            slot.client.send(vfio.READ, struct.pack("<QII", 0, MEMORY_BAR, 4096))
        elif ends == 1:  # within a message
            slot.client.send(vfio.WRITE, struct.pack("<QII", 0, MEMORY_BAR, 64) + bytes(10),
                             size=16 + 16 + 64)  # fmt: skip
        slot.close()
        gone += 1
    with served.opened() as device:
        run_once(device, 20_000)
        slot_of(device).close()  # with a run under way
    with served.opened() as device:
        assert train(device, 528, 3) == 5
    assert gone == 6


@each_card
def test_failing_memory_ends_a_run_with_an_error_and_the_card_is_usable_again(
    served: Served,
) -> None:
    with served.opened() as device:
        event = slot_of(device).listen()
        served.card.inject(Injection(kind="slverr", write=False))
        with pytest.raises(KernelError) as caught:
            run_once(device).wait()
        assert caught.value.cause == "READ_RESPONSE"
        assert wait_for(event) == 1
        served.card.heal()
        run_once(device).wait()
        assert wait_for(event) == 1


@each_card
def test_a_failed_read_of_memory_is_all_ones_and_a_failed_write_is_noted(served: Served) -> None:
    slot = ClientSlot(served.path)
    slot.write(MEMORY_BAR, 0, b"12345678" * 16)
    assert slot.read(MEMORY_BAR, 0, 8) == b"12345678"
    served.card.inject(Injection(kind="slverr", write=False, host=True))
    assert slot.read(MEMORY_BAR, 0, 8) == b"\xff" * 8
    assert slot.read(MEMORY_BAR, 0, 8) == b"12345678"
    served.card.inject(Injection(kind="decerr", write=True, host=True))
    slot.write(MEMORY_BAR, 64, b"abcdefgh")
    assert slot.read(MEMORY_BAR, 64, 8) == b"12345678"
    assert slot.read(REGISTER_BAR, 0, 4) != b"\xff" * 4
    counters = served.function.counters
    assert (counters.refused, counters.unanswered) == (2, 0)
    assert "posted write to memory at 0x40" in counters.last
    slot.close()


@each_card
def test_a_write_that_failed_before_start_does_not_start_a_run_twice(served: Served) -> None:
    with served.opened() as device:
        slot = slot_of(device)
        event = slot.listen()
        run_once(device, 4).wait()
        assert wait_for(event) == 1
        served.card.inject(Injection(kind="slverr", write=True, host=True, base=MEMORY_BYTES - 64))
        slot.write(MEMORY_BAR, MEMORY_BYTES - 8, b"abcdefgh")
        slot.client.write(CONFIG_REGION, 0x42, b"\x00\x80")  # time passes: the write has failed
        slot.write(REGISTER_BAR, served.function._start, b"\1\0\0\0")  # the same run again
        assert wait_for(event) == 1
        slot.read(REGISTER_BAR, 0, 4)
    assert served.function.counters.refused == 1
    assert served.function.counters.interrupts == 2


@each_card
def test_a_kernel_that_reads_what_nobody_wrote_stops_the_card_until_a_reset(
    served: Served,
) -> None:
    with served.opened() as device:
        arrays = {name: device.alloc(256) for name in "pgmv"}
        run = device.update("adam", arrays, step=1)
        with pytest.raises(SilentCardError, match="not even with its ID"):
            run.wait()
        assert "nobody has written there" in served.function.counters.last
        device.reset()
        run_once(device).wait()


def test_a_card_that_does_not_answer_in_time_is_answered_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = ClientSlot(served.path)
    ident = slot.read(REGISTER_BAR, 0, 4)
    with served.card._lock:  # the card is slow
        monkeypatch.setattr(bars, "ANSWER_S", 0.05)
        assert slot.read(REGISTER_BAR, 0, 4) == b"\xff" * 4
        for number in range(bars.POSTED + 1):
            slot.write(MEMORY_BAR, 8 * number, b"abcdefgh")
        assert slot.read(MEMORY_BAR, 0, 8) == b"\xff" * 8
        assert slot.client.call(vfio.RESET).error == 0
    monkeypatch.undo()
    assert slot.read(REGISTER_BAR, 0, 4) == ident
    assert slot.read(MEMORY_BAR, 0, 8) != b"abcdefgh"  # a reset drops what has not begun
    assert served.function.counters.unanswered == 3
    slot.close()


def test_a_wait_of_a_card_that_hangs_is_bounded(served: Served) -> None:
    with served.opened() as device:
        served.card.inject(Injection(kind="never", write=False))
        run = run_once(device)
        with pytest.raises(WaitTimeoutError, match="waited 50 steps"):
            run.wait(max_cycles=50)
        served.card.heal()
        device.reset()
        run_once(device).wait()


def test_the_driver_refuses_a_card_of_another_configuration(served: Served) -> None:
    other = SmartssdConfig(memory_bytes=MEMORY_BYTES)
    backend = PciBackend(ClientSlot(served.path), other)
    with pytest.raises(MismatchError, match="updater0"):
        drive(backend, "pci:test")
    backend.close()


def test_the_server_of_the_command_serves_bars(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nearstep", "card", "serve", URLS["golden"], "--front",
               "bars", "--socket", "s"]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as made:
        assert made.stderr is not None
        assert "is served at s until Ctrl-C" in made.stderr.readline()
        slot = ClientSlot(tmp_path / "s")
        assert slot.read(REGISTER_BAR, 0, 4) == b"TDPU"
        slot.close()
        made.send_signal(signal.SIGINT)
        assert made.wait(60) == 0
        assert made.stderr.read() == "0 writes and 1 reads of BARs, 0 interrupts\n"


@pytest.mark.parametrize(("url", "more", "reason"), [
    ("golden:smartssd?cards=2", [], "with one card"),
    ("golden:axdimm", [], "golden:smartssd or sim:smartssd?bus=pcie"),
    (URLS["golden"], ["--serial", "2"], "--serial is an option of --front nvme"),
])  # fmt: skip
def test_what_has_no_bars_is_said(tmp_path: Path, url: str, more: list[str], reason: str) -> None:
    socket = tmp_path / "s"
    words = ["card", "serve", url, "--front", "bars", "--socket", str(socket), *more]
    done = CliRunner().invoke(cli._app(), words)
    assert done.exit_code in (1, 2)
    assert done.stderr.startswith("error: ")
    assert reason in done.stderr
    assert not socket.exists()


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sysfs with files in the place of BARs."""
    monkeypatch.setattr("nearstep.backends.pci.FUNCTIONS", tmp_path)
    folder = tmp_path / "0000:01:00.0"
    folder.mkdir()
    (folder / "enable").write_text("0\n")
    for bar, nbytes in ((0, 0x2000), (2, 1 << 16)):
        (folder / f"resource{bar}").write_bytes(bytes(nbytes))
    return folder


def test_resource_files_are_accessed_in_words_of_eight_bytes(sysfs: Path) -> None:
    slot = ResourceSlot(sysfs.name, 1 << 16)
    assert (sysfs / "enable").read_text() == "1"
    draw = random.Random(5)
    expected = bytearray(1 << 16)
    for _ in range(200):
        at, nbytes = draw.randrange(60_000), draw.choice([0, 1, 3, 4, 7, 8, 9, 16, 23, 64, 4096])
        data = draw.randbytes(nbytes)
        slot.write(MEMORY_BAR, at, data)
        expected[at : at + nbytes] = data
        assert slot.read(MEMORY_BAR, at, nbytes) == data
        assert slot.read(MEMORY_BAR, max(0, at - 9), nbytes) == expected[max(0, at - 9) :][:nbytes]
    slot.write(REGISTER_BAR, 8, b"word")
    slot.close()
    assert (sysfs / "resource2").read_bytes() == expected
    assert (sysfs / "resource0").read_bytes()[8:12] == b"word"


def test_what_is_no_card_in_a_slot_is_said(sysfs: Path) -> None:
    with pytest.raises(UrlError, match=r"no such function; valid: 0000:01:00\.0"):
        open_device("0000:02:00.0", {})
    with pytest.raises(MismatchError, match=r"BAR 2 of 0000:01:00\.0 must be 1048576 bytes"):
        open_device(sysfs.name, {"memory_bytes": "1MiB", "lanes": "4", "chunk_bytes": "512"})
    options = {"memory_bytes": "64KiB", "lanes": "4", "chunk_bytes": "512"}
    with pytest.raises(MismatchError, match=r"updater0\.id must be 0x55504454"):
        drive(open_device(sysfs.name, options), "pci:test")
    (sysfs / "resource0").write_bytes(b"\xff" * 0x2000)
    with pytest.raises(SilentCardError):
        open_device(sysfs.name, options)
    (sysfs / "enable").unlink()
    with pytest.raises(UrlError, match="enable: No such file"):
        open_device(sysfs.name, options)
    (sysfs / "driver").mkdir()
    with pytest.raises(MismatchError, match=r"driver of 0000:01:00\.0 must be none, not driver"):
        open_device(sysfs.name, options)


def test_a_slot_without_a_reset_says_so(sysfs: Path) -> None:
    slot = ResourceSlot(sysfs.name, 1 << 16)
    (sysfs / "reset").mkdir()  # cannot be written
    with pytest.raises(DeviceError, match=r"knows no reset of 0000:01:00\.0"):
        slot.reset()
    slot.close()


def test_a_name_with_colons_is_one_of_a_slot() -> None:
    name = DeviceUrl.parse("pci:0000:01:00.0?lanes=4")
    assert (name.backend, name.target) == ("pci", "0000:01:00.0")
    assert DEVICES[name.target].parse(name.options).card.kernel.lanes == 4
    assert str(FUNCTIONS) == "/sys/bus/pci/devices"
