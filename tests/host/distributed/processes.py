"""Several processes of one group, over one service."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nearstep.torch.distributed.rendezvous import register

from ... import processes

PRELOADED = ["nearstep.torch.distributed.fsdp", "torch._dynamo"]
TIMEOUT_S = 60.0

Gone = processes.Gone


def on_processes(
    count: int, function: Callable[..., Any], *args: Any, backend: str = "coarse"
) -> list[Any]:
    """What a function returns in each process."""
    return processes.on_processes(
        count,
        function,
        *args,
        backend=partial(_registered, backend),
        preloaded=PRELOADED,
        timeout_s=TIMEOUT_S,
    )


def _registered(backend: str) -> str:
    register()
    return backend
