"""The index of a generation: tensors with their extents, and metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole
from nearstep.storage.extents import (
    EXTENT,
    HOLE,
    Run,
    Table,
    Tensor,
    blocks_of,
    overlap,
    rows_of,
)
from nearstep.storage.superblock import FIRST_FREE, end_of

MAGIC = b"NSINDEX\n"
MAGIC_OF_KEPT = b"NSINDEX2"
"""Of an index with names: releases without names, which would free the blocks of kept generations,
refuse it."""

PREFIX = struct.Struct("<8sQ")
"""Magic and bytes of the JSON that follows, before the extents of all tensors in order."""


class IndexFormatError(Exception):
    """Reason why bytes are not an index."""


class Names(NamedTuple):
    """Names in an index.

    Attributes
    ----------
    own : of the generation; empty: none.
    kept : generation, bytes, CRC-32 and runs of the index of each generation that is kept.
    """

    own: str = ""
    kept: Mapping[str, tuple[int, int, int, Sequence[Run]]] = MappingProxyType({})


NO_NAMES = Names()


def pack_index(
    generation: int, meta: Mapping[str, Any], tensors: Sequence[Tensor], names: Names = NO_NAMES
) -> bytes:
    """Return the index as bytes."""
    listed = []
    for each in tensors:
        entry = {"name": each.name, "nbytes": each.nbytes, "extents": len(each.table)}
        entry |= {"first_drive": each.first_drive, "attributes": each.attributes}
        entry |= {"step": each.step} if each.step else {}
        listed.append(entry | ({"pinned": True} if each.pinned else {}))
    table: dict[str, Any] = {"generation": generation, "meta": meta, "tensors": listed}
    has_names = bool(names.own or names.kept)
    if has_names:
        table |= {"name": names.own, "kept": dict(names.kept)}
    head = json.dumps(table, sort_keys=True, allow_nan=False).encode()
    rows = [each.table.rows.tobytes() for each in tensors]
    magic = MAGIC_OF_KEPT if has_names else MAGIC
    return b"".join([PREFIX.pack(magic, len(head)), head, *rows])


def unpack_index(
    data: bytes, generation: int, blocks: Sequence[int], own: Sequence[Run]
) -> tuple[dict[str, Tensor], dict[str, Any], Names]:
    """Return the tensors by name, the metadata, and names of generations.

    Parameters
    ----------
    generation : expected number.
    blocks : of each drive.
    own : runs of the index itself.

    Raises
    ------
    IndexFormatError : the bytes are not an index, or contradict themselves.
    """
    magic, length = PREFIX.unpack_from(data) if len(data) >= PREFIX.size else (b"", 0)
    if magic not in (MAGIC, MAGIC_OF_KEPT) or PREFIX.size + length > len(data):
        raise IndexFormatError(f"it must begin with {MAGIC!r}, not {magic!r}")
    try:
        head = json.loads(data[PREFIX.size : PREFIX.size + length])
        found, meta, listed = head["generation"], head["meta"], head["tensors"]
        columns = ("name", "nbytes", "extents", "first_drive", "attributes")
        fields = [
            (*(each[name] for name in columns), bool(each.get("pinned")), each.get("step", 0))
            for each in listed
        ]
        kept = {
            name: (number, nbytes, crc, [Run(*run) for run in runs])
            for name, (number, nbytes, crc, runs) in head.get("kept", {}).items()
        }
        names = Names(head.get("name", ""), kept)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IndexFormatError(f"its head is invalid: {str(error)[:100]}") from None
    if found != generation:
        raise IndexFormatError(f"it must be of generation {generation}, not {found}")
    rest = len(data) - PREFIX.size - length
    expected = EXTENT.itemsize * sum(each[2] for each in fields)
    if rest != expected:
        raise IndexFormatError(f"its extents must have {expected} bytes, not {rest}")
    rows = np.frombuffer(data, EXTENT, offset=PREFIX.size + length)
    _check_extents(rows, blocks, own)
    tensors: dict[str, Tensor] = {}
    at = 0
    for name, nbytes, count, first_drive, attributes, pinned, step in fields:
        table = Table(rows[at : at + count])  # a view of bytes, read-only
        at += count
        if table.starts[-1] != blocks_of(nbytes):
            raise IndexFormatError(f"{name!r} must have {blocks_of(nbytes)} blocks")
        first = first_drive % len(blocks)
        if pinned and ((table.rows["drive"] != first) & (table.rows["drive"] != HOLE)).any():
            raise IndexFormatError(f"{name!r} must be on drive {first} alone")
        if not is_whole(step) or step < 0:
            raise IndexFormatError(f"{name!r} must have extents of blocks, not of {step!r}")
        tensors[name] = Tensor(name, nbytes, attributes, table, first, pinned, step)
    if len(tensors) != len(fields):
        raise IndexFormatError("it names a tensor twice")
    return tensors, meta, names


def _check_extents(rows: NDArray[Any], blocks: Sequence[int], own: Sequence[Run]) -> None:
    """Raise `IndexFormatError` if an extent is on no drive or overlaps another one."""
    real = np.concatenate([rows[rows["drive"] != HOLE], rows_of(own)])
    if (real["drive"] >= len(blocks)).any() or (rows["blocks"] == 0).any():
        raise IndexFormatError("an extent is on no drive of the set")
    starts = real["block"].astype(np.int64)
    limits = np.array([end_of(each) for each in blocks])[real["drive"]]
    if (starts < FIRST_FREE).any() or (starts + real["blocks"] > limits).any():
        raise IndexFormatError("an extent is outside its drive")
    if overlap(real):
        raise IndexFormatError("two extents have the same block")


def checked_json(what: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `value` after a round trip through JSON; None becomes an empty dict.

    Raises
    ------
    ArgumentError : JSON cannot represent `value`.
    """
    if value is None:
        return {}
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{what} must be representable in JSON: {error}") from None
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ArgumentError(f"{what} must be a mapping, not {type(value).__name__}")
    return found


def checked_tensor(name: object, nbytes: object) -> None:
    """Raise `ArgumentError` unless the name and size of a tensor are valid."""
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"name of a tensor must be a text, not {name!r}")
    if not is_whole(nbytes) or not 0 <= nbytes < 1 << 62:
        raise ArgumentError(f"bytes of {name!r} must be a whole number, not {nbytes!r}")
