"""A guest in front of a card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .guest import Guest, guest_of


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    with guest_of(tmp_path) as made:
        yield made
