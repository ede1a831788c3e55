"""Boards with COARSE devices in a ring, used as one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import RESPONSES, ArgumentError, BusError, OutOfBoundsError
from nearstep.serial.backend import LinkBackend
from nearstep.serial.errors import WrongBoardError
from nearstep.serial.polling import PollingBackend
from nearstep_spec.coarse.config import MAX_DEVICES, CoarseConfig
from nearstep_spec.coarse.registers import register_bytes
from nearstep_spec.codec import to_json

FAMILY = "coarse"


class BoardRing(PollingBackend):
    """Boards in a ring: link 1 of each is connected to link 0 of the next, of the last to the
    first; of two boards only the first to the second.

    Registers of board d begin at d * `register_bytes`, its memory at d * `memory_bytes`. Time is
    that of the first board. `close`, or an error of the constructor, closes all boards.

    Parameters
    ----------
    boards : opened, in the order of the ring.

    Raises
    ------
    ArgumentError : there are fewer than two or more than 64.
    WrongBoardError : a board has another device, or another configuration than the first.
    """

    def __init__(self, boards: Sequence[LinkBackend]) -> None:
        self.boards = tuple(boards)
        try:
            if not 2 <= len(self.boards) <= MAX_DEVICES:
                count = len(self.boards)
                raise ArgumentError(f"a ring must have 2 to {MAX_DEVICES} boards, not {count}")
            for board in self.boards:
                self._check(board)
        except BaseException:
            self.close()
            raise
        self.family = FAMILY
        self.config = self._config(self.boards[0])
        self._register_bytes = register_bytes(self.config)  # kept: it builds whole maps
        self._memory_bytes = self.boards[0].capacity_bytes
        self.capacity_bytes = len(self.boards) * self._memory_bytes

    def _config(self, board: LinkBackend) -> CoarseConfig:
        if not isinstance(board.config, CoarseConfig):
            what = f"device of {board.manifest.board} on {board.link.port}"
            raise WrongBoardError(what, f"of the family {FAMILY}", board.family)
        return board.config

    def _check(self, board: LinkBackend) -> None:
        first = self.boards[0]
        mine, theirs = to_json(self._config(first)), to_json(self._config(board))
        found = {name: value for name, value in theirs.items() if value != mine[name]}
        if found:
            what = f"configuration of {board.manifest.board} on {board.link.port}"
            expected = {name: mine[name] for name in found}
            raise WrongBoardError(what, f"{expected}, as on {first.link.port},", found)
        if len(board.regions) != 1:
            what = f"memories of {board.manifest.board} on {board.link.port}"
            raise WrongBoardError(what, 1, len(board.regions))

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        size = self._memory_bytes
        return tuple((number * size, size) for number in range(len(self.boards)))

    @property
    def cycles(self) -> int | None:
        return self.boards[0].cycles

    @property
    def unit(self) -> str:
        return self.boards[0].unit

    @property
    def now(self) -> int:
        return self.boards[0].now

    def read_register(self, address: int) -> int:
        board, offset = self._register(address, write=False)
        return board.read_register(offset)

    def write_register(self, address: int, value: int) -> None:
        board, offset = self._register(address, write=True)
        board.write_register(offset, value)

    def _register(self, address: int, *, write: bool) -> tuple[LinkBackend, int]:
        number, offset = divmod(address, self._register_bytes)
        if not 0 <= number < len(self.boards):
            raise BusError(address, RESPONSES.index("DECERR"), write=write)
        return self.boards[number], offset

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        for board, offset, part in self._parts("read", address, out):
            board.read_memory(offset, part)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        for board, offset, part in self._parts("write", address, data):
            board.write_memory(offset, part)

    def _parts(
        self, what: str, address: int, data: NDArray[np.uint8]
    ) -> Iterator[tuple[LinkBackend, int, NDArray[np.uint8]]]:
        """Split an access at the ends of the boards' memories: yield board, local address and
        bytes."""
        end = address + data.size
        if address < 0 or end > self.capacity_bytes:
            raise OutOfBoundsError(f"memory {what}", address, end, self.capacity_bytes)
        at = address
        while at < end:
            number, offset = divmod(at, self._memory_bytes)
            size = min(end - at, self._memory_bytes - offset)
            yield self.boards[number], offset, data[at - address :][:size]
            at += size

    def reset(self) -> None:
        """Reset all devices and their paths to memory.

        Raises
        ------
        WaitTimeoutError : memory does not complete an outstanding access.
        """
        for board in self.boards:
            board.reset()

    def close(self) -> None:
        for board in self.boards:
            board.close()

    def transactions(self) -> Sequence[str]:
        """The last transactions of each board, with its port."""
        return tuple(
            f"{board.link.port}: {each}" for board in self.boards for each in board.transactions()
        )
