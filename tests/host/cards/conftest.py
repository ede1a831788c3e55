"""Folders that drives can lie in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ...on_a_drive import on_a_drive


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with on_a_drive(tmp_path) as folder:
        yield folder
