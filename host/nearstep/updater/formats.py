"""Number formats of arrays, and the buffers that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from nearstep.buffer import Buffer
from nearstep.errors import DtypeError
from nearstep_spec.blockwise import SIGNED

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "fp32": np.dtype(np.float32),
        "fp16": np.dtype(np.float16),
        "bf16": np.dtype(np.uint16),
        **dict.fromkeys(SIGNED, np.dtype(np.uint8)),
    }
)
"""dtype of a buffer of each format; numpy has no bfloat16, and of an array in 8 bits it is that of
its bytes, scales included."""

UNNAMED = ("fp32", "fp16")
"""Formats that a dtype stands for."""


def format_of(
    buffer: Buffer, named: str | None, formats: Sequence[str], *, name: str, argument: str
) -> str:
    """The format of a buffer.

    Parameters
    ----------
    named : the format that it was said to have, one of `formats`; None is that of its dtype.
    formats : those that it may have.
    name, argument : names of the buffer, and of the argument for its format, for messages.

    Raises
    ------
    DtypeError
    """
    if named is not None:
        if buffer.dtype != DTYPES[named]:
            raise DtypeError(name, DTYPES[named], buffer.dtype)
        return named
    unnamed = [each for each in formats if each in UNNAMED]
    for each in unnamed:
        if buffer.dtype == DTYPES[each]:
            return each
    expected = [str(DTYPES[each]) for each in unnamed]
    if "bf16" in formats:
        expected.append(f"uint16 with {argument}='bf16'")
    raise DtypeError(name, " or ".join(expected), buffer.dtype)
