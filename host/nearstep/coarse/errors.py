"""What can go wrong with a pool of memory devices.

A `RingError` ends all jobs on all devices; tensors keep the values that they had, and
`nearstep.coarse.CoarsePool.reset` makes the pool usable again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from nearstep.errors import (
    ArgumentError,
    Fielded,
    FieldedDeviceError,
    WaitTimeoutError,
)
from nearstep.errors import ResetNeededError as ResetNeededError
from nearstep.storage.errors import SnapshotError as SnapshotError
from nearstep.storage.errors import SnapshotSaveError as SnapshotSaveError
from nearstep.storage.errors import TornSnapshotError as TornSnapshotError


class TensorMismatchError(ArgumentError):
    """Arrays of the devices that differ in shape or dtype. No device was touched.

    Attributes
    ----------
    found : dtype and shape of each device's array.
    """

    def __init__(self, found: Mapping[int, str]) -> None:
        self.found = dict(found)
        text = ", ".join(f"device {device}: {each}" for device, each in self.found.items())
        super().__init__(f"arrays of all devices must have one shape and dtype, not {text}")


class QueueFullError(FieldedDeviceError):
    """A queue has no space for the job; it was sent to no device.

    Attributes
    ----------
    device, group : whose queue it is.
    capacity : jobs that can wait there.
    """

    template = "all {capacity} places of the queue of group {group} on device {device} are taken"
    device: int
    group: int
    capacity: int


class ProfileError(Fielded, ArgumentError):
    """What a client measured of its proxies cannot be a profile.

    Attributes
    ----------
    proxy : whose measurements they are, or None.
    """

    template = "profile{of}: {reason}"
    proxy: int | None
    reason: str

    @property
    def of(self) -> str:
        return "" if self.proxy is None else f" of proxy {self.proxy}"


class RingError(FieldedDeviceError):
    """A device ended its jobs, and with them all devices did.

    Attributes
    ----------
    device : which found the first fault.
    causes : what each device says: `PEER` if it heard of it from another one.
    stream : where it happened on `device`, as in the register map.
    address : of the access, in the memory of `device`, if it was one.
    """

    template = "{summary} ({said})"
    _: KW_ONLY
    device: int
    causes: Mapping[int, str]
    stream: str
    address: int
    detail: str = ""

    @property
    def cause(self) -> str:
        """Name of the cause on `device`, as in the register map."""
        return self.causes[self.device]

    @property
    def summary(self) -> str:
        if self.detail:
            return self.detail
        where = f"{self.cause} on stream {self.stream} at {self.address:#x}"
        return f"device {self.device} ended its jobs: {where}"

    @property
    def said(self) -> str:
        return ", ".join(f"device {number}: {each}" for number, each in self.causes.items())


class SilentLinkError(RingError):
    """Nothing valid came from a link for longer than the limit.

    Attributes
    ----------
    port : link of `device`.
    peer : the device at its other end.
    """

    template = "device {device} heard nothing from device {peer} on link {port} ({said})"
    _: KW_ONLY
    port: int
    peer: int


class JobMismatchError(RingError):
    """A device had another job than the one before it in its ring."""


class JobRefusedError(RingError):
    """A job that a device cannot run: its window, alignment, overlap, or what it is."""


class MemoryResponseError(RingError):
    """The DRAM of a device answered other than OKAY."""


class PoolAbortedError(RingError):
    """The host ended the jobs."""


@dataclass(frozen=True)
class Waiting:
    """A device that waits, and the devices that it waits for.

    Attributes
    ----------
    job : what it has in work.
    peers : those it waits for, and what they do instead.
    """

    device: int
    job: str
    peers: Mapping[int, str]

    def __str__(self) -> str:
        peers = ", ".join(f"device {peer} ({doing})" for peer, doing in self.peers.items())
        return f"device {self.device} has {self.job} in work and waits for {peers or 'nobody'}"


class RingTimeoutError(WaitTimeoutError):
    """Jobs did not end in the device time given.

    Attributes
    ----------
    waits : tuple[Waiting, ...]. Who waits for whom.
    """

    def __init__(
        self,
        waited_for: str,
        max_cycles: int,
        waits: Sequence[Waiting],
        *,
        unit: str = "device cycles",
        transactions: Sequence[str] = (),
    ) -> None:
        self.waits = tuple(waits)
        text = "; ".join(map(str, self.waits)) or "no device has a job in work"
        super().__init__(f"{waited_for}: {text}", max_cycles, unit=unit, transactions=transactions)


class SnapshotSpaceError(SnapshotError):
    """More pages than the devices can freeze, or no memory for their copies."""
