"""Gradients as the elements of largest magnitude, and what becomes of the others."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from nearstep.allocator import LINE_BYTES
from nearstep.backends.base import TakeLargest
from nearstep.torch import convert
from nearstep.torch.errors import HyperparameterError
from nearstep.torch.topk import NOTHING, kept_of, take_largest
from nearstep.updater.checks import is_real, real
from nearstep_spec.rule.file import RuleFileError, is_in_file
from nearstep_spec.updater.decompressor import Decompressor, DecompressorError, load


def empty(size: int) -> NDArray[np.float32]:
    """A new array of one dimension that begins a line of the cache; its contents are undefined."""
    room = np.empty(size + LINE_BYTES // 4, np.float32)
    first = -room.ctypes.data % LINE_BYTES // 4
    return room[first : first + size]


class ScratchPool:
    """Gives arrays the memory of earlier ones that nobody refers to any more.

    Large arrays that are made anew in each step would get new pages from the operating system each
    time, which fills them with zeros first: that takes as long as a pass over them.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[NDArray[np.float32]]] = defaultdict(list)

    def empty(self, size: int) -> NDArray[np.float32]:
        """An array of one dimension, whose contents are undefined."""
        free = self._free[size]
        memory = free.pop() if free else empty(size)
        # Views of an array refer to it as long as what it is made of is no array: its memory is
        # free when it and all of them are gone.
        array: NDArray[np.float32] = np.frombuffer(memory.data, np.float32)
        weakref.finalize(array, free.append, memory).atexit = False
        return array


FORMS = ("fused", "scatter")
RecordData = tuple[NDArray[np.uint32], NDArray[np.generic]]

_LIMITS: Mapping[str, float] = MappingProxyType(
    {"fp16": torch.finfo(torch.float16).max, "bf16": torch.finfo(torch.bfloat16).max}
)


@dataclass(frozen=True, eq=False)
class Compressed:
    """One gradient, compressed.

    Attributes
    ----------
    index : positions in the flat parameter, ascending.
    value : what is sent for them: float32, float16, or uint16 that holds bfloat16. Of a user's
        decompressor float32: what it gives for what is sent.
    residual : what the next step adds to its gradient, of the parameter's size: a tensor on an
        accelerator where the gradient is (`nearstep.torch.select`). None without error feedback.
    """

    index: NDArray[np.intp]
    value: NDArray[np.generic]
    residual: NDArray[np.float32] | torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How gradients are compressed; `nearstep.torch.topk` says which elements are kept.

    Parameters
    ----------
    share : share of the elements that is kept, above 0 and at most 1; a user's decompressor may
        mean something else by it.
    error_feedback : what was not sent is added to the gradient of the next step.
    form : `fused` or `scatter`: the form of pairs that the kernel is to take. The pairs are sorted
        either way. Or `FILE.py:NAME`, a decompressor of the user's.
    format : `fp32`, `fp16` or `bf16`: what kept values are rounded to, to nearest even. A number
        too large for 16 bits becomes the largest that they have.

    Raises
    ------
    HyperparameterError
    """

    share: float
    error_feedback: bool = True
    form: str = "fused"
    format: str = "fp32"
    user: Decompressor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        share = real("compression", self.share) if is_real(self.share) else math.nan
        if not 0.0 < share <= 1.0:
            raise HyperparameterError("compression", "a share above 0 and at most 1", self.share)
        if not isinstance(self.error_feedback, bool | np.bool_):
            raise HyperparameterError("error_feedback", "True or False", self.error_feedback)
        user = check_pairs(self.form, self.format)
        object.__setattr__(self, "share", share)
        object.__setattr__(self, "user", user)

    @property
    def limit(self) -> float | None:
        """The largest finite number that is sent; None if any may be."""
        return _LIMITS.get(self.format)

    @property
    def pair_bytes(self) -> int:
        """Of the index and the value of one element."""
        return 8 if self.format == "fp32" else 6

    def kept_of(self, size: int) -> int:
        """Elements that are kept of a gradient of `size` elements; or records that it has, at
        most."""
        return kept_of(size, self.share) if self.user is None else self.user.most(size)

    def compress(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        *,
        take: TakeLargest = take_largest,
        memory: Callable[[int], NDArray[np.float32]] = empty,
    ) -> Compressed:
        """Choose what to send of a flat gradient, to which the residual is added first.

        With error feedback, a finite sum equals what is sent for it plus what stays, exactly; what
        a number too large for 16 bits leaves is rounded to fp32. NaN and infinities leave nothing
        behind where they are sent.

        Parameters
        ----------
        residual : None is nothing.
        take : does what `nearstep.torch.topk.take_largest` does.
        memory : gives an array of so many elements, for what stays.
        """
        if self.user is not None:
            return self._by_user(self.user, gradient, residual, memory)
        rest = memory(gradient.size) if self.error_feedback else None
        with np.errstate(over="ignore", invalid="ignore"):
            index, wanted = take(gradient, residual, rest, self.share)
            value = self._rounded(wanted)
            if rest is not None and self.format != "fp32":
                lost = wanted - convert.widen(value)
                rest[index] = np.where(np.isfinite(lost) & (lost != 0.0), lost, NOTHING)
        return Compressed(index, value, rest)

    def records(
        self, index: NDArray[np.uint32], value: NDArray[np.generic], count: int
    ) -> RecordData:
        """What is sent for elements of a run of `count`: `index` and `value`; or, for a user's
        decompressor, the words and values of records.

        Raises
        ------
        DecompressorError : they do not mean these elements.
        """
        if self.user is None:
            return index, value
        sent = np.zeros(count, np.float32)
        sent[index] = value
        words, data, meant = self._made(self.user, sent)
        if not np.array_equal(_positive_zeros(meant), sent.view(np.uint32)):
            at = int((_positive_zeros(meant) != sent.view(np.uint32)).argmax())
            raise DecompressorError(
                f"{self.form}: compress must lose nothing of what decompress gave; "
                f"element {at} of {count} was {sent.view(np.uint32)[at]:#010x} "
                f"and became {meant[at]:#010x}"
            )
        return words, data

    def _by_user(
        self,
        user: Decompressor,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        memory: Callable[[int], NDArray[np.float32]],
    ) -> Compressed:
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = gradient if residual is None else gradient + residual
            wanted = np.ascontiguousarray(wanted)
            _, _, meant = self._made(user, wanted)
            sent = meant.view(np.float32)
            index = np.flatnonzero(sent)
            if not self.error_feedback:
                return Compressed(index, sent[index], None)
            rest = memory(gradient.size)
            rest[:] = wanted
            lost = wanted[index] - sent[index]
            rest[index] = np.where(np.isfinite(lost) & (lost != 0.0), lost, NOTHING)
        return Compressed(index, sent[index], rest)

    def _made(
        self, user: Decompressor, wanted: NDArray[np.float32]
    ) -> tuple[NDArray[np.uint32], NDArray[np.generic], NDArray[np.uint32]]:
        """Words, values as they are sent, and the patterns that the device makes of them."""
        words, values = user.records(wanted, self.share)
        data = self._rounded(values)
        patterns = np.asarray(convert.widen(data), np.float32).view(np.uint32)
        return words, data, user.dense(words, patterns, wanted.size)

    def _rounded(self, values: NDArray[np.float32]) -> NDArray[np.generic]:
        if self.limit is None:
            return values
        limit = np.float32(self.limit)
        bounded = np.where(np.isinf(values), values, np.clip(values, -limit, limit))
        return convert.narrow(bounded, self.format)


def check_pairs(form: object, format: object) -> Decompressor | None:
    """The user's decompressor that `form` names, if it is none of the forms of pairs.

    Raises
    ------
    HyperparameterError : there is no form, or no format, of this name.
    """
    if format not in convert.NAMES.values():
        expected = f"one of {tuple(convert.NAMES.values())}"
        raise HyperparameterError("compression_format", expected, format)
    if isinstance(form, str) and is_in_file(form):
        try:
            return load(form)
        except RuleFileError as error:
            expected = f"one of {FORMS}, or FILE.py:NAME ({error})"
            raise HyperparameterError("compression_form", expected, form) from error
    if form not in FORMS:
        raise HyperparameterError("compression_form", f"one of {FORMS}, or FILE.py:NAME", form)
    return None


def _positive_zeros(patterns: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.where(patterns == np.uint32(1 << 31), np.uint32(0), patterns)
