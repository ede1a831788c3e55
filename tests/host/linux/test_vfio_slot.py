"""A card in a slot over VFIO: what stands for Linux answers ioctls, on files in the place of nodes.

A guest of `make linux --front bars` has VFIO itself.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearstep.backends import pci, vfio
from nearstep.backends.base import Poll
from nearstep.backends.pci import PciBackend, VfioSlot, open_device
from nearstep.backends.vfio import EVENTS, GROUP, REGION, Call
from nearstep.errors import DeviceError, MismatchError, UrlError, WaitTimeoutError
from nearstep_spec.pcie import MEMORY_BAR, REGISTER_BAR
from nearstep_spec.smartssd.config import SmartssdConfig

NAME, NUMBER = "0000:01:00.0", "4"
MEMORY_BYTES = 1 << 16
SIZES = {REGISTER_BAR: 0x2000, MEMORY_BAR: MEMORY_BYTES, vfio.CONFIG_REGION: 4096}
OPTIONS = {"access": "vfio", "memory_bytes": "64KiB", "lanes": "4", "chunk_bytes": "512"}
STATUS = 4
"""A register that tests poll."""


class LinuxStandIn:
    """VFIO of one function: nodes below a folder, regions in a file, and ioctls.

    Attributes
    ----------
    made : requests that were made.
    refuses : request that fails with EPERM.
    event : duplicate of the eventfd that listens, or -1.
    """

    def __init__(self, folder: Path) -> None:
        self.nodes, self.functions = folder / "dev", folder / "sys"
        group = folder / "groups" / NUMBER
        for each in (self.nodes, self.functions / NAME, group, folder / "drivers/vfio-pci"):
            each.mkdir(parents=True)
        for node in ("vfio", NUMBER):
            (self.nodes / node).touch()
        (self.functions / NAME / "driver").symlink_to(folder / "drivers/vfio-pci")
        (self.functions / NAME / "iommu_group").symlink_to(group)
        self.file = os.memfd_create("regions")
        os.truncate(self.file, 8 << 20)
        self.made: list[Call] = []
        self.refuses: Call | None = None
        self.viable, self.mappable, self.version, self.iommu, self.event = True, True, 0, 0, -1

    def ioctl(self, fd: int, request: Call, argument: bytearray | int = 0) -> int:
        if request is self.refuses:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        self.made.append(request)
        node = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        if request is Call.GET_API_VERSION:
            assert node == "vfio"
            return self.version
        if request is Call.SET_IOMMU:
            assert (node, Call.GROUP_SET_CONTAINER in self.made) == ("vfio", True)
            assert isinstance(argument, int)
            self.iommu = argument
        elif request is Call.DEVICE_RESET:
            assert argument == 0
        else:
            assert isinstance(argument, bytearray)
            self._pass(request, node, argument)
        if request is Call.GROUP_GET_DEVICE_FD:
            assert self.iommu != 0
            return os.dup(self.file)
        return 0

    def _pass(self, request: Call, node: str, argument: bytearray) -> None:
        if request is Call.GROUP_GET_STATUS:
            assert (node.removeprefix("noiommu-"), GROUP.unpack(argument)) == (NUMBER, (8, 0))
            GROUP.pack_into(argument, 0, 8, int(self.viable))
        elif request is Call.GROUP_SET_CONTAINER:
            (container,) = struct.unpack("=i", argument)
            assert os.readlink(f"/proc/self/fd/{container}") == str(self.nodes / "vfio")
        elif request is Call.GROUP_GET_DEVICE_FD:
            assert argument == NAME.encode() + b"\0"
        elif request is Call.DEVICE_GET_REGION_INFO:
            nbytes, _, index, _, _, _ = REGION.unpack(argument)
            assert nbytes == REGION.size == 32
            flags = 0b11 | (vfio.MAPPABLE if self.mappable else 0)
            REGION.pack_into(argument, 0, 32, flags, index, 0, SIZES.get(index, 0), index << 20)
        else:
            assert request is Call.DEVICE_SET_IRQS
            assert EVENTS.unpack_from(argument) == (24, 0b100100, 2, 0, 1)
            if self.event >= 0:
                os.close(self.event)
            self.event = os.dup(struct.unpack_from("=i", argument, EVENTS.size)[0])

    def put(self, region: int, offset: int, data: bytes) -> None:
        """Write a region as the card does."""
        os.pwrite(self.file, data, (region << 20) + offset)

    def close(self) -> None:
        for each in (self.file, self.event):
            if each >= 0:
                os.close(each)


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LinuxStandIn]:
    made = LinuxStandIn(tmp_path)
    monkeypatch.setattr(pci, "FUNCTIONS", made.functions)
    monkeypatch.setattr(vfio, "NODES", made.nodes)
    monkeypatch.setattr(vfio.fcntl, "ioctl", made.ioctl)
    yield made
    made.close()


@pytest.fixture
def slot(linux: LinuxStandIn) -> Iterator[VfioSlot]:
    made = VfioSlot(NAME, MEMORY_BYTES)
    yield made
    made.close()


def test_bars_are_mapped_at_their_regions_and_the_bus_mastered(
    linux: LinuxStandIn, slot: VfioSlot
) -> None:
    assert linux.iommu == vfio.TYPE1
    assert os.pread(linux.file, 2, (7 << 20) + 4) == b"\6\0"
    slot.write(REGISTER_BAR, 8, b"word")
    slot.write(MEMORY_BAR, MEMORY_BYTES - 11, b"hello world")
    assert os.pread(linux.file, 4, 8) == b"word"
    assert os.pread(linux.file, 11, (2 << 20) + MEMORY_BYTES - 11) == b"hello world"
    assert slot.read(MEMORY_BAR, MEMORY_BYTES - 11, 11) == b"hello world"
    slot.reset()
    assert linux.made[-1] is Call.DEVICE_RESET
    linux.refuses = Call.DEVICE_RESET
    with pytest.raises(DeviceError, match="VFIO_DEVICE_RESET: Operation not permitted"):
        slot.reset()


def test_a_wait_sleeps_until_the_interrupt_and_looks_again(
    linux: LinuxStandIn, slot: VfioSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pci, "SLEEP_S", 60.0)
    linux.put(REGISTER_BAR, STATUS, b"\1\0\0\0")
    backend = PciBackend(slot, SmartssdConfig())
    idle = Poll(address=STATUS, mask=1, value=0)

    def end_of_run() -> None:
        linux.put(REGISTER_BAR, STATUS, bytes(4))
        os.eventfd_write(linux.event, 1)

    timer = threading.Timer(0.05, end_of_run)
    os.eventfd_write(linux.event, 3)  # of earlier runs: only one look more
    timer.start()
    begin = time.monotonic()
    backend.wait([idle], 2)
    assert time.monotonic() - begin < 30
    timer.join()
    monkeypatch.setattr(pci, "SLEEP_S", 0.001)
    linux.put(REGISTER_BAR, STATUS, b"\1\0\0\0")
    with pytest.raises(WaitTimeoutError, match="waited 5 steps"):
        backend.wait([idle], 5)


def test_a_group_that_linux_made_up_needs_no_iommu(linux: LinuxStandIn) -> None:
    (linux.nodes / NUMBER).rename(linux.nodes / f"noiommu-{NUMBER}")
    VfioSlot(NAME, MEMORY_BYTES).close()
    assert linux.iommu == vfio.NO_IOMMU


def test_what_vfio_refuses_is_said_and_nothing_stays_open(linux: LinuxStandIn) -> None:
    def fails(kind: type[Exception], reason: str) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(kind, match=reason):
            open_device(NAME, OPTIONS)
        assert len(os.listdir("/proc/self/fd")) == before

    VfioSlot(NAME, MEMORY_BYTES).close()
    for refused in Call:
        if refused is not Call.DEVICE_RESET:
            linux.refuses = refused
            fails(UrlError, f"VFIO_{refused.name}: Operation not permitted")
    linux.refuses = None
    linux.viable = False
    fails(MismatchError, "drivers of IOMMU group 4 must be vfio-pci, or no driver")
    linux.viable, linux.version = True, 1
    fails(MismatchError, "version of VFIO must be 0, not 1")
    linux.version, linux.mappable = 0, False
    fails(MismatchError, "BAR 0 of .* must be mappable")
    (linux.nodes / NUMBER).unlink()
    fails(UrlError, f"dev/{NUMBER}: No such file")
    folder = linux.functions / NAME
    (folder / "iommu_group").unlink()
    fails(MismatchError, r"IOMMU group of 0000:01:00\.0 must be one of an IOMMU")
    (folder / "driver").unlink()
    fails(MismatchError, r"driver of 0000:01:00\.0 must be vfio-pci, not none")


def test_numbers_are_those_of_linuxs_header(tmp_path: Path) -> None:
    """gcc prints them; a machine without the header skips."""
    if shutil.which("gcc") is None or not Path("/usr/include/linux/vfio.h").exists():
        pytest.skip("gcc, or headers of Linux, are not installed")
    values = (
        *(f"VFIO_{each.name}" for each in Call), "VFIO_API_VERSION", "VFIO_TYPE1v2_IOMMU",
        "VFIO_NOIOMMU_IOMMU", "VFIO_GROUP_FLAGS_VIABLE", "VFIO_REGION_INFO_FLAG_MMAP",
        "sizeof(struct vfio_group_status)", "sizeof(struct vfio_region_info)",
        "sizeof(struct vfio_irq_set)", "offsetof(struct vfio_irq_set, data)",
        "VFIO_PCI_CONFIG_REGION_INDEX", "VFIO_PCI_MSIX_IRQ_INDEX",
        "VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER",
        "offsetof(struct vfio_region_info, size)", "PCI_COMMAND",
        "PCI_COMMAND_MEMORY", "PCI_COMMAND_MASTER",
    )  # fmt: skip
    lines = "\n".join(f'printf("%llu\\n", (unsigned long long)({each}));' for each in values)
    includes = ("stddef.h", "stdio.h", "linux/pci_regs.h", "linux/vfio.h")
    head = "".join(f"#include <{each}>\n" for each in includes)
    source, program = tmp_path / "numbers.c", tmp_path / "numbers"
    source.write_text(f"{head}int main(void) {{ {lines} return 0; }}\n")
    subprocess.run(["gcc", str(source), "-o", str(program)], check=True, capture_output=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    own = vfio
    assert [int(each) for each in printed.split()] == [
        *Call, own.VERSION, own.TYPE1, own.NO_IOMMU, own.VIABLE, own.MAPPABLE, GROUP.size,
        REGION.size, EVENTS.size, EVENTS.size, own.CONFIG_REGION, own.MSIX, own.TRIGGERS_EVENT,
        struct.calcsize("=IIII"), own.COMMAND, own.MEMORY_SPACE, own.BUS_MASTER,
    ]  # fmt: skip
