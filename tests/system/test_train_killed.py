"""A GPT whose state is on the drives of cards is killed again and again, and ends with the bits of
a run that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
SHAPE = ("--size", "tiny", "--batch", "2", "--context", "32", "--no-baseline")


def command(device: str, steps: int, output: Path, more: Sequence[str] = ()) -> list[str]:
    options = ["--device", device, "--steps", str(steps), "--output", str(output), *more]
    if "drive=" in device:
        options.append("--resume")
    return [sys.executable, str(EXAMPLE), *options, *SHAPE]


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )


def finish(arguments: Sequence[str], output: Path) -> dict[str, object]:
    """Run to the end; the report."""
    child = start(arguments)
    said = child.communicate(timeout=500)[0]
    if "direct=False" in said:
        pytest.skip(f"there is no O_DIRECT in {output}")
    assert child.returncode == 0, said
    found: dict[str, object] = json.loads((output / "report.json").read_text())
    return found


def killed(arguments: Sequence[str], steps: int, delay: float) -> int:
    """The last step that was reported before the process was killed, some time after so many."""
    child = start(arguments)
    assert child.stdout is not None
    said, told = "", 0
    while told < steps:
        line = child.stdout.readline()
        assert line, said
        said += line
        told += line.startswith("step ")
    time.sleep(delay)
    assert child.poll() is None, "it has ended before it was killed"
    os.kill(child.pid, signal.SIGKILL)
    rest = child.communicate()[0]
    assert child.returncode == -signal.SIGKILL
    steps_said = [line for line in (said + rest).splitlines() if line.startswith("step ")]
    return int(steps_said[-1].split()[1])


def check_killed(
    devices: Sequence[str],
    alone: str,
    steps: int,
    seed: int,
    folder: Path,
    most: int,
    more: Sequence[str] = (),
) -> int:
    """Kill a training on one device after the other, at random; how often that was."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    expected = finish(command(alone, steps, folder / "alone", more), folder / "alone")
    last = 0
    for device in devices:
        steps_before, delay = rng.randrange(1, most), rng.random() * 0.15
        now = killed(command(device, steps, folder / "killed", more), steps_before, delay)
        assert now > last, "each run goes on where the last one was killed"
        last = now
    output = folder / "killed"
    found = finish(command(devices[-1], steps, output, more), output)
    assert isinstance(found["first_step"], int)
    assert last <= found["first_step"] <= last + 1
    assert isinstance(expected["loss"], list)
    assert expected["loss"][found["first_step"] :] == found["loss"]
    assert found["sha256"] == expected["sha256"]
    return len(devices)


def on(folder: Path, name: str, cards: int) -> str:
    drives = folder / name
    drives.mkdir(exist_ok=True)
    return f"golden:smartssd?cards={cards}&subgroup_elements=8192&drive={drives}"


@pytest.mark.deep
def test_killed_ten_times(tmp_path: Path) -> None:
    devices = [on(tmp_path, "drives", 4)] * 10
    assert check_killed(devices, on(tmp_path, "alone_drives", 4), 60, 1, tmp_path, 4) == 10


@pytest.mark.deep
def test_killed_and_moved_to_other_cards_each_time(tmp_path: Path) -> None:
    devices = [on(tmp_path, "drives", cards) for cards in (4, 3, 1, 2, 4)]
    assert check_killed(devices, "golden:smartssd?rules=adam", 40, 2, tmp_path, 3) == 5


@pytest.mark.deep
def test_killed_with_something_held_back_of_the_gradients(tmp_path: Path) -> None:
    devices = [on(tmp_path, "drives", cards) for cards in (2, 3, 3, 1)]
    more = ("--compression", "0.05")
    assert check_killed(devices, "golden:smartssd", 40, 5, tmp_path, 3, more) == 4


@pytest.mark.deep
def test_killed_on_the_rtl(tmp_path: Path) -> None:
    """It runs every step; the run that is left alone is on the golden model."""
    (tmp_path / "drives").mkdir()
    shape = "smartssd?lanes=4&chunk_bytes=512&memory_bytes=4MiB&cards=2&subgroup_elements=8192"
    device = f"sim:{shape}&drive={tmp_path / 'drives'}"
    assert check_killed([device] * 2, f"golden:{shape}", 8, 3, tmp_path, 2) == 2


@pytest.mark.deep
def test_killed_while_its_drives_are_made(tmp_path: Path) -> None:
    """Until there is a generation it begins anew."""
    print("seed 4")
    rng = random.Random(4)
    device, output, kills = on(tmp_path, "drives", 2), tmp_path / "killed", 0
    for _ in range(4):
        child = start(command(device, 4, output))
        while child.poll() is None and not list((tmp_path / "drives").iterdir()):
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        child.kill()
        said = child.communicate()[0]
        assert child.returncode == -signal.SIGKILL, said
        kills += "step 1 " not in said
    assert kills > 0
    alone = finish(command("golden:smartssd?rules=adam", 4, tmp_path / "alone"), tmp_path / "alone")
    found = finish(command(device, 4, output), output)
    assert found["sha256"] == alone["sha256"]
