"""`torch.distributed` with COARSE's memory devices: `init_process_group("coarse")`.

    import torch
    import nearstep.torch.distributed
    torch.distributed.init_process_group("coarse")

Ref: COARSE paper, sections III and IV-B.
"""

from nearstep.torch import eager  # noqa: F401 - it refuses an old torch
from nearstep.torch.distributed.dual import dual_hook, measure_dual
from nearstep.torch.distributed.fallback import GlooFallbackWarning
from nearstep.torch.distributed.hook import ddp_hook
from nearstep.torch.distributed.process_group import CoarseProcessGroup
from nearstep.torch.distributed.rendezvous import register
from nearstep.torch.distributed.snapshots import restore_snapshot, save_snapshot
from nearstep.torch.distributed.stored import StorageOptimizer

__all__ = [
    "CoarseProcessGroup",
    "GlooFallbackWarning",
    "StorageOptimizer",
    "ddp_hook",
    "dual_hook",
    "measure_dual",
    "restore_snapshot",
    "save_snapshot",
]

register()
