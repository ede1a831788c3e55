"""`nearstep card serve`: a controller for a client of vfio-user, in another process."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearstep.linux.nvme.standard import Admin, Nvm, Register

from . import client as vfio
from .client import Client
from .guest import PAGE, SHAPE, Completion, entry

DATA, MEMORY_BYTES = 8 * PAGE, 16 * PAGE
QUEUES = {0: (PAGE, 2 * PAGE), 1: (3 * PAGE, 4 * PAGE)}


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "nearstep", "card", "serve", SHAPE, "--socket", "s",
               "--drive", "d",
               "--drive-mib", "1", "--memory-mib", "1"]  # fmt: skip
    made = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert made.stderr is not None
    line = made.stderr.readline()
    assert "is served at s until Ctrl-C" in line, line
    yield made
    made.kill()
    made.wait()
    made.stderr.close()


class Driver:
    """Enables the controller over vfio-user, and executes commands one by one."""

    def __init__(self, path: Path) -> None:
        self.client = client = Client(path)
        self.ram, self.event = client.memfd(MEMORY_BYTES), client.eventfd()
        assert client.map(0, MEMORY_BYTES, self.ram) == 0
        irqs = struct.pack("<IIIII", 20, 4 | 32, 2, 0, 1)
        assert client.call(vfio.SET_IRQS, irqs, (self.event,)).error == 0
        client.write(7, 4, b"\x06\x00")
        self.tails = {0: 0, 1: 0}
        for offset, value in ((Register.AQA, 31 | 31 << 16), (Register.ASQ, PAGE), (0x2C, 0),
                              (Register.ACQ, 2 * PAGE), (0x34, 0), (Register.CC,
                              0x460061)):  # fmt: skip
            client.write(0, offset, struct.pack("<I", value))
        assert client.read(0, Register.CSTS, 4) == b"\1\0\0\0"
        for opcode, base, flags in (
            (Admin.CREATE_CQ, 4 * PAGE, 1),
            (Admin.CREATE_SQ, 3 * PAGE, 1 | 1 << 16),
        ):
            assert self.run(opcode, prp1=base, dw10=1 | 31 << 16, dw11=flags).status == 0

    def run(self, opcode: int, nsid: int = 0, queue: int = 0, **fields: int) -> Completion:
        entries, completions = QUEUES[queue]
        at = self.tails[queue]
        os.pwrite(self.ram, entry(opcode, at, nsid, **fields), entries + 64 * at)
        self.tails[queue] = at + 1
        body = struct.pack("<QIII", Register.DOORBELLS + 8 * queue, 0, 4, at + 1)
        self.client.send(vfio.WRITE, body, flags=1 << 4)  # posted, as QEMU's are
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = struct.unpack("<QHHHH", os.pread(self.ram, 16, completions + 16 * at))
            if found[4] & 1:
                self.client.write(0, Register.DOORBELLS + 8 * queue + 4, struct.pack("<I", at + 1))
                return Completion(found[0], found[4] >> 1 & 0x7FF, found[3], found[2], found[1])
            time.sleep(0.001)
        raise AssertionError("no completion")


def test_a_client_after_the_other_drives_the_card(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    data = os.urandom(PAGE)
    first = Driver(tmp_path / "s")
    assert first.run(Admin.IDENTIFY, prp1=DATA, dw10=1).status == 0
    assert os.pread(first.ram, 40, DATA + 24).rstrip() == b"nearstep card"
    assert os.eventfd_read(first.event) == 3  # creations of two queues, and Identify
    os.pwrite(first.ram, data, DATA)
    assert first.run(Nvm.WRITE, 1, 1, prp1=DATA, dw10=5).status == 0
    assert first.client.call(vfio.RESET).error == 0
    assert first.client.read(0, Register.CSTS, 4) == bytes(4)
    first.client.close()  # with queues and maps, as when QEMU is killed
    second = Driver(tmp_path / "s")
    assert second.run(Nvm.READ, 1, 1, prp1=DATA, dw10=5).status == 0
    assert os.pread(second.ram, PAGE, DATA) == data
    second.client.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert "7 commands" in process.stderr.read()
    assert not (tmp_path / "s").exists()


def test_what_was_written_is_there_after_the_server_was_killed(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    driver = Driver(tmp_path / "s")
    data = os.urandom(PAGE)
    os.pwrite(driver.ram, data, DATA)
    assert driver.run(Nvm.WRITE, 1, 1, prp1=DATA, dw10=9).status == 0
    assert driver.run(Nvm.FLUSH, 1, 1).status == 0
    process.kill()
    process.wait()
    assert (tmp_path / "d").read_bytes()[9 * PAGE : 10 * PAGE] == data
    assert driver.client.is_closed
    driver.client.close()


def test_without_a_file_the_drive_is_temporary(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nearstep", "card", "serve", SHAPE, "--socket", "s",
               "--memory-mib", "1"]  # fmt: skip
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment
    ) as made:
        assert made.stderr is not None
        assert "is served" in made.stderr.readline()
        assert [each.stat().st_size for each in temporary.glob("*/drive")] == [64 << 20]
        driver = Driver(tmp_path / "s")
        assert driver.run(Nvm.READ, 1, 1, prp1=DATA).status == 0
        driver.client.close()
        made.send_signal(signal.SIGTERM)
        assert made.wait(60) == 0
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("options", "reason"), [
    (["golden:coarse?devices=2&groups=1", "--drive", "new"], "with a kernel"),
    (["golden:smartssd?cards=2", "--drive", "new"], "one channel"),
    (["golden:smartssd", "--drive", "odd"], "whole blocks"),
    (["golden:smartssd?memory_bytes=1MiB&subgroup_elements=4096", "--drive", "new",
    "--memory-mib", "2"], "memory"),
])  # fmt: skip
def test_what_cannot_be_served_is_said(tmp_path: Path, options: list[str], reason: str) -> None:
    (tmp_path / "odd").write_bytes(bytes(5000))
    command = [sys.executable, "-m", "nearstep", "card", "serve", *options, "--socket", "s"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
