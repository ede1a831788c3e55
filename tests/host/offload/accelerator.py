"""An accelerator of torch without a GPU: `accelerator.cpp`, which see, as device `accel`."""

from __future__ import annotations

import hashlib
import subprocess
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from nearstep.torch.offload.mapped import MAPPERS, PINNERS
from nearstep_spec.cache import cache_dir, once
from nearstep_spec.compiler import compiler

SOURCE = Path(__file__).with_suffix(".cpp")
CLOCKS = Path(__file__).with_name("accelerator_clocks.h")
TORCH = Path(torch.__file__).parent


def build() -> Path:
    """The library, compiled once for a source and a torch."""
    text = f"{torch.__version__} {CLOCKS.read_text()} {SOURCE.read_text()}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]

    def compiled(folder: Path) -> Path:
        library = folder / "accelerator.so"
        command = [*compiler(), "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{TORCH / 'include'}"]
        command += [str(SOURCE), "-o", str(library), f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True, timeout=300)
        return library

    return once(cache_dir() / "lib" / f"accelerator-{digest}.so", compiled)


@cache
def load() -> None:
    """Make it torch's accelerator, for the rest of this process."""
    torch.ops.load_library(build())
    torch.utils.rename_privateuse1_backend("accel")
    module = types.ModuleType("accel")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device: torch.get_rng_state(),  # operations compute on the CPU
        set_rng_state=lambda state, device: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    torch._register_device_module("accel", module)
    MAPPERS["accel"] = lambda flat, device: torch.ops.nearstep_accelerator.mapped(flat)

    def pin(memory: torch.Tensor) -> Callable[[], None]:
        torch.ops.nearstep_accelerator.pin(memory, True)
        return partial(torch.ops.nearstep_accelerator.pin, memory, False)

    PINNERS["accel"] = pin


def hazards() -> list[str]:
    """What an order of streams left to chance since the last call."""
    found: list[str] = torch.ops.nearstep_accelerator.hazards()
    return found


@dataclass(frozen=True)
class Counts:
    """What has been done so far.

    Attributes
    ----------
    to_device, to_host : copies.
    late : those of them that waited for streams.
    nbytes, peak : of the device's memory.
    """

    to_device: int
    to_host: int
    late: int
    nbytes: int
    peak: int


def counts() -> Counts:
    """Since it was loaded."""
    return Counts(*torch.ops.nearstep_accelerator.counts())
