"""Errors of the link to a board.

After a `PortError` no port is open. After a `LinkError` the device must be reopened: requests in
flight may have been executed fully, partly or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nearstep.errors import AccessError, DeviceError, FieldedDeviceError, MismatchError

UNKNOWN = "the board may have executed it"


class PortError(FieldedDeviceError):
    """A serial port that cannot be opened."""

    template = "cannot open serial port {port}: {reason}"
    port: str
    reason: str


class PortNotFoundError(PortError):
    """There is no such port."""


class PortPermissionError(PortError):
    """This user may not open the port."""


class PortBusyError(PortError):
    """Another program has the port open."""


class LinkError(FieldedDeviceError):
    """The link to a board failed. No further request is possible until the device is reopened."""

    template = "link on {port}: {reason}; open the device again"
    port: str
    reason: str


class NoAnswerError(LinkError):
    """A request without an answer after all retries: the board may have executed the request.

    Attributes
    ----------
    seconds : since the request was first sent.
    tries : number of times that the request was sent.
    """

    def __init__(
        self,
        port: str,
        request: str,
        *,
        seconds: float,
        tries: int,
        detail: str = "nothing was received",
        transactions: Sequence[str] = (),
    ) -> None:
        self.seconds, self.tries = seconds, tries
        reason = f"no answer to {request} in {seconds:.3g} s, sent {tries} times: {detail}"
        super().__init__(port, f"{reason}; {UNKNOWN}", transactions=transactions)


class DamagedFramesError(NoAnswerError):
    """A `NoAnswerError` during which damaged frames, or bytes of another protocol, arrived.

    Attributes
    ----------
    frames : number of damaged frames.
    nbytes : bytes received in all.
    """

    def __init__(
        self,
        port: str,
        request: str,
        *,
        seconds: float,
        tries: int,
        frames: int,
        nbytes: int,
        transactions: Sequence[str] = (),
    ) -> None:
        self.frames, self.nbytes = frames, nbytes
        detail = (
            f"none of {nbytes} received bytes were its answer; {frames} damaged frames "
            "(are board and baud rate the right ones?)"
        )
        sent: Any = {"seconds": seconds, "tries": tries, "transactions": transactions}
        super().__init__(port, request, detail=detail, **sent)


class PortLostError(LinkError):
    """The port has vanished: the cable was unplugged, or the program behind the port ended.

    Requests without an answer may have been executed.
    """


class SessionLostError(LinkError):
    """The board was reset while in use: the state of registers and kernel is lost."""


class InterruptedLinkError(LinkError):
    """Requests were abandoned after an interrupt; the board may have executed them."""


class AnswerError(LinkError):
    """The board sent an answer that the protocol does not allow."""

    def __init__(
        self,
        port: str,
        request: str,
        expected: str,
        actual: str,
        *,
        transactions: Sequence[str] = (),
    ) -> None:
        self.expected, self.actual = expected, actual
        reason = f"the answer to {request} must be {expected}, not {actual}"
        super().__init__(port, reason, transactions=transactions)


class LinkFailedError(LinkError):
    """The link was used after it had failed; its `__cause__` is the failure."""


class ProtocolVersionError(MismatchError):
    """The board has another version of the link's protocol."""


class WrongBoardError(MismatchError):
    """The board on the port, or its device family, differs from the requested one."""


class FirmwareError(MismatchError):
    """The design on the board does not belong to this version of nearstep."""


class LinkMemoryError(AccessError):
    """An access of the board's memory that its bus answered with an error.

    Attributes
    ----------
    address : of the request, or of the burst, that failed first.
    status : answer of the bus.
    """

    template = "{action} of memory at {address:#x}: response must be OKAY, not {status}"
    address: int
    status: str


class RegisterTimeoutError(AccessError):
    """A register that did not answer on the board's bus in time."""

    template = "register {action} at {address:#x}: the bus of the board did not answer"
    address: int


class MemoryNotReadyError(DeviceError):
    """The memory controller of the board cannot be initialised."""
