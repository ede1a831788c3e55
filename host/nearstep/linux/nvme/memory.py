"""The namespace of Subsystem Local Memory: DRAM of a card."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike

from nearstep.buffer import Buffer
from nearstep.errors import ArgumentError, NearstepError, PairError
from nearstep.linux.nvme.namespace import (
    LBA_SHIFT,
    DriveNamespace,
    Namespace,
    Run,
    reachable,
)
from nearstep.linux.nvme.standard import (
    Choice,
    CommandSet,
    Memory,
    Status,
    StatusError,
    require,
)
from nearstep.linux.nvme.transfer import Command
from nearstep.updater.updating import UpdatingDevice

WORD_BYTES = 4
BLOCK_SOURCES, BYTE_SOURCES = (2, 3), 4
FAST_ONLY = 1 << 15
ENTRY_BYTES = 32

Result = TypeVar("Result")


@dataclass(frozen=True)
class Source:
    """A source of Memory Copy: bytes of a namespace."""

    namespace: Namespace
    start: int
    nbytes: int
    blocks: tuple[int, int] | None


class MemoryNamespace(Namespace):
    """Memory of a card, cleared when it is opened.

    Parameters
    ----------
    card : closed with the namespace.
    nbytes : size; a multiple of 4.

    Attributes
    ----------
    card, nbytes
    turn : lock of the card: one command uses it at a time.

    Raises
    ------
    ArgumentError : the size is 0 or no multiple of 4.
    OutOfDeviceMemoryError : the card has less memory.
    """

    command_set = CommandSet.MEMORY

    def __init__(self, card: UpdatingDevice, nbytes: int) -> None:
        if nbytes < WORD_BYTES or nbytes % WORD_BYTES:
            raise ArgumentError(f"local memory must be of words of 4 bytes, not {nbytes} bytes")
        self.card = card
        self.nbytes = nbytes
        self.turn = threading.Lock()
        self._words = card.alloc(nbytes // WORD_BYTES)
        self._words.fill(0.0)
        self._others: Sequence[Namespace] = ()

    @property
    def commands(self) -> Mapping[int, Run]:
        fills = dict.fromkeys(map(int, Choice.FILLS), self._fill)
        return {**fills, Memory.COPY: self._copy, Memory.READ: self._read,
                Memory.WRITE: self._write}  # fmt: skip

    def see(self, namespaces: Sequence[Namespace]) -> None:
        """Set the namespaces that can be sources of copies, by NSID."""
        self._others = namespaces

    def words(
        self,
        start: int,
        nbytes: int,
        status: Status = Status.INVALID_FIELD,
        dtype: DTypeLike = np.float32,
    ) -> Buffer:
        """Part of the memory, as words of 4 bytes.

        Raises
        ------
        StatusError : it is not in the memory, or not of whole words, with `status`.
        """
        require(start % WORD_BYTES == 0 and nbytes % WORD_BYTES == 0, status)
        require(start + nbytes <= self.nbytes, status)
        address, shape = self._words.address + start, (nbytes // WORD_BYTES,)
        return Buffer(self.card, address, shape, dtype, root=self._words)

    def on_card(self, access: Callable[[], Result]) -> Result:
        """Access the card; after a fault of the card it is reset.

        Raises
        ------
        StatusError : the card refused arguments, or failed.
        """
        with self.turn:
            try:
                return access()
            except ArgumentError:
                raise StatusError(Status.INVALID_FIELD) from None
            except PairError:  # the host's pairs, not the card
                self.card.reset()
                raise StatusError(Status.INVALID_FIELD) from None
            except NearstepError:
                self.card.reset()
                raise StatusError(Status.INTERNAL_ERROR) from None

    def close(self) -> None:
        self.card.close()

    def _span(self, command: Command) -> Buffer:
        return self.words(command.wide(10), command.dwords[12])

    def _read(self, command: Command) -> None:
        words = self._span(command)
        command.segments(words.nbytes)
        command.send(self.on_card(words.read).tobytes())

    def _write(self, command: Command) -> None:
        words = self._span(command)
        self._put(words, command.fetch(words.nbytes))

    def _fill(self, command: Command) -> None:
        words = self._span(command)
        self.on_card(lambda: words.fill(0.0))

    def _put(self, words: Buffer, data: bytes) -> None:
        self.on_card(lambda: words.write(np.frombuffer(data, np.float32)))

    def _copy(self, command: Command) -> None:
        """Copy from ranges of this and other namespaces; nothing is written if one is refused."""
        length, start, form = command.wide(2), command.wide(10), command.bits(12, 11, 8)
        count = command.bits(12, 7) + Choice.RANGES_ARE_ZERO_BASED
        require(0 < count <= Choice.COPY_LIMIT and (form == BYTE_SOURCES or form in BLOCK_SOURCES))
        target = self.words(start, length)
        table = command.fetch(ENTRY_BYTES * count)
        entries = [table[at : at + ENTRY_BYTES] for at in range(0, len(table), ENTRY_BYTES)]
        sources = [self._source(entry, form, start, length) for entry in entries]
        require(sum(each.nbytes for each in sources) == length)
        at = 0
        for each in sources:
            self._put(target[at : at + each.nbytes // WORD_BYTES], self._bytes(each))
            at += each.nbytes // WORD_BYTES

    def _source(self, entry: bytes, form: int, start: int, length: int) -> Source:
        """Check an entry of a copy whose destination is [start, start + length)."""
        number, first, nbytes, blocks, options = struct.unpack("<I4xQIHH8x", entry)
        namespace = reachable(self._others, number)
        if namespace is None:
            raise StatusError(Status.INVALID_NAMESPACE)
        require(not options & FAST_ONLY, Status.FAST_COPY_NOT_POSSIBLE)
        if form == BYTE_SOURCES:
            require(namespace is self, Status.INVALID_NAMESPACE)
            self.words(first, nbytes)
            overlaps = max(first, start) < min(first + nbytes, start + length)
            require(not overlaps, Status.OVERLAPPING_IO_RANGE)
            return Source(namespace, first, nbytes, None)
        if not isinstance(namespace, DriveNamespace):
            raise StatusError(Status.INCOMPATIBLE_NAMESPACE)
        require(first + blocks + 1 <= namespace.blocks, Status.LBA_OUT_OF_RANGE)
        return Source(namespace, 0, blocks + 1 << LBA_SHIFT, (first, blocks + 1))

    def _bytes(self, source: Source) -> bytes:
        if isinstance(source.namespace, DriveNamespace) and source.blocks is not None:
            return source.namespace.read_blocks(*source.blocks)
        return self.on_card(self.words(source.start, source.nbytes).read).tobytes()
