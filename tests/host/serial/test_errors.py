"""What can go wrong with a board, each with what was expected and found; then it is opened anew."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import threading
import tty
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import serial

from nearstep.backends.serial import open_device
from nearstep.device import drive, open_backend
from nearstep.errors import (
    BusError,
    ClosedDeviceError,
    ForkedDeviceError,
    MismatchError,
    OptionError,
    WaitTimeoutError,
)
from nearstep.serial import controllers
from nearstep.serial.backend import READY_CYCLES, RESET_CYCLES, LinkBackend
from nearstep.serial.errors import (
    DamagedFramesError,
    FirmwareError,
    LinkError,
    LinkFailedError,
    LinkMemoryError,
    MemoryNotReadyError,
    NoAnswerError,
    PortBusyError,
    PortError,
    PortLostError,
    PortNotFoundError,
    PortPermissionError,
    RegisterTimeoutError,
    SessionLostError,
    WrongBoardError,
)
from nearstep.serial.link import Link
from nearstep.serial.transport import SerialPort
from nearstep_sim.serial.endpoint import Endpoint
from nearstep_sim.serial.line import Loopback, Noise, NoisyLine
from nearstep_spec.codec import to_json
from nearstep_spec.serial.manifest import Manifest
from nearstep_spec.serial.protocol import MOST_DATA, Op, Request, Space

from ..driver.conftest import URLS
from ..driver.job import Job
from .conftest import COUNT, open_port, over_link, served, works

URL = URLS["golden-card"]


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint(open_backend(URL), "test")


def opened(endpoint: Endpoint, **line: Any) -> LinkBackend:
    return LinkBackend(Link(Loopback(endpoint, **line), tries=4))


def said(endpoint: Endpoint, **change: Any) -> Endpoint:
    """A board on the same device that says something else of itself."""
    manifest = dataclasses.replace(endpoint.manifest, **change)
    return Endpoint(endpoint._backend, "test", manifest=manifest)


def test_a_port_that_is_not_there(tmp_path: Any) -> None:
    with pytest.raises(PortNotFoundError, match=r"port .*/none: there is no such port") as caught:
        open_port(tmp_path / "none")
    assert caught.value.port == str(tmp_path / "none")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_port(tmp_path: Any, kind: str) -> None:
    path = tmp_path / "thing"
    if kind == "file":
        path.write_text("text")
    else:
        path.mkdir()
    with pytest.raises(PortError, match="cannot open serial port"):
        open_port(path)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, PortPermissionError),
        (errno.EBUSY, PortBusyError),
        (errno.ENXIO, PortNotFoundError),
        (errno.EIO, PortError),
    ],
)
def test_what_the_system_says_of_a_port(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: type[PortError]
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise serial.SerialException(number, os.strerror(number))

    monkeypatch.setattr("nearstep.serial.transport.serial.Serial", refused)
    with pytest.raises(PortError) as caught:
        open_port("/dev/ttyUSB7")
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, serial.SerialException)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"baud": "fast"}, "must be a whole number"),
        ({"baud": "1"}, r"baud must lie in \[9600, 12000000\]"),
        ({"tries": "0"}, "tries must lie in"),
        ({"lanes": "4"}, "no such option; valid: baud, board, wait, tries, window"),
    ],
)
def test_wrong_options_fail_before_the_port_is_opened(option: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        open_device("/dev/null", option)


def test_two_programs_on_one_port() -> None:
    with served(URL) as server:
        with (
            open_port(server.path),
            pytest.raises(PortBusyError, match="another program"),
        ):
            open_port(server.path)
        with open_port(server.path) as device:
            assert works(device) == 3 * COUNT


@contextmanager
def terminal() -> Iterator[tuple[int, str]]:
    """The descriptor of a master, and the name of its port."""
    master, slave = os.openpty()
    tty.setraw(slave)
    try:
        yield master, os.ttyname(slave)
    finally:
        os.close(slave)
        os.close(master)


def test_nobody_answers() -> None:
    with terminal() as (_, path):
        with pytest.raises(NoAnswerError, match=r"no answer to SYNC in .* s, sent 3 tim") as found:
            open_port(path, wait=0.01, tries=3)
        assert found.value.seconds >= 0.07
        with pytest.raises(NoAnswerError):  # the first has given the port back
            open_port(path, wait=0.01, tries=1)


def test_another_board_than_was_asked_for() -> None:
    with served(URL) as server:
        with pytest.raises(WrongBoardError, match="must be 'ulx3s_85f', not golden:smartssd"):
            open_port(server.path, board="ulx3s_85f")
        with open_port(server.path, board=URL) as device:
            assert works(device) == 3 * COUNT


def config(endpoint: Endpoint, **change: Any) -> dict[str, Any]:
    return {"config": {**endpoint.manifest.config, **change}}


WRONG: dict[str, tuple[Callable[[Endpoint], dict[str, Any]], type[MismatchError], str]] = {
    "family": (lambda e: {"family": "abacus"}, WrongBoardError,
        "must be one of axdimm, coarse, smartssd, not 'abacus'"),
    "hash": (lambda e: {"map_hashes": {**e.manifest.map_hashes, "updater0": 5}}, FirmwareError,
        r"register map of updater0 of test on loopback, made by nearstep .* not 0x00000005"),
    "board's hash": (lambda e: {"map_hashes": {**e.manifest.map_hashes, "board": 5}},
        FirmwareError, "register map of board"),
    "blocks": (lambda e: {"map_hashes": {"updater0": 5}}, FirmwareError,
        "must be board, updater0, not updater0"),
    "unknown option": (lambda e: config(e, turbo=True), FirmwareError,
        "turbo.*there is no such option"),
    "value": (lambda e: config(e, lanes=3), FirmwareError, "lanes must be one of"),
    "another": (lambda e: config(e, lanes=8), FirmwareError, "hash of the register map"),
    "rules": (lambda e: {"digest": "0123"}, FirmwareError, "digest of the update rules.*0123"),
    "controller": (lambda e: {"controller": "new"}, FirmwareError,
        "memory controller of test must be one of none.*, not 'new'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_board_that_this_host_does_not_drive(endpoint: Endpoint, case: str) -> None:
    change, kind, message = WRONG[case]
    with pytest.raises(kind, match=message) as caught:
        opened(said(endpoint, **change(endpoint)))
    assert caught.value.expected != caught.value.actual
    assert works(drive(opened(endpoint), "serial:test")) == 3 * COUNT


@pytest.mark.parametrize("text", [b"", b"not JSON", b'{"format":99}', b"\xff" * 3000])
def test_a_manifest_of_another_format(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(endpoint, "_text", text)
    with pytest.raises(FirmwareError, match="must be one that this version of nearstep reads"):
        opened(endpoint)


def test_a_manifest_is_what_the_device_is(endpoint: Endpoint) -> None:
    backend = opened(endpoint)
    assert backend.manifest == Manifest.decode(endpoint.manifest.encode())
    assert to_json(backend.config) == json.loads(json.dumps(endpoint.manifest.config))
    assert backend.config == endpoint._backend.config


def test_a_board_that_is_reset_while_it_is_used(endpoint: Endpoint) -> None:
    device = drive(opened(endpoint), "serial:test")
    work = Job(device, COUNT, 5)
    run = work.start()
    endpoint.reset()
    with pytest.raises(SessionLostError, match="the board was reset while in use"):
        run.wait()
    for use in (lambda: run.done, lambda: work.buffers["p"].read(), device.reset, work.start):
        with pytest.raises(LinkFailedError, match="it failed before: the board was reset"):
            use()
    device.close()
    with pytest.raises(ClosedDeviceError):
        work.buffers["p"].read()
    assert works(drive(opened(endpoint), "serial:test")) == 3 * COUNT


def test_resets_in_the_midst_of_frames_are_never_taken_for_success() -> None:
    """A step is whole, or an error; what a board had before the reset is asked for anew."""
    emulated = open_backend(URL)
    ended: Counter[str] = Counter()
    for after in range(1009, 200_000, 7993):
        line = Loopback(Endpoint(emulated, "test"), reset_after=after)
        try:
            device = drive(LinkBackend(Link(line, tries=4)), "serial:test")
            assert works(device) == 3 * COUNT
            ended["whole"] += 1
        except (SessionLostError, NoAnswerError) as error:
            ended[type(error).__name__] += 1
            emulated.reset()
    print(dict(ended))
    assert ended.total() == 25
    assert min(ended["whole"], ended["SessionLostError"]) > 5
    assert ended["NoAnswerError"] < 3  # where no frame is whole between two resets


def test_the_cable_is_pulled_in_the_midst_of_a_transfer() -> None:
    with served(URL) as server:
        device = open_port(server.path, wait=0.5)
        data = np.zeros(1 << 16, np.uint8)
        begun = threading.Event()
        found: list[BaseException] = []

        def write() -> None:
            try:
                while True:
                    device.backend.write_memory(0, data)
                    begun.set()
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        assert begun.wait(60)
        server.close()
        thread.join(60)
        assert [type(each) for each in found] == [PortLostError]
        with pytest.raises(LinkFailedError, match="it failed before: the port has vanished"):
            device.backend.write_memory(0, data)
        device.close()
        with pytest.raises(PortNotFoundError):
            open_port(server.path)


def test_a_port_is_read_while_it_is_written() -> None:
    """Whoever is behind it takes nothing until all that it says was taken."""
    said, heard = bytes(range(256)) * 512, bytearray()

    def peer(master: int) -> None:
        at = 0
        while at < len(said):
            at += os.write(master, said[at : at + 4096])
        while len(heard) < len(said):
            heard.extend(os.read(master, 4096))

    with terminal() as (master, path):
        port = SerialPort(path, 3_000_000)
        thread = threading.Thread(target=peer, args=[master])
        thread.start()
        port.write(said[::-1])
        got = bytearray()
        while len(got) < len(said) and (more := port.read(60)):
            got += more
        thread.join(60)
        assert (bytes(got), bytes(heard)) == (said, said[::-1])
        port.close()


def test_a_port_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearstep.serial.transport.STUCK_SECONDS", 0.05)
    stuck = pytest.raises(
        PortLostError, match=r"accepted no bytes for 0.05 s; .* may have been execut"
    )
    with terminal() as (_, path):
        port = SerialPort(path, 3_000_000)
        with stuck:
            port.write(bytes(1 << 20))
        port.close()


@pytest.mark.parametrize(
    ("direction", "kind"), [("down", NoAnswerError), ("up", DamagedFramesError)]
)
def test_damage_up_to_the_bound(endpoint: Endpoint, direction: str, kind: type[LinkError]) -> None:
    """A board drops what is damaged; what comes from it damaged is counted here."""
    line = Loopback(endpoint)
    backend = LinkBackend(Link(line, tries=6))
    setattr(line, direction, NoisyLine(Noise(corruption=0.4), 3))
    with pytest.raises(NoAnswerError, match="sent 6 times") as caught:
        backend.write_memory(0, np.zeros(8 * MOST_DATA, np.uint8))
    assert type(caught.value) is kind
    assert works(drive(opened(endpoint), "serial:test")) == 3 * COUNT


def test_memory_and_registers_that_are_not_there(endpoint: Endpoint) -> None:
    backend = opened(endpoint)
    out = np.zeros(3000, np.uint8)
    with pytest.raises(LinkMemoryError, match="response must be OKAY, not DECERR") as caught:
        backend.read_memory(backend.capacity_bytes - 1024, out)
    assert (caught.value.address, caught.value.write) == (backend.capacity_bytes, False)
    with pytest.raises(LinkMemoryError) as caught:
        backend.write_memory(backend.capacity_bytes, out)
    assert (caught.value.address, caught.value.write) == (backend.capacity_bytes, True)
    for use in (
        lambda: backend.read_register(0xFF0),
        lambda: backend.write_register(0, 1),
        lambda: backend.controller.read_register(0),
        lambda: backend.controller.write_register(0, 1),
    ):
        with pytest.raises(BusError, match="must be OKAY, not"):
            use()
    assert works(drive(backend, "serial:test")) == 3 * COUNT  # the link goes on


def test_a_device_that_stopped_answers_again_after_a_reset(endpoint: Endpoint) -> None:
    """A kernel reads what nobody has written, which an emulated device does not let pass."""
    device = drive(opened(endpoint), "serial:test")
    work = Job(device, COUNT, 5)
    other = device.alloc(COUNT)
    arrays = {**{name: work.buffers[name] for name in "pmv"}, "g": other}
    run = device.update("adam", arrays, step=1)
    with pytest.raises(RegisterTimeoutError, match="the bus of the board did not answer"):
        run.wait()
    assert "nobody has written" in str(endpoint.fault) or "written" in str(endpoint.fault)
    device.reset()
    assert endpoint.fault is None
    assert works(device) == 3 * COUNT


def test_a_reset_that_does_not_end(endpoint: Endpoint) -> None:
    backend = opened(endpoint)
    endpoint._registers["status.resetting"] = 1
    with pytest.raises(WaitTimeoutError, match=f"{RESET_CYCLES} .* for board.status.resetting"):
        backend.reset()


def test_memory_that_does_not_become_ready(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearstep.serial.backend.READY_CYCLES", READY_CYCLES >> 4)
    endpoint._registers["status.memory_ready"] = 0
    with pytest.raises(MemoryNotReadyError, match="memory of test is not ready") as caught:
        opened(endpoint)
    assert caught.value.registers["board.status.memory_ready"] == 0


def test_a_controller_is_brought_up_by_what_knows_it(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = said(endpoint, controller="test")
    board._registers["status.memory_ready"] = 0

    def initialise(access: controllers.BoardAccess) -> None:
        assert access.manifest.controller == "test"
        with pytest.raises(BusError):
            access.controller.read_register(4)
        board._registers["status.memory_ready"] = 1

    module = SimpleNamespace(initialise=initialise)
    monkeypatch.setitem(sys.modules, "controller_of_this_test", module)  # type: ignore[arg-type]
    known = {"test": "controller_of_this_test:initialise"}
    monkeypatch.setattr(controllers, "CONTROLLERS", known)
    backend = opened(board)
    assert backend.board.memory.ready == 1
    assert works(drive(backend, "serial:test")) == 3 * COUNT


def test_requests_that_are_none_are_told_so(endpoint: Endpoint) -> None:
    backend = opened(endpoint)
    with pytest.raises(LinkError, match="not BAD_REQUEST"):
        backend.link.ask(Request(op=Op.READ, space=Space.MEMORY, length=MOST_DATA + 1))


def test_a_child_does_not_use_the_link_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with over_link(URL) as device:
        monkeypatch.setattr("nearstep.serial.link.os.getpid", lambda: 1)
        with pytest.raises(ForkedDeviceError, match="belongs to process"):
            device.backend.read_register(0)
