"""What faults leave on the drives: cuts, lies and rot, drawn from a seed, and all counted."""

from __future__ import annotations

import random
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nearstep.storage.blocks import BLOCK_BYTES
from nearstep_sim.models.drive import (
    SECTOR_BYTES,
    Event,
    Kept,
    Write,
    after_cut,
    unflushed,
)

WAYS = ("none", "all", "prefix", "subset")
"""What a drive keeps of its unflushed writes."""


def power_cut(
    images: Sequence[bytes], events: Sequence[Event], rng: random.Random, faults: Counter[str]
) -> list[bytes]:
    """Return the drives after a cut, in which each keeps others of its unflushed writes."""
    kept: Kept = {}
    ways, torn, lost = set(), 0, unflushed(events)
    for drive in range(len(images)):
        mine = [at for at in lost if events[at].drive == drive]
        way = rng.choice(WAYS)
        if way == "prefix":
            mine = mine[: rng.randrange(len(mine) + 1)]
        elif way != "all":
            mine = [at for at in mine if way == "subset" and rng.random() < 0.5]
        ways.add(way)
        for at in mine:
            event = events[at]
            assert isinstance(event, Write)
            sectors = range(len(event.data) // SECTOR_BYTES)
            kept[at] = sectors
            if sectors and rng.random() < 0.3:
                kept[at] = [each for each in sectors if rng.random() < 0.5]
                torn += 0 < len(kept[at]) < len(sectors)
    faults["cuts"] += 1
    faults["cuts that tear writes at 512 bytes"] += torn > 0
    faults["cuts with another subset on each drive"] += len(ways) > 1 and len(lost) > len(kept) > 0
    return after_cut(images, events, kept)


def rot(
    images: Sequence[bytes], rng: random.Random, blocks: Sequence[tuple[int, int]]
) -> tuple[list[bytes], set[tuple[int, int]]]:
    """Flip bits of one block, sometimes of two; return the drives, and the blocks by drive.

    Parameters
    ----------
    blocks : that were written, by drive: one of them is chosen as often as any of all.
    """
    found = [bytearray(image) for image in images]
    hit = set()
    for _ in range(rng.choice((1, 1, 1, 2))):
        drive = rng.randrange(len(images))
        place = (drive, rng.randrange(len(images[drive]) // BLOCK_BYTES))
        drive, block = rng.choice(blocks) if blocks and rng.random() < 0.7 else place
        if (drive, block) in hit:
            continue
        hit.add((drive, block))
        most = rng.choice((64, BLOCK_BYTES))  # of a superblock the rest are zeros
        bits = {rng.randrange(8 * most) for _ in range(rng.choice((1, 1, 2, 40)))}
        for bit in bits:
            found[drive][block * BLOCK_BYTES + bit // 8] ^= 1 << bit % 8
    return [bytes(each) for each in found], hit


@dataclass
class Lie:
    """What a drive acknowledges and does not do.

    Parameters
    ----------
    kind : `lost` or `misdirected`: one write; `unflushed`: every flush from then on.
    at : number of that operation, counted from 0.
    target : block to which a misdirected write goes.
    """

    kind: str
    at: int
    target: int
    told: bool = False

    def __call__(self, action: str, block: int) -> int | None:
        wanted = "flush" if self.kind == "unflushed" else "write"
        if action == wanted:
            self.at -= 1
            if self.at == -1 or (self.at < 0 and wanted == "flush"):
                self.told = True
                return self.target if self.kind == "misdirected" else None
        return block


def superblocks_on(image: bytes) -> dict[int, int]:
    """Return the generations of whole superblocks on the first drive, by block (-1: the last one),
    read without the project's own reader."""
    found = {}
    for at in (1, 2, -1, -2):
        first = at * BLOCK_BYTES % len(image)
        block = image[first : first + BLOCK_BYTES]
        (crc,) = struct.unpack_from("<I", block, BLOCK_BYTES - 4)
        if block.startswith(b"NSSUPER\n") and zlib.crc32(block[:-4]) == crc:
            (found[at],) = struct.unpack_from("<Q", block, 24)
    return found
