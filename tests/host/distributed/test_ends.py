"""Processes that end while their groups are at work, or with their parents' groups."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from . import ends


def test_processes_end_as_they_would_without_a_group(tmp_path: Path) -> None:
    """Status 1 is that of an exception in the main thread; 134 that of an abort."""
    command = [sys.executable, ends.__file__, str(tmp_path / "statuses")]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=ends.TIMEOUT_S * len(ends.PROGRAMS)
    )
    found = json.loads((tmp_path / "statuses").read_text())
    expected = {each.__name__: int(each is ends.callback) for each in ends.PROGRAMS}
    assert found == expected, ended.stderr[-6000:]
