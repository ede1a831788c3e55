"""The machine of the Smart-Infinity paper's evaluation, under assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from nearstep.work.operation import Transfer
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import Figure, Hop, Link, Platform

ADAM_STATES = 3
PARAMETER_BYTES = 4
"""Bytes of a parameter, a gradient or a moment on a drive (section II-A)."""

UPDATER_BYTES_PER_S = 7e9
"""Read rate of an updater, at least (section VII-H)."""

HOST_BYTES = 28
"""Bytes that the CPU's update of Adam moves for a parameter: four loads and three stores."""

SATURATED_BY = 4
"""Drives beyond which the baseline gains nothing (section III, figure 3(b))."""

Duplex = Literal["half", "full"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Assumptions that can be changed.

    Attributes
    ----------
    drive : `half`: reads and writes of a drive alternate, each at its own rate; `full`: they
        overlap.
    uplink : `half`: both ways share its rate.
    read_bytes_per_s, write_bytes_per_s : of a drive. None: those of the platform.
    overlap : backward continues while the gradients of the block before are sent to the drives.
    updater_bytes_per_s : read rate of an updater.
    decompressor : rate of gradients, as a factor on the bytes that a drive reads.
    uplink_bytes_per_s : None: fitted, so that `SATURATED_BY` drives fill it.
    gpu : share of the peak that the GPU reaches. None: fitted (`nearstep.paper.smart_infinity`).
    sequence : tokens.
    upload : when a subgroup's updated parameters are sent to the host: while the updater works on
        the next one (`update`, section IV-A), or as soon as they are written (`written`).
    """

    drive: Duplex = "half"
    uplink: Duplex = "half"
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    overlap: bool = False
    updater_bytes_per_s: float = UPDATER_BYTES_PER_S
    decompressor: float = 1.0
    uplink_bytes_per_s: float | None = None
    gpu: float | None = None
    sequence: int = 1024
    upload: Literal["update", "written"] = "update"


class Machine:
    """Rates and routes of the paper's machine.

    Attributes
    ----------
    read_bytes_per_s, write_bytes_per_s : of a drive.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        drive = load("smart-infinity").drives["ssd0"]
        self.read_bytes_per_s = options.read_bytes_per_s or float(drive.read_bytes_per_s or 0)
        self.write_bytes_per_s = options.write_bytes_per_s or float(drive.write_bytes_per_s or 0)

    @property
    def drive_bytes_per_s(self) -> float:
        """Rate of a drive in the baseline's update of Adam: reads and writes together."""
        reads, writes = (
            (ADAM_STATES + 1) / self.read_bytes_per_s,
            ADAM_STATES / (self.write_bytes_per_s),
        )
        seconds = reads + writes if self.options.drive == "half" else max(reads, writes)
        return (2 * ADAM_STATES + 1) / seconds

    @property
    def uplink_bytes_per_s(self) -> float:
        """Rate of the host's link to the expansion, in the sense of `Options.uplink`."""
        if self.options.uplink_bytes_per_s is not None:
            return self.options.uplink_bytes_per_s
        both = SATURATED_BY * self.drive_bytes_per_s
        share = (ADAM_STATES + 1) / (2 * ADAM_STATES + 1)  # of an update, reads
        return both if self.options.uplink == "half" else both * share

    @cached_property
    def platform(self) -> Platform:
        """The platform file's machine, with the fitted rate of the uplink."""
        machine = load("smart-infinity")
        rate = Figure(value=self.uplink_bytes_per_s, origin="fitted", source="section III")
        uplink = Link(ends=("cpu", "falcon"), bytes_per_s=rate, duplex=self.options.uplink)
        return replace(machine, links={**machine.links, "uplink": uplink})

    @cached_property
    def _weights(self) -> tuple[int, int, float]:
        """Weights of a byte read and of one written on a drive's lane, and that lane's rate."""
        ratio = Fraction(self.read_bytes_per_s) / Fraction(self.write_bytes_per_s)
        ratio = ratio.limit_denominator(16)
        return ratio.denominator, ratio.numerator, self.read_bytes_per_s * ratio.denominator

    @cached_property
    def _routes(self) -> dict[tuple[str, str], tuple[Hop, ...]]:
        return {}

    def transfer(self, start: str, stop: str, nbytes: int) -> Transfer:
        """Make a transfer from one part to another, with half-duplex drives."""
        if (start, stop) not in self._routes:
            route = self.platform.route(start, stop)
            hops = [each for hop in route for each in self._drive(hop)]
            self._routes[start, stop] = tuple(hops)
        return Transfer(nbytes=nbytes, route=self._routes[start, stop])

    def _drive(self, hop: Hop) -> list[Hop]:
        if hop.link not in self.platform.drives:
            return [hop]
        if self.options.drive == "full":
            rate = (self.read_bytes_per_s, self.write_bytes_per_s)[hop.direction]
            return [replace(hop, bytes_per_s=rate)]
        read, write, rate = self._weights
        shared = replace(hop, lane=hop.link, bytes_per_s=rate)
        again = replace(shared, link=f"{hop.link} in turn")  # the same bytes, counted once
        return [shared, *[again] * ((read, write)[hop.direction] - 1)]

    def flops(self, gpu: str) -> float:
        """Rate of a GPU in half precision, at the datasheet's peak."""
        return float(self.platform.processors[gpu].flops["fp16"])

    @property
    def host_params_per_s(self) -> float:
        """Updates of the CPU, as fast as its memory allows."""
        return float(self.platform.processors["cpu"].memory_bytes_per_s or 0) / HOST_BYTES

    def update_s(self, elements: int, arrays: int) -> float:
        """Seconds of a card's updater, which reads so many arrays."""
        return elements * arrays * PARAMETER_BYTES / self.options.updater_bytes_per_s

    def decompress_s(self, elements: int) -> float:
        """Seconds of a card's decompressor, which fills a gradient (section V-B)."""
        rate = self.read_bytes_per_s * self.options.decompressor
        return elements * PARAMETER_BYTES / rate

    @property
    def card_bytes(self) -> int:
        """Bytes of a card's DRAM."""
        return int(float(self.platform.processors["fpga0"].memory_bytes or 0))


STATES: Mapping[str, tuple[str, ...]] = {
    "adam": ("p", "m", "v"),
    "sgd_momentum": ("p", "m"),
    "adagrad": ("p", "v"),
}
"""Arrays of an optimizer besides the gradient (section VII-F)."""
