"""Backends of `golden:` and `sim:` for the host."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from nearstep.backends.options import Family

FAMILIES = {"axdimm": "axdimm", "smartssd": "smartssd", "coarse": "coarse", "board": "boards"}
"""Package of each family, whose module `options` lists devices by backend."""


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
