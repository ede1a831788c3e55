"""PRP entries: the walk against a naive model, and what it refuses."""

from __future__ import annotations

import random
import struct

import pytest

from nearstep.linux.nvme.standard import TRANSFER_BYTES, Status, StatusError
from nearstep.linux.nvme.transfer import Command, segments
from nearstep.linux.pci import DmaError

from .guest import PAGE, GuestRam, entry


class Layout:
    """A random transfer: its pages, its list pages, and where a byte is."""

    def __init__(self, draw: random.Random, nbytes: int, start: int, list_start: int) -> None:
        self.ram = GuestRam(12 << 20)
        free = [PAGE * each for each in range(1, len(self.ram.data) // PAGE)]
        draw.shuffle(free)
        first = min(nbytes, PAGE - start)
        count = -(-(nbytes - first) // PAGE)
        pages = [free.pop() for _ in range(count)]
        self.prp1, self.prp2 = free.pop() + start, 0
        self.bytes_at = [*range(self.prp1, self.prp1 + first)]
        for page in pages:
            self.bytes_at += range(page, page + min(PAGE, nbytes - len(self.bytes_at)))
        self.lists = 0
        if count == 1:
            self.prp2 = pages[0]
        elif count > 1:
            self.prp2 = at = free.pop() + list_start
            while pages:
                slots = (PAGE - at % PAGE) // 8
                more = len(pages) > slots
                here = [pages.pop(0) for _ in range(slots - 1 if more else len(pages))]
                following = free.pop() if more else 0
                words = [*here, following] if more else here
                self.ram.data[at : at + 8 * len(words)] = struct.pack(f"<{len(words)}Q", *words)
                at, self.lists = following, self.lists + 1


def command(ram: GuestRam, prp1: int, prp2: int) -> Command:
    return Command(entry(2, 0, 1, prp1=prp1, prp2=prp2), ram)


def test_random_transfers_touch_the_bytes_of_their_pages_in_order() -> None:
    draw = random.Random(1)
    chained = checked = 0
    sizes = [4, PAGE, PAGE + 4, 2 * PAGE, 2 * PAGE + 4, 600 * 1024, TRANSFER_BYTES]
    for number in range(60):
        nbytes = sizes[number % len(sizes)] if number < 28 else 4 * draw.randrange(1, 1 << 16)
        start = 4 * draw.choice((0, 0, 1, 1023, draw.randrange(1024)))
        list_start = 8 * draw.choice((0, 510, 511, draw.randrange(512)))
        layout = Layout(draw, nbytes, start, list_start)
        found = command(layout.ram, layout.prp1, layout.prp2)
        data = draw.randbytes(nbytes)
        found.send(data)
        assert bytes(layout.ram.data[at] for at in layout.bytes_at) == data
        assert sum(size for _, size in layout.ram.written) == nbytes
        assert found.fetch(nbytes) == data
        chained += layout.lists > 1
        checked += 1
    assert (checked, chained > 5) == (60, True)


@pytest.mark.parametrize(("prp1", "prp2", "nbytes"), [
    (0x1002, 0, 4), (0x1001, 0x2000, PAGE), (0x1000, 0x2004, 2 * PAGE), (0x1004, 0x2800, PAGE),
    (0x1000, 0x3004, 3 * PAGE), (0x1000, 0x3001, 3 * PAGE),
])  # fmt: skip
def test_offsets_where_none_may_be_are_refused(prp1: int, prp2: int, nbytes: int) -> None:
    with pytest.raises(StatusError) as caught:
        command(GuestRam(), prp1, prp2).fetch(nbytes)
    assert caught.value.status == Status.PRP_OFFSET_INVALID


def test_entries_and_chains_with_offsets_are_refused() -> None:
    ram = GuestRam()
    ram.data[0x3000:0x3010] = struct.pack("<2Q", 0x4000, 0x5004)
    with pytest.raises(StatusError) as caught:
        command(ram, 0x1000, 0x3000).fetch(3 * PAGE)
    assert caught.value.status == Status.PRP_OFFSET_INVALID
    ram.data[0x3FF8:0x4000] = struct.pack("<Q", 0x6008)  # the last slot: a chain, with an offset
    with pytest.raises(StatusError) as caught:
        command(ram, 0x1000, 0x3FF8).fetch(3 * PAGE)
    assert caught.value.status == Status.PRP_OFFSET_INVALID
    ram.data[0x3FF8:0x4000] = struct.pack("<Q", 0x6000)
    ram.data[0x6000:0x6010] = struct.pack("<2Q", 0x4000, 0x5000)
    assert list(segments(ram, 0x1000, 0x3FF8, 3 * PAGE)) == [
        (0x1000, PAGE), (0x4000, PAGE), (0x5000, PAGE),
    ]  # fmt: skip


def test_what_points_nowhere_is_an_error_of_the_transfer() -> None:
    ram = GuestRam()
    nowhere = 1 << 40
    ram.data[0x3000:0x3010] = struct.pack("<2Q", 0x4000, nowhere)
    for prp1, prp2, nbytes in ((nowhere, 0, 4), (0x1000, nowhere, 2 * PAGE),
                               (0x1000, nowhere, 3 * PAGE), (0x1000, 0x3000, 3 * PAGE),
                               ((1 << 64) - 4, 0, 4)):  # fmt: skip
        with pytest.raises(StatusError) as caught:
            command(ram, prp1, prp2).fetch(nbytes)
        assert caught.value.status == Status.DATA_TRANSFER_ERROR
    with pytest.raises(StatusError) as caught:
        command(ram, 0x1000, 0x3000).fetch(TRANSFER_BYTES + 4)
    assert caught.value.status == Status.INVALID_FIELD
    with pytest.raises(DmaError):
        list(segments(ram, 0x1000, nowhere, 3 * PAGE))
