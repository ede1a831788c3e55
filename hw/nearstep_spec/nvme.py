"""An NVMe controller: its registers, and the sizes of its queues, for hardware and software."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from nearstep_spec.codec import Option

PAGE_BYTES = 4096
QUEUE_ENTRIES = 1024
"""Most entries of an I/O queue; an admin queue has up to 4,096."""

IO_QUEUES = 8
MDTS = 9
TRANSFER_BYTES = PAGE_BYTES << MDTS
"""Most bytes of one command."""

ENTRY_BYTES, COMPLETION_BYTES = 64, 16
DO_NOT_RETRY = 1 << 14

BAR_BYTES, MSIX_TABLE, MSIX_PENDING = 0x4000, 0x2000, 0x3000
READY_TIME = 0x1E
"""Time to become ready, in units of 500 ms: of CAP.TO and CRTO.CRWMT."""

CAP = (QUEUE_ENTRIES - 1) | 1 << 16 | READY_TIME << 24 | 1 << 37 | 1 << 43 | 1 << 59
"""Contiguous queues, 15 s to become ready, NVM alone or all I/O command sets, pages of 4 KiB, ready
with media."""

VERSION = 0x00020100
ENABLE, READY, FATAL, SHUTDOWN_BUSY, SHUTDOWN_DONE = 1, 1 << 0, 1 << 1, 1 << 2, 2 << 2
COMMAND_SETS = (0, 6)
"""CC.CSS: NVM alone, or all."""

AQA_MASK = 0x0FFF0FFF
NO_SUCH_DOORBELL, NO_SUCH_VALUE = 0, 1
"""What a wrong doorbell is reported as."""


class Register(IntEnum):
    """Offsets in BAR 0."""

    CAP = 0x00
    VS = 0x08
    CC = 0x14
    CSTS = 0x1C
    AQA = 0x24
    ASQ = 0x28
    ACQ = 0x30
    CRTO = 0x68
    DOORBELLS = 0x1000


class EngineStatus(IntEnum):
    """Statuses that queues and PRP entries give by themselves; type in the upper byte."""

    SUCCESS = 0x000
    DATA_TRANSFER_ERROR = 0x004
    ABORTED_BY_DELETION = 0x008
    PRP_OFFSET_INVALID = 0x013


def completed(status: int) -> int:
    """Status field of a completion, without the phase: a host may repeat what was aborted because
    its queue was deleted, and nothing else that failed."""
    may_repeat = status in (EngineStatus.SUCCESS, EngineStatus.ABORTED_BY_DELETION)
    return status if may_repeat else status | DO_NOT_RETRY


@dataclass(frozen=True, kw_only=True)
class NvmeConfig:
    """Shape of a queue engine."""

    io_queues: Annotated[int, Option(meaning="pairs of I/O queues", low=1, high=63)] = IO_QUEUES
