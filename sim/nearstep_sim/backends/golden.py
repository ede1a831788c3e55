"""`golden:`: registers and results of the RTL, without cycles."""

from nearstep.backends.emulated import EmulatedBackend
from nearstep.backends.options import open_family
from nearstep_sim.backends import families

DEVICES = families("GOLDEN")
"""Devices of this backend."""


def open_device(family: str, options: dict[str, str]) -> EmulatedBackend:
    """Open `golden:<family>`.

    Raises
    ------
    UrlError : there is no golden model of the family.
    OptionError
    """
    return open_family("golden", DEVICES, family, options, EmulatedBackend)
