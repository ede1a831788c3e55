"""Guest, server, and what is between them end or are reset at random moments; then all is well.

Debian's kernel below QEMU, in front of `nearstep card serve`, or of a server in this process.
"""

from __future__ import annotations

import copy
import os
import random
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nearstep.linux.nvme.admin import AdminCommands
from nearstep.linux.nvme.card import open_controller
from nearstep.linux.nvme.controller import (
    CAP,
    Counters,
    Flight,
    NvmeController,
    SubmissionQueue,
)
from nearstep.linux.nvme.namespace import DriveNamespace
from nearstep.linux.nvme.standard import Admin, Register, Status
from nearstep.linux.nvme.transfer import Command
from nearstep.linux.pci import BUS_MASTER, COMMAND, DmaError
from nearstep_sim.linux.guest import Guest, boot, serving, sums_of_torch
from nearstep_sim.linux.packages import PackagesError

from .test_linux import like_torch

URL, COUNT, STEPS = "golden:smartssd", 4112, 10
DRIVE_BYTES, BLOCK = 64 << 20, 4096

TRAIN = """
run "nvme_adamw $(cat /arguments)"
run "sha256sum p m v"
"""

BUSY = """
busy() {
    fio --name=busy --filename=$drive --direct=1 --rw=randwrite --bs=4k --size=16m \\
        --ioengine=io_uring --iodepth=16 --time_based --runtime=600 --allow_file_create=0 \\
        > busy 2>&1 &
    writer=$!
    rm -f stop
    (while [ ! -e stop ] && nvme_adamw $(cat /arguments) > /dev/null 2>&1; do :; done) &
    trainer=$!
    until grep -q '[1-9]' /sys/block/${drive#/dev/}/inflight; do sleep 0.1; done
    echo BUSY
}
"""
"""Writes the drive and trains, until the device is gone or, to train, there is a file `stop`."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a drive, and a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="nearstep-linux-") as name:
        with (Path(name) / "drive").open("wb") as file:
            file.truncate(DRIVE_BYTES)
        yield Path(name)


def guest_of(folder: Path, script: str) -> Guest:
    try:
        return Guest(folder, COUNT, STEPS, script)
    except PackagesError as error:
        pytest.skip(str(error))


@contextmanager
def served(folder: Path, program: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    """`nearstep card serve` in another process."""
    command = [sys.executable, *program, "card", "serve", URL, "--drive", str(folder / "drive"),
               "--socket", str(folder / "card")]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "is served" in line, line + process.stderr.read()
        try:
            yield process
        finally:
            process.kill()


NEARSTEP = ("-m", "nearstep")
KEEPS, DROPS = (
    (str(Path(__file__).parent / "volatile_drive.py"), name) for name in ("keep", "drop")
)


def region(number: int) -> str:
    """A job of fio: 64 blocks in random order, with checksums."""
    return (
        f"--name=region --rw=randwrite --bs=4k --size=256k --offset={256 * number}k "
        f"--randseed={number} --verify=crc32c --verify_state_save=0"
    )


def cut_script(first: int) -> str:
    """Write region after region: even ones with a flush at the end, odd ones with FUA writes."""
    ways = ("--ioengine=io_uring --iodepth=16 --end_fsync=1", "--ioengine=psync --sync=dsync")
    return "\n".join(
        f"fio --filename=$drive --direct=1 --do_verify=0 {ways[number % 2]} {region(number)} > log "
        f"&& echo FLUSHED {number}"
        for number in range(first, first + 60)
    )


def lost(guest: Guest, drive: Path, regions: list[int]) -> list[int]:
    """Regions of a file that Debian's fio, on this machine, does not find as they were written."""
    found = []
    for number in regions:
        command = [*guest.program("fio"), f"--filename={drive}", "--ioengine=psync",
                   "--verify_only", *shlex.split(region(number))]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
        )
        if done.returncode:
            assert "verify: " in done.stdout + done.stderr, done.stdout + done.stderr
            found.append(number)
    return found


def cut(
    folder: Path, program: tuple[str, ...], flushed: list[int], draw: random.Random
) -> list[int]:
    """Cut the power of the server while fio writes; return the regions that are lost.

    Parameters
    ----------
    flushed : regions that must be there; those that fio flushes are appended.
    """
    first = flushed[-1] + 2 if flushed else 0  # the one after the last may be there in part
    guest = guest_of(folder, cut_script(first))
    after, wait_s = draw.randint(1, 5), draw.uniform(0, 0.5)
    seen: list[int] = []
    with served(folder, program) as process:

        def end() -> None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            guest.tell("quit")

        timer = threading.Timer(wait_s, end)

        def show(line: str) -> None:
            if line.startswith("FLUSHED"):
                seen.append(int(line.split()[1]))
                if len(seen) == after:
                    timer.start()

        console = guest.run(show).console
        assert len(seen) >= after, console
        timer.join()
    assert seen == list(range(first, first + len(seen)))
    flushed += seen
    return lost(guest, folder / "drive", flushed)


@pytest.mark.deep
def test_what_was_flushed_is_there_after_power_cuts(folder: Path) -> None:
    draw = random.Random(7)
    flushed: list[int] = []
    for program in (NEARSTEP, KEEPS, KEEPS):
        assert cut(folder, program, flushed, draw) == []
    assert len(flushed) >= 3
    script = "\n".join(
        f'run "fio --filename=$drive --direct=1 --ioengine=io_uring --iodepth=4 --verify_only '
        f'{region(number)} > log && echo READ {number}"'
        for number in flushed
    )
    with served(folder, KEEPS):
        again = guest_of(folder, script).run()
    assert again.succeeded, again.console
    assert re.findall(r"^READ (\d+)", again.console, re.M) == [str(each) for each in flushed]


@pytest.mark.deep
def test_a_drive_that_drops_flushes_is_found_out(folder: Path) -> None:
    assert cut(folder, DROPS, [], random.Random(8)) != []


@like_torch
@pytest.mark.deep
@pytest.mark.parametrize("script", [
    BUSY + "busy\nwait $writer $trainer",
    "echo BUSY\nsleep 3\ndd if=$drive of=/dev/null count=1 iflag=direct",
], ids=["busy", "idle"])  # fmt: skip
def test_a_guest_ends_when_its_server_is_killed_and_the_next_one_trains(
    folder: Path, script: str
) -> None:
    draw = random.Random(9)
    guest = guest_of(folder, f"{script}\necho ALL ENDED\n")
    killed: list[float] = []
    with served(folder, NEARSTEP) as process:

        def end() -> None:
            process.send_signal(signal.SIGKILL)
            killed.append(time.monotonic())

        timers = [threading.Timer(draw.uniform(0, 0.5), end)]

        def seen(line: str) -> None:
            if line == "BUSY" and timers:
                timers.pop().start()

        found = guest.run(seen)
        assert process.wait(60) == -signal.SIGKILL
    # Linux waits 30 s for a command of a queue, and finds the registers gone. QEMU 11.1 can end by
    # an assertion of its own if an access is under way.
    powered_off = "\nALL ENDED" in found.console and "Power down" in found.console
    ended = script.startswith(BUSY) and "error_setv: Assertion" in found.console
    assert powered_off or ended, found.console
    print(f"the guest ended {time.monotonic() - killed[0]:.1f} s after its server")
    with served(folder, NEARSTEP):
        again = guest_of(folder, TRAIN).run()
    assert again.succeeded, again.console
    assert list(again.sums[-3:]) == sums_of_torch(COUNT, STEPS)


class ResetWatch:
    """Accesses to memory of the host by commands from before the last reset of a controller.

    Parameters
    ----------
    then : called after each reset.

    Attributes
    ----------
    late : what was accessed; must be empty.
    accesses : number of accesses.
    busy : for each time that a controller with queues loses the bus, whether they had a command.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None
    ) -> None:
        self.late: list[str] = []
        self.accesses = 0
        self.busy: list[bool] = []
        self._resets = 0
        self._born: dict[Flight, int] = {}
        self._patch, self._then = monkeypatch, then
        for name in ("read", "write"):
            self._watch_access(name)
        self._watch_completions()
        self._watch_resets()

    def _watch_access(self, name: str) -> None:
        real = getattr(Flight, name)

        def access(flight: Flight, *given: object) -> object:
            with flight.controller.lock:
                born = self._born.setdefault(flight, self._resets)
                done = real(flight, *given)
                self.accesses += 1
                if born != self._resets:
                    self.late.append(f"{name} {given[0]}")
                return done

        self._patch.setattr(Flight, name, access)

    def _watch_completions(self) -> None:
        real = NvmeController.post

        def post(
            controller: NvmeController, queue: SubmissionQueue, identifier: int, status: Status,
            result: int = 0,
        ) -> None:  # fmt: skip
            self.accesses += 1
            if queue.completions not in controller.completions.values():
                self.late.append(f"completion of queue {queue.number}")
            real(controller, queue, identifier, status, result)

        self._patch.setattr(NvmeController, "post", post)

    def _watch_resets(self) -> None:
        """A reset of the machine begins when QEMU switches bus mastering off."""
        write_config, reset = NvmeController.write_config, NvmeController.reset

        def config(controller: NvmeController, offset: int, data: bytes) -> None:
            with controller.lock:
                before, queues = controller.masters_bus, list(controller.submissions.values())
                write_config(controller, offset, data)
                if before and not controller.masters_bus:
                    self._resets += 1
                    if len(queues) > 1:
                        self.busy.append(any(each.pending or each.flying for each in queues))

        def whole(controller: NvmeController) -> None:
            with controller.lock:
                reset(controller)
                self._resets += 1
            self._then()

        self._patch.setattr(NvmeController, "write_config", config)
        self._patch.setattr(NvmeController, "reset", whole)


def test_the_watch_sees_a_late_access(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bus:
        def read(self, address: int, nbytes: int) -> bytes:
            return bytes(nbytes)

        def write(self, address: int, data: bytes) -> None:
            pass

        def interrupt(self, vector: int) -> None:
            pass

    watch = ResetWatch(monkeypatch)
    controller = open_controller(URL, folder / "drive", 1 << 20)
    controller.bus = Bus()
    for checked in (True, False):
        if not checked:
            monkeypatch.setattr(Flight, "_check", lambda *given: None)
        flight = Flight(controller)
        controller.write_config(COMMAND, struct.pack("<H", BUS_MASTER))
        flight.read(0, 64)
        controller.reset()
        controller.write_config(COMMAND, struct.pack("<H", BUS_MASTER))
        flight.alive = False
        if checked:
            with pytest.raises(DmaError, match="aborted"):
                flight.write(4096, b"1234")
            assert watch.late == []
        else:
            flight.write(4096, b"1234")
    controller.close()
    assert watch.late == ["write 4096"]
    assert watch.accesses == 3


@like_torch
@pytest.mark.deep
def test_a_guest_is_reset_at_random_moments_and_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of the drive tells the guest that no other reset comes.

    QEMU stops the processor before it resets the controller: writes of the drive wait until that
    has been done, so that some are in flight.
    """
    draw = random.Random(10)
    go, stuck = threading.Event(), threading.Event()
    go.set()
    watch = ResetWatch(monkeypatch, then=go.set)
    write = DriveNamespace._write

    def held(drive: DriveNamespace, command: Command) -> None:
        if not go.is_set():
            stuck.set()
            assert go.wait(60)
        write(drive, command)

    monkeypatch.setattr(DriveNamespace, "_write", held)
    guest = guest_of(
        folder,
        f"{BUSY}\n"
        f"last=$(dd if=$drive bs=4k skip={DRIVE_BYTES // BLOCK - 1} count=1 iflag=direct "
        "2>/dev/null | head -c 4)\n"
        f'[ "$last" = LAST ] || {{ busy; wait; }}\n{TRAIN}',
    )
    # Seconds after commands are in flight, and once after the reset before, while Linux boots.
    moments = [("BUSY", draw.uniform(0, 1)) for _ in range(2)]
    moments.insert(1, ("RESET", draw.uniform(0.5, 2)))
    timers: list[threading.Timer] = []

    def plan(line: str) -> None:
        if moments and line == moments[0][0]:
            timers.append(threading.Timer(moments.pop(0)[1], reset, [line]))
            timers[-1].start()

    def reset(line: str) -> None:
        if not moments:
            with (folder / "drive").open("r+b") as file:
                file.seek(DRIVE_BYTES - BLOCK)
                file.write(b"LAST")
        stuck.clear()
        go.clear()
        if line == "BUSY":
            stuck.wait(60)
        guest.tell("system_reset")
        plan("RESET")

    with serving(URL, folder / "drive", guest.socket) as controller:
        found = guest.run(plan, reboots=True)
    for timer in timers:
        timer.join()
    assert len(timers) == 3
    assert found.succeeded, found.console
    assert list(found.sums[-3:]) == sums_of_torch(COUNT, STEPS)
    assert controller.counters.completions <= controller.counters.commands
    assert watch.late == []
    assert watch.accesses > 1000
    assert sum(watch.busy) >= 2, watch.busy


@like_torch
@pytest.mark.deep
def test_the_driver_is_reloaded_and_the_controller_reset_with_commands_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the guest powers off with commands in flight: CSTS.SHST is answered."""
    read = NvmeController.read_bar
    states: list[int] = []

    def read_bar(controller: NvmeController, number: int, offset: int, nbytes: int) -> bytes:
        data = read(controller, number, offset, nbytes)
        if offset == Register.CSTS:
            states.append(int.from_bytes(data, "little"))
        return data

    monkeypatch.setattr(NvmeController, "read_bar", read_bar)
    driver = "/sys/bus/pci/drivers/nvme"
    reload = f"""
busy
sleep 1
run "echo 0000:00:01.0 > {driver}/unbind"
wait $writer $trainer
echo "BOTH ENDED"
run "echo 0000:00:01.0 > {driver}/bind"
ready
drive=$(ls /dev/nvme0n*)
"""
    reset = """
busy
sleep 1
run "nvme reset /dev/nvme0"
sleep 1
run "nvme reset /dev/nvme0"
sleep 1
kill -INT $writer
wait $writer
grep -o "busy: .*err= *[0-9]*" busy
touch stop
wait $trainer
ready
"""
    script = f"{BUSY}{reload}{reload}{reset}{TRAIN}busy\nsleep 1\n"
    try:
        found = boot(URL, count=COUNT, steps=STEPS, script=script)
    except PackagesError as error:
        pytest.skip(str(error))
    assert list(found.sums[-3:]) == sums_of_torch(COUNT, STEPS)
    assert found.console.count("\nBOTH ENDED") == 2
    assert "jobs=1): err= 0" in found.console  # the block layer repeats its writes
    assert not re.search(r"timeout|completion polled|shutdown incomplete", found.console)
    assert "Power down" in found.console
    assert states[-1] & 0xC == 0x8  # shutdown complete, as Linux read it
    print(f"power-off in {found.power_off_s:.2f} s")
    # Without the answer Linux waits for RTD3E, at least 5 s.
    assert found.power_off_s < 5


@pytest.mark.deep
def test_a_step_takes_three_commands_six_doorbells_and_three_interrupts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Get Features of power management, which Linux does not send, marks moments."""
    at: list[Counters] = []
    execute = AdminCommands.execute

    def marked(own: AdminCommands, queue: SubmissionQueue, command: Command) -> int | None:
        if command.opcode == Admin.GET_FEATURES and command.bits(10, 7) == 2:
            at.append(copy.deepcopy(own._controller.counters))
        return execute(own, queue, command)

    monkeypatch.setattr(AdminCommands, "execute", marked)
    mark = 'run "nvme get-feature /dev/nvme0 --feature-id=2 > log"'
    lines = [mark]
    for steps in (10, 110):
        lines += [f'run "nvme_adamw $(cut -d" " -f1 /arguments) 65552 {steps} > log"', mark]
    try:
        boot(URL, count=COUNT, steps=STEPS, script="\n".join(lines))
    except PackagesError as error:
        pytest.skip(str(error))
    begin, few, many = (_values(each) for each in at)
    steps = {name: many[name] - 2 * few[name] + begin.get(name, 0) for name in many if name in few}
    assert {name: number for name, number in steps.items() if number} == {
        "commands": 300, "completions": 300, "doorbells": 600, "mmio_writes": 600,
        "interrupts": 300, "Execute Program": 100, "Memory Write": 200,
    }  # fmt: skip
    assert steps["mmio_reads"] == 0


def _values(counters: Counters) -> dict[str, int]:
    found = {key: value for key, value in vars(counters).items() if key != "by_opcode"}
    names = {(1, 0x01): "Execute Program", (1, 0x05): "Memory Write"}
    return found | {names.get(key, str(key)): each for key, each in counters.by_opcode.items()}


@pytest.mark.deep
def test_nvme_cli_shows_what_is_so() -> None:
    script = """
run "dd if=/dev/zero of=$drive bs=1M count=16 oflag=direct"
run "dd if=$drive of=/dev/null bs=1M count=3 iflag=direct"
run "nvme id-ctrl /dev/nvme0"
run "nvme smart-log /dev/nvme0"
run "nvme error-log /dev/nvme0"
run "nvme show-regs /dev/nvme0"
echo "# refused"
nvme id-ns /dev/nvme0 --namespace-id=3
nvme self-test-log /dev/nvme0
nvme id-ns /dev/nvme0 --namespace-id=9
"""
    try:
        found = boot(URL, count=COUNT, steps=STEPS, script=script)
    except PackagesError as error:
        pytest.skip(str(error))
    rows = [re.split(r"\s*:\s*", line, maxsplit=1) for line in found.console.splitlines()]
    shown = {row[0]: row[1] for row in rows if len(row) == 2}
    wanted = {
        "vid": "0x1b36", "mn": "nearstep card", "mdts": "9", "cntlid": "0x1", "nn": "3",
        "vwc": "0x7", "sqes": "0x66", "temperature": "27 °C (300 K)", "available_spare": "100%",
        "Data Units Written": "33 (16.90 MB)",
        "error_count": "0", "num_err_log_entries": "0",
        "cap": f"{CAP:#x}", "version": "0x20100", "cc": "0x460061", "csts": "0x1",
    }  # fmt: skip
    assert {name: shown.get(name) for name in wanted} == wanted, found.console
    refused = found.console.partition("# refused")[2]
    assert re.findall(r"\((0x\w+)\)", refused) == ["0x402c", "0x4109", "0x400b"]
