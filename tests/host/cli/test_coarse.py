"""`nearstep coarse serve`: what cannot be served is refused in a line and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nearstep.cli.coarse import app
from nearstep.coarse.service import Client
from nearstep.coarse.service.errors import RefusedError

GOLDEN = "golden:coarse?devices=2"
REFUSED = {
    "device": (["--device", "golden:coarse?devices=0"], "devices must lie in"),
    "family": (["--device", "golden:smartssd"], "must be driven by CoarseDevice"),
    "address": (["--listen", "here"], "tcp:HOST:PORT or tcp:[HOST]:PORT, not 'here'"),
    # TEST-NET-1 of RFC 5737: nobody's
    "host": (["--listen", "tcp:192.0.2.1:9"], f"[Errno {errno.EADDRNOTAVAIL}]"),
    "token": (["--token-file", "missing"], "No such file"),
    "shard": (["--shard-bytes", "0"], "shard_bytes must be a positive multiple"),
    "queue": (["--queue-shards", "0"], "queue_shards must be"),
    "beat": (["--beat-s", "-1"], "beat_s and silence_s must be positive"),
    "snapshots": (["--snapshots", "missing"], "snapshots must be a folder, not missing"),
    "scheduler": (["--scheduler", "x"], "scheduler must be one of queues, fcfs, not 'x'"),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused(
    given: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = {"--device": GOLDEN, "--listen": "unix:"} | dict(zip(*[iter(given)] * 2, strict=True))
    arguments = [part for each in options.items() for part in each]
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_service_saves_in_its_folder_alone(tmp_path: Path) -> None:
    """Names that are no whole paths are in it: the service works there."""
    folder = tmp_path / "in"
    folder.mkdir()
    command = [sys.executable, "-m", "nearstep", "coarse", "serve", "--device", GOLDEN]
    command += ["--listen", "unix:socket", "--snapshots", str(folder), "--until-eof"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("a token\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["address"] == "unix:socket"
        address = f"unix:{tmp_path}/socket"
        with Client(address, "a token", job="a", rank=0, clients=1) as client:
            client.keep("a", np.ones(8, np.uint8))
            assert client.save("x", ["a"]) == f"{folder}/x.000001"
            with pytest.raises(RefusedError, match="path must be in"):
                client.save(f"{tmp_path}/x", ["a"])
        process.stdin.close()
        assert process.wait(60) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["in"]
