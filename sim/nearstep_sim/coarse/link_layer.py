"""Two link layers of COARSE devices, Verilated, between modelled links."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from nearstep_hw.verilog import to_verilog
from nearstep_sim.coverage.points import DAMAGES, SEEN, folder_of_points, hit, saw_faults
from nearstep_sim.models.link.faults import (
    HEADER,
    KINDS,
    ONE,
    CFault,
    COptions,
    CStatistics,
    LinkFault,
    LinkOptions,
)
from nearstep_sim.verilate.abi import load, structure
from nearstep_sim.verilate.build import Model, verilate_library, verilog_of
from nearstep_spec.coarse.config import PORTS, CoarseConfig
from nearstep_spec.coarse.registers import LINK_COUNTERS

DEVICES = 2
SOURCE = Path(__file__).with_name("link_layer.cpp")

Forged = Literal["payload", "group", "report"]
"""What `LinkBench.forge` changes in a frame."""


_Config = structure("coarse/link_layer.cpp", "Config")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of one device as of `LinkLayer`; stalls are the chances that a source and a sink stall
    in a cycle, `blocked` has a bit for each group with a blocked sink.
    """

    epoch: int = 1
    used: int | None = None
    watch: int = 0
    silence_limit: int = 0
    keepalive: int = 256
    retry: int = 1024
    abort: int = 0
    abort_cause: int = 0
    abort_device: int = 0
    abort_port: int = 0
    clear: int = 0
    source_stall: float = 0.0
    sink_stall: float = 0.0
    blocked: int = 0


_Inputs = structure("coarse/link_layer.cpp", "Inputs")


_DeviceReport = structure(
    "coarse/link_layer.cpp", "DeviceReport", sizes={"kEvents": len(LINK_COUNTERS), "kPorts": PORTS}
)


_Report = structure(
    "coarse/link_layer.cpp",
    "Report",
    types={"DeviceReport": _DeviceReport},
    sizes={"kDevices": DEVICES},
)


@dataclass(frozen=True)
class DeviceState:
    """Observations of one device since the start; lists have an item a group, or a port."""

    counters: list[dict[str, int]]
    delivered: list[int]
    phits: list[int]
    checks: list[int]
    mismatches: list[int]
    sent: list[int]
    aborts: int
    abort: tuple[int, int, int]
    silent_cycles: list[int]
    silent_since: list[int]
    unused_port: int
    unstable: int
    digest: int


@cache
def _library(config: CoarseConfig) -> ctypes.CDLL:
    def generate() -> str:
        from nearstep_hw.coarse.link_layer import LinkLayer

        return to_verilog(LinkLayer(config), "LinkLayer")

    model = Model(
        top="LinkLayer",
        verilog=verilog_of(f"link_layer {config!r}", generate),
        prefix="VLinkLayer",
    )
    # The header is in another folder: its text must be part of the cache name.
    defines = {"GROUPS": config.groups, "LINK_HPP": _hash_of(HEADER)}
    return load(verilate_library("link_layer", [model], [SOURCE], defines=defines), SOURCE)


def _hash_of(path: Path) -> str:
    """A C identifier that changes with the file."""
    return "x" + hashlib.sha256(path.read_bytes()).hexdigest()[:24]


class LinkBench:
    """Devices 0 and 1, connected by one or two links, with sources and sinks for their groups.

    Port 1 of device 0 is connected to port 0 of device 1; with `ports` 2 the other ports too, and
    odd groups run in reverse. The seed determines the data of a source; every output phit is
    compared with them.

    Parameters
    ----------
    config : of the devices.
    seed : of entries and stalls.
    ports : links.
    full : entries of `entry_phits` only, otherwise of 1 up to that.
    options : of every direction of the links.
    inputs : of both devices.
    """

    def __init__(
        self,
        config: CoarseConfig,
        *,
        seed: int,
        ports: int = 1,
        full: bool = False,
        options: LinkOptions | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self.config = config
        self.ports = ports
        self._cleared = False  # it cuts frames
        self._library = _library(config)
        mirror = _Config(seed=seed, ports=ports, entry_phits=config.entry_phits, full=full)
        self._bench = self._library.link_bench_open(ctypes.byref(mirror))
        self.options(options or LinkOptions())
        self.inputs = [inputs or Inputs()] * DEVICES
        for device in range(DEVICES):
            self.set(device)

    def __del__(self) -> None:
        if getattr(self, "_bench", None):
            self._library.link_bench_close(self._bench)

    def options(self, options: LinkOptions) -> None:
        """Reset all links with these options; data in flight are lost."""
        for device, port in self._ends():
            self._link(device, port, options.mirror(2 * device + port))

    def _ends(self) -> list[tuple[int, int]]:
        return [(device, port) for device in range(DEVICES) for port in range(PORTS)]

    def _link(self, device: int, port: int, options: COptions) -> None:
        self._library.link_bench_link(self._bench, device, port, ctypes.byref(options))

    def set(self, device: int, **changes: float) -> None:
        """Change inputs of a device from the next cycle on."""
        values = asdict(self.inputs[device]) | changes
        self.inputs[device] = Inputs(**values)  # type: ignore[arg-type]
        if values["used"] is None:
            values["used"] = 3 if self.ports == 2 else 2 >> device
        for name in ("source_stall", "sink_stall"):
            values[name] = round(values[name] * ONE)
        mirror = _Inputs(**{name: int(value) for name, value in values.items()})
        self._library.link_bench_inputs(self._bench, device, ctypes.byref(mirror))

    def fault(self, fault: LinkFault) -> None:
        """Inject a fault; link 0 is at port 1 of device 0, and direction 0 is from device 0."""
        port = 1 - fault.link
        mirror: CFault = fault.mirror()
        end = (fault.direction, port if fault.direction == 0 else 1 - port)
        self._library.link_bench_fault(self._bench, *end, ctypes.byref(mirror))

    def forge(self, nth: int, what: Forged = "payload") -> None:
        """Change the `nth` entry frame (from 1) to device 1, and its CRC.

        The payload and the group change by a bit; the report becomes one of a group above 1,
        without accepted entries.
        """
        self._library.link_bench_forge(self._bench, nth, get_args(Forged).index(what))

    def send(self, entries: int, *, device: int | None = None, group: int | None = None) -> None:
        """Queue entries for each device and group, or for the given ones."""
        for d in range(DEVICES) if device is None else (device,):
            for g in range(self.config.groups) if group is None else (group,):
                self._library.link_bench_send(self._bench, d, g, entries)

    def forget(self) -> None:
        """Continue sources and sinks with an entry that was never sent."""
        self._library.link_bench_forget(self._bench)

    def run(self, cycles: int, *, until_delivered: bool = False) -> int:
        """Run cycles, or until every entry was received; return the number of cycles."""
        ran = int(self._library.link_bench_run(self._bench, cycles, int(until_delivered)))
        if folder_of_points():
            self._cover()
        return ran

    def _cover(self) -> None:
        """Sample the faults of links, and what receivers counted if all faults are of one kind."""
        made = {each for link in self._statistics() for each in link.frame_faults_made()}
        saw_faults(made)
        kinds = {kind for kind, _ in made}
        counters = [port for state in self.state() for port in state.counters]
        for name in SEEN if len(kinds) == 1 and kinds <= {*DAMAGES} and not self._cleared else ():
            if any(port[name] for port in counters):
                hit("coarse.receiver", f"{kinds.copy().pop()}: {name}")

    def clear(self, epoch: int) -> None:
        """Clear both devices, and continue in another epoch."""
        self._cleared = True
        for device in range(DEVICES):
            self.set(device, clear=1, epoch=epoch, abort=0)
        self.forget()
        self.run(1)
        for device in range(DEVICES):
            self.set(device, clear=0)

    def state(self) -> list[DeviceState]:
        """Return the observations of each device."""
        report = _Report()
        self._library.link_bench_report(self._bench, ctypes.byref(report))
        groups = self.config.groups
        return [
            DeviceState(
                [dict(zip(LINK_COUNTERS, map(int, row), strict=True)) for row in each.events],
                *(
                    list(getattr(each, name))[:groups]
                    for name in ("delivered", "phits", "checks", "mismatches", "sent")
                ),
                each.aborts,
                (each.abort_cause, each.abort_device, each.abort_port),
                list(each.silent_cycles),
                list(each.silent_since),
                each.unused_port,
                each.unstable,
                each.digest,
            )
            for each in report.devices
        ]

    def frames(self) -> int:
        """Frames that were put on links."""
        return sum(each.frames for each in self._statistics())

    def faults(self) -> Mapping[str, int]:
        """Count the frames of each fault on all links."""
        total = dict.fromkeys(KINDS, 0)
        for statistics in self._statistics():
            for name, count in zip(KINDS, statistics.faults, strict=True):
                total[name] += count
        return total

    def _statistics(self) -> list[CStatistics]:
        every = []
        for device, port in self._ends():
            every.append(CStatistics())
            self._library.link_bench_statistics(self._bench, device, port, ctypes.byref(every[-1]))
        return every
