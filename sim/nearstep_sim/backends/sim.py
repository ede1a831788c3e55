"""`sim:`: the RTL, Verilated, in this process."""

from nearstep.backends.base import Backend
from nearstep.backends.options import open_family
from nearstep_sim.backends import families

DEVICES = families("SIM")
"""Devices of this backend."""


def open_device(family: str, options: dict[str, str]) -> Backend:
    """Open `sim:<family>`. The library of a configuration is built when it is first opened.

    Which options an AXDIMM has depends on `memory`.

    Raises
    ------
    UrlError : there is no RTL of the family.
    OptionError
    nearstep_sim.verilate.build.BuildError
    """
    return open_family("sim", DEVICES, family, options, Backend)
