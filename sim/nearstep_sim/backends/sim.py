"""`sim:`: the RTL, Verilated, in this process."""

from nearstep.backends.base import Backend
from nearstep.backends.options import open_family
from nearstep_sim.backends import families

DEVICES = families("SIM")
"""What this backend offers."""


def open_device(family: str, options: dict[str, str]) -> Backend:
    """Open `sim:<family>`. The first time that a configuration is opened its library is built.

    Which options an AXDIMM has depends on `memory`.

    Raises
    ------
    UrlError : there is no RTL of the family.
    OptionError
    nearstep_sim.verilate.build.BuildError
    """
    return open_family("sim", DEVICES, family, options, Backend)
