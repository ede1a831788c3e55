"""`nearstep serve`: a process behind a pseudo-terminal, which `serial:` opens as a board."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import nearstep
from nearstep.cli.devices import options
from nearstep.cli.open import command as open_command
from nearstep.cli.open import manifest
from nearstep.device import backends, open_backend
from nearstep.serial.errors import PortLostError, SessionLostError
from nearstep_sim.serial.pty_server import MOST_UNREAD, PtyServer
from nearstep_sim.serial.serve import command, wire_of

from ..driver.conftest import CARD_SHAPE
from ..driver.job import Job
from .conftest import COUNT, open_port, served, works

URL = f"golden:smartssd?{CARD_SHAPE}"
CODE = "import typer; from nearstep_sim.serial.serve import command; typer.run(command)"
SECONDS = 120


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and the name that it prints."""
    server = subprocess.Popen(
        [sys.executable, "-c", CODE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert select.select([server.stdout], [], [], SECONDS)[0], "the server says nothing"
        yield server, server.stdout.readline().strip()
    finally:
        server.kill()
        server.communicate()


def invoke(called: Callable[..., None], *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(called)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def run(*arguments: str) -> Any:
    return invoke(command, *arguments)


def test_a_server_is_a_board_until_it_is_interrupted(tmp_path: Path) -> None:
    link = tmp_path / "board"
    with process(URL, "--link", str(link), "--corruption", "1e-5") as (server, name):
        assert name == f"serial:{link}"
        assert re.fullmatch(r"/dev/pts/\d+", os.readlink(link))
        for seed in (1, 2):  # clients one after the other
            with open_port(link, wait=0.1, tries=100) as device:
                assert works(device, seed) == 3 * COUNT
        device = open_port(link)
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=SECONDS)
        assert server.returncode == 0, said
        assert "is served until Ctrl-C" in said
        assert "bytes from the board: 0 lost" in said
        assert not link.is_symlink()
        with pytest.raises(PortLostError):
            device.backend.read_register(0)


def test_the_name_that_is_printed_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any device, with `nearstep open` and `nearstep devices`."""
    entry = EntryPoint(
        name="serial", value="nearstep.backends.serial:open_device", group="nearstep.backends"
    )

    with served(URL) as server:
        monkeypatch.setitem(backends(), "serial", entry)
        name = f"serial:{server.path}?wait=5.0&tries=20"
        with nearstep.open(name) as device:
            assert works(device) == 3 * COUNT
        said = manifest(name)
        assert said["device"] == name
        assert said["family"] == "smartssd"
        assert set(said["options"]) == {row.name for row in options(name)}
        assert set(said["registers"]) == {"updater0"}
        assert said["board"]["config"]["lanes"] == 4
        done = invoke(open_command, name)
        assert done.exit_code == 0
        assert f"{URL}, made by nearstep" in done.output.replace("\n", "")


def test_a_client_that_ends_in_the_midst_leaves_nothing_to_the_next() -> None:
    with served(URL) as server:
        for seed in range(5):
            device = open_port(server.path)
            work = Job(device, COUNT, seed)
            work.start()
            line = device.backend.link._transport
            line.write(bytes(100 + 333 * seed))  # of a frame that never ends
            device.close()
        with open_port(server.path) as device:
            assert works(device) == 3 * COUNT


def test_resets_on_request_end_the_session_and_no_more() -> None:
    with served(URL, reset_after=100_000) as server:
        lost = 0
        for seed in range(4):
            with open_port(server.path) as device:
                try:
                    while True:
                        assert works(device, seed) == 3 * COUNT
                except SessionLostError:
                    lost += 1
        assert lost == 4


def test_bytes_that_no_client_reads_are_lost_as_behind_a_uart() -> None:
    class Loud:
        def write(self, data: bytes) -> None:
            raise AssertionError("nobody writes")

        def read(self, seconds: float) -> bytes:
            return bytes(3 * MOST_UNREAD)

    server = PtyServer(Loud())
    server._give(bytes(3 * MOST_UNREAD))
    assert server.overrun == 2 * MOST_UNREAD
    assert 0 < len(server._unread) < MOST_UNREAD  # the terminal took some
    server.close()


def test_a_link_that_leads_nowhere_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    link, file = tmp_path / "old", tmp_path / "file"
    link.symlink_to(tmp_path / "gone")
    file.write_text("mine")
    with served(URL, link=link) as server:
        assert os.readlink(link) == server.path
        with pytest.raises(FileExistsError), served(URL, link=link):
            pass
    assert not link.is_symlink()
    with served(URL, link=tmp_path / "new" / "link") as server:
        assert os.readlink(tmp_path / "new" / "link") == server.path
    done = run(URL, "--link", str(file))
    assert done.exit_code == 2
    assert "File exists" in done.output
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["golden:smartssd?cards=2"], "a board has a device of"),
        (["golden:nothing"], "there is no family"),
        ([f"{URL}&lanes=3"], "lanes"),
        ([URL, "--loss", "0.9"], "Invalid value for '--loss'"),
        ([URL, "--reset-after", "0"], "Invalid value for '--reset-after'"),
        ([URL, "--window", "200"], "Invalid value for '--window'"),
    ],
)
def test_what_cannot_be_served_is_an_error_of_use(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_a_board_of_bits_is_served_by_its_own_wire() -> None:
    """Such a backend has `wire`; nothing of the protocol is done in software then."""
    backend = open_backend(URL)
    endpoint_wire, endpoint = wire_of(backend, URL)
    assert endpoint is not None
    backend.wire = endpoint_wire  # type: ignore[attr-defined]
    assert wire_of(backend, URL) == (endpoint_wire, None)
    with pytest.raises(ValueError, match="no --window, --reset-after"):
        wire_of(backend, URL, reset_after=5)
    with PtyServer(endpoint_wire).start() as server, open_port(server.path) as device:
        assert works(device) == 3 * COUNT
        with pytest.raises(ValueError, match="is no emulated device"):
            wire_of(device.backend, "serial:x")
