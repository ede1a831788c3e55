"""Several processes of one group, over one service."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from nearstep.torch.distributed.rendezvous import register

from ... import processes

PRELOADED = ["nearstep.torch.distributed.fsdp", "torch._dynamo"]
TIMEOUT_S = 60.0

Gone = processes.Gone


def on_processes(
    count: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "coarse",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:
    """What a function returns in each process, with these environment variables."""
    return processes.on_processes(
        count,
        function,
        *args,
        backend=partial(_registered, backend, dict(variables)),
        preloaded=PRELOADED,
        timeout_s=TIMEOUT_S,
    )


def _registered(backend: str, variables: Mapping[str, str]) -> str:
    os.environ |= variables
    register()
    return backend
