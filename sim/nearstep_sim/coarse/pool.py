"""`sim:coarse`: memory devices, Verilated once, an object for each, joined by emulated links."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion, Poll
from nearstep.errors import (
    RESPONSES,
    ArgumentError,
    BusError,
    CompletionError,
    OutOfBoundsError,
    PostedWriteError,
)
from nearstep.scalars import is_whole
from nearstep.threads import shared, simulation_threads
from nearstep_sim.coarse.library import pool_library
from nearstep_sim.coarse.options import VerilatedPoolOptions
from nearstep_sim.coverage.points import folder_of_points, saw_faults
from nearstep_sim.models.link.faults import KINDS, COptions, CStatistics, LinkFault
from nearstep_sim.updater.in_flight import STATUS, InFlight
from nearstep_sim.updater.shell import ShellBackend, ShellOptions
from nearstep_sim.updater.transfer import DeviceTransfer
from nearstep_sim.verilate.abi import structure
from nearstep_sim.verilate.harness import FAILED, CPoll
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import register_bytes

HOST_ID_WIDTH = 4
"""Bits of an ID of the window; see nearstep_hw.coarse.device."""

SLICE_CYCLES = 4096
"""Most cycles of one call into the simulation."""


_Client = structure("coarse/client_link.hpp", "ClientOptions")


_Options = structure(
    "coarse/pool.cpp", "PoolOptions", types={"link::Options": COptions, "ClientOptions": _Client}
)


_Failure = structure("models/bar_host.hpp", "BarFailure")


class PoolBackend(ShellBackend):
    """Devices of which every cycle is simulated.

    Registers of device d begin at d * `register_bytes`, its memory at d * `memory_bytes`. Link i
    connects port 1 of device i to port 0 of the next; its direction 0 is from device i to the next.
    Submitted transfers use the link of a device's client, in both directions at once, and its
    window, while cycles pass; with a direct window they take no time.
    """

    family = "coarse"
    source = "coarse/pool.cpp"
    config: CoarseConfig
    links_inside = False

    def __init__(self, options: VerilatedPoolOptions) -> None:
        self.config = options.config()
        self.devices = options.devices
        self._register_bytes = register_bytes(self.config)  # cached: whole maps are built
        self._pool_options = options
        self._threads = simulation_threads()
        self._under_way = InFlight()
        total = options.devices * self.config.memory_bytes
        super().__init__(self._library(), options, total, host_ids=1 << HOST_ID_WIDTH)

    def _library(self) -> Callable[[], Path]:
        """Return the builder of the library."""
        return partial(pool_library, self.config, trace=self._pool_options.trace is not None)

    def _open(self, options: ShellOptions) -> int:
        lib, given = self._lib, self._pool_options
        return int(
            lib.pool_open(
                ctypes.byref(
                    _Options(
                        data=options.data,
                        state=options.state,
                        capacity=self.config.memory_bytes,
                        register_bytes=self._register_bytes,
                        devices=self.devices,
                        latency=options.latency,
                        seed=options.seed,
                        half_duplex=options.half_duplex,
                        native=options.native,
                        stall=options.stall,
                        host_ids=options.host_ids,
                        threads=self._threads,
                        links_inside=self.links_inside,
                        trace=options.trace,
                        link=given.link().mirror(),
                        client=_Client(given.client_interval, given.client_latency),
                    )
                )
            )
        )

    @property
    def regions(self) -> tuple[tuple[int, int], ...]:
        size = self.config.memory_bytes
        return tuple((device * size, size) for device in range(self.devices))

    @property
    def links(self) -> int:
        """Number of links; two devices share one."""
        return 1 if self.devices == 2 else self.devices

    def run(self, cycles: int) -> None:
        """Run `cycles`."""
        for begun in range(0, cycles, SLICE_CYCLES):
            self._lib.pool_run(self._device, min(SLICE_CYCLES, cycles - begun))
        self._check(0, "run")

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        self._lib.pool_threads(self._device, shared(self._threads))
        super().wait(polls, max_cycles)

    def advance(self, max_cycles: int, polls: Sequence[Poll] = ()) -> None:
        self._lib.pool_threads(self._device, shared(self._threads))
        array = (CPoll * len(polls))(*((p.address, p.mask, p.value) for p in polls))
        end = self._lib.device_cycle(self._device) + max_cycles

        def go(device: int) -> int:
            left = max(0, end - self._lib.device_cycle(device))
            return int(self._lib.pool_advance(device, array, len(polls), left))

        self._check(self._carry_out(go), "advance")

    def submit_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        return self._submit(address, out, write=False)

    def submit_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        return self._submit(address, data, write=True)

    def look_at_transfers(self) -> None:
        """Complete the transfers of clients that have ended.

        No time passes and no error is raised.
        """
        self._under_way.look(partial(self._lib.pool_ended, self._device))

    def reset(self) -> None:
        self._cover()
        super().reset()
        self.look_at_transfers()

    def close(self) -> None:
        self._cover()
        super().close()
        self._under_way.close(self._name)

    def _submit(self, address: int, data: NDArray[np.uint8], *, write: bool) -> Completion:
        kind = "write" if write else "read"
        parts = self._parts(kind, address, data.size)
        if self._pool_options.window == "direct" or len(parts) != 1:  # of no device, or of several
            submit = super().submit_write if write else super().submit_read
            return submit(address, data)
        what = f"client's {kind} of {data.size} bytes at {address:#x}"
        begun = int(self._lib.device_cycle(self._device))
        transfer = DeviceTransfer(self, what, begun, data, host=True)
        number = self._under_way.add(transfer)
        self._lib.pool_submit(self._device, number, address, data.ctypes.data, data.size, write)
        return transfer

    def kill(self, device: int) -> None:
        """Cut all links of a device, in both directions."""
        for link, direction in self._directions_of(device):
            self.inject_link(LinkFault(kind="dead", link=link, direction=direction))

    def revive(self, device: int) -> None:
        """Restore the links of a killed device; data in flight are lost."""
        for link, direction in self._directions_of(device):
            self._lib.pool_link_revive(self._device, self._number(link, direction))

    def inject_link(self, fault: LinkFault) -> None:
        """Inject a fault into a link, until `heal`.

        Raises
        ------
        ArgumentError : no such link.
        """
        number = self._number(fault.link, fault.direction)
        self._lib.pool_link_fault(self._device, number, ctypes.byref(fault.mirror()))

    def link_statistics(self, link: int, direction: int) -> dict[str, int]:
        """Return the phits and frames that a direction of a link has accepted since the last reset,
        the phits delivered, and the frames hit by each kind of fault.
        """
        found = self._statistics(self._number(link, direction))
        whole = {n: getattr(found, n) for n in ("phits", "frames", "delivered_phits", "swallowed")}
        return {**whole, **dict(zip(KINDS, found.faults, strict=True))}

    def _statistics(self, number: int) -> CStatistics:
        found = CStatistics()
        self._lib.pool_link_counters(self._device, number, ctypes.byref(found))
        return found

    def _cover(self) -> None:
        """Sample the faults of links since the last reset."""
        if folder_of_points() and self._simulation.is_open:
            for number in range(2 * self.links):
                saw_faults(self._statistics(number).frame_faults_made())

    def _number(self, link: int, direction: int) -> int:
        if not is_whole(link) or not 0 <= link < self.links:
            raise ArgumentError(f"link must be from 0 to {self.links - 1}, not {link!r}")
        if not is_whole(direction) or direction not in (0, 1):
            raise ArgumentError(f"direction must be 0 or 1, not {direction!r}")
        return 2 * link + direction

    def _directions_of(self, device: int) -> list[tuple[int, int]]:
        """Both directions of each link of a device."""
        if not is_whole(device) or not 0 <= device < self.devices:
            raise ArgumentError(f"device must be from 0 to {self.devices - 1}, not {device!r}")
        links = {0} if self.devices == 2 else {device, (device - 1) % self.devices}
        return [(link, direction) for link in links for direction in (0, 1)]

    def read_register(self, address: int) -> int:
        self._check_register(address)
        return super().read_register(address)

    def write_register(self, address: int, value: int) -> None:
        self._check_register(address, write=True)
        super().write_register(address, value)

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        if self._pool_options.window == "direct":
            self._memory.read(address, out)
            return
        for at, first, last in self._parts("read", address, out.size):
            part = out[first:last]
            status = self._carry_out(self._lib.pool_read, at, part.ctypes.data, part.size)
            self._check(status, "load")

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        if self._pool_options.window == "direct":
            self._memory.write(address, data)
            return
        for at, first, last in self._parts("write", address, data.size):
            part = data[first:last]
            status = self._carry_out(self._lib.pool_write, at, part.ctypes.data, part.size)
            self._check(status, "store")

    def _parts(self, what: str, address: int, nbytes: int) -> list[tuple[int, int, int]]:
        """Split an access at the devices' boundaries: address, first and last byte of the data."""
        if address < 0 or address + nbytes > self.capacity_bytes:
            raise OutOfBoundsError(f"memory {what}", address, address + nbytes, self.capacity_bytes)
        size, parts, at = self.config.memory_bytes, [], address
        while at < address + nbytes:
            end = min(address + nbytes, (at // size + 1) * size)
            parts.append((at, at - address, end - address))
            at = end
        return parts

    def _check_register(self, address: int, *, write: bool = False) -> None:
        if not 0 <= address < self.devices * self._register_bytes or address % 4:
            raise BusError(address, RESPONSES.index("DECERR"), write=write)

    def _check(self, status: int, action: str) -> None:
        if status == FAILED:
            failure = _Failure()
            self._lib.pool_failure(self._device, ctypes.byref(failure))
            kind = PostedWriteError if failure.write else CompletionError
            response = STATUS[failure.response]
            raise kind(failure.address, response, transactions=self.transactions())
        super()._check(status, action)
