"""A campaign: mutants of a component that its tests notice, and a test that notices none."""

import subprocess
import sys
from pathlib import Path

import pytest

from .__main__ import BLOCKS, ROOT, Mutant, score

COUNT = 12
CAMPAIGN = """
import sys
from pathlib import Path
from tests.mutation.__main__ import campaign
table = {"modules": "^stream_slice", "tests": [sys.argv[1]]}
mutants = campaign(table, count=int(sys.argv[2]), seed=1, folder=Path(sys.argv[3]))
print(*(each.outcome for each in mutants))
"""
WEAK = """
from amaranth.hdl import unsigned
from nearstep_hw.stream.slice import StreamSlice
from nearstep_sim.bench.stream_bench import StreamBench

def test_nothing():
    assert StreamBench(StreamSlice(unsigned(32)), name="stream_slice", key="32").library
"""


def outcomes(tests: object, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CAMPAIGN, str(tests), str(COUNT), str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1].split()


@pytest.mark.deep
def test_tests_of_a_component_notice_its_mutants_and_one_that_checks_nothing_none(
    tmp_path: Path,
) -> None:
    found = outcomes("tests/hw/stream/test_slice.py", tmp_path / "strong")
    (tmp_path / "test_weak.py").write_text(WEAK)
    missed = outcomes(tmp_path / "test_weak.py", tmp_path / "weak")
    assert len(found) == len(missed) == COUNT
    assert {*missed} == {"survived"}
    assert found.count("killed") >= COUNT - 1


def test_equivalent_mutants_count_for_nothing() -> None:
    each = [*["killed"] * 6, "hung", "survived", "equivalent", "equivalent"]
    counts, share = score([Mutant(n, "", outcome) for n, outcome in enumerate(each)])
    assert (counts["killed"], share) == (6, 7 / 8)


def test_a_block_has_tests_that_exist() -> None:
    files = [test.partition("::")[0] for table in BLOCKS.values() for test in table["tests"]]
    assert len(files) >= len(BLOCKS) >= 6
    assert [file for file in files if not (ROOT / file).is_file()] == []
