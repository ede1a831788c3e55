"""What `make` hands on is what was written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STUB = "import json, sys\njson.dump(sys.argv[1:], open('arguments.json', 'w'))\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile in a checkout whose environment is ready and whose example is a stub."""
    folder = tmp_path / "a checkout"
    for name in ("examples", ".ci", ".venv/bin"):
        (folder / name).mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", ".ci/run_with_args.py"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "examples" / "train_gpt.py").write_text(STUB)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for stamp in (".yosys", ".ready", ".prepared"):
        (folder / ".venv" / stamp).touch()
    for name in ("a.txt", "b.txt"):
        (folder / name).touch()
    return folder


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "RUN_ARGS")}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT / "hw"), **environment},  # as if it was installed
        capture_output=True,
        text=True,
        check=False,
    )


CASES = {
    "": [],
    "--steps 3": ["--steps", "3"],
    "--device golden:axdimm?rules=adam&channels=2": [
        "--device",
        "golden:axdimm?rules=adam&channels=2",
    ],
    "--device 'sim:axdimm?x=1&y=2' --steps 1": [
        "--device",
        "sim:axdimm?x=1&y=2",
        "--steps",
        "1",
    ],
    "'two words' \"and more\" it\\'s": ["two words", "and more", "it's"],
    "* ?.txt ~ {a,b} #x": ["*", "?.txt", "~", "{a,b}", "#x"],
    "$HOME $(HOME) $$ ${MAKE} `id` $(shell id)": [
        *("$HOME", "$(HOME)", "$$", "${MAKE}", "`id`", "$(shell", "id)"),
    ],
    "a; echo b > c | cat && false": ["a;", "echo", "b", ">", "c", "|", "cat", "&&", "false"],
    "\\\\ %n café": ["\\", "%n", "café"],
}


@pytest.mark.parametrize("source", ["command line", "environment"])
@pytest.mark.parametrize(("given", "expected"), CASES.items())
def test_run_args_reach_the_example_as_they_are_written(
    checkout: Path, given: str, expected: list[str], source: str
) -> None:
    if source == "environment":
        done = make(checkout, "run", RUN_ARGS=given)
    else:
        done = make(checkout, "run", f"RUN_ARGS={given}")
    assert done.returncode == 0, done.stderr
    assert json.loads((checkout / "arguments.json").read_text()) == expected
    assert not (checkout / "c").exists()


def test_a_quote_that_is_not_closed_is_an_error(checkout: Path) -> None:
    done = make(checkout, "run", "RUN_ARGS=--device 'golden")
    assert done.returncode != 0
    assert "RUN_ARGS=--device 'golden: No closing quotation" in done.stderr
    assert not (checkout / "arguments.json").exists()


NEARSTEP = """#!/bin/sh
echo "$@" >> called.txt
test "$2 $4" != "orangecrab_85f dram"
"""


def called(checkout: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit status, and what `nearstep` is given, line by line; it fails for one board."""
    command = checkout / ".venv" / "bin" / "nearstep"
    command.write_text(NEARSTEP)
    command.chmod(0o755)
    done = make(checkout, *arguments)
    return done.returncode, (checkout / "called.txt").read_text().splitlines()


def test_a_bitstream_is_made_for_the_board_that_is_named(checkout: Path) -> None:
    given = ("bitstream", "BOARD=ulx3s_85f", "BOARD_ARGS=--memory blockram --rules sgd")
    assert called(checkout, *given) == (
        0,
        ["bitstream ulx3s_85f --memory blockram --rules sgd"],
    )


def test_every_bitstream_is_tried_and_one_that_fails_is_told(checkout: Path) -> None:
    status, lines = called(checkout, "bitstream-all", "BOARD_ARGS=--seeds 2")
    assert status != 0
    assert lines == [
        f"bitstream {board} --memory {memory} --seeds 2"
        for board in ("ulx3s_85f", "orangecrab_85f")
        for memory in ("dram", "blockram")
    ]
