"""`serial:`: a board on a serial port, such as `serial:/dev/ttyUSB0`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nearstep.backends.options import Family, Paths, Variant, parse_options
from nearstep.serial.backend import LinkBackend
from nearstep.serial.link import TRIES, WAIT_SECONDS, Link
from nearstep.serial.ring import BoardRing
from nearstep.serial.transport import SerialPort
from nearstep_spec.codec import Option, check_bounds

PORT = "PORT"
"""Placeholder of a port's path in lists of devices."""


@dataclass(frozen=True, kw_only=True)
class SerialOptions:
    """Options of `serial:PORT`."""

    baud: Annotated[int, Option(meaning="bits a second", low=9600, high=12_000_000)] = 3_000_000
    board: Annotated[
        str | None,
        Option(meaning="expected board", allowed="a name, as ulx3s_85f", unset="any"),
    ] = None
    wait: Annotated[
        float,
        Option(meaning="seconds before the first retry of a request", low=1e-3, high=60),
    ] = WAIT_SECONDS
    tries: Annotated[
        int, Option(meaning="transmissions of a request before the link fails", low=1, high=1000)
    ] = TRIES
    window: Annotated[
        int | None,
        Option(
            meaning="requests sent ahead of their answers",
            low=1,
            high=128,
            unset="the board's capacity",
        ),
    ] = None

    peers: Annotated[
        tuple[str, ...] | None,
        Option(
            meaning="ports of the other boards of a COARSE ring, in order, from the neighbour at "
            "link 1 of this board",
            allowed="paths, with commas between them",
            unset="none: one board alone",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.peers is not None and not all(self.peers):
            raise ValueError(f"peers must be paths, not {','.join(self.peers)!r}")


DEVICES = Paths(
    PORT,
    Family(
        f"serial:{PORT}",
        (
            Variant(
                options=SerialOptions,
                opens="nearstep.backends.serial:open_device",
                summary="a board on a serial port",
            ),
        ),
    ),
)
"""Devices of this backend."""


def open_device(port: str, options: dict[str, str]) -> LinkBackend | BoardRing:
    """Open the board on `serial:<port>`; with `peers`, the ring of boards that begins with it.

    No other program may have the ports open.

    Raises
    ------
    OptionError
    nearstep.serial.errors.PortError : a port cannot be opened.
    LinkError, ProtocolVersionError, WrongBoardError, FirmwareError, MemoryNotReadyError : as
        `nearstep.serial.backend.LinkBackend` and `nearstep.serial.ring.BoardRing`.
    """
    chosen = parse_options(SerialOptions, f"serial:{port}", options)
    if not chosen.peers:
        return _open(port, chosen)
    opened: list[LinkBackend] = []
    try:
        for each in (port, *chosen.peers):
            opened.append(_open(each, chosen))
    except BaseException:
        for board in opened:
            board.close()
        raise
    return BoardRing(opened)


def _open(port: str, options: SerialOptions) -> LinkBackend:
    line = SerialPort(port, options.baud)
    link = Link(line, wait=options.wait, tries=options.tries, window=options.window)
    return LinkBackend(link, options.board)
