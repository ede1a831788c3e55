"""What the queue engine and the firmware of a controller say to each other."""

from amaranth import unsigned
from amaranth.lib import data, enum
from amaranth.utils import bits_for

from nearstep_spec.nvme import ENTRY_BYTES, PAGE_BYTES, TRANSFER_BYTES, Register

BEAT_BITS = 128
"""Of the port to memory of the host: a completion, or a quarter of an entry."""

ADDRESS_BITS = 64
PAGE_BITS = bits_for(PAGE_BYTES - 1)
BASE_BITS = ADDRESS_BITS - PAGE_BITS  # of the address of a page
POINTER_BITS = 12  # of the admin queue's, which can be the longest
STATUS_BITS = 15  # of a completion, without its phase
RESULT_BITS = 64
IDENTIFIER_BITS = 16
SIZE_BITS = bits_for(TRANSFER_BYTES)
DOORBELL_BITS = bits_for(Register.DOORBELLS // 8 - 1)  # of a queue's number


class CommandLayout(data.StructLayout):
    """An entry of a submission queue.

    Parameters
    ----------
    queues : pairs of queues, that of admin commands included.

    Members
    -------
    queue : number of the queue; admin commands come from queue 0.
    entry : 64 bytes, the first in the lowest bits.
    """

    def __init__(self, queues: int) -> None:
        super().__init__(
            {"queue": unsigned(bits_for(queues - 1)), "entry": unsigned(8 * ENTRY_BYTES)}
        )


DoneLayout = data.StructLayout(
    {
        "io": unsigned(1),
        "complete": unsigned(1),
        "status": unsigned(STATUS_BITS),
        "result": unsigned(RESULT_BITS),
    }
)
"""The command under way, an admin command or one of `io`, was executed: `complete` it with a status
and a result, or not, because an event does so later."""

EventLayout = data.StructLayout(
    {"identifier": unsigned(IDENTIFIER_BITS), "result": unsigned(RESULT_BITS)}
)
"""An admin command that was not completed when it was executed is completed now."""


class OrderKind(enum.Enum, shape=2):
    """What an order does; values are those of bits of the admin commands' opcodes."""

    DELETE_SUBMISSIONS = 0
    CREATE_SUBMISSIONS = 1
    DELETE_COMPLETIONS = 2
    CREATE_COMPLETIONS = 3


class OrderLayout(data.StructLayout):
    """Creates or deletes a queue, for the admin command under way.

    Parameters
    ----------
    queues : pairs of queues, that of admin commands included.
    vectors : interrupts.

    Members
    -------
    kind : what is done.
    number : of the queue.
    base : number of its first page in memory of the host.
    last : number of its last entry: its size less one.
    target : of a submission queue, its completion queue.
    vector, interrupts : of a completion queue: which, and whether any.
    """

    def __init__(self, *, queues: int, vectors: int) -> None:
        number = unsigned(bits_for(queues - 1))
        super().__init__(
            {
                "kind": OrderKind,
                "number": number,
                "base": unsigned(BASE_BITS),
                "last": unsigned(POINTER_BITS),
                "target": number,
                "vector": unsigned(bits_for(vectors - 1)),
                "interrupts": unsigned(1),
            }
        )


WalkLayout = data.StructLayout(
    {
        "io": unsigned(1),
        "prp1": unsigned(ADDRESS_BITS),
        "prp2": unsigned(ADDRESS_BITS),
        "nbytes": unsigned(SIZE_BITS),
    }
)
"""PRP entries of the command under way, an admin command or one of `io`, and bytes of its data."""

PartLayout = data.StructLayout(
    {
        "address": unsigned(ADDRESS_BITS),
        "nbytes": unsigned(bits_for(PAGE_BYTES)),
        "end": unsigned(1),
        "status": unsigned(STATUS_BITS),
    }
)
"""A part of a transfer; or the `end` of the walk with its status, and no part."""


class SubmissionContext(data.StructLayout):
    """A submission queue.

    Members
    -------
    valid : it exists.
    base, last, head, tail : as of `OrderLayout`; numbers of the entries to be fetched, and to be
        written by the host.
    target : its completion queue.
    """

    def __init__(self, queues: int) -> None:
        super().__init__(
            {
                "valid": unsigned(1),
                "base": unsigned(BASE_BITS),
                "last": unsigned(POINTER_BITS),
                "head": unsigned(POINTER_BITS),
                "tail": unsigned(POINTER_BITS),
                "target": unsigned(bits_for(queues - 1)),
            }
        )


class CompletionContext(data.StructLayout):
    """A completion queue.

    Members
    -------
    valid, base, last : as of `SubmissionContext`.
    head, tail : numbers of the completions that the host takes next, and that is posted next.
    phase : of the next completion.
    vector, interrupts : as of `OrderLayout`.
    """

    def __init__(self, vectors: int) -> None:
        super().__init__(
            {
                "valid": unsigned(1),
                "base": unsigned(BASE_BITS),
                "last": unsigned(POINTER_BITS),
                "head": unsigned(POINTER_BITS),
                "tail": unsigned(POINTER_BITS),
                "phase": unsigned(1),
                "vector": unsigned(bits_for(vectors - 1)),
                "interrupts": unsigned(1),
            }
        )
