"""`make linux`: Debian's kernel, unmodified, below QEMU, unmodified, in front of a card.

The guest looks at the card with Debian's nvme-cli, writes and reads the drive, and trains ten steps
of AdamW on the card by standard commands. SHA-256 of p, m and v are compared with those of
`torch.optim.AdamW(fused=True)`. With `--front bars` it trains on the card's own BARs, with the
driver that every device has: over resource files, and once more over VFIO.
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
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from nearstep.backends.pci import PciOptions
from nearstep.linux.bars import CardFunction, open_card
from nearstep.linux.bars import Counters as BarCounters
from nearstep.linux.nvme.card import open_controller
from nearstep.linux.nvme.controller import Counters, NvmeController
from nearstep.linux.vfio_user import Server
from nearstep_sim.linux.initramfs import Initramfs
from nearstep_sim.linux.packages import LOADER, QEMU, VFIO, VIRTIOFSD, PackagesError, unpacked
from nearstep_sim.linux.train import numbers
from nearstep_sim.nvme.controller import RtlController
from nearstep_spec.cache import cache_dir
from nearstep_spec.codec import to_text
from nearstep_spec.errors import NearstepError
from nearstep_spec.rule.rules import OPTIMIZERS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXAMPLE, SLOT_EXAMPLE = EXAMPLES / "nvme_adamw.c", EXAMPLES / "slot_adamw.py"
TRAIN = "nearstep_sim.linux.train"
SLOT = "0000:01:00.0"
"""Of the card with its own BARs: below a root port, which can reset it."""

OWN_BARS = f"""run "uname -r"
run "grep PCI_ID /sys/bus/pci/devices/{SLOT}/uevent"
run "cat /sys/bus/pci/devices/{SLOT}/resource | head -3"
python "{{}}"
vfio {SLOT}
python "{{}}"
"""
"""Script of a guest that has the card itself, for the arguments of two trainings."""

ACCESSES: tuple[Literal["resource", "vfio"], ...] = ("resource", "vfio")

MEMORY_MIB, CARD_MIB, DRIVE_MIB = 512, 16, 64
PYTHON_MIB = 1536
"""Memory of a guest that imports torch."""

LIMIT_S, PYTHON_LIMIT_S = 280, 900
"""Seconds after which a guest has hung, even on a busy machine."""

COMMAND_LINE = (
    "console=ttyS0 quiet panic=-1 nokaslr random.trust_cpu=on no_timer_check iomem=relaxed"
)
"""On a busy machine QEMU gets no processor for so long that Linux's check of the timer would panic;
`nvme show-regs` maps registers that a driver has.
"""


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
    """What a guest did.

    Attributes
    ----------
    console : all that the guest printed.
    seconds : from the start of QEMU to its end.
    power_off_s : of that, from the last line of the guest's init to the end; 0 if it has none.
    counters : of the controller, over the whole boot.
    """

    console: str
    seconds: float
    power_off_s: float
    counters: Counters | BarCounters = field(default_factory=Counters)

    @property
    def sums(self) -> Sequence[str]:
        """SHA-256 of p, m and v in the guest, of each training."""
        return re.findall(r"^([0-9a-f]{64})  [pmv]$", self.console, re.MULTILINE)

    @property
    def succeeded(self) -> bool:
        """Whether init came to its end, and no command in it failed."""
        return "FAILED" not in self.console and "\nEND" in self.console


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


def _nothing(line: str) -> None:
    pass


def boot(
    url: str, *, count: int, steps: int, front: Literal["nvme", "bars"] = "nvme",
    queues: str = "python", kills: Sequence[float] = (), script: str = "",
    python: Sequence[str] = (), show: Callable[[str], None] = _nothing,
) -> Outcome:  # fmt: skip
    """Boot a guest in front of a card, and let it train.

    Parameters
    ----------
    url : of the card.
    count, steps : parameters, and steps of AdamW.
    front : as `nearstep card serve` has it; with `bars` the guest runs `examples/slot_adamw.py`.
    queues : registers and queues of the NVMe controller, in `python` or in `rtl`.
    kills : for each a guest is started first, and QEMU killed after so many seconds; the card stays
        open.
    script, python : as of `Guest`.
    show : is given each line of the console between BEGIN and END.

    Raises
    ------
    PackagesError : QEMU or the guest cannot be fetched, or the example not be compiled.
    GuestError : the guest hung, or a command in it failed.
    NearstepError : from the cache, or the card.
    """
    unpacked()
    with tempfile.TemporaryDirectory(prefix="nearstep-linux-") as name:
        folder = Path(name)
        drive = None if front == "bars" else folder / "drive"
        if drive is not None:
            with drive.open("wb") as file:
                file.truncate(DRIVE_MIB << 20)
        with serving(url, drive, folder / "card", queues) as function:
            if isinstance(function, CardFunction):
                names = (slot_name(function, SLOT, access) for access in ACCESSES)
                script = OWN_BARS.format(*(f"'{name}' {count} {steps}" for name in names))
                python = [str(SLOT_EXAMPLE)]
            guest = Guest(folder, count, steps, script, python, below_port=drive is None)
            for each in kills:
                guest.run(limit_s=each)
            found = guest.run(show)
    if not found.succeeded or (not (script and drive) and not found.sums):
        raise GuestError("the guest failed", found.console)
    return replace(found, counters=function.counters)


@contextmanager
def serving(
    url: str, drive: Path | None, path: Path, queues: str = "python"
) -> Iterator[CardFunction | NvmeController]:
    """Serve a card at a socket, from another thread of this process; without a drive its own
    BARs."""
    function: CardFunction | NvmeController
    if drive is None:
        function = open_card(url)
    else:
        kind = RtlController if queues == "rtl" else NvmeController
        function = open_controller(url, drive, CARD_MIB << 20, kind=kind)
    server = Server(function, path)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield function
    finally:
        server.stop()
        thread.join()
        function.close()


def slot_name(function: CardFunction, slot: str, access: Literal["resource", "vfio"]) -> str:
    """Name of the device in a guest that has a function in a slot."""
    options = to_text(PciOptions(card=function.config, access=access))
    return f"pci:{slot}?" + "&".join(f"{key}={text}" for key, text in options.items())


class Guest:
    """A guest: Debian's kernel, and a filesystem that is made.

    Parameters
    ----------
    folder : for the filesystem and the sockets.
    count, steps : parameters, and steps of AdamW, of `/arguments` in the guest.
    script : lines for the guest's shell in place of the demonstration; see `init.sh`. The guest has
        those of Debian's programs that they name.
    python : arguments of this interpreter, which runs in the guest behind the other commands, with
        the packages of this process: the guest has the files of this machine, read-only, at their
        paths. Only /dev/shm can be written.
    below_port : the card is below a root port, at `SLOT`; the guest has an IOMMU, too, and Linux's
        modules of VFIO, which need one.

    Attributes
    ----------
    socket : of the card, which somebody must serve.
    files : the folder of QEMU and of Debian's programs.

    Raises
    ------
    PackagesError : as `boot`.
    CacheError
    """

    def __init__(
        self, folder: Path, count: int, steps: int, script: str = "",
        python: Sequence[str] = (), *, below_port: bool = False,
    ) -> None:  # fmt: skip
        self.files = unpacked()
        self.socket = folder / "card"
        self._monitor = folder / "monitor"
        self._initramfs = folder / "initramfs"
        digest = OPTIMIZERS["adam"].by_rule["adam"].digest
        self._has_python, self._below_port = bool(python), below_port
        made = _initramfs(self.files, folder, f"{digest} {count} {steps}", script)
        if python:
            made.add("python", f'{shlex.join(_in_guest(python))} "$@"'.encode())
        if below_port:
            made.add("modules/order", "\n".join(VFIO).encode())
            for each in VFIO:
                made.add(f"modules/{each}.ko", (self.files / "modules" / f"{each}.ko").read_bytes())
        self._initramfs.write_bytes(made.archive())

    def run(
        self,
        show: Callable[[str], None] = _nothing,
        *,
        limit_s: float | None = None,
        reboots: bool = False,
    ) -> Outcome:
        """Run QEMU until the guest powers off, or for `limit_s`; None: until it has hung.

        Parameters
        ----------
        show : is given each line of the console between BEGIN and END.
        reboots : whether a reset boots the guest again; otherwise it ends QEMU.
        """
        with self._shared() if self._has_python else nullcontext(()) as more:
            return self._run(show, limit_s, [*self._command(reboots), *more])

    def _run(
        self, show: Callable[[str], None], limit_s: float | None, command: Sequence[str]
    ) -> Outcome:
        begin = last = time.monotonic()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        hung_s = PYTHON_LIMIT_S if self._has_python else LIMIT_S
        watch = threading.Timer(hung_s if limit_s is None else limit_s, process.kill)
        watch.start()
        lines: list[str] = []
        shown = False
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw.decode(errors="replace")).rstrip()
                lines.append(line)
                shown = (shown or line == "BEGIN") and line != "END"
                if line == "END":
                    last = time.monotonic()
                if shown and line != "BEGIN":
                    show(line)
            process.wait()
        finally:
            watch.cancel()
            process.kill()
            process.wait()
            process.stdout.close()
        end = time.monotonic()
        return Outcome("\n".join(lines), end - begin, end - last if last > begin else 0.0)

    def tell(self, command: str) -> None:
        """Give the QEMU that runs a command of its monitor: `system_reset`, `quit`."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.connect(str(self._monitor))
            with monitor.makefile("rw") as lines:
                lines.readline()  # its greeting
                for each in ("qmp_capabilities", command):
                    lines.write(json.dumps({"execute": each}) + "\n")
                    lines.flush()
                    while "return" not in json.loads(lines.readline()):
                        pass  # an event

    def _command(self, reboots: bool) -> list[str]:
        memory_mib = PYTHON_MIB if self._has_python else MEMORY_MIB
        at = {"type": "unix", "path": str(self.socket)}
        place = {"bus": "below"} if self._below_port else {"addr": "1"}
        device = json.dumps({"driver": "vfio-user-pci", "socket": at, **place})
        iommu = "intel-iommu,intremap=on,caching-mode=on"
        port = ["-device", iommu, "-device", "pcie-root-port,id=below,addr=1,chassis=1"]
        return [
            *self.program(QEMU),
            "-L", str(self.files / "share"), "-nodefaults", "-no-user-config", "-display", "none",
            "-machine", "q35,memory-backend=m,accel=tcg",
            "-action", f"reboot={'reset' if reboots else 'shutdown'}",
            "-cpu", "max", "-smp", "1",
            "-object", f"memory-backend-memfd,id=m,size={memory_mib}M,share=on",
            "-m", f"{memory_mib}M", "-kernel", str(self.files / "vmlinuz"),
            "-initrd", str(self._initramfs), "-append", COMMAND_LINE, "-serial", "stdio",
            "-qmp", f"unix:{self._monitor},server=on,wait=off",
            *(port if self._below_port else ()), "-device", device,
        ]  # fmt: skip

    @contextmanager
    def _shared(self) -> Iterator[list[str]]:
        """Serve the files of this machine, read-only; QEMU's arguments."""
        path = self.socket.with_name("files")
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen(1)
            command = [
                *self.program(VIRTIOFSD), "--fd", str(server.fileno()), "--shared-dir", "/",
                "--readonly", "--sandbox", "none", "--log-level", "error",
            ]  # fmt: skip
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[server.fileno()]
            )
        try:
            yield [
                "-chardev", f"socket,id=files,path={path}",
                "-device", "vhost-user-fs-pci,chardev=files,tag=host,addr=2",
            ]  # fmt: skip
        finally:
            process.kill()
            process.wait()

    def program(self, name: str) -> list[str]:
        """The command that runs one of Debian's programs on this machine."""
        loader = str(self.files / "lib" / LOADER)
        return [loader, "--library-path", str(self.files / "lib"), str(self.files / name)]


def _in_guest(python: Sequence[str]) -> list[str]:
    """The command that runs this interpreter in the guest, below its root."""
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


def _initramfs(files: Path, folder: Path, arguments: str, script: str) -> Initramfs:
    """The guest's filesystem: init, busybox, Debian's programs with libraries, the example."""
    made = Initramfs()
    made.add("init", (Path(__file__).parent / "init.sh").read_bytes())
    made.add("arguments", arguments.encode())
    if script:
        made.add("script", script.encode())
    if not script or EXAMPLE.stem in script:
        made.add(f"bin/{EXAMPLE.stem}", _example(folder))
    programs = [each for each in ("nvme", "fio") if not script or f"{each} " in script]
    for each in ("busybox", *programs):
        made.add(f"bin/{each}", (files / each).read_bytes())
    lists = [(files / f"{each}.libraries").read_text().split() for each in programs]
    for each in sorted({LOADER, *chain(*lists)}):
        made.add(f"lib/{each}", (files / "lib" / each).read_bytes())
    made.link(f"lib64/{LOADER}", f"/lib/{LOADER}")
    return made


def _example(folder: Path) -> bytes:
    """The example, compiled for the guest."""
    program = folder / EXAMPLE.stem
    command = ["gcc", "-static", "-O2", str(EXAMPLE), "-o", str(program), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PackagesError(f"compile {EXAMPLE.name}", "gcc is not installed") from None
    if done.returncode:
        raise PackagesError(f"compile {EXAMPLE.name}", done.stderr.strip()[-500:])
    return program.read_bytes()


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
    print(f"boot to power-off: {found.seconds:.1f} s, {found.power_off_s:.2f} s of it power-off")
    print(found.counters)
    wanted = sums_of_torch(given.parameters, given.steps)
    trainings = len(ACCESSES) if given.front == "bars" else 3 if python else 1
    equal = wanted * trainings == list(found.sums)
    print(f"p, m and v {'equal' if equal else 'DIFFER FROM'} those of torch, fused, in every bit")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
