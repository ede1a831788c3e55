"""Commands from user space through Linux's NVMe driver: ioctl, and io_uring.

Linux sets CDW4 and CDW5 to 0: a program cannot.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import FieldedDeviceError
from nearstep.linux.nvme.standard import Status

GET_ID, ADMIN, IO, RING_IO = 0x4E40, 0xC0504E47, 0xC0504E48, 0xC0484E80
"""NVME_IOCTL_ID, NVME_IOCTL_ADMIN64_CMD, NVME_IOCTL_IO64_CMD, NVME_URING_CMD_IO."""

STATUS_BITS = 0x7FF
"""Type and code, without the bits for retries, More and Do Not Retry."""

PASSED = struct.Struct("<BBHIIIQQIIIIIIIIII")
"""`struct nvme_uring_cmd`; `struct nvme_passthru_cmd64` has the result behind it."""

RESULT = struct.Struct("<Q")
SETUP, ENTER = 425, 426
ENTRIES = 8
WIDE_ENTRIES, WIDE_COMPLETIONS = 1 << 10, 1 << 11
PARAMETERS = struct.Struct("<10I8IQ8IQ")
GET_EVENTS = 1
RINGS_AT, ENTRIES_AT = 0, 0x10000000
PASS_COMMAND = 46
ENTRY = struct.Struct("<BBHiQQIIQQ")
COMPLETION = struct.Struct("<QiIQQ")
ENTRY_BYTES = 128
WORD = 0xFFFFFFFF


class NodeError(FieldedDeviceError):
    """Linux does not open a node of a namespace, or does not pass a command on.

    Attributes
    ----------
    code : errno.
    """

    template = "cannot {action} {node}: {reason}{hint}"
    action: str
    node: str
    code: int
    hint: str = ""

    @property
    def reason(self) -> str:
        return f"{os.strerror(self.code)} ({errno.errorcode.get(self.code, self.code)})"


class NodeNotFoundError(NodeError):
    """There is no such node, or its device has gone."""


class NodePermissionError(NodeError):
    """This user may not open the node, or send a command."""


class NodeBusyError(NodeError):
    """Another process uses the node."""


KINDS = {
    errno.ENOENT: NodeNotFoundError, errno.ENODEV: NodeNotFoundError,
    errno.ENXIO: NodeNotFoundError, errno.EACCES: NodePermissionError,
    errno.EPERM: NodePermissionError, errno.EAGAIN: NodeBusyError, errno.EBUSY: NodeBusyError,
}  # fmt: skip


class CommandStatusError(FieldedDeviceError):
    """A command that the controller completed with another status than success.

    Attributes
    ----------
    actual : the status, with its type in the upper byte.
    """

    template = "{command} on {node} must end with {expected}, not with {name} ({actual:#05x})"
    command: str
    node: str
    actual: int
    expected: str = Status.SUCCESS.name

    @property
    def name(self) -> str:
        known = self.actual in set(Status)
        return Status(self.actual).name if known else "a status that has no name here"


@dataclass(frozen=True, kw_only=True)
class PassedCommand:
    """A command.

    Attributes
    ----------
    name : for errors.
    data : contiguous memory, read or written in place, of a multiple of 4 bytes; or None.
    """

    name: str
    opcode: int
    namespace: int = 0
    data: NDArray[np.uint8] | None = None
    cdw2: int = 0
    cdw3: int = 0
    cdw10: int = 0
    cdw11: int = 0
    cdw12: int = 0

    def packed(self, timeout_ms: int) -> bytes:
        """`struct nvme_uring_cmd`."""
        address, nbytes = (0, 0) if self.data is None else (self.data.ctypes.data, self.data.size)
        return PASSED.pack(
            self.opcode, 0, 0, self.namespace, self.cdw2, self.cdw3, 0, address, 0, nbytes,
            self.cdw10, self.cdw11, self.cdw12, 0, 0, 0, timeout_ms, 0,
        )  # fmt: skip


class Answer(NamedTuple):
    """Status of a completion, with flags, and DW0 and DW1."""

    status: int
    result: int


class Node(ABC):
    """The node of a namespace, which passes commands on.

    Attributes
    ----------
    path
    number : NSID.
    """

    path: Path
    number: int

    @abstractmethod
    def answer_admin(self, command: PassedCommand) -> Answer:
        """Execute a command of the admin queue.

        Raises
        ------
        NodeError
        """

    @abstractmethod
    def answers(self, commands: Sequence[PassedCommand]) -> Sequence[Answer]:
        """Execute commands of an I/O queue in any order, and wait for all; as `answer_admin`."""

    @abstractmethod
    def close(self) -> None:
        """Close the node, after its last command. Closing twice does nothing."""

    def admin(self, command: PassedCommand) -> int:
        """Execute a command of the admin queue; return DW0 and DW1 of its completion.

        Raises
        ------
        NodeError
        CommandStatusError
        """
        return self._checked(command, self.answer_admin(command))

    def run(self, *commands: PassedCommand) -> int:
        """Execute commands of an I/O queue in any order; return DW0 and DW1 of the last one,
        or 0.

        Raises
        ------
        NodeError
        CommandStatusError : of the first command that failed; the others have ended, too.
        """
        answers = self.answers(commands)
        results = [self._checked(*each) for each in zip(commands, answers, strict=True)]
        return results[-1] if results else 0

    def _checked(self, command: PassedCommand, answer: Answer) -> int:
        if answer.status & STATUS_BITS:
            raise CommandStatusError(command.name, str(self.path), answer.status & STATUS_BITS)
        return answer.result


class IoctlNode(Node):
    """A node whose commands are ioctls, one after the other.

    Parameters
    ----------
    path : such as /dev/ng0n3; opened for this process alone, as far as others ask.
    timeout_ms : after which Linux aborts a command.

    Raises
    ------
    NodeError
    """

    def __init__(self, path: Path, timeout_ms: int) -> None:
        self.path, self._timeout_ms = path, timeout_ms
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._failed("open", error) from None
        action, hint = "lock", "; another process, or device, uses it"
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            action, hint = "ask for the namespace of", ""
            self.number = fcntl.ioctl(self._fd, GET_ID)
        except OSError as error:
            os.close(self._fd)
            raise self._failed(action, error, hint) from None

    def answer_admin(self, command: PassedCommand) -> Answer:
        return self._ioctl(ADMIN, command)

    def answers(self, commands: Sequence[PassedCommand]) -> Sequence[Answer]:
        return [self._ioctl(IO, each) for each in commands]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _ioctl(self, request: int, command: PassedCommand) -> Answer:
        passed = bytearray(command.packed(self._timeout_ms) + bytes(RESULT.size))
        try:
            status = fcntl.ioctl(self._fd, request, passed)
        except OSError as error:
            raise self._failed(f"send {command.name} to", error) from None
        return Answer(status, *RESULT.unpack_from(passed, PASSED.size))

    def _failed(self, action: str, error: OSError, hint: str = "") -> NodeError:
        code = error.errno or 0
        return KINDS.get(code, NodeError)(action, str(self.path), code, hint)


class RingNode(IoctlNode):
    """A node whose I/O commands are passed through a ring of io_uring, several at a time; admin
    commands are ioctls.

    Parameters and errors are those of `IoctlNode`.
    """

    def __init__(self, path: Path, timeout_ms: int) -> None:
        super().__init__(path, timeout_ms)
        self._lock = threading.Lock()
        self._flying: dict[int, PassedCommand] = {}  # their memory must live
        self._found: dict[int, Answer] = {}
        self._sent = 0
        self._ring = -1
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        try:
            self._set_up()
        except OSError as error:
            super().close()
            hint = "; passthrough=ioctl needs no io_uring"
            raise self._failed("make a ring of io_uring for", error, hint) from None

    def _set_up(self) -> None:
        given = [0, 0, WIDE_ENTRIES | WIDE_COMPLETIONS, *[0] * 25]
        parameters = ctypes.create_string_buffer(PARAMETERS.pack(*given), PARAMETERS.size)
        self._ring = self._system_call(SETUP, ENTRIES, ctypes.addressof(parameters))
        entries, completions, *_ = found = PARAMETERS.unpack(parameters.raw)
        submit, complete = found[10:19], found[19:28]
        self._head, self._tail = submit[0] // 4, submit[1] // 4
        self._done_head, self._done_tail = complete[0] // 4, complete[1] // 4
        self._mask, self._done_mask, self._done = entries - 1, completions - 1, complete[5]
        nbytes = max(submit[6] + 4 * entries, self._done + COMPLETION.size * completions)
        rings = mmap.mmap(self._ring, nbytes, offset=RINGS_AT)  # both, since Linux 5.4
        self._words, self._bytes = memoryview(rings).cast("I"), memoryview(rings)
        self._entries = memoryview(mmap.mmap(self._ring, ENTRY_BYTES * entries, offset=ENTRIES_AT))
        for number in range(entries):
            self._words[submit[6] // 4 + number] = number

    def answers(self, commands: Sequence[PassedCommand]) -> Sequence[Answer]:
        with self._lock:
            self._drain()  # of a call that was interrupted
            found: list[Answer] = []
            for at in range(0, len(commands), ENTRIES):
                self._found.clear()
                numbers = [self._push(each) for each in commands[at : at + ENTRIES]]
                self._drain()
                found += [self._found[each] for each in numbers]
        for command, each in zip(commands, found, strict=True):
            if each.status < 0:
                raise self._failed(f"send {command.name} to", OSError(-each.status, ""))
        return found

    def close(self) -> None:
        if self._ring >= 0:
            with self._lock:
                self._drain()
                os.close(self._ring)
                self._ring = -1
        super().close()

    def _push(self, command: PassedCommand) -> int:
        """Write an entry, which `_drain` submits; an interrupt leaves it out, or whole."""
        number, at = self._sent, ENTRY_BYTES * (self._sent & self._mask)
        head = ENTRY.pack(PASS_COMMAND, 0, 0, self._fd, RING_IO, 0, 0, 0, number, 0)
        entry = head + command.packed(self._timeout_ms)
        self._entries[at : at + ENTRY_BYTES] = entry.ljust(ENTRY_BYTES, b"\0")
        self._flying[number] = command
        self._sent += 1
        return number

    def _drain(self) -> None:
        """Submit all entries, and wait until no command is in flight.

        The ring is read behind the system call that waits for a completion.
        """
        while self._sent & WORD != self._reap():
            self._words[self._tail] = self._sent & WORD
            left = self._sent - self._words[self._head] & WORD
            arguments = (self._ring, left, 1, GET_EVENTS, 0, 0)
            try:
                self._system_call(ENTER, *arguments)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._failed("enter the ring of", error) from None

    def _reap(self) -> int:
        """Take completions; return how many there were since the beginning, modulo 2**32."""
        head: int = self._words[self._done_head]
        while head != self._words[self._done_tail]:
            at = self._done + COMPLETION.size * (head & self._done_mask)
            number, status, _, result, _ = COMPLETION.unpack_from(self._bytes, at)
            self._found[number] = Answer(status, result)
            self._flying.pop(number, None)
            head = head + 1 & WORD
            self._words[self._done_head] = head
        return head

    def _system_call(self, *arguments: int) -> int:
        found = int(self._call(*map(ctypes.c_long, arguments)))
        if found < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return found
