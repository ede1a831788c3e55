"""Debian's kernel below QEMU, both unmodified, in front of a card: `make linux`."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from nearstep.linux.bars import Counters as BarCounters
from nearstep.linux.nvme.controller import Counters
from nearstep_sim.linux.guest import TRAIN, boot, sums_of_torch
from nearstep_sim.linux.initramfs import Initramfs
from nearstep_sim.linux.packages import PackagesError
from nearstep_sim.linux.train import numbers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "linux.md"
VARIES = r"nvme0n\d|ng0n\d|[\d.]+ ms a step|nvme0q\d.*|^ \d+: .*nvme0q\d|^/dev/nvme0n\d.*"
"""Parts of the transcript that differ from boot to boot: the order in which namespaces are found,
times, and counts of interrupts.
"""

RTL = "sim:smartssd?lanes=4&chunk_bytes=512&memory_bytes=32MiB"
SMALL = "lanes=4&chunk_bytes=512&memory_bytes=4MiB"


CAPABILITY = torch.backends.cpu.get_cpu_capability()

like_torch = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"),
    reason=f"ATen's capability is {CAPABILITY}; its fused steps are vectorised for AVX2 and AVX512",
)


def stable(console: str) -> list[str]:
    """Lines of a console, without what varies; in order of the alphabet, as /dev/ng is not."""
    return sorted(re.sub(VARIES, "...", line, flags=re.M).rstrip() for line in console.splitlines())


@like_torch
@pytest.mark.deep
@pytest.mark.parametrize(
    ("url", "count", "queues"),
    [("golden:smartssd", 65552, "python"), (RTL, 4112, "python"), (RTL, 4112, "rtl")],
)
def test_a_stock_linux_trains_ten_steps_with_torchs_bits(url: str, count: int, queues: str) -> None:
    lines: list[str] = []
    try:
        found = boot(url, count=count, steps=10, show=lines.append, queues=queues)
    except PackagesError as error:
        pytest.skip(str(error))
    assert list(found.sums) == sums_of_torch(count, 10)
    counters = found.counters
    assert isinstance(counters, Counters)
    assert counters.by_opcode[1, 1] >= 10 + 16  # Execute, and writes of the drive
    assert counters.by_opcode[0, 0x89] == counters.by_opcode[0, 0x88] == 1
    assert counters.completions == counters.commands
    assert "Power down" in found.console
    assert not re.search(r"timeout|completion polled|I/O error", found.console)
    assert lines.count("equal") == 2
    if count == 65552:
        transcript = re.search(r"```log\n(# uname.*?)^boot to", PAGE.read_text(), re.S | re.M)
        assert transcript is not None
        assert stable("\n".join(lines)) == stable(transcript[1])


@like_torch
@pytest.mark.deep
def test_torch_trains_on_nvme_in_the_guest_by_io_uring_and_by_ioctl() -> None:
    count, steps, lines = 65552, 10, list[str]()
    try:
        found = boot(
            "golden:smartssd", count=count, steps=steps, show=lines.append,
            python=["-m", TRAIN, str(count), str(steps)],
        )  # fmt: skip
    except PackagesError as error:
        pytest.skip(str(error))
    assert list(found.sums) == 3 * sums_of_torch(count, steps)  # of C, io_uring, ioctl
    ways = [re.search(r"passthrough=(\w+)", line) for line in lines]
    assert [each[1] for each in ways if each] == ["io_uring", "ioctl"]
    assert isinstance(found.counters, Counters)
    assert found.counters.by_opcode[1, 1] >= 3 * steps
    assert found.counters.by_opcode[0, 0x88] == 1 + 2 * 2  # Python deactivates at its end
    assert not re.search(r"timeout|completion polled|I/O error", found.console)


@like_torch
@pytest.mark.deep
@pytest.mark.parametrize("queues", ["python", "rtl"])
def test_a_guest_trains_after_others_were_killed_at_random_moments(queues: str) -> None:
    draw = random.Random(5)
    kills = [draw.uniform(1, 9) for _ in range(6)]
    try:
        found = boot("golden:smartssd", count=4112, steps=10, kills=kills, queues=queues)
    except PackagesError as error:
        pytest.skip(str(error))
    assert list(found.sums) == sums_of_torch(4112, 10)
    assert isinstance(found.counters, Counters)
    assert found.counters.by_opcode[0, 0x89] >= 1


@like_torch
@pytest.mark.deep
@pytest.mark.parametrize(("url", "count"), [
    (f"golden:smartssd?{SMALL}", 4112), (f"sim:smartssd?{SMALL}&bus=pcie", 4112),
])  # fmt: skip
def test_the_driver_in_a_guest_trains_on_the_cards_own_bars(url: str, count: int) -> None:
    try:
        found = boot(url, count=count, steps=10, front="bars")
    except PackagesError as error:
        pytest.skip(str(error))
    assert list(found.sums) == 2 * sums_of_torch(count, 10)  # by resource files, by VFIO
    assert "PCI_ID=10EE:9034" in found.console
    assert "vfio_container_dma_unmap" not in found.console
    counters = found.counters
    assert isinstance(counters, BarCounters)
    assert (counters.refused, counters.unanswered) == (0, 0), counters
    assert counters.writes > 2 * (3 + 10) * count / 2  # stores of 8 bytes
    assert counters.reads > 2 * 3 * count / 2
    seen = re.findall(r"^ *\d+: +(\d+) .*vfio-msix\[0\]", found.console, re.MULTILINE)
    assert list(map(int, seen)) == [counters.interrupts] == [10]


def test_a_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PackagesError, match="apt-get is not installed"):
        boot("golden:smartssd", count=16, steps=1)
    assert not list((tmp_path / "cache" / "linux").glob("debian*"))


def test_numbers_are_those_of_the_example() -> None:
    """Values that the C program prints with the same two loops."""
    found = numbers(3, 5)
    assert found.dtype.name == "float32"
    assert found.tolist() == [
        0.6691782474517822,
        -0.9245424270629883,
        -0.7708601951599121,
        0.8066625595092773,
        -0.36436784267425537,
    ]
    assert abs(numbers(0, 100_000)).max() <= 1


def test_an_archive_has_headers_of_110_bytes_and_names_padded_to_words() -> None:
    made = Initramfs()
    made.add("bin/sh", b"12345", mode=0o755)
    made.link("lib64/a", "/lib/a")
    archive = made.archive()
    assert len(archive) % 4 == 0
    entries, at = [], 0
    while at < len(archive):
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name_at = at + 110
        name = archive[name_at : name_at + fields[11] - 1].decode()
        data_at = -(-(name_at + fields[11]) // 4) * 4
        entries.append((name, oct(fields[1]), archive[data_at : data_at + fields[6]]))
        at = -(-(data_at + fields[6]) // 4) * 4
    assert entries == [
        ("bin", "0o40755", b""), ("bin/sh", "0o100755", b"12345"), ("lib64", "0o40755", b""),
        ("lib64/a", "0o120777", b"/lib/a"), ("TRAILER!!!", "0o0", b""),
    ]  # fmt: skip
