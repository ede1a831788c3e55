"""What can go wrong on the way to a board.

A `PortError` says that nothing was opened. After a `LinkError` the device has to be opened again:
what was under way may have been done, in part, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from nearstep.errors import DeviceError, MismatchError

UNKNOWN = "whether it was carried out is not known"


class PortError(DeviceError):
    """A serial port that cannot be opened.

    Attributes
    ----------
    port
    reason
    """

    def __init__(self, port: str, reason: str) -> None:
        self.port = port
        self.reason = reason
        super().__init__(f"cannot open serial port {port}: {reason}")


class PortNotFoundError(PortError):
    """There is no such port."""


class PortPermissionError(PortError):
    """This user may not open the port."""


class PortBusyError(PortError):
    """Another program has the port."""


class LinkError(DeviceError):
    """The link to a board failed. Nothing more goes over it: the device has to be opened again.

    Attributes
    ----------
    port
    reason
    """

    def __init__(self, port: str, reason: str, *, transactions: Sequence[str] = ()) -> None:
        self.port = port
        self.reason = reason
        super().__init__(
            f"link on {port}: {reason}; open the device again", transactions=transactions
        )


class NoAnswerError(LinkError):
    """Nobody answered a request, however often it was sent: it may have been carried out, or not.

    Attributes
    ----------
    seconds : from the first time that it was sent.
    tries : times that it was sent.
    """

    def __init__(
        self,
        port: str,
        request: str,
        *,
        seconds: float,
        tries: int,
        detail: str = "nothing came",
        transactions: Sequence[str] = (),
    ) -> None:
        self.seconds = seconds
        self.tries = tries
        super().__init__(
            port,
            f"no answer to {request} in {seconds:.3g} s, sent {tries} times: {detail}; {UNKNOWN}",
            transactions=transactions,
        )


class DamagedFramesError(NoAnswerError):
    """As `NoAnswerError`, and what came meanwhile was damaged, or is of another protocol.

    Attributes
    ----------
    frames : damaged ones.
    nbytes : that came, all in all.
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
        self.frames = frames
        self.nbytes = nbytes
        super().__init__(
            port,
            request,
            seconds=seconds,
            tries=tries,
            detail=f"of {nbytes} bytes that came, none were its answer; {frames} damaged frames "
            "(is it this kind of board, and this baud rate?)",
            transactions=transactions,
        )


class PortLostError(LinkError):
    """The port went away: the cable was pulled, or what was behind it ended.

    What had no answer yet may have been carried out, or not.
    """


class SessionLostError(LinkError):
    """The board was reset while it was in use: what registers and the kernel held is gone."""


class InterruptedLinkError(LinkError):
    """Requests were given up by an interruption: they may have been carried out, or not."""


class AnswerError(LinkError):
    """The board answered something that the protocol does not allow.

    Attributes
    ----------
    expected, actual
    """

    def __init__(
        self,
        port: str,
        request: str,
        expected: str,
        actual: str,
        *,
        transactions: Sequence[str] = (),
    ) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(
            port,
            f"the answer to {request} must be {expected}, not {actual}",
            transactions=transactions,
        )


class LinkFailedError(LinkError):
    """The link was used after it had failed; its `__cause__` is what it failed with."""


class ProtocolVersionError(MismatchError):
    """The board speaks another version of the link's protocol."""


class WrongBoardError(MismatchError):
    """Another board, or another family of devices, is on the port than was asked for."""


class FirmwareError(MismatchError):
    """The design on the board is not one of this version of nearstep."""


class LinkMemoryError(DeviceError):
    """An access of the board's memory that its bus answered with an error.

    Attributes
    ----------
    address : of the request, or of the burst, that failed first.
    status : answer of the bus.
    write
    """

    def __init__(
        self, address: int, status: str, *, write: bool, transactions: Sequence[str] = ()
    ) -> None:
        self.address = address
        self.status = status
        self.write = write
        super().__init__(
            f"{'write' if write else 'read'} of memory at {address:#x}: response must be OKAY, "
            f"not {status}",
            transactions=transactions,
        )


class RegisterTimeoutError(DeviceError):
    """A register that did not answer on the board's bus in time.

    Attributes
    ----------
    address
    write
    """

    def __init__(self, address: int, *, write: bool, transactions: Sequence[str] = ()) -> None:
        self.address = address
        self.write = write
        super().__init__(
            f"register {'write' if write else 'read'} at {address:#x}: the bus of the board did "
            "not answer",
            transactions=transactions,
        )


class MemoryNotReadyError(DeviceError):
    """The memory controller of the board cannot be brought up."""
