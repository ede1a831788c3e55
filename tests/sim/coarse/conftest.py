"""Lists of faults run on the small pool of objects, and on the whole top."""

from __future__ import annotations

import pytest

from . import small_pool


@pytest.fixture(params=["objects", pytest.param("ring", marks=pytest.mark.deep)])
def top(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the pools of `small_pool` are made of."""
    monkeypatch.setitem(small_pool.WHOLE, "top", request.param == "ring")
    return str(request.param)
