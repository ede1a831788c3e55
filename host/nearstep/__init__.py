"""Near-data optimizer steps, from RTL to ``optimizer.step()``."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from nearstep.device import Device
from nearstep.device import open_device as open

if TYPE_CHECKING:
    from nearstep import optim as optim

__all__ = ["Device", "open", "optim"]


def __getattr__(name: str) -> ModuleType:
    """Load ``nearstep.optim`` when it is first used: it needs torch, the rest does not."""
    if name == "optim":
        return importlib.import_module("nearstep.optim")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
