"""Registers, queues, doorbells, resets and shutdown of the controller."""

from __future__ import annotations

import struct
import threading
import time
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from nearstep.errors import ArgumentError
from nearstep.linux.nvme import card
from nearstep.linux.nvme.controller import NvmeController
from nearstep.linux.nvme.memory import MemoryNamespace
from nearstep.linux.nvme.standard import Admin, Memory, Register, Status
from nearstep.linux.pci import COMMAND

from .guest import PAGE, Guest, Queue, entry, until

SLM = 2


def memory_of(guest: Guest) -> MemoryNamespace:
    found = guest.controller.namespaces[1]
    assert isinstance(found, MemoryNamespace)
    return found


def test_registers_read_in_halves_and_whole(guest: Guest) -> None:
    read = guest.controller.read_bar
    cap = int.from_bytes(read(0, 0, 8), "little")
    assert (cap & 0xFFFF, cap >> 37 & 1, cap >> 43 & 1, cap >> 32 & 0xF) == (1023, 1, 1, 0)
    assert read(0, 0, 4) + read(0, 4, 4) == read(0, 0, 8)
    assert read(0, Register.VS, 4) == b"\x00\x01\x02\x00"
    assert int.from_bytes(read(0, Register.ASQ, 8), "little") == guest.admin.entries
    assert cap >> 59 & 3 == 1  # CRMS: ready with media, as revision 2.0 demands
    assert int.from_bytes(read(0, Register.CRTO, 4), "little") == cap >> 24 & 0xFF == 30
    guest.write(Register.CRTO, 0)
    assert read(0, Register.CRTO, 8) == b"\x1e" + bytes(7)
    assert read(0, 0x38, 8) == bytes(8)  # no controller memory buffer
    assert read(0, 0x1000, 64) == bytes(64)
    assert read(0, 0x2FFC, 4) == bytes(4)
    guest.controller.write_bar(0, Register.ACQ, struct.pack("<Q", 0x123456789A000))
    assert int.from_bytes(read(0, Register.ACQ, 8), "little") == 0x123456789A000
    for offset, data in ((0x15, bytes(4)), (0x14, bytes(2)), (0x14, bytes(16))):
        guest.controller.write_bar(0, offset, data)  # dropped
    assert guest.status == 1


@pytest.mark.parametrize(("register", "value", "cc"), [
    (Register.AQA, 31, 0x460061), (Register.AQA, 31 << 16, 0x460061),
    (Register.ASQ, 0x1004, 0x460061), (Register.ACQ, 0x1800, 0x460061),
    (Register.VS, 0, 0x4600E1), (Register.VS, 0, 0x460011), (Register.VS, 0, 0x460861),
])  # fmt: skip
def test_a_wrong_configuration_is_fatal_until_it_is_disabled(
    guest: Guest, register: Register, value: int, cc: int
) -> None:
    guest.write(Register.CC, 0)
    assert guest.status == 0
    guest.write(register, value)
    guest.write(Register.CC, cc)
    assert guest.status == 2
    guest.write(Register.CC, 0)
    assert guest.status == 0


def test_queues_are_checked_when_they_are_created(guest: Guest) -> None:
    base = guest.pages(2)
    run = guest.run
    cq, sq = Admin.CREATE_CQ, Admin.CREATE_SQ
    found = [
        run(cq, prp1=base, dw10=0 | 7 << 16, dw11=1), run(cq, prp1=base, dw10=9 | 7 << 16, dw11=1),
        run(cq, prp1=base, dw10=1 | 7 << 16, dw11=1), run(cq, prp1=base, dw10=2, dw11=1),
        run(cq, prp1=base, dw10=2 | 1024 << 16, dw11=1), run(cq, prp1=base, dw10=2 | 7 << 16),
        run(cq, prp1=base + 8, dw10=2 | 7 << 16, dw11=1),
        run(cq, prp1=base, dw10=2 | 7 << 16, dw11=3 | 9 << 16),
        run(sq, prp1=base, dw10=2 | 7 << 16, dw11=1),
        run(sq, prp1=base, dw10=2 | 7 << 16, dw11=1 | 9 << 16),
        run(sq, prp1=base, dw10=2 | 7 << 16, dw11=1 | 3 << 16),
        run(sq, prp1=base, dw10=1 | 7 << 16, dw11=1 | 1 << 16),
        run(Admin.DELETE_CQ, dw10=1), run(Admin.DELETE_CQ, dw10=5), run(Admin.DELETE_CQ),
        run(Admin.DELETE_SQ), run(Admin.DELETE_SQ, dw10=5),
    ]  # fmt: skip
    assert [Status(each.status).name for each in found] == [
        "INVALID_QUEUE_ID", "INVALID_QUEUE_ID", "INVALID_QUEUE_ID", "INVALID_QUEUE_SIZE",
        "INVALID_QUEUE_SIZE", "INVALID_FIELD", "PRP_OFFSET_INVALID", "INVALID_VECTOR",
        "INVALID_QUEUE_ID", "INVALID_QUEUE_ID", "COMPLETION_QUEUE_INVALID", "INVALID_QUEUE_ID",
        "INVALID_QUEUE_DELETION", "INVALID_QUEUE_ID", "INVALID_QUEUE_ID", "INVALID_QUEUE_ID",
        "INVALID_QUEUE_ID",
    ]  # fmt: skip
    other = Queue(guest, 2, 8)
    assert guest.create(other) == [0, 0]
    other.push(entry(Memory.FILL, 77, SLM, dw12=4))
    assert other.wait()[1:4] == (0, 77, 2)
    assert 2 in guest.ram.vectors
    assert [run(Admin.DELETE_SQ, dw10=2).status, run(Admin.DELETE_CQ, dw10=2).status] == [0, 0]


def test_queues_wrap_and_a_full_completion_queue_stops_the_fetch(guest: Guest) -> None:
    small = Queue(guest, 2, 4)
    large = guest.pages(1)
    size = 2 | 63 << 16
    assert guest.run(Admin.CREATE_CQ, prp1=small.completions, dw10=2 | 3 << 16, dw11=1).status == 0
    assert guest.run(Admin.CREATE_SQ, prp1=large, dw10=size, dw11=1 | 2 << 16).status == 0
    for number in range(50):
        guest.put(large + 64 * number, entry(Memory.FILL, number, SLM, dw12=4))
    before = guest.controller.counters.completions
    guest.ring(4, 50)
    until(lambda: guest.controller.counters.completions == before + 3)
    time.sleep(0.05)
    assert guest.controller.counters.completions == before + 3
    found = [small.wait() for _ in range(50)]
    assert [each.identifier for each in found] == list(range(50))
    assert small.poll() is None
    for number in range(300):  # the phase changes with every round
        assert guest.run(Memory.FILL, SLM, io=True, dw12=4).status == 0, number


def test_wrong_doorbells_are_reported_and_change_nothing(guest: Guest) -> None:
    limit = guest.admin
    for number in range(4):
        limit.push(entry(Admin.ASYNC_EVENT, 100 + number))
    assert guest.run(Admin.ASYNC_EVENT).status == Status.TOO_MANY_EVENT_REQUESTS
    rings = ((2 * 5, 1), (2 * 5 + 1, 1), (2 * 200, 1), (2, 64), (3, 0xFFFFFFFF), (2, 1 << 31))
    for doorbell, value in rings:
        guest.ring(doorbell, value)
    reported = [guest.admin.wait()]
    for retains in (1, 0):  # RAE: the events of this type stay masked
        log = {"dw10": 1 | retains << 15 | 15 << 16, "prp1": guest.scratch}
        assert guest.run(Admin.GET_LOG, **log).status == 0
        guest.ring(3, 0xFFFFFFFF)
        guest.ring(2 * 5, 1)
    reported.append(guest.admin.wait())
    assert [each.identifier for each in reported] == [100, 101]
    assert [each.result >> 8 & 0xFF for each in reported] == [0, 1]
    assert guest.run(Memory.FILL, SLM, io=True, dw12=4).status == 0


def repeats_forbidden(guest: Guest, at: int) -> bool:
    """Do Not Retry, of a completion of the I/O queue."""
    return bool(guest.ram.data[guest.io.completions + 16 * at + 15] & 0x80)


def test_commands_of_a_deleted_queue_are_aborted_the_one_in_flight_too(guest: Guest) -> None:
    data = guest.scratch
    guest.put(data, b"\xaa" * PAGE)
    with memory_of(guest).turn:  # the card is busy
        for number in range(5):
            guest.io.push(entry(Memory.READ, 40 + number, SLM, prp1=data, dw12=PAGE))
        until(lambda: guest.controller.submissions[1].flying is not None)
        assert guest.run(Admin.DELETE_SQ, dw10=1).status == 0
        found = [guest.io.wait() for _ in range(5)]
        assert [each.status for each in found] == [Status.ABORTED_BY_DELETION] * 5
        assert [each.identifier for each in found] == [40, 41, 42, 43, 44]
        assert not any(repeats_forbidden(guest, at) for at in range(5))
        assert guest.run(Admin.CREATE_SQ, prp1=guest.io.entries, dw10=1 | 63 << 16,
                         dw11=1 | 1 << 16).status == 0  # fmt: skip
    guest.io.tail = 0
    assert guest.run(Memory.FILL, SLM, io=True, dw12=4).status == 0
    assert guest.run(0x7F, SLM, io=True).status == Status.INVALID_OPCODE
    assert repeats_forbidden(guest, guest.io.head - 1)
    assert guest.get(data, PAGE) == b"\xaa" * PAGE  # what was aborted writes nothing later


@pytest.mark.parametrize("how", ["disable", "function"])
def test_a_reset_ends_commands_in_flight(guest: Guest, how: str) -> None:
    data = guest.scratch
    guest.put(data, b"\xaa" * PAGE)
    with memory_of(guest).turn:
        for number in range(5):
            guest.io.push(entry(Memory.READ, 40 + number, SLM, prp1=data, dw12=PAGE))
        until(lambda: guest.controller.submissions[1].flying is not None)
        if how == "disable":
            guest.write(Register.CC, 0)
        else:
            guest.controller.reset()
            assert guest.controller.read_config(COMMAND, 2) == b"\0\0"
        assert guest.status == 0
        before = bytes(guest.ram.data)
    time.sleep(0.05)
    assert bytes(guest.ram.data) == before
    assert not guest.ram.written[-1:] or guest.ram.written[-1][0] != data
    guest.ring(2, 7)  # there is no such queue now
    again = Guest(guest.controller)
    assert again.run(Memory.FILL, SLM, io=True, dw12=4).status == 0


def test_no_access_is_under_way_once_bus_mastering_is_off(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QEMU switches it off at the beginning of a reset of the machine."""
    inside, go, write = threading.Event(), threading.Event(), guest.ram.write

    def slow(address: int, data: bytes) -> None:
        inside.set()
        assert go.wait(60)
        write(address, data)

    monkeypatch.setattr(guest.ram, "write", slow)
    guest.io.push(entry(Memory.READ, 1, SLM, prp1=guest.scratch, dw12=PAGE))
    assert inside.wait(60)
    off = threading.Thread(target=guest.controller.write_config, args=(COMMAND, bytes(2)))
    off.start()
    off.join(0.2)
    under_way = off.is_alive()
    go.set()
    off.join(60)
    assert under_way
    written = list(guest.ram.written)
    assert (guest.scratch, PAGE) in written
    time.sleep(0.05)
    assert guest.ram.written == written  # the completion too was before, or had no memory


def test_shutdown_is_acknowledged(guest: Guest) -> None:
    for kind in (1, 2):
        guest.write(Register.CC, 0x460061 | kind << 14)
        until(lambda: guest.status == 1 | 2 << 2)
        guest.write(Register.CC, 0)
        assert guest.status == 0
        guest.admin.tail = guest.admin.head = 0
        guest.enable()


def test_queues_that_are_not_in_memory_are_fatal(guest: Guest) -> None:
    assert guest.run(Admin.CREATE_CQ, prp1=1 << 40, dw10=2 | 7 << 16, dw11=1).status == 0
    assert guest.run(Admin.CREATE_SQ, prp1=1 << 41, dw10=2 | 7 << 16, dw11=1 | 2 << 16).status == 0
    guest.ring(4, 1)
    until(lambda: guest.status == 3)
    guest.write(Register.CC, 0)
    assert guest.status == 0
    assert Guest(guest.controller).run(Memory.FILL, SLM, io=True, dw12=4).status == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_is_fatal_to_the_host_and_no_silence(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_of(guest), "on_card", None)
    guest.io.push(entry(Memory.FILL, 1, SLM, dw12=4))
    until(lambda: guest.status == 3)


def test_only_nvm_is_there_with_that_command_set_alone(guest: Guest) -> None:
    guest.write(Register.CC, 0)
    guest.admin = Queue(guest, 0, 32)
    guest.enable(css=0)
    guest.io = Queue(guest, 1, 8)
    assert guest.create(guest.io) == [0, 0]
    assert guest.run(Admin.IDENTIFY, prp1=guest.scratch, dw10=2).status == 0
    assert guest.get(guest.scratch, 12) == struct.pack("<3I", 1, 0, 0)
    assert guest.run(2, 1, io=True, prp1=guest.scratch).status == 0
    assert guest.run(2, SLM, io=True, dw12=4).status == Status.COMMAND_SET_NOT_ENABLED


def test_queues_are_in_python_or_where_a_package_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    known = project["project"]["entry-points"][card.CONTROLLERS]
    entries = [EntryPoint(name, value, card.CONTROLLERS) for name, value in known.items()]
    monkeypatch.setattr(card, "entry_points", lambda group: entries)
    assert card.controller_kind("python") is NvmeController
    assert issubclass(card.controller_kind("rtl"), NvmeController)
    assert card.controller_kind("rtl") is not NvmeController
    with pytest.raises(ArgumentError, match="one of python, rtl, not silicon"):
        card.controller_kind("silicon")
