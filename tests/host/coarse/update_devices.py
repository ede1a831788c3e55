"""Memory devices with update kernels, small ones."""

from __future__ import annotations

from pathlib import Path

from nearstep_sim.coarse.pool_values import SMALL, SMALL_MEMORY

ROOT = Path(__file__).parents[3]
RULES = f"adam,sgd,sgd_momentum,{ROOT}/examples/lion.py:LION"
"""As in tests/sim/coarse/test_updater.py, so that two devices of the RTL are one library."""


def device_url(kind: str, devices: int, rules: str = RULES) -> str:
    small = SMALL.replace("devices=4", f"devices={devices}")
    native = "&fu=native" if kind == "sim" else ""
    return f"{kind}:coarse?{small}&{SMALL_MEMORY}&rules={rules}{native}"
