"""Errors between clients and the service of the memory devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from nearstep.errors import Fielded, NearstepError

Kind = TypeVar("Kind", bound=NearstepError)


class ServiceError(NearstepError, RuntimeError):
    """Base of errors between clients and the service; a RuntimeError, as torch's collectives
    raise."""


class FrameError(Fielded, ServiceError):
    """Received bytes or messages break the protocol. The connection is closed."""

    template = "expected {expected}, found {found}"
    expected: str
    found: str


class StalledError(Fielded, ServiceError):
    """The other end made no progress within a frame for `silence_s` seconds."""

    template = "a frame made no progress for more than {silence_s} s"
    silence_s: float


class HandshakeError(ServiceError):
    """The handshake failed: token, version, job, rank or number of clients."""


class RefusedError(Fielded, ServiceError):
    """The service refused a request; nothing was changed, and the job continues.

    Attributes
    ----------
    kind : name of the error's class in the service.
    """

    template = "{kind}: {detail}"
    kind: str
    detail: str


class UnlikeError(RefusedError):
    """Clients of a job opened different tensors, or a value has another size."""


class DeviceMemoryError(RefusedError):
    """The devices have no memory for a value or an exchange; nothing was changed."""


class UnsharedError(RefusedError):
    """A gather needs clients that share memory with the service."""


class FullError(RefusedError):
    """The client's queue, or the place of a shard, is taken."""


class JobError(Fielded, ServiceError):
    """The job has ended for all of its clients, which may connect again together.

    Attributes
    ----------
    ranks : clients that caused the end; may be empty.
    devices : memory devices that caused the end; may be empty.
    """

    template = "{detail}"
    detail: str
    ranks: Sequence[int] = ()
    devices: Sequence[int] = ()


class ClientLostError(JobError):
    """A client died, left, was silent for too long or broke the protocol."""


class DeviceLostError(JobError):
    """A memory device failed, or a link to it."""


class OrderError(JobError):
    """Two clients, `ranks`, that must make the same sums in one order did not."""


class ProxyDeadlockError(JobError):
    """Proxies, `devices`, that hold the first pushed shard each wait for the next, the last for the
    first."""


class ServiceLostError(JobError):
    """The service died, or was silent for too long."""


def named(base: type[Kind], name: str) -> type[Kind]:
    """Return the class of an error that the service sent: derived from `base`, or `base`."""
    return next((each for each in base.__subclasses__() if each.__name__ == name), base)


def refusal(kind: str, detail: str) -> RefusedError:
    """Return the error of a refusal received from the service."""
    return named(RefusedError, kind)(kind, detail)
