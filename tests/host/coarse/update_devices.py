"""Memory devices with update kernels, small ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearstep_sim.coarse.pool_values import SMALL, SMALL_MEMORY, SMALL_RULES, SMALLEST

ROOT = Path(__file__).parents[3]
RULES = f"adam,sgd,sgd_momentum,{ROOT}/examples/lion.py:LION"
"""As in tests/sim/coarse/test_updater.py, so that two devices of the RTL are one library."""

RTL = f"sim:coarse?{SMALLEST}&{SMALL_MEMORY}&rules={SMALL_RULES}&fu=native"
"""Two devices of the RTL, of the library that fast tests share."""


def device_url(kind: str, devices: int, rules: str = RULES) -> str:
    small = SMALL.replace("devices=4", f"devices={devices}")
    native = "&fu=native" if kind == "sim" else ""
    return f"{kind}:coarse?{small}&{SMALL_MEMORY}&rules={rules}{native}"


def of_rtl(devices: int) -> list[object]:
    """Parameters of a test on the RTL: the library of fast tests, then one of all rules."""
    url = device_url("sim", devices)
    return [
        *([pytest.param(RTL, id="small")] if devices == 2 else []),
        pytest.param(url, id=f"{devices} devices", marks=pytest.mark.deep),
    ]
