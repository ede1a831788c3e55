"""Classes that torch.compile must not trace."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

Class = TypeVar("Class", bound=type)


def untraced(kind: Class) -> Class:
    """Exclude the methods of a class, and the functions that they call, from torch.compile.

    A compiled model calls its process group from C++, and methods written in Python would be
    traced. `torch.compiler.disable` excludes only calls from traced code, and takes two seconds to
    import.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for member in vars(kind).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, skip)
    return kind
