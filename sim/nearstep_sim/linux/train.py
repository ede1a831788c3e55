"""The program that Python runs in the guest of `make linux --python`: AdamW of torch on `nvme:`.

    python -m nearstep_sim.linux.train PARAMETERS STEPS

It trains with the numbers of `examples/nvme_adamw.c`, through io_uring and again through ioctls,
and prints SHA-256 of p, m and v each time.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np


def numbers(step: int, count: int) -> np.ndarray:
    """Parameters (step 0) and gradients of `examples/nvme_adamw.c`; float32, in [-1, 1)."""
    x = np.arange(count, dtype=np.uint32) * np.uint32(2654435761)
    x += np.uint32((step * 40503 + 12345) & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(2246822519)
    x ^= x >> np.uint32(13)
    return (x >> np.uint32(8)).astype(np.float32) / np.float32(8388608) - np.float32(1)


def train(url: str, count: int, steps: int) -> None:
    """Train, and print sums and the time of a step."""
    import torch

    import nearstep.optim

    with nearstep.open(url) as device:
        print(f"{device!r}: {device.capacity_bytes} bytes", flush=True)
        parameter = torch.nn.Parameter(torch.from_numpy(numbers(0, count)))
        optimizer = nearstep.optim.AdamW([parameter], device=device, lr=1e-3)
        gradients = [torch.from_numpy(numbers(step, count)) for step in range(1, steps + 1)]
        begin = time.perf_counter()
        for parameter.grad in gradients:
            optimizer.step()
        seconds = time.perf_counter() - begin
        state = optimizer.state[parameter]
        arrays = {"p": parameter.detach(), "m": state["exp_avg"], "v": state["exp_avg_sq"]}
        for name, array in arrays.items():
            print(f"{hashlib.sha256(array.numpy().tobytes()).hexdigest()}  {name}")
    print(f"{steps} steps of {count} parameters, {1e3 * seconds / steps:.1f} ms a step", flush=True)


def main() -> None:
    """Train both ways, on the card of the first node."""
    count, steps = map(int, sys.argv[1:])
    begin = time.perf_counter()
    import torch

    print(f"torch {torch.__version__}, imported in {time.perf_counter() - begin:.1f} s", flush=True)
    node = min(Path("/dev").glob("ng*n*"))
    for way in ("io_uring", "ioctl"):
        train(f"nvme:{node}?passthrough={way}", count, steps)


if __name__ == "__main__":
    main()
