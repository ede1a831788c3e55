"""A home of one's own: optimizer state in files of /dev/shm, updated in place by the processor.

A home says where the columns of an optimizer are kept. This one maps a file for each moment of each
parameter, so that another process can look at the state while a model trains, and so that memory of
the process is not needed for it::

    optimizer = nearstep.optim.AdamW(params, device=partial(ShmHome, folder="/dev/shm/run"))

Run it: `python examples/shm_home.py --steps 3`
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import nearstep
from nearstep.device import open_processor
from nearstep.torch.homes.host import HostHome
from nearstep.torch.layout import Layout


class ShmHome(HostHome):
    """State of an optimizer in files of a new folder, one for each moment of each parameter.

    Parameters
    ----------
    layout : state of a parameter.
    folder : what the new folder is in; made if there is none.
    """

    def __init__(self, layout: Layout, folder: str | Path) -> None:
        super().__init__(layout, open_processor())
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(dir=folder))  # a copy of the optimizer has its own
        self._files = 0

    def allocate(self, key: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Map a new file as a tensor of the state, of the shape of another tensor.

        Parameters
        ----------
        key : of the state.
        like
        dtype
        """
        if not like.numel():
            return torch.empty(like.shape, dtype=dtype)
        path = self._folder / f"{self._files}.{key}"
        self._files += 1
        flat = torch.from_file(str(path), shared=True, size=like.numel(), dtype=dtype)
        return flat.view(like.shape)


def main() -> None:
    """Train a layer for some steps, beside torch, and compare the bits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3, help="steps (default: 3)")
    parser.add_argument("--folder", type=Path, help="where state is kept; default: a new folder")
    given = parser.parse_args()
    if given.steps < 0:
        parser.error(f"--steps must be at least 0, not {given.steps}")
    shm = Path("/dev/shm")
    folder = given.folder or Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
    generator = torch.Generator().manual_seed(1)
    ours = [torch.randn(64, 32, generator=generator).requires_grad_()]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=partial(ShmHome, folder=folder))
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for _ in range(given.steps):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    different = sum(int((p != q).sum()) for p, q in zip(ours, theirs, strict=True))
    for path in sorted(folder.glob("*/*")):
        print(f"{path.name}: {path.stat().st_size} bytes")
    print(f"{given.steps} steps; {different} elements differ from torch's fused AdamW")
    if given.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
