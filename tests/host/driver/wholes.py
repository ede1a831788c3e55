"""Tops as they are shipped, beside the devices of parts that stand for them: what is the same for
all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray
from typer.testing import CliRunner

import nearstep
from nearstep.device import Device
from nearstep_hw.generate import command

from .dimm_scenarios import Log

SPECIALS = np.array(
    [0, 0x8000_0000, 1, 0x807F_FFFF, 0x0080_0000, 0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000,
     0x7FC0_0000, 0x7F80_0001, 0xFFFF_FFFF, 0x3F80_0000],
    np.uint32,
)  # fmt: skip
"""Zeros, subnormals, the ends of the normal numbers, infinities, NaN of both kinds, one."""
COUNTS = (1, 15, 16, 17, 127, 129, 1001, 4097)


def words(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Any bit patterns, a fifth of them special ones."""
    made = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    special = rng.random(count) < 0.2
    made[special] = rng.choice(SPECIALS, special.sum())
    return made.view(np.float32)


def written(top: str, options: Sequence[str], folder: Path) -> bytes:
    """What `nearstep rtl` writes."""
    path = folder / f"{top}.v"
    rtl = typer.Typer()
    rtl.command(context_settings=command.context_settings)(command)
    result = CliRunner().invoke(rtl, [top, *options, "-o", str(path)])
    assert result.exit_code == 0, result.output
    return path.read_bytes()


def seen_of_both(urls: Sequence[str], see: Callable[[Device], Log]) -> Log:
    """What is seen of two devices, which must be the same."""
    logs = []
    for url in urls:
        with nearstep.open(url) as device:
            logs.append(see(device))
    for place, (one, other) in enumerate(zip(*logs, strict=True)):
        assert one == other, f"observation {place} of {len(logs[0])}"
    return logs[0]
