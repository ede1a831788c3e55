"""A ring of shipped memory devices: one Verilated object, functional units inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from nearstep.backends.options import DeviceUrl
from nearstep.coarse.device import CoarseDevice
from nearstep.device import drive
from nearstep.errors import ArgumentError, MismatchError
from nearstep_sim.coarse.options import SIM, VerilatedPoolOptions
from nearstep_sim.coarse.pool import PoolBackend
from nearstep_sim.coarse.ring_library import ring_library

__all__ = ["ShippedRing", "shipped_ring"]


class ShippedRing(PoolBackend):
    """The devices of `nearstep rtl coarse_device`, connected to a ring, in one object.

    Bits and cycles are those of `sim:coarse`, which has an object of each device, functional units
    outside and links in C++.

    Parameters
    ----------
    options : as of `sim:coarse`, without a trace, and with `fu` of `rtl`.
    links_inside : links are delays in Verilog, without faults and of a phit a cycle; otherwise
        links as of `sim:coarse`.

    Raises
    ------
    ArgumentError : an option that such a ring does not have.
    """

    def __init__(self, options: VerilatedPoolOptions, *, links_inside: bool) -> None:
        link = options.link()
        rates = (link.drop, link.duplicate, link.reorder, link.corrupt)
        faults = any(rates) or link.interval != 1
        for name, found, wrong in (
            ("trace", options.trace, options.trace is not None),
            ("fu", options.fu, options.fu != "rtl"),
            ("devices", options.devices, options.devices < 2),
            ("links", link, links_inside and faults),
        ):
            if wrong:
                raise ArgumentError(f"{name} of a ring in one object must not be {found}")
        self.links_inside = links_inside
        super().__init__(options)

    @property
    def links(self) -> int:
        """Links that may have faults."""
        return 0 if self.links_inside else super().links

    def _library(self) -> Callable[[], Path]:
        options = self._pool_options
        return partial(ring_library, self.config, options.devices, options.link_latency)


def shipped_ring(url: str, *, links_inside: bool) -> CoarseDevice:
    """Open the shipped devices of `sim:coarse?...` in one object: see `ShippedRing`.

    Raises
    ------
    UrlError, OptionError : as `nearstep.open`.
    ArgumentError : as `ShippedRing`.
    MismatchError : the name is of something else than `sim:coarse`.
    """
    name = DeviceUrl.parse(url)
    if (name.backend, name.target) != ("sim", "coarse"):
        raise MismatchError(url, "sim:coarse", f"{name.backend}:{name.target}")
    options = SIM.parse(name.options)
    assert isinstance(options, VerilatedPoolOptions)
    device = drive(ShippedRing(options, links_inside=links_inside), url)
    assert isinstance(device, CoarseDevice)
    return device
