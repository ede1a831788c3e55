"""Rates of a processor with torch: matrix products, AdamW, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from nearstep.measure.clocked import seconds

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Dtypes of torch by name in `nearstep_spec.platform.machine.DTYPES`."""

FIRST_ROWS = 256
LONG_S = 0.03
"""Time of a sufficiently large product, with negligible launch overhead."""


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """List the dtypes of products on the device: TF32 on GPUs only."""
    return tuple(name for name in DTYPES if name != "tf32" or device.type == "cuda")


def matmul_flops(device: torch.device, dtype: str, most: int) -> tuple[float, int]:
    """Measure floating-point operations a second of a product of square matrices.

    Parameters
    ----------
    dtype : of `DTYPES`.
    most : most rows of a matrix; fewer if a product takes long, as FP16 on many CPUs.

    Returns
    -------
    tuple[float, int] : the rate and the rows.
    """
    size = min(FIRST_ROWS, most)
    with _tf32(dtype == "tf32"):
        while True:
            one, other = (
                torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2)
            )
            product = _synchronous(device, partial(torch.matmul, one, other))
            took = seconds(product)
            if size == most or took > LONG_S:
                return 2 * size**3 / took, size
            size = min(2 * size, most)


def adam_params_per_s(device: torch.device, count: int) -> float:
    """Measure torch's fused AdamW on one fp32 tensor of so many parameters."""
    parameter = torch.nn.Parameter(torch.randn(count, device=device))
    parameter.grad = torch.randn(count, device=device)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return count / seconds(_synchronous(device, optimizer.step))


def copy_bytes_per_s(to: torch.device, start: torch.device, nbytes: int) -> float:
    """Measure a copy, each byte once; on the host from or to pinned memory if the other side is a
    GPU."""
    pinned = {to.type, start.type} == {"cpu", "cuda"}
    source, target = (
        torch.zeros(
            nbytes, dtype=torch.uint8, device=each, pin_memory=pinned and each.type == "cpu"
        )
        for each in (start, to)
    )
    gpu = to if to.type == "cuda" else start
    return nbytes / seconds(_synchronous(gpu, lambda: target.copy_(source, non_blocking=True)))


def _synchronous(device: torch.device, work: Callable[[], object]) -> Callable[[], None]:
    """Wrap work so that it returns when the device is done."""

    def run() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Set whether products of fp32 on a GPU may use TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
