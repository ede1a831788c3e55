"""Host memory controller in Python, alone or on bare DRAM."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_hw.dram.dfi import HOST_DATA_BYTES, HOST_PHASES
from nearstep_sim.models.dram.device import Ddr4Device
from nearstep_sim.models.dram.library import (
    CGeometry,
    CHostConfig,
    CHostCycle,
    CHostStatistics,
    CMapping,
    CPortConfig,
    CSlot,
    CTiming,
    load_error,
)
from nearstep_sim.models.dram.library import load as load_library
from nearstep_sim.verilate.abi import values
from nearstep_spec.dram.address import DEFAULT_INTERLEAVE, DEFAULT_MAPPING, AddressMapping
from nearstep_spec.dram.command import DESELECT, Pins
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.timing import SPEED_GRADES, DramTiming, dram_timing
from nearstep_spec.errors import NearstepError

__all__ = [
    "BareDram",
    "HostConfig",
    "HostController",
    "HostCycle",
    "HostDataError",
    "HostStatistics",
    "HostedDram",
    "Loads",
    "without_a_module",
]

HOST_GRADE = "DDR4-800"
SCHEDULERS = ("in-order", "fr-fcfs")


class HostDataError(NearstepError, RuntimeError):
    """The memory returned data when none was due, or none when it was."""


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """A host memory controller and the parameters of its memory.

    Parameters
    ----------
    density, width : of the chips.
    ranks : ranks on the bus: those of the first channel, then those of the next.
    channel_ranks : ranks of a channel; the channel is the top of the address.
    mapping : order of the address bits inside a rank.
    interleave : bytes in one of two ranks of a channel before the other.
    read_latency, write_latency : fabric cycles from a column command to its first data, fixed.
    write_to_read : clocks, at least, from a write to a read of another rank of its channel. Bare
        DRAM has no more than its latencies; a module has `HOST_WRITE_TO_READ`.
    cl, cwl : clocks from which turnarounds are computed; None: those of the latencies, two in a
        fabric cycle. Bare DRAM has the part's own, which need not be whole fabric cycles.
    scheduler : `in-order` (columns in the order of the requests, rows prepared ahead) or
        `fr-fcfs` (row hits first).
    window : requests that the scheduler sees.
    overtake : column commands that may overtake the oldest request, with `fr-fcfs`.
    postpone : refreshes gathered before they are forced, 1 to 8.
    late_rank : a rank that is refreshed only when eight are due to it, or None.
    column_slot : the slot of all column commands, or None for any.
    stall : chance of a cycle that issues no access, 0 to 1.
    refresh_offset : clocks by which its refresh intervals begin early, less than tREFI.
    whim : refreshes begin and end at random, at any time that JEDEC allows, up to the last moment:
        no two REF more than nine tREFI apart, at most 16 in two tREFI.
    pull_in : refreshes given in advance at most, 0 to 8; only with `whim`.
    auto_precharge : chance of a read or write that closes its bank, 0 to 1.
    seed : of the stalls, of whims and of closed banks.

    Raises
    ------
    ValueError : with the value and what is allowed.
    """

    density: str = "8Gb"
    width: str = "x8"
    ranks: int = 1
    channel_ranks: int = 1
    mapping: str = DEFAULT_MAPPING
    interleave: int = DEFAULT_INTERLEAVE
    read_latency: int = 10
    write_latency: int = 3
    write_to_read: int = 1
    cl: int | None = None
    cwl: int | None = None
    scheduler: str = "fr-fcfs"
    window: int = 16
    overtake: int = 32
    postpone: int = 1
    late_rank: int | None = None
    column_slot: int | None = None
    stall: float = 0.0
    refresh_offset: int = 0
    whim: bool = False
    pull_in: int = 0
    auto_precharge: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler must be one of {SCHEDULERS}, not {self.scheduler!r}")
        if not 0 <= self.stall < 1:
            raise ValueError(f"stall must be at least 0 and less than 1, not {self.stall!r}")
        if not 0 <= self.auto_precharge <= 1:
            raise ValueError(f"auto_precharge must be 0 to 1, not {self.auto_precharge!r}")
        if self.late_rank is not None and not 0 <= self.late_rank < self.ranks:
            raise ValueError(f"late_rank must be a rank of {self.ranks}, not {self.late_rank!r}")
        if self.column_slot not in (None, 0, 1):
            raise ValueError(f"column_slot must be 0, 1 or None, not {self.column_slot!r}")
        if self.ranks % self.address_mapping.geometry.ranks:
            raise ValueError(
                f"ranks must be a multiple of channel_ranks, {self.channel_ranks}, not {self.ranks}"
            )
        if self.pull_in and not self.whim:
            raise ValueError(f"pull_in must be 0 without whim, not {self.pull_in!r}")
        if not 0 <= self.refresh_offset < self.timing.t_refi:
            raise ValueError(
                f"refresh_offset must be 0 to {self.timing.t_refi - 1}, not {self.refresh_offset!r}"
            )

    @property
    def timing(self) -> DramTiming:
        """Timing at the host's clock."""
        return dram_timing(
            HOST_GRADE,
            self.density,
            self.width,
            cl=HOST_PHASES * self.read_latency if self.cl is None else self.cl,
            cwl=HOST_PHASES * self.write_latency if self.cwl is None else self.cwl,
        )

    @property
    def geometry(self) -> DramGeometry:
        """Geometry of a rank."""
        return DramGeometry(self.density, self.width)

    @property
    def address_mapping(self) -> AddressMapping:
        """Mapping inside a channel."""
        channel = DramGeometry(self.density, self.width, self.channel_ranks)
        return AddressMapping(channel, self.mapping, self.interleave)

    def _c(self) -> CHostConfig:
        return CHostConfig(
            timing=CTiming.of(self.timing),
            geometry=CGeometry.of(self.geometry),
            mapping=CMapping.of(self.address_mapping),
            ranks=self.ranks,
            read_latency=self.read_latency,
            write_latency=self.write_latency,
            write_to_read=self.write_to_read,
            fr_fcfs=self.scheduler == "fr-fcfs",
            window=self.window,
            overtake=self.overtake,
            postpone=self.postpone,
            late_rank=-1 if self.late_rank is None else self.late_rank,
            column_slot=-1 if self.column_slot is None else self.column_slot,
            stall=round(self.stall * 65536),
            refresh_offset=self.refresh_offset,
            whim=self.whim,
            pull_in=self.pull_in,
            auto_precharge=round(self.auto_precharge * 65536),
            seed=self.seed,
        )


@dataclass(frozen=True)
class HostCycle:
    """Outputs of the host in one fabric cycle: a rank (or None) and pins for each slot, data."""

    ranks: tuple[int | None, ...]
    slots: tuple[Pins, ...]
    wrdata: bytes | None
    wrdata_mask: int


@dataclass(frozen=True)
class HostStatistics:
    """Counts since the start; cycles and latencies are fabric cycles.

    `busy_cycles` are those with a request; a latency is from submission to the last data.
    """

    cycles: int
    loads: int
    stores: int
    row_hits: int
    row_misses: int
    row_conflicts: int
    refreshes: int
    busy_cycles: int
    load_latency_sum: int
    load_latency_max: int

    @property
    def throughput(self) -> float:
        """Bytes transferred in a busy fabric cycle, 32 at most."""
        return BEAT_BYTES * (self.loads + self.stores) / max(self.busy_cycles, 1)


@dataclass(frozen=True)
class Loads:
    """Completed loads, in the order of completion. `data` has shape (n, 64)."""

    tags: NDArray[np.uint64]
    submitted: NDArray[np.uint64]
    completed: NDArray[np.uint64]
    data: NDArray[np.uint8]


class HostController:
    """Turns loads and stores of 64 bytes into DDR4 commands, one fabric cycle a call.

    Raises `ValueError` for an invalid configuration.
    """

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        self._library = load_library()
        self._owner: object = None
        self.handle: int | None = self._library.ddr4_host_new(ctypes.byref(config._c()))
        if not self.handle:
            raise ValueError(load_error())
        self._cycle = CHostCycle()

    @classmethod
    def borrowed(cls, handle: int, config: HostConfig, owner: object) -> "HostController":
        """Return a view of a controller that `owner` owns, and keep `owner` alive."""
        self = cls.__new__(cls)
        self._owner = owner
        self.config, self.handle = config, handle
        self._library, self._cycle = load_library(), CHostCycle()
        return self

    def __del__(self) -> None:
        if getattr(self, "_owner", self) is None and getattr(self, "handle", None):
            self._library.ddr4_host_free(self.handle)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all ranks."""
        return self.config.ranks * self.config.geometry.capacity_bytes

    def load(self, address: int, tag: int = 0) -> None:
        """Queue a load of the 64 bytes at a byte address."""
        self.submit([False], [address], tags=[tag])

    def store(self, address: int, data: bytes, mask: int = 0) -> None:
        """Queue a store of 64 bytes; set bits of `mask` keep bytes as they are."""
        if len(data) != BEAT_BYTES:
            raise ValueError(f"data must be {BEAT_BYTES} bytes, not {len(data)}")
        self.submit([True], [address], data=np.frombuffer(data, np.uint8), masks=[mask])

    def submit(
        self,
        is_store: Sequence[bool] | NDArray[Any],
        addresses: Sequence[int] | NDArray[Any],
        *,
        tags: Sequence[int] | NDArray[Any] | None = None,
        data: NDArray[Any] | None = None,
        masks: Sequence[int] | NDArray[Any] | None = None,
    ) -> None:
        """Queue many accesses, in order.

        Parameters
        ----------
        is_store : (n,) booleans.
        addresses : (n,) byte addresses, multiples of 64.
        tags : (n,) numbers returned with the loads; by default 0.
        data : (n, 64) bytes; rows of loads are ignored. May be missing if there is no store.
        masks : (n,) 64-bit numbers; a set bit keeps the byte. By default 0.

        Raises
        ------
        ValueError : an address is not on a beat or outside the memory, or a shape is wrong.
        """
        where = np.asarray(addresses, dtype=np.int64)
        kinds = np.asarray(is_store, dtype=np.uint8)
        n = where.size
        if np.any((where % BEAT_BYTES != 0) | (where < 0) | (where >= self.capacity_bytes)):
            raise ValueError(f"addresses must be multiples of 64 below {self.capacity_bytes:#x}")
        marks = np.zeros(n, np.uint64) if tags is None else np.asarray(tags, dtype=np.uint64)
        keep = np.zeros(n, np.uint64) if masks is None else np.asarray(masks, dtype=np.uint64)
        if data is None:
            if kinds.any():
                raise ValueError("stores need data")
            payload = np.zeros((n, BEAT_BYTES), np.uint8)
        else:
            payload = np.ascontiguousarray(data).view(np.uint8).reshape(-1, BEAT_BYTES)
        if not kinds.size == marks.size == keep.size == payload.shape[0] == n:
            raise ValueError(
                f"expected {n} accesses everywhere, found {kinds.size} kinds, {marks.size} tags, "
                f"{keep.size} masks and {payload.shape[0]} rows of data"
            )
        beats = (where // BEAT_BYTES).astype(np.uint64)
        arrays = (kinds, beats, marks, payload, keep)
        if not self._library.ddr4_host_submit(self.handle, n, *(a.ctypes.data for a in arrays)):
            raise ValueError(load_error())

    def give(self, pins: Pins, *, rank: int = 0) -> None:
        """Queue a command that needs all banks closed: MRS, ZQCS, ZQCL or the reserved code.

        The command precedes all waiting accesses; the rank is then idle for tMOD, tZQCS or tZQoper.

        Raises
        ------
        ValueError : no such rank.
        """
        if not self._library.ddr4_host_give(self.handle, rank, ctypes.byref(CSlot(*pins))):
            raise ValueError(f"rank must be one of the host's, not {rank!r}")

    def fence(self) -> None:
        """Delay later accesses until the data of all earlier ones are transferred."""
        self._library.ddr4_host_fence(self.handle)

    @property
    def idle(self) -> bool:
        """Whether no access is waiting or in flight."""
        return bool(self._library.ddr4_host_idle(self.handle))

    @property
    def waiting(self) -> int:
        """Return the accesses without a column command so far."""
        return int(self._library.ddr4_host_waiting(self.handle))

    @property
    def cycle(self) -> int:
        """Fabric cycle of the next call."""
        return int(self._library.ddr4_host_cycle_number(self.handle))

    def tick(self, rddata: bytes | None = None) -> HostCycle:
        """Run one fabric cycle: `rddata` (None while not valid) in, commands and `wrdata` out.

        Raises
        ------
        HostDataError
        """
        if rddata is not None and len(rddata) != HOST_DATA_BYTES:
            raise ValueError(f"rddata must be {HOST_DATA_BYTES} bytes, not {len(rddata)}")
        self._library.ddr4_host_tick(self.handle, rddata, ctypes.byref(self._cycle))
        self.check()
        c = self._cycle
        slots = range(HOST_PHASES)
        return HostCycle(
            ranks=tuple(None if c.rank[s] < 0 else int(c.rank[s]) for s in slots),
            slots=tuple(
                DESELECT
                if c.rank[s] < 0
                else Pins(0, c.slots[s].act_n, c.slots[s].address, c.slots[s].bg, c.slots[s].ba)
                for s in slots
            ),
            wrdata=bytes(c.wrdata) if c.wrdata_en else None,
            wrdata_mask=int(c.wrdata_mask),
        )

    def check(self) -> None:
        """Raise `HostDataError` if the memory's data were not on time."""
        if text := self._library.ddr4_host_error(self.handle).decode():
            raise HostDataError(text)

    def completed(self, most: int = 1 << 16) -> Loads:
        """Return up to `most` completed loads."""
        tags, submitted, done = (np.empty(most, np.uint64) for _ in range(3))
        data = np.empty((most, BEAT_BYTES), np.uint8)
        arrays = (tags, submitted, done, data)
        n = self._library.ddr4_host_completions(
            self.handle, most, *(array.ctypes.data for array in arrays)
        )
        return Loads(tags[:n], submitted[:n], done[:n], data[:n])

    @property
    def statistics(self) -> HostStatistics:
        out = CHostStatistics()
        self._library.ddr4_host_statistics(self.handle, ctypes.byref(out))
        return HostStatistics(**values(out))


class _Handle:
    """Owns the C++ object; views of its parts keep the handle alive."""

    def __init__(self, library: ctypes.CDLL, pointer: int | None) -> None:
        self.library = library
        self.pointer = pointer
        if not pointer:
            raise ValueError(library.ddr4_last_error().decode())

    def __del__(self) -> None:
        if self.pointer:
            self.library.ddr4_hosted_free(self.pointer)


class HostedDram:
    """A host controller and DDR4 devices, with a design between them or none: `hosted.hpp`.

    Parameters
    ----------
    library : has the functions of `library.cpp`, and made the object.
    pointer : the object, or None if its configuration is invalid.
    config : of the host.
    timing : of the devices.
    devices : number of devices.

    Attributes
    ----------
    failure : exception of a failed run.
    """

    failure: type[Exception]

    def __init__(
        self,
        library: ctypes.CDLL,
        pointer: int | None,
        config: HostConfig,
        timing: DramTiming,
        devices: int,
    ) -> None:
        handle = _Handle(library, pointer)
        self._library, self._pointer = library, pointer
        self.host = HostController.borrowed(library.ddr4_hosted_host(pointer), config, handle)
        self.devices = tuple(
            Ddr4Device.borrowed(
                library.ddr4_hosted_device(pointer, number), timing, config.geometry, handle
            )
            for number in range(devices)
        )

    def run(self, cycles: int, *, until_idle: bool = False) -> int:
        """Run fabric cycles, or until the host is idle; return the number of cycles."""
        ran = int(self._library.ddr4_hosted_run(self._pointer, cycles, until_idle))
        self._check()
        return ran

    def _check(self) -> None:
        if text := self._library.ddr4_hosted_error(self._pointer).decode():
            raise self.failure(text)


def without_a_module(config: HostConfig) -> HostConfig:
    """Return the host's configuration for DRAM chips without a module: CL 6 and CWL 5 at its clock,
    three fabric cycles each, and the turnarounds that follow from CL and CWL."""
    grade = SPEED_GRADES[HOST_GRADE]
    cycles = (-(-clocks // HOST_PHASES) for clocks in (grade.cl, grade.cwl))
    read_latency, write_latency = cycles
    return replace(
        config,
        read_latency=read_latency,
        write_latency=write_latency,
        write_to_read=1,
        cl=grade.cl,
        cwl=grade.cwl,
    )


class BareDram(HostedDram):
    """A host controller wired to its own ranks, without a module in between.

    The latencies of a module are kept; `without_a_module` removes them.
    """

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        port = CPortConfig(HOST_PHASES, HOST_DATA_BYTES, config.read_latency, config.write_latency)
        library = load_library()
        pointer = library.ddr4_bare_new(ctypes.byref(config._c()), ctypes.byref(port))
        super().__init__(library, pointer, config, config.timing, config.ranks)

    def run(self, cycles: int, *, until_idle: bool = True) -> int:
        """Run up to `cycles` fabric cycles, or until no access is left.

        Returns
        -------
        int : how many ran.

        Raises
        ------
        DramViolationError, HostDataError
        """
        return super().run(cycles, until_idle=until_idle)

    def _check(self) -> None:
        for device in self.devices:
            device.check()
        self.host.check()
