"""Hooks on modules that stay with the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Hook:
    """A hook that does nothing in copies of the module, and in pickled ones."""

    def __init__(self, action: Callable[[nn.Module], None] | None = None) -> None:
        self._action = action

    def __call__(self, module: nn.Module, *others: Any) -> None:
        if self._action is not None:
            self._action(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()
