"""Interfaces between the parts of a sync core: steps, and beats of entries."""

from amaranth.lib import data
from amaranth.utils import bits_for

from nearstep_hw.coarse.wire import MEMBER_BITS
from nearstep_spec.coarse.config import BEAT_ELEMENTS, ELEMENT_BITS, CoarseConfig
from nearstep_spec.updater.config import ELEMENT_BYTES

BEAT_BITS = ELEMENT_BITS - (BEAT_ELEMENTS.bit_length() - 1) + 1
"""Bits of a count of memory beats of a tensor."""


def max_entry_beats(config: CoarseConfig) -> int:
    """Return the most memory beats of an entry, in any wire format."""
    return max(config.entry_beats(wire) for wire in config.wire_formats)


class StepLayout(data.StructLayout):
    """Operations of a core on one entry.

    Members
    -------
    at : first memory beat of the entry, from the start of the tensor.
    beats : memory beats of the entry within the tensor; the others are zeros.
    wire_beats : memory beats of the entry on the wire.
    receive, local : an entry is received from the ring; the device's own values are combined.
    send, write : the result is sent; the result is written.
    final : after this step the values of all devices are combined.
    tail : the last beat of the tensor is in the entry.
    end : the last step of the job.
    list, addends : with exact sums alone. The step makes a list longer: so many addends of each
        beat are received, and sent before the device's own one; in the final step all are added.
    apart : with exact sums alone. Received and own elements, of 16 bits, pass the ALUs in one beat:
        in a list the last received ones, sent before the own ones; elsewhere results, written.
    """

    def __init__(self, config: CoarseConfig) -> None:
        beats = bits_for(max_entry_beats(config))
        super().__init__(
            {
                "at": BEAT_BITS,
                "beats": beats,
                "wire_beats": beats,
                "receive": 1,
                "local": 1,
                "send": 1,
                "write": 1,
                "final": 1,
                "tail": 1,
                "end": 1,
                **({"list": 1, "addends": MEMBER_BITS, "apart": 1} if config.exact else {}),
            }
        )


class SentLayout(data.StructLayout):
    """A `PieceLayout` for the wire; with exact sums also whether both of its halves are sent, of
    elements of 16 bits.
    """

    def __init__(self, width: int, *, exact: bool) -> None:
        super().__init__({"data": width, "last": 1, **({"both": 1} if exact else {})})


class RangeLayout(data.StructLayout):
    """A range of memory beats.

    Members
    -------
    at : number of the first beat in memory.
    beats : number of beats, at least 1.
    tail : the last beat ends the tensor.
    """

    def __init__(self, config: CoarseConfig) -> None:
        super().__init__(
            {
                "at": config.address_width - 6,
                "beats": bits_for(max_entry_beats(config)),
                "tail": 1,
            }
        )


def path_beats(config: CoarseConfig) -> int:
    """Return the beats of the ALUs in a full entry of binary32: the depth of the FIFOs around the
    ALUs, with which a step that only sends overlaps one that receives.
    """
    return max(2, config.entry_bytes // (ELEMENT_BYTES * config.alus))


def most_woven(config: CoarseConfig) -> int:
    """Return the most members of a ring in which all entries that a chunk of an exact sum sends,
    twice as many for two members, and the longest list fit into the buffers between two cores.
    """
    space = 2 * config.buffer_entries - 2
    fit = (n for n in range(2, space) if (n * n + n - 2) // (1 if n == 2 else 2) + n - 1 <= space)
    return max(fit, default=0)


def most_members(config: CoarseConfig, chunks: int) -> int:
    """Return the most members of a ring in which batches of `chunks` of an exact sum fit into the
    buffers between two cores, with the description of a job.
    """
    return (2 * config.buffer_entries - 2) // chunks + 1
