"""Decompressors from a user's file: compression of a gradient, and its inverse."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_spec.errors import NearstepError
from nearstep_spec.rule.file import RuleFileError, definitions

__all__ = ["Decompressor", "DecompressorError", "load"]

Words = NDArray[np.uint32]
Floats = NDArray[np.float32]
NAMED_BYTES = 4  # of the digest in a register of the kernel


class DecompressorError(NearstepError, ValueError):
    """A function of a decompressor returned a value that violates its contract."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Decompressor:
    """A form of compressed gradients: records of a 32-bit word and a value.

    The decompressor defines the meaning of a record; the kernel moves words and values, widens the
    values to binary32, and passes both to `unit`, whose output is the gradient.

    Parameters
    ----------
    compress : (gradient, share) to (words, values): float32 of shape (n,) and a number above 0 and
        at most 1 to uint32 and float32 of one shape (records,). Must preserve a result of
        `decompress`: the records of its part from any multiple of 16 elements on, padded with
        zeros, at the same share represent the same bits.
    decompress : (words, values, count) to the gradient: uint32 of shape (records,), values as
        patterns of binary32, to patterns of binary32 of shape (count,). For any number of records
        that are not `wrong`.
    unit : (lanes=, records=) to an Amaranth component with the bits of `decompress`; its ports are
        those of `nearstep_hw.updater.pairs.user.UserUnit`.
    elements_per_record : n elements have at most ceil(n / elements_per_record) records.
    wrong : (word, number, count) to whether record `number` (from 0) is invalid in a gradient of
        `count` elements. Applied to numpy arrays (int64) and to Amaranth values, so it must use
        operators only. None: every word is valid, and any number of records.

    Attributes
    ----------
    name : `FILE.py:NAME`, see `load`.
    digest : of the file's content and NAME; hexadecimal.

    Raises
    ------
    DecompressorError : `elements_per_record` is below 1, or a function cannot be called.

    Ref: Smart-Infinity, section V-B and figure 8.
    """

    compress: Callable[[Floats, float], tuple[Words, Floats]]
    decompress: Callable[[Words, Words, int], Words]
    unit: Callable[..., Any]
    elements_per_record: int = 1
    wrong: Callable[[Any, Any, Any], Any] | None = None
    name: str = field(default="", init=False)
    digest: str = field(default="", init=False)

    def __post_init__(self) -> None:
        per = self.elements_per_record
        if not isinstance(per, int) or isinstance(per, bool) or per < 1:
            raise DecompressorError(f"elements_per_record must be a positive integer, not {per!r}")
        for name in ("compress", "decompress", "unit"):
            if not callable(getattr(self, name)):
                raise DecompressorError(
                    f"{name} must be a function, not {type(getattr(self, name)).__name__}"
                )

    @property
    def mark(self) -> int:
        """The 32 bits of the digest in a kernel's register."""
        return int.from_bytes(bytes.fromhex(self.digest)[:NAMED_BYTES], "big")

    def most(self, count: int) -> int:
        """Most records of `count` elements."""
        return -(-count // self.elements_per_record)

    def records(self, gradient: Floats, share: float) -> tuple[Words, Floats]:
        """Compress a gradient of shape (n,) to words and values.

        Raises
        ------
        DecompressorError : `compress` returned other types or shapes, or too many records.
        """
        words, values = self.compress(gradient, share)
        given = [f"{np.asarray(each).dtype} {np.shape(each)}" for each in (words, values)]
        if given != [f"{kind} ({len(words)},)" for kind in ("uint32", "float32")]:
            raise DecompressorError(
                f"{self.name}: compress must give uint32 words and float32 values of one shape "
                f"(records,), not {' and '.join(given)}"
            )
        if len(words) > self.most(gradient.size):
            raise DecompressorError(
                f"{self.name}: compress must give at most {self.most(gradient.size)} records of "
                f"{gradient.size} elements (elements_per_record={self.elements_per_record}), not "
                f"{len(words)}"
            )
        return words, values

    def dense(self, words: Words, values: Words, count: int) -> Words:
        """Decompress records to patterns of the gradient, of shape (count,); values are patterns of
        binary32.

        Raises
        ------
        DecompressorError : `decompress` returned another type or shape.
        """
        found = self.decompress(words, values, count)
        if found.dtype != np.uint32 or found.shape != (count,):
            raise DecompressorError(
                f"{self.name}: decompress must give uint32 of shape ({count},), "
                f"not {found.dtype} {found.shape}"
            )
        return found

    def first_wrong(self, words: Words, count: int) -> int | None:
        """Return the number of the first invalid record; None if there is none."""
        if self.wrong is None or not words.size:
            return None
        numbers = np.arange(words.size, dtype=np.int64)
        found = np.broadcast_to(self.wrong(words.astype(np.int64), numbers, count), words.shape)
        return int(found.argmax()) if found.any() else None


def load(name: str) -> Decompressor:
    """Load the decompressor `FILE.py:NAME`; the file is executed once for the same contents.

    Raises
    ------
    RuleFileError : the name is not of that form, the file cannot be read or run, or has no such
        decompressor.
    """
    path, wanted, content, names = definitions(name, "a decompressor")
    found = names.get(wanted)
    if not isinstance(found, Decompressor):
        there = [each for each, value in names.items() if isinstance(value, Decompressor)]
        what = f"a {type(found).__name__}" if wanted in names else "not there"
        raise RuleFileError(
            f"{path}: {wanted} must be a Decompressor, and is {what}; "
            f"there are: {', '.join(there) or 'none'}"
        )
    known = replace(found)
    object.__setattr__(known, "name", name)
    digest = hashlib.sha256(wanted.encode() + b"\0" + content).hexdigest()
    object.__setattr__(known, "digest", digest)
    return known
