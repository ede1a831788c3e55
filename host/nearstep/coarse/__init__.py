"""A pool of memory devices that sum tensors near memory.

    with CoarsePool.open("golden:coarse?devices=4&groups=2") as pool:
        gradients = pool.tensor([worker.gradients() for worker in workers])
        pool.all_reduce(gradients, op="average")
        for device, worker in enumerate(workers):
            worker.use(gradients.read(device))

Ref: COARSE paper, sections III and IV.
"""

import importlib
from typing import TYPE_CHECKING, Any

from nearstep.coarse.device import CoarseDevice
from nearstep.coarse.optimizer import StorageOptimizer
from nearstep.coarse.pool import CoarsePool, Event
from nearstep.coarse.tensor import PoolTensor

if TYPE_CHECKING:
    from nearstep.torch.distributed import ddp_hook as ddp_hook

__all__ = ["CoarseDevice", "CoarsePool", "Event", "PoolTensor", "StorageOptimizer"]


def __getattr__(name: str) -> Any:
    """Load `ddp_hook` when it is first used: it needs torch."""
    if name != "ddp_hook":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("nearstep.torch.distributed").ddp_hook


def __dir__() -> list[str]:
    return sorted({*globals(), "ddp_hook"})
