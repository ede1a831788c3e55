"""What `golden:` and `sim:` offer to the host."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from nearstep.backends.options import Family

FAMILIES = {"axdimm": "axdimm", "smartssd": "smartssd", "coarse": "coarse", "board": "boards"}
"""Package here of each family; its module `options` says what can be opened, on which backends."""


def families(backend: str) -> Mapping[str, Family]:
    """The devices of a backend, `GOLDEN` or `SIM`, by family."""
    modules = {
        name: importlib.import_module(f"nearstep_sim.{package}.options")
        for name, package in FAMILIES.items()
    }
    return MappingProxyType(
        {
            name: getattr(module, backend)
            for name, module in modules.items()
            if hasattr(module, backend)
        }
    )
