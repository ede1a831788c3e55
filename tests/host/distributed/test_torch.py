"""torch's own tests of a backend pass with the memory devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 2400


@pytest.mark.deep
@pytest.mark.parametrize(("count", "least"), [(2, 120), (4, 150)])
def test_torchs_own_tests_pass(count: int, least: int) -> None:
    pytest.importorskip("expecttest", reason="torch's tests import expecttest: `pip install` it")
    ended = subprocess.run(
        [sys.executable, "-m", f"{__package__}.torch_class", str(count)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    for each in results:
        if each["result"] != "passed":
            print(f"{each['test']}: {each['result']}: {each['why']}")
    counted = Counter(each["result"] for each in results)
    print(dict(counted))
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert counted["failed"] == 0
    assert counted["passed"] >= least
