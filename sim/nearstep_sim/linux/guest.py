"""`make linux`: Debian's kernel, unmodified, below QEMU, unmodified, in front of a card.

The guest looks at the card with Debian's nvme-cli, writes and reads the drive, and trains ten steps
of AdamW on the card by standard commands. SHA-256 of p, m and v are compared with those of
`torch.optim.AdamW(fused=True)`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from nearstep.linux.nvme.card import open_controller
from nearstep.linux.nvme.controller import Counters, NvmeController
from nearstep.linux.vfio_user import Server
from nearstep_sim.linux.initramfs import Initramfs
from nearstep_sim.linux.packages import LOADER, QEMU, PackagesError, unpacked
from nearstep_spec.errors import NearstepError
from nearstep_spec.rule.rules import OPTIMIZERS

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "nvme_adamw.c"
MEMORY_MIB, CARD_MIB, DRIVE_MIB = 512, 16, 64
LIMIT_S = 280
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
    counters: Counters = field(default_factory=Counters)

    @property
    def sums(self) -> Sequence[str]:
        """SHA-256 of the guest's last p, m and v."""
        return re.findall(r"^([0-9a-f]{64})  [pmv]$", self.console, re.MULTILINE)[-3:]

    @property
    def succeeded(self) -> bool:
        """Whether init came to its end, and no command in it failed."""
        return "FAILED" not in self.console and "\nEND" in self.console


def numbers(step: int, count: int) -> np.ndarray:
    """Parameters (step 0) and gradients of `examples/nvme_adamw.c`; float32, in [-1, 1)."""
    x = np.arange(count, dtype=np.uint32) * np.uint32(2654435761)
    x += np.uint32((step * 40503 + 12345) & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(2246822519)
    x ^= x >> np.uint32(13)
    return (x >> np.uint32(8)).astype(np.float32) / np.float32(8388608) - np.float32(1)


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
    url: str, *, count: int, steps: int, kills: Sequence[float] = (), script: str = "",
    show: Callable[[str], None] = _nothing,
) -> Outcome:  # fmt: skip
    """Boot a guest in front of a card, and let it train.

    Parameters
    ----------
    url : of the card.
    count, steps : parameters, and steps of AdamW.
    kills : for each a guest is started first, and QEMU killed after so many seconds; the card stays
        open.
    script : as of `Guest`.
    show : is given each line of the console between BEGIN and END.

    Raises
    ------
    PackagesError : QEMU or the guest cannot be fetched, or the example not be compiled.
    GuestError : the guest hung, or a command in it failed.
    NearstepError : from the cache, or the card.
    """
    with tempfile.TemporaryDirectory(prefix="nearstep-linux-") as name:
        guest = Guest(Path(name), count, steps, script)
        drive = Path(name) / "drive"
        with drive.open("wb") as file:
            file.truncate(DRIVE_MIB << 20)
        with serving(url, drive, guest.socket) as controller:
            for each in kills:
                guest.run(limit_s=each)
            found = guest.run(show)
    if not found.succeeded or (not script and len(found.sums) != 3):
        raise GuestError("the guest failed", found.console)
    return replace(found, counters=controller.counters)


@contextmanager
def serving(url: str, drive: Path, path: Path) -> Iterator[NvmeController]:
    """Serve a card at a socket, from another thread of this process."""
    controller = open_controller(url, drive, CARD_MIB << 20)
    server = Server(controller, path)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield controller
    finally:
        server.stop()
        thread.join()
        controller.close()


class Guest:
    """A guest: Debian's kernel, and a filesystem that is made.

    Parameters
    ----------
    folder : for the filesystem and the sockets.
    count, steps : parameters, and steps of AdamW, of `/arguments` in the guest.
    script : lines for the guest's shell in place of the demonstration; see `init.sh`. The guest has
        those of Debian's programs that they name.

    Attributes
    ----------
    socket : of the card, which somebody must serve.
    files : the folder of QEMU and of Debian's programs.

    Raises
    ------
    PackagesError : as `boot`.
    CacheError
    """

    def __init__(self, folder: Path, count: int, steps: int, script: str = "") -> None:
        self.files = unpacked()
        self.socket = folder / "card"
        self._monitor = folder / "monitor"
        self._initramfs = folder / "initramfs"
        digest = OPTIMIZERS["adam"].by_rule["adam"].digest
        made = _initramfs(self.files, folder, f"{digest} {count} {steps}", script)
        self._initramfs.write_bytes(made)

    def run(
        self,
        show: Callable[[str], None] = _nothing,
        *,
        limit_s: float = LIMIT_S,
        reboots: bool = False,
    ) -> Outcome:
        """Run QEMU until the guest powers off, or for `limit_s`.

        Parameters
        ----------
        show : is given each line of the console between BEGIN and END.
        reboots : whether a reset boots the guest again; otherwise it ends QEMU.
        """
        begin = last = time.monotonic()
        process = subprocess.Popen(
            self._command(reboots), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**os.environ, "LC_ALL": "C"},
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
        device = f'{{"driver":"vfio-user-pci","socket":{{"type":"unix","path":"{self.socket}"}}}}'
        return [
            *self.program(QEMU),
            "-L", str(self.files / "share"), "-nodefaults", "-no-user-config", "-display", "none",
            "-machine", "q35,memory-backend=m,accel=tcg",
            "-action", f"reboot={'reset' if reboots else 'shutdown'}",
            "-cpu", "max", "-smp", "1",
            "-object", f"memory-backend-memfd,id=m,size={MEMORY_MIB}M,share=on",
            "-m", f"{MEMORY_MIB}M", "-kernel", str(self.files / "vmlinuz"),
            "-initrd", str(self._initramfs), "-append", COMMAND_LINE, "-serial", "stdio",
            "-qmp", f"unix:{self._monitor},server=on,wait=off", "-device", device,
        ]  # fmt: skip

    def program(self, name: str) -> list[str]:
        """The command that runs one of Debian's programs on this machine."""
        loader = str(self.files / "lib" / LOADER)
        return [loader, "--library-path", str(self.files / "lib"), str(self.files / name)]


def _initramfs(files: Path, folder: Path, arguments: str, script: str) -> bytes:
    """The guest's filesystem: init, busybox, Debian's programs with libraries, the example."""
    program = folder / "nvme_adamw"
    command = ["gcc", "-static", "-O2", str(EXAMPLE), "-o", str(program), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PackagesError(f"compile {EXAMPLE.name}", "gcc is not installed") from None
    if done.returncode:
        raise PackagesError(f"compile {EXAMPLE.name}", done.stderr.strip()[-500:])
    made = Initramfs()
    made.add("init", (Path(__file__).parent / "init.sh").read_bytes())
    made.add("bin/nvme_adamw", program.read_bytes())
    made.add("arguments", arguments.encode())
    if script:
        made.add("script", script.encode())
    programs = [each for each in ("nvme", "fio") if not script or f"{each} " in script]
    for each in ("busybox", *programs):
        made.add(f"bin/{each}", (files / each).read_bytes())
    lists = [(files / f"{each}.libraries").read_text().split() for each in programs]
    for each in sorted({LOADER, *chain(*lists)}):
        made.add(f"lib/{each}", (files / "lib" / each).read_bytes())
    made.link(f"lib64/{LOADER}", f"/lib/{LOADER}")
    return made.archive()


def main() -> None:
    """Boot, print the transcript, and compare with torch."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make linux")
    parser.add_argument("--device", default="golden:smartssd", help="the card")
    parser.add_argument("--parameters", type=int, default=65536 + 16)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    try:
        found = boot(given.device, count=given.parameters, steps=given.steps, show=print)
    except (NearstepError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    counts = found.counters
    print(f"boot to power-off: {found.seconds:.1f} s, {found.power_off_s:.2f} s of it power-off")
    print(
        f"{counts.commands} commands, {counts.mmio_writes} writes and {counts.mmio_reads} reads of "
        f"registers, {counts.interrupts} interrupts"
    )
    wanted = sums_of_torch(given.parameters, given.steps)
    equal = wanted == list(found.sums)
    print(f"p, m and v {'equal' if equal else 'DIFFER FROM'} those of torch, fused, in every bit")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
