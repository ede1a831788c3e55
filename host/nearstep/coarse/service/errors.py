"""What can go wrong between clients and the service of the memory devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nearstep.errors import Fielded, NearstepError


class ServiceError(NearstepError, RuntimeError):
    """Base: something between clients and the service; what fails in torch's collectives is a
    RuntimeError, too."""


class FrameError(Fielded, ServiceError):
    """What came over a connection is not the protocol. The connection is closed."""

    template = "expected {expected}, found {found}"
    expected: str
    found: str


class StalledError(Fielded, ServiceError):
    """The other end stopped in the middle of a frame, for the limit of `silence_s` seconds."""

    template = "a frame stood still for more than {silence_s} s"
    silence_s: float


class HandshakeError(ServiceError):
    """The service does not take the client: token, version, job, rank or number of clients."""


class RefusedError(Fielded, ServiceError):
    """The service refused a request; nothing was changed, and the job goes on.

    Attributes
    ----------
    kind : name of the error in the service.
    """

    template = "{kind}: {detail}"
    kind: str
    detail: str


class UnlikeError(RefusedError):
    """Clients of a job opened unlike tensors, or in another order."""


class DeviceMemoryError(RefusedError):
    """The devices have no memory for that. What was there before is untouched."""


class FullError(RefusedError):
    """The client's queue at its proxy is full."""


class JobError(Fielded, ServiceError):
    """The job has ended, for all of its clients: connect again, all together.

    Attributes
    ----------
    ranks : clients that are gone; empty if it was no client.
    devices : memory devices that failed; empty if it was none.
    """

    template = "{detail}"
    detail: str
    ranks: Sequence[int] = ()
    devices: Sequence[int] = ()


class ClientLostError(JobError):
    """A client died, left, fell silent or broke the protocol."""


class DeviceLostError(JobError):
    """A memory device failed, or a link to it."""


class OrderError(JobError):
    """Clients that make the same sums one after the other do not: `ranks` differ."""


class ProxyDeadlockError(JobError):
    """Proxies that serve what came first wait for each other: `devices`, each for the next one, and
    the last for the first."""


class ServiceLostError(JobError):
    """The service died, or fell silent."""


JOB_ERRORS: Mapping[str, type[JobError]] = {
    each.__name__: each
    for each in (
        ClientLostError,
        DeviceLostError,
        JobError,
        OrderError,
        ProxyDeadlockError,
        ServiceLostError,
    )
}
REFUSALS: Mapping[str, type[RefusedError]] = {
    each.__name__: each for each in (DeviceMemoryError, FullError, RefusedError, UnlikeError)
}
"""Errors that have a name on the wire."""


def refusal(kind: str, detail: str) -> RefusedError:
    """The error of a refusal that came over the wire."""
    return REFUSALS.get(kind, RefusedError)(kind, detail)
