"""What `nearstep.offload` is."""

from __future__ import annotations

from nearstep.torch.offload import engine
from nearstep.torch.offload.construction import Init


class Offload:
    """`nearstep.torch.offload.engine.offload`, which has `init` as an attribute."""

    init = Init
    __call__ = staticmethod(engine.offload)


offload = Offload()
