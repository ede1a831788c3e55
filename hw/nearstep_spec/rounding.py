"""The random bits of stochastic rounding, common to hardware, models and host.

A number of binary32 is rounded to bfloat16 by adding 16 random bits to its pattern and dropping the
lower half: it is rounded away from zero with exactly the probability of the dropped fraction, and
towards zero otherwise, so that the expectation is the number (Gupta et al., *Deep Learning with
Limited Numerical Precision*, ICML 2015, section 3.2). Numbers of bfloat16 do not change.

The bits come from a generator without state: `Threefry-2x32-13
<https://doi.org/10.1145/2063384.2063405>`_ (Salmon, Moraes, Dror and Shaw, *Parallel Random
Numbers: As Easy as 1, 2, 3*, SC 2011), 13 rounds, the fewest for which no statistical flaw was
found. The key is (seed, step). One call serves four neighbouring elements of an array: the counter
is the number of the four, `index // 4`, in 60 bits, below a `stream` that distinguishes the arrays
of a run; element k of the four has bits 16 k to 16 k + 15 of the result, the first word below the
second.

So the result of an element depends only on its value, seed, step, stream and index, not on lanes,
blocks, channels, devices, or the order of execution.
"""

__all__ = [
    "CALL_ELEMENTS",
    "INDEX_BITS",
    "INJECTED",
    "PARITY",
    "RANDOM_BITS",
    "ROTATIONS",
    "ROUNDS",
    "SKIP_BITS",
    "STREAMS",
    "STREAM_BIT",
    "WORD_BITS",
    "alignment",
]

WORD_BITS = 32
"""Bits of each half of counter, key and result; of a seed, and of a step."""

ROUNDS = 13
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
"""Left rotations of the rounds, in turn."""

PARITY = 0x1BD11BDA
"""The third word of the key is this constant, exclusive-or the other two."""

INJECTED = 4
"""A part of the key is added after so many rounds."""

RANDOM_BITS = 16
"""Random bits of an element: the bits of binary32 beyond bfloat16."""

CALL_ELEMENTS = 2 * WORD_BITS // RANDOM_BITS
"""Elements that one call serves."""

STREAM_BIT = 28
"""Position of a stream in the second word of the counter."""

STREAMS = 1 << (WORD_BITS - STREAM_BIT)
"""Bound of streams; stream 0 is rounding to nearest even."""

INDEX_BITS = 48
"""Bits of the index of an element."""

SKIP_BITS = 32
"""Bits of the number of other channels' elements between two blocks of an array, and of the
position of an element in its block.
"""


def alignment(lanes: int) -> int:
    """Divisor of the index of a run's first element, and of its position in its block: the element
    begins a beat, and a call.
    """
    return max(CALL_ELEMENTS, lanes)
