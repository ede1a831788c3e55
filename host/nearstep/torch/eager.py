"""What `torch.compile` is kept out of."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

from nearstep.torch.errors import check_torch

check_torch(torch.__version__)  # before its newer names are used: here, and by those who import it

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Have `torch.compile` call `function` as it is: whoever compiles a caller gets a graph
    break here, and an error with `fullgraph=True`.

    Compiled, a step would be wrong without an error. Dynamo looks a tensor up in a dict once, when
    it traces, and its guards do not hold the result to that tensor (torch 2.13): of
    `lambda p: table[p]`, compiled, every `p` of one shape gets what the first one got, here the
    first parameter's place on the device. It does not see, either, what a device does to memory.
    """
    # Public, not torch's lazy twin: that one imports dynamo in the first call, by which a frame
    # that holds the first optimizer gets into a reference cycle.
    hidden = torch.compiler.disable(  # type: ignore[no-untyped-call]
        function, reason="the work is a device's, which no graph contains"
    )
    return cast(Callable[P, R], hidden)
