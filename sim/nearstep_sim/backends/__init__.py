"""What `golden:` and `sim:` offer to the host."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from nearstep.backends.options import Family

FAMILIES = ("axdimm", "smartssd", "coarse")
"""Each is a package here; its module `options` says what can be opened."""


def families(backend: str) -> Mapping[str, Family]:
    """The devices of a backend, `GOLDEN` or `SIM`, by family."""
    modules = {name: importlib.import_module(f"nearstep_sim.{name}.options") for name in FAMILIES}
    return MappingProxyType({name: getattr(module, backend) for name, module in modules.items()})
