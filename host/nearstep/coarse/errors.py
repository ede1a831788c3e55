"""Errors of a pool of memory devices.

A `RingError` ends all jobs on all devices; tensors keep their old values, and
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
from nearstep.storage.errors import SnapshotVersionError as SnapshotVersionError
from nearstep.storage.errors import TornSnapshotError as TornSnapshotError


class TensorMismatchError(ArgumentError):
    """The arrays of the devices differ in shape or dtype. Nothing was sent.

    Attributes
    ----------
    found : dtype and shape of each device's array.
    """

    def __init__(self, found: Mapping[int, str]) -> None:
        self.found = dict(found)
        text = ", ".join(f"device {device}: {each}" for device, each in self.found.items())
        super().__init__(f"arrays of all devices must have one shape and dtype, not {text}")


class QueueFullError(FieldedDeviceError):
    """A queue has no space for the job; the job was sent to no device.

    Attributes
    ----------
    device, group : owner of the queue.
    capacity : maximum number of queued jobs.
    """

    template = "all {capacity} places of the queue of group {group} on device {device} are taken"
    device: int
    group: int
    capacity: int


class ProfileError(Fielded, ArgumentError):
    """A client's measurements of its proxies are no valid profile.

    Attributes
    ----------
    proxy : the measured proxy, or None.
    """

    template = "profile{of}: {reason}"
    proxy: int | None
    reason: str

    @property
    def of(self) -> str:
        return "" if self.proxy is None else f" of proxy {self.proxy}"


class ExactSumError(Fielded, ArgumentError):
    """An exact sum that the devices do not have. Nothing was sent.

    Attributes
    ----------
    what : the property of the sum: its operation, format, addends.
    expected : what the devices have.
    """

    template = "{what} of an exact sum must be {expected}, not {found}"
    what: str
    expected: object
    found: object


class RingError(FieldedDeviceError):
    """A fault on one device ended the jobs of all devices.

    Attributes
    ----------
    device : the device that found the first fault.
    causes : cause reported by each device: `PEER` if the fault was on another device.
    stream : stream of the fault on `device`, as in the register map.
    address : address of a failed access, in the memory of `device`.
    """

    template = "device {device} ended its jobs: {cause} on stream {stream} at {address:#x} ({said})"
    _: KW_ONLY
    device: int
    causes: Mapping[int, str]
    stream: str
    address: int

    @property
    def cause(self) -> str:
        """Name of the cause on `device`, as in the register map."""
        return self.causes[self.device]

    @property
    def said(self) -> str:
        return ", ".join(f"device {number}: {each}" for number, each in self.causes.items())


class SilentLinkError(RingError):
    """A link received nothing valid for longer than the limit.

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
    """A device and its predecessor in the ring had different jobs."""


class JobRefusedError(RingError):
    """A device cannot run a job, because of its window, alignment, overlap or kind."""


class MemoryResponseError(RingError):
    """The DRAM of a device gave a response other than OKAY."""


class PoolAbortedError(RingError):
    """The host ended the jobs."""


@dataclass(frozen=True)
class Waiting:
    """A device that waits for others.

    Attributes
    ----------
    job : the running job of `device`.
    peers : the other devices, with their current activity.
    """

    device: int
    job: str
    peers: Mapping[int, str]

    def __str__(self) -> str:
        peers = ", ".join(f"device {peer} ({doing})" for peer, doing in self.peers.items())
        return f"device {self.device} runs {self.job} and waits for {peers or 'no device'}"


class RingTimeoutError(WaitTimeoutError):
    """Jobs did not end within the given device time.

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
        text = "; ".join(map(str, self.waits)) or "no device runs a job"
        super().__init__(f"{waited_for}: {text}", max_cycles, unit=unit, transactions=transactions)


class SnapshotSpaceError(SnapshotError):
    """A snapshot has more pages than the devices can freeze, or no memory for their copies."""
