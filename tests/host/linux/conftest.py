"""A guest in front of a card, whose controller has its queues in Python or, deep, in RTL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .guest import Guest, guest_of


@pytest.fixture(params=["python", pytest.param("rtl", marks=pytest.mark.deep)])
def guest(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Guest]:
    with guest_of(tmp_path, queues=request.param) as made:
        yield made
