"""Near-data optimizer steps, from RTL to `optimizer.step()`."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from nearstep import blockwise
from nearstep.device import Device
from nearstep.device import open_device as open
from nearstep.updater.pairs import Pairs
from nearstep.updater.rounding import Rounding

if TYPE_CHECKING:
    from nearstep import optim as optim
    from nearstep.torch.offload import offload as offload

__all__ = ["Device", "Pairs", "Rounding", "blockwise", "open"]


__version__: str

_OF_TORCH = {"optim": "nearstep.optim", "offload": "nearstep.torch.offload"}
"""Names that need torch, and the module that each names or is defined in."""


def __getattr__(name: str) -> Any:
    """Load `nearstep.optim` and `nearstep.offload` at their first use: only these need torch."""
    if name == "__version__":
        return importlib.metadata.version("nearstep")
    if name not in _OF_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_OF_TORCH[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        hint = f"nearstep.{name} needs torch: pip install 'nearstep[torch]'"
        raise ModuleNotFoundError(hint, name="torch") from error
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_TORCH, "__version__"})
