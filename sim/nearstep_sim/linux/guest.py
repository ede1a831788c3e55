"""`make linux`: Debian's kernel, unmodified, below QEMU, unmodified, in front of a card.

The guest looks at the card with Debian's nvme-cli, writes and reads the drive, and trains ten steps
of AdamW on the card by standard commands. SHA-256 of p, m and v are compared with those of
`torch.optim.AdamW(fused=True)`. With `--front bars` it trains on the card's own BARs, with the
driver that every device has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nearstep.backends.pci import PciOptions
from nearstep.linux.bars import CardFunction, open_card
from nearstep.linux.bars import Counters as BarCounters
from nearstep.linux.nvme.card import open_controller
from nearstep.linux.nvme.controller import Counters, NvmeController
from nearstep.linux.vfio_user import Server
from nearstep_sim.linux.initramfs import Initramfs
from nearstep_sim.linux.packages import LOADER, QEMU, VIRTIOFSD, PackagesError, unpacked
from nearstep_sim.linux.train import numbers
from nearstep_sim.nvme.controller import RtlController
from nearstep_spec.cache import cache_dir
from nearstep_spec.codec import to_text
from nearstep_spec.errors import NearstepError
from nearstep_spec.rule.rules import OPTIMIZERS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXAMPLE, SLOT_EXAMPLE = EXAMPLES / "nvme_adamw.c", EXAMPLES / "slot_adamw.py"
SLOT = "0000:01:00.0"
"""Of the card with its own BARs: below a root port, which can reset it."""

MEMORY_MIB, CARD_MIB, DRIVE_MIB = 512, 16, 64
PYTHON_MIB = 1536
"""Memory of a guest that imports torch."""

TRAIN = "nearstep_sim.linux.train"
LIMIT_S, PYTHON_LIMIT_S = 280, 900
"""Seconds after which a guest has hung, even on a busy machine."""

COMMAND_LINE = "console=ttyS0 quiet panic=-1 nokaslr random.trust_cpu=on no_timer_check"


class GuestError(NearstepError, RuntimeError):
    """A guest did not do what it should; the console says why.

    Attributes
    ----------
    console : what the guest printed.
    """

    def __init__(self, reason: str, console: str) -> None:
        self.console = console
        super().__init__(f"{reason}; the console's last lines:\n{console[-2000:]}")


@dataclass(frozen=True)
class Outcome:
    """A boot.

    Attributes
    ----------
    console : all that the guest printed.
    seconds : from the start of QEMU to its end.
    counters : of the controller, over the whole boot.
    sums : SHA-256 of p, m and v in the guest, of each training.
    """

    console: str
    seconds: float
    counters: Counters | BarCounters
    sums: Sequence[str]


def sums_of_torch(count: int, steps: int) -> list[str]:
    """SHA-256 of p, m and v after steps of torch's fused AdamW.

    Bits are those of a card on processors with torch's kernels for AVX2 or AVX512, if `count` is a
    multiple of 16; see `nearstep.optim`.
    """
    import torch

    parameter = torch.nn.Parameter(torch.from_numpy(numbers(0, count)))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    for step in range(1, steps + 1):
        parameter.grad = torch.from_numpy(numbers(step, count))
        optimizer.step()
    state = optimizer.state[parameter]
    arrays = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
    return [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in arrays]


def boot(
    url: str, *, count: int, steps: int, front: Literal["nvme", "bars"] = "nvme",
    queues: str = "python", kills: Sequence[float] = (), python: Sequence[str] = (),
    show: Callable[[str], None] = lambda line: None,
) -> Outcome:  # fmt: skip
    """Boot a guest in front of a card, and let it train.

    Parameters
    ----------
    url : of the card.
    count, steps : parameters, and steps of AdamW.
    front : as `nearstep card serve` has it; with `bars` the guest runs `examples/slot_adamw.py`.
    kills : for each a guest is started first, and QEMU killed after so many seconds; the card stays
        open.
    queues : registers and queues of the NVMe controller, in `python` or in `rtl`.
    python : arguments of this interpreter, which runs in the guest behind the other commands, with
        the packages of this process: the guest has the files of this machine, read-only, at their
        paths. Only /dev/shm can be written.
    show : is given each line of the console between BEGIN and END.

    Raises
    ------
    PackagesError : QEMU or the guest cannot be fetched, or the example not be compiled.
    GuestError : the guest hung, or a command in it failed.
    NearstepError : from the cache, or the card.
    """
    files = unpacked()
    with tempfile.TemporaryDirectory(prefix="nearstep-linux-") as name:
        folder = Path(name)
        made = _initramfs(files)
        controller: CardFunction | NvmeController
        if front == "bars":
            controller = open_card(url)
            python = [str(SLOT_EXAMPLE), slot_name(controller, SLOT), str(count), str(steps)]
        else:
            arguments = f"{OPTIMIZERS['adam'].by_rule['adam'].digest} {count} {steps}"
            _add_nvme(made, files, folder, arguments)
            drive = folder / "drive"
            with drive.open("wb") as file:
                file.truncate(DRIVE_MIB << 20)
            kind = RtlController if queues == "rtl" else NvmeController
            controller = open_controller(url, drive, CARD_MIB << 20, kind=kind)
        if python:
            made.add("python", shlex.join(_command(python)).encode())
        (folder / "initramfs").write_bytes(made.archive())
        server = Server(controller, folder / "card")
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            for each in kills:
                _run(files, folder, lambda line: None, each)
            begin = time.monotonic()
            with _shared(files, folder) if python else nullcontext(()) as more:
                limit_s = PYTHON_LIMIT_S if python else LIMIT_S
                below = front == "bars"
                console = _run(files, folder, show, limit_s, more, below_port=below)
            seconds = time.monotonic() - begin
        finally:
            server.stop()
            thread.join()
            controller.close()
    sums = re.findall(r"^([0-9a-f]{64})  [pmv]$", console, re.MULTILINE)
    if "FAILED" in console or "END" not in console or not sums:
        raise GuestError("the guest failed", console)
    return Outcome(console, seconds, controller.counters, sums)


def _command(python: Sequence[str]) -> list[str]:
    """The command that runs a program of this machine in the guest, below its root."""
    variables = {
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "NEARSTEP_CACHE": str(cache_dir()),
        "NEARSTEP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": "/dev/shm",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    given = [f"{name}={value}" for name, value in variables.items()]
    return ["env", "-i", *given, "chroot", "/host", sys.executable, *python]


@contextmanager
def _shared(files: Path, folder: Path) -> Iterator[list[str]]:
    """Serve the files of this machine, read-only, to one guest; QEMU's arguments."""
    path = folder / "files"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        command = [
            str(files / "lib" / LOADER), "--library-path", str(files / "lib"),
            str(files / VIRTIOFSD), "--fd", str(server.fileno()), "--shared-dir", "/",
            "--readonly", "--sandbox", "none", "--log-level", "error",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[server.fileno()])
    try:
        yield [
            "-chardev", f"socket,id=files,path={path}",
            "-device", "vhost-user-fs-pci,chardev=files,tag=host,addr=2",
        ]  # fmt: skip
    finally:
        process.kill()
        process.wait()


def slot_name(function: CardFunction, slot: str) -> str:
    """Name of the device in a guest that has a function in a slot."""
    options = to_text(PciOptions(card=function.config))
    return f"pci:{slot}?" + "&".join(f"{key}={text}" for key, text in options.items())


def _initramfs(files: Path) -> Initramfs:
    """The guest's filesystem: init and busybox."""
    made = Initramfs()
    made.add("init", (Path(__file__).parent / "init.sh").read_bytes())
    made.add("bin/busybox", (files / "busybox").read_bytes())
    return made


def _add_nvme(made: Initramfs, files: Path, folder: Path, arguments: str) -> None:
    """Add what drives an NVMe device: nvme-cli with its libraries, and the example."""
    program = folder / "nvme_adamw"
    command = ["gcc", "-static", "-O2", str(EXAMPLE), "-o", str(program), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PackagesError(f"compile {EXAMPLE.name}", "gcc is not installed") from None
    if done.returncode:
        raise PackagesError(f"compile {EXAMPLE.name}", done.stderr.strip()[-500:])
    made.add("bin/nvme_adamw", program.read_bytes())
    made.add("arguments", arguments.encode())
    made.add("bin/nvme", (files / "nvme").read_bytes())
    names = (files / "nvme.libraries").read_text().split()
    for each in (*names, LOADER):
        made.add(f"lib/{each}", (files / "lib" / each).read_bytes())
    made.link(f"lib64/{LOADER}", f"/lib/{LOADER}")


def _run(
    files: Path, folder: Path, show: Callable[[str], None], limit_s: float,
    more: Sequence[str] = (), *, below_port: bool = False,
) -> str:  # fmt: skip
    """Run QEMU until the guest powers off, or for `limit_s`; return all of its console."""
    memory_mib = PYTHON_MIB if more else MEMORY_MIB
    at = {"type": "unix", "path": str(folder / "card")}
    place = {"bus": "below"} if below_port else {"addr": "1"}
    device = json.dumps({"driver": "vfio-user-pci", "socket": at, **place})
    port = ["-device", "pcie-root-port,id=below,addr=1,chassis=1"] if below_port else []
    command = [
        str(files / "lib" / LOADER), "--library-path", str(files / "lib"), str(files / QEMU),
        "-L", str(files / "share"), "-nodefaults", "-no-user-config", "-display", "none",
        "-machine", "q35,memory-backend=m,accel=tcg", "-no-reboot",
        "-cpu", "max", "-smp", "1",
        "-object", f"memory-backend-memfd,id=m,size={memory_mib}M,share=on", "-m", f"{memory_mib}M",
        "-kernel", str(files / "vmlinuz"), "-initrd", str(folder / "initramfs"),
        "-append", COMMAND_LINE, "-serial", "stdio", *port, "-device", device, *more,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    watch = threading.Timer(limit_s, process.kill)
    watch.start()
    lines: list[str] = []
    shown = False
    assert process.stdout is not None
    try:
        for raw in process.stdout:
            line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw.decode(errors="replace")).rstrip()
            lines.append(line)
            shown = (shown or line == "BEGIN") and line != "END"
            if shown and line != "BEGIN":
                show(line)
        process.wait()
    finally:
        watch.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
    return "\n".join(lines)


def main() -> None:
    """Boot, print the transcript, and compare with torch."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make linux")
    parser.add_argument("--device", default="golden:smartssd", help="the card")
    parser.add_argument("--front", choices=("nvme", "bars"), default="nvme")
    parser.add_argument("--parameters", type=int, default=65536 + 16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--queues", choices=("python", "rtl"), default="python",
                        help="registers and queues of the controller")  # fmt: skip
    parser.add_argument(
        "--python", action="store_true",
        help="train with torch in the guest, too, on nvme:, by io_uring and by ioctl",
    )  # fmt: skip
    given = parser.parse_args()
    if given.front == "bars" and (given.python or given.queues != "python"):
        parser.error("--python and --queues are options of --front nvme, not of bars")
    python = ["-m", TRAIN, str(given.parameters), str(given.steps)] if given.python else []
    try:
        found = boot(given.device, count=given.parameters, steps=given.steps, front=given.front,
                     queues=given.queues, python=python, show=print)  # fmt: skip
    except (NearstepError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"boot to power-off: {found.seconds:.1f} s")
    print(found.counters)
    wanted = sums_of_torch(given.parameters, given.steps)
    equal = wanted * (3 if python else 1) == list(found.sums)
    print(f"p, m and v {'equal' if equal else 'DIFFER FROM'} those of torch, fused, in every bit")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
