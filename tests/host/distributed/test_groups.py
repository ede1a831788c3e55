"""Process groups of the memory devices: what torch expects of a group, and errors."""

from __future__ import annotations

import pytest

from . import programs
from .processes import Gone, on_processes


def check(count: int) -> None:
    *found, gone = on_processes(count, programs.all_of_them)
    assert isinstance(gone, Gone)
    for checks, errors in found:
        assert checks >= 8 + 3 + count + 6 + 11 + 5 + 1
        assert all(f"client {count - 1} of job" in each for each in errors), errors


def test_two_processes() -> None:
    check(2)


@pytest.mark.deep
@pytest.mark.parametrize("count", [4, 8])
def test_more_processes(count: int) -> None:
    check(count)
