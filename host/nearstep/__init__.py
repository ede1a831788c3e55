"""Near-data optimizer steps, from RTL to `optimizer.step()`."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from nearstep.device import Device
from nearstep.device import open_device as open
from nearstep.updater.pairs import Pairs

if TYPE_CHECKING:
    from nearstep import optim as optim

__all__ = ["Device", "Pairs", "open"]


def __getattr__(name: str) -> ModuleType:
    """Load `nearstep.optim` when it is first used: it needs torch, the rest does not."""
    if name == "optim":
        try:
            return importlib.import_module("nearstep.optim")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            hint = "nearstep.optim needs torch: pip install 'nearstep[torch]'"
            raise ModuleNotFoundError(hint, name="torch") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
