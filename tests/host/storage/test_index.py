"""Bytes that are no index, although their CRC is right."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from nearstep.storage.extents import Run, Table, Tensor
from nearstep.storage.index import MAGIC, PREFIX, IndexFormatError, pack_index, unpack_index
from nearstep.storage.superblock import FIRST_FREE, MOST_RUNS, Superblock, unpack


def packed(change: Callable[[dict[str, Any]], None] = lambda head: None) -> bytes:
    """An index of a tensor of two extents, with a head that was changed."""
    tensor = Tensor("p", 5000, {}, Table.of_hole(2, 1), step=1)
    data = pack_index(3, {"step": 7}, [tensor])
    magic, length = PREFIX.unpack_from(data)
    head = json.loads(data[PREFIX.size : PREFIX.size + length])
    change(head)
    text = json.dumps(head).encode()
    return PREFIX.pack(magic, len(text)) + text + data[PREFIX.size + length :]


def test_what_was_packed_is_unpacked() -> None:
    tensors, meta, names = unpack_index(packed(), 3, [FIRST_FREE + 9], [])
    assert (list(tensors), meta, names.own, names.kept) == (["p"], {"step": 7}, "", {})
    assert (tensors["p"].nbytes, tensors["p"].step, len(tensors["p"].table)) == (5000, 1, 2)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "must begin with"),
        (packed()[: PREFIX.size - 1], "must begin with"),
        (b"NSINDEXX" + packed()[8:], "must begin with"),
        (PREFIX.pack(MAGIC, 1 << 40) + packed()[PREFIX.size :], "must begin with"),
        (PREFIX.pack(MAGIC, 2) + packed()[PREFIX.size :], "its head is invalid"),
        (packed()[:-1], "its extents must have"),
        (packed(lambda head: head.update(generation=2)), "must be of generation 3, not 2"),
        (packed(lambda head: head["tensors"][0].update(nbytes=9000)), "must have 3 blocks"),
        (packed(lambda head: head["tensors"][0].update(step=-1)), "not of -1"),
        (packed(lambda head: head["tensors"][0].update(step="x")), "not of 'x'"),
        (packed(lambda head: head["tensors"][0].pop("name")), "its head is invalid"),
    ],
)
def test_other_bytes_are_refused(data: bytes, expected: str) -> None:
    with pytest.raises(IndexFormatError, match=expected):
        unpack_index(data, 3, [FIRST_FREE + 9], [])


def test_a_superblock_holds_as_many_runs_as_fit_in_a_block() -> None:
    set_id = uuid.UUID(int=5)
    for count in (1, MOST_RUNS):
        runs = [Run(each % 2, FIRST_FREE + each, 1) for each in range(count)]
        superblock = Superblock(set_id, 9, 10, 11, runs)
        assert unpack(superblock.pack(), set_id) == superblock
