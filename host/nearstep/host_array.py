"""Conversion of other libraries' arrays, such as torch's tensors, to numpy's; torch is not imported
here."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import DtypeError


def host_array(what: object, value: Any, dtype: np.dtype) -> NDArray[Any]:
    """`value` as an array of numpy, without a copy where possible.

    Parameters
    ----------
    what : named in errors, by its `repr`.
    value : an array of numpy; a dense tensor of torch on the CPU, whose gradient is ignored; or an
        object with `__dlpack__` or `__array__`.
    dtype : wanted; a tensor of bfloat16, which numpy lacks, is accepted for uint16 only.

    Raises
    ------
    DtypeError
    """
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    expected = f"array of {dtype}"
    torch: Any = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.layout is not torch.strided:
                actual = f"{value.layout} tensor on {value.device}"
                raise DtypeError(repr(what), f"{expected}, dense, on the CPU", actual)
            if value.dtype is torch.bfloat16 and dtype != np.uint16:
                raise DtypeError(repr(what), dtype, "torch.bfloat16")
            values = value.detach().resolve_conj().resolve_neg()
            if value.dtype is torch.bfloat16:
                values = values.contiguous().view(torch.int16)
                return np.asarray(values.numpy()).view(np.uint16)
            return np.asarray(values.numpy())
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        if hasattr(value, "__array__"):
            return np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        if isinstance(error, DtypeError):
            raise
        text = str(error).partition("\n")[0]
        raise DtypeError(repr(what), expected, f"{type(value).__name__}: {text}") from None
    raise DtypeError(repr(what), expected, type(value).__name__)
