"""The small pool in RTL that tests of this folder open."""

from __future__ import annotations

import re

import numpy as np

from nearstep.coarse import CoarsePool
from nearstep_sim.coarse.pool import PoolBackend
from nearstep_sim.coarse.pool_values import SMALL, SMALL_MEMORY
from nearstep_sim.coarse.shipped_ring import shipped_ring

URL = f"sim:coarse?{SMALL}&{SMALL_MEMORY}"
WHOLE = {"top": False}
"""Whether pools are four devices as `nearstep rtl` writes them, in one object: fixture `top`."""
DEVICES = 4
MEMORY = 1 << 20
"""Bytes of each device."""


def opened(silence_cycles: int = 1 << 16, **options: object) -> CoarsePool:
    """A pool with these options; links are quick to try again."""
    text = "".join(f"&{name}={value}" for name, value in options.items())
    url = URL
    for name in ("chunks_ahead", "buffer_entries"):
        if name in options:
            url = re.sub(f"&{name}=\\d+", "", url)
    if WHOLE["top"]:
        pool = CoarsePool(
            shipped_ring(url + text, links_inside=False), silence_cycles=silence_cycles
        )
    else:
        pool = CoarsePool.open(url + text, silence_cycles=silence_cycles)
    for node in pool.device.nodes:
        node.pool.retry.value = 512
        node.pool.keepalive.value = 128
    return pool


def backend(pool: CoarsePool) -> PoolBackend:
    assert isinstance(pool.device.backend, PoolBackend)
    return pool.device.backend


def random(seed: int) -> np.random.Generator:
    print(f"seed {seed}")
    return np.random.default_rng(seed)
