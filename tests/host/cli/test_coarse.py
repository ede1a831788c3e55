"""`nearstep coarse serve`: what cannot be served is refused in a line and leaves nothing behind."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nearstep.cli.coarse import app

GOLDEN = "golden:coarse?devices=2"
REFUSED = {
    "device": (["--device", "golden:coarse?devices=0"], "devices must lie in"),
    "family": (["--device", "golden:smartssd"], "must be driven by CoarseDevice"),
    "address": (["--listen", "here"], "unix:PATH or tcp:HOST:PORT, not 'here'"),
    # TEST-NET-1 of RFC 5737: nobody's
    "host": (["--listen", "tcp:192.0.2.1:9"], f"[Errno {errno.EADDRNOTAVAIL}]"),
    "token": (["--token-file", "missing"], "No such file"),
    "shard": (["--shard-bytes", "0"], "shard_bytes must be a positive multiple"),
    "queue": (["--queue-shards", "0"], "queue_shards must be"),
    "beat": (["--beat-s", "-1"], "beat_s and silence_s must be positive"),
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
