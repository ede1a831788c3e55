"""Process groups of the memory devices: what torch expects of a group, and errors."""

from __future__ import annotations

import time

import pytest

from . import programs
from .processes import TIMEOUT_S, Gone, on_processes


def check(count: int) -> None:
    *found, gone = on_processes(count, programs.all_of_them)
    assert isinstance(gone, Gone)
    for checks, errors in found:
        assert checks >= 8 + 3 + 2 + count + 6 + 11 + 5 + 2 + 1
        assert all(f"client {count - 1} of job" in each for each in errors), errors


def test_an_error_is_seen_whatever_the_other_processes_wait_for() -> None:
    start, waits_s = time.monotonic(), 4 * TIMEOUT_S  # of these modules are imported, too
    with pytest.raises(AssertionError, match=r"process 1:(.|\n)*rank 1 fails"):
        on_processes(2, programs.waits_or_fails, waits_s, backend="gloo")
    assert time.monotonic() - start < waits_s


def test_two_processes() -> None:
    check(2)


@pytest.mark.deep
@pytest.mark.parametrize("count", [4, 8])
def test_more_processes(count: int) -> None:
    check(count)
