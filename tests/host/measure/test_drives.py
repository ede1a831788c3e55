"""Rates of a drive: what is measured, and what is refused before anything is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nearstep.errors import ArgumentError
from nearstep.measure import clocked, drives
from nearstep.measure.drives import BLOCK_BYTES, DEPTHS, DriveRates, MeasureError, drive_rates


def direct_or_skip(folder: Path) -> None:
    """Skip, and say why, where the file system of the tests has no O_DIRECT."""
    file = folder / "probe"
    file.touch()
    try:
        os.close(os.open(file, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"{folder} takes no O_DIRECT: {error.strerror}")
    finally:
        file.unlink()


def test_every_block_is_moved_once_at_each_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct_or_skip(tmp_path)
    moved: dict[str, list[int]] = {"preadv": [], "pwritev": []}
    for name, calls in moved.items():
        own = getattr(os, name)

        def spy(file: int, buffers: list[bytes], offset: int, own=own, calls=calls) -> int:
            count: int = own(file, buffers, offset)
            if count == BLOCK_BYTES:
                calls.append(offset)
            return count

        monkeypatch.setattr(drives.os, name, spy)
    steps: list[str] = []
    rates = drive_rates(tmp_path, 5 * BLOCK_BYTES, steps.append)
    assert len(steps) == 2 * len(DEPTHS) + 1
    for calls in moved.values():
        assert sorted(calls) == sorted(len(DEPTHS) * [i * BLOCK_BYTES for i in range(5)])
    assert tuple(rates.read_bytes_per_s) == tuple(rates.write_bytes_per_s) == DEPTHS
    assert all(rate > 0 for rate in rates.read_bytes_per_s.values())
    assert rates.read_latency_s > 0
    assert rates.write_latency_s > 0
    assert list(tmp_path.iterdir()) == []


def test_the_depth_that_is_told_is_the_least_that_both_ways_need() -> None:
    reads = {1: 50.0, 2: 96.0, 4: 100.0, 8: 99.0, 16: 98.0}
    writes = {1: 10.0, 2: 20.0, 4: 30.0, 8: 30.0, 16: 31.0}
    assert DriveRates(reads, writes, 1.0, 1.0).depth == 4
    assert DriveRates(reads, reads, 1.0, 1.0).depth == 2
    reads, writes = {1: 100.0, 2: 100.0, 4: 80.0}, {1: 50.0, 2: 70.0, 4: 100.0}
    assert DriveRates(reads, writes, 1.0, 1.0).depth == 4, "80 % of both, and no depth has 95 %"


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES + 4096])
def test_a_size_that_is_no_number_of_blocks_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ArgumentError, match=f"multiple of {BLOCK_BYTES}, not {size}"):
        drive_rates(tmp_path, size)


def test_what_is_no_folder_and_a_full_drive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="is no folder"):
        drive_rates(tmp_path / "nothing", BLOCK_BYTES)
    with pytest.raises(MeasureError, match=r"has \d+ bytes free, not"):
        drive_rates(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_o_direct_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(drives.os, "open", refuse)
        patch.setattr(drives.tempfile, "mkstemp", lambda prefix, dir: made(Path(dir) / "file"))
        with pytest.raises(MeasureError, match="does not support O_DIRECT: Invalid argument"):
            drive_rates(tmp_path, BLOCK_BYTES)
    assert list(tmp_path.iterdir()) == []


def made(path: Path) -> tuple[int, str]:
    file = path.open("wb")
    return os.dup(file.fileno()), str(path)


def test_a_drive_that_fails_is_named_and_its_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct_or_skip(tmp_path)

    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(drives.os, "pwritev", fail)
    with pytest.raises(MeasureError, match="failed: Input/output error") as caught:
        drive_rates(tmp_path, BLOCK_BYTES)
    assert caught.value.directory == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_short_write_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct_or_skip(tmp_path)
    monkeypatch.setattr(drives.os, "pwritev", lambda *arguments: 4096)
    with pytest.raises(MeasureError, match=f"4096 of {BLOCK_BYTES} bytes were moved"):
        drive_rates(tmp_path, BLOCK_BYTES)


def test_the_median_counts_and_the_first_run_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.9, 0.1, 0.3, 0.2, 0.2, 0.15])
    monkeypatch.setattr(clocked, "once", lambda work: next(times))
    assert clocked.seconds(lambda: None) == 0.2
    assert next(times, None) is None


def test_what_takes_long_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([7.0])
    monkeypatch.setattr(clocked, "once", lambda work: next(times))
    assert clocked.seconds(lambda: None) == 7.0
    times = iter([0.1, 0.7, 0.6, 0.5])
    assert clocked.seconds(lambda: None) == pytest.approx(0.65)
