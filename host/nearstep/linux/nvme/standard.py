"""Numbers of the NVMe specifications: opcodes and statuses; registers and sizes are in
`nearstep_spec.nvme`.

`Choice` is the one place for what public implementations disagree about, or what none shows; the
texts of the command sets for Subsystem Local Memory and Computational Programs were not available.
"""

from __future__ import annotations

from enum import IntEnum

from nearstep.errors import NearstepError
from nearstep_spec.nvme import IO_QUEUES as IO_QUEUES
from nearstep_spec.nvme import MDTS as MDTS
from nearstep_spec.nvme import PAGE_BYTES as PAGE_BYTES
from nearstep_spec.nvme import QUEUE_ENTRIES as QUEUE_ENTRIES
from nearstep_spec.nvme import TRANSFER_BYTES as TRANSFER_BYTES
from nearstep_spec.nvme import Register as Register

ALL_NAMESPACES = 0xFFFFFFFF


class CommandSet(IntEnum):
    """Identifiers of I/O command sets (CSI)."""

    NVM = 0
    MEMORY = 3
    PROGRAMS = 4


class Admin(IntEnum):
    """Opcodes of admin commands."""

    DELETE_SQ = 0x00
    CREATE_SQ = 0x01
    GET_LOG = 0x02
    DELETE_CQ = 0x04
    CREATE_CQ = 0x05
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT = 0x0C
    LOAD_PROGRAM = 0x85
    ACTIVATE_PROGRAM = 0x88
    MANAGE_RANGES = 0x89


class Nvm(IntEnum):
    """Opcodes of the NVM command set."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02


class Memory(IntEnum):
    """Opcodes of the command set of Subsystem Local Memory."""

    FILL = 0x00
    COPY = 0x01
    READ = 0x02
    FILL_TOO = 0x04
    WRITE = 0x05


class Program(IntEnum):
    """Opcodes of the command set of Computational Programs."""

    EXECUTE = 0x01


class Status(IntEnum):
    """Status codes, with their type in the upper byte."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    DATA_TRANSFER_ERROR = 0x004
    INTERNAL_ERROR = 0x006
    ABORTED_BY_DELETION = 0x008
    INVALID_NAMESPACE = 0x00B
    SEQUENCE_ERROR = 0x00C
    PRP_OFFSET_INVALID = 0x013
    COMMAND_SET_NOT_ENABLED = 0x02A
    INVALID_COMMAND_SET = 0x02C
    LBA_OUT_OF_RANGE = 0x080
    COMPLETION_QUEUE_INVALID = 0x100
    INVALID_QUEUE_ID = 0x101
    INVALID_QUEUE_SIZE = 0x102
    TOO_MANY_EVENT_REQUESTS = 0x105
    INVALID_VECTOR = 0x108
    INVALID_LOG_PAGE = 0x109
    INVALID_QUEUE_DELETION = 0x10C
    NOT_SAVEABLE = 0x10D
    COMBINATION_REJECTED = 0x02B
    INCOMPATIBLE_NAMESPACE = 0x185
    FAST_COPY_NOT_POSSIBLE = 0x186
    OVERLAPPING_IO_RANGE = 0x187
    INVALID_MEMORY_NAMESPACE = 0x18B
    INVALID_RANGE_SET = 0x18C
    INVALID_RANGE_SET_ID = 0x18D
    INVALID_PROGRAM_INDEX = 0x18F
    TOO_MANY_RANGES = 0x191
    TOO_MANY_RANGE_SETS = 0x192
    TOO_MANY_PROGRAMS = 0x193
    RANGE_SET_IN_USE = 0x195
    NO_PROGRAM = 0x196
    OVERLAPPING_RANGES = 0x197
    PROGRAM_NOT_ACTIVATED = 0x198
    PROGRAM_IN_USE = 0x199
    NOT_DOWNLOADABLE = 0x19A


class StatusError(NearstepError):
    """A command that ends with a status other than success.

    Attributes
    ----------
    status
    """

    def __init__(self, status: Status) -> None:
        self.status = status
        super().__init__(f"status {status:#05x}, {status.name}")


def require(condition: object, status: Status = Status.INVALID_FIELD) -> None:
    """Raise `StatusError` unless a condition holds."""
    if not condition:
        raise StatusError(status)


class Choice:
    """What sources leave open, or contradict each other about; all of it is inferred.

    Attributes
    ----------
    FIRST_PROGRAM : index of the first program. One implementation counts from 0, another from 1 and
        refuses 0.
    FILLS : opcodes of Memory Fill: two implementations have 00h, one has 04h.
    RANGES_ARE_ZERO_BASED : whether the number of ranges of Memory Copy counts from 0, as that of
        the NVM Copy command does; one implementation has a plain count.
    ACTIVATES : SEL of Program Activation Management that activates; one implementation has it the
        other way round.
    ARGUMENT_BYTES : size of an argument block, see `programs`. Linux cannot set DLEN (CDW4), so a
        block has a size of its own.
    IDENTIFIES_OTHERS : status of Identify Namespace for NVM (CNS 00h) for a namespace of another
        command set. Linux asks when it is asked for the size in use, and prints a line.
    RESET_FORGETS : whether a controller reset deactivates programs and deletes memory range sets.
    RANGE_GRANULARITY, COPY_LIMIT : MRSG, of memory ranges, as a power of two; ranges of one copy.
    SETS, SET_RANGES : limits of memory range sets, and of the ranges in one.
    """

    FIRST_PROGRAM = 1
    FILLS = (Memory.FILL, Memory.FILL_TOO)
    RANGES_ARE_ZERO_BASED = True
    ACTIVATES = 1
    ARGUMENT_BYTES = 64
    IDENTIFIES_OTHERS = Status.INVALID_COMMAND_SET
    RESET_FORGETS = True
    RANGE_GRANULARITY = 2
    COPY_LIMIT = 128
    SETS, SET_RANGES = 256, 16


def dlen(given: int, ranges: int, range_bytes: int = 32) -> int:
    """Bytes at the data pointer of Execute: DLEN, or what is meant where Linux sends 0."""
    return given or (ranges * range_bytes or Choice.ARGUMENT_BYTES)
