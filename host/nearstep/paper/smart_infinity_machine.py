"""The machine of the Smart-Infinity paper's evaluation, under assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from nearstep.work.operation import Transfer
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import Duplex, Figure, Hop, Link, Platform

ADAM_STATES = 3
PARAMETER_BYTES = 4
"""Bytes of a parameter, a gradient or a moment on a drive (section II-A)."""

UPDATER_BYTES_PER_S = 7e9
"""Read rate of an updater, at least (section VII-H)."""

HOST_BYTES = 28
"""Bytes that the CPU's update of Adam moves for a parameter: four loads and three stores."""

SATURATED_BY = 4
"""Drives beyond which the baseline gains nothing (section III, figure 3(b))."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Assumptions that can be changed.

    Attributes
    ----------
    drive : None: that of the platform, `half`.
    uplink : `half`: both ways share its rate.
    read_bytes_per_s, write_bytes_per_s : of a drive. None: those of the platform.
    overlap : backward continues while the gradients of the block before are sent to the drives.
    updater_bytes_per_s : read rate of an updater.
    decompressor : rate of gradients, as a factor on the bytes that a drive reads.
    uplink_bytes_per_s : None: fitted, so that `SATURATED_BY` drives fill it.
    gpu : share of the peak that the GPU reaches. None: fitted (`nearstep.paper.smart_infinity`).
    sequence : tokens.
    allocation_s : seconds to allocate buffers, in SU for each subgroup (section IV-B).
    tasklet_s : seconds to start a tasklet on a card, one for each subgroup.
    upload : when a subgroup's updated parameters are sent to the host: while the updater works on
        the next one (`update`, section IV-A), or as soon as they are written (`written`).
    """

    drive: Duplex | None = None
    uplink: Duplex = "half"
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    overlap: bool = False
    updater_bytes_per_s: float = UPDATER_BYTES_PER_S
    decompressor: float = 1.0
    uplink_bytes_per_s: float | None = None
    gpu: float | None = None
    sequence: int = 1024
    allocation_s: float = 0.0
    tasklet_s: float = 0.0
    upload: Literal["update", "written"] = "update"


class Machine:
    """Rates and routes of the paper's machine.

    Attributes
    ----------
    drive : each of the drives.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        drive = load("smart-infinity").drives["ssd0"]
        changed: dict[str, Any] = {"duplex": options.drive or drive.duplex}
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            if (given := getattr(options, name)) is not None:
                changed[name] = Figure(value=given, origin="fitted", source="an assumption")
        self.drive = replace(drive, **changed)

    @property
    def read_bytes_per_s(self) -> float:
        return float(self.drive.read_bytes_per_s or 0)

    @property
    def drive_bytes_per_s(self) -> float:
        """Rate of a drive in the baseline's update of Adam: reads and writes together."""
        reads = (ADAM_STATES + 1) / self.read_bytes_per_s
        writes = ADAM_STATES / float(self.drive.write_bytes_per_s or 0)
        seconds = reads + writes if self.drive.duplex == "half" else max(reads, writes)
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
        """The platform file's machine, with these drives and the fitted rate of the uplink."""
        machine = load("smart-infinity")
        rate = Figure(value=self.uplink_bytes_per_s, origin="fitted", source="section III")
        uplink = Link(ends=("cpu", "falcon"), bytes_per_s=rate, duplex=self.options.uplink)
        drives = dict.fromkeys(machine.drives, self.drive)
        return replace(machine, drives=drives, links={**machine.links, "uplink": uplink})

    def transfer(self, start: str, stop: str, nbytes: int) -> Transfer:
        """Make a transfer from one part to another."""
        if (start, stop) not in self._routes:
            self._routes[start, stop] = self.platform.route(start, stop)
        return Transfer(nbytes=nbytes, route=self._routes[start, stop])

    @cached_property
    def _routes(self) -> dict[tuple[str, str], tuple[Hop, ...]]:
        return {}

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
