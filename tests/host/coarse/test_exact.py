"""Exact sums of a pool of golden devices."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import ExactSumError, JobMismatchError, JobRefusedError
from nearstep.coarse.pool import OPERATIONS, WIRES
from nearstep.coarse.rings import Addends, Pending
from nearstep.coarse.split import Part
from nearstep.errors import ArgumentError, OptionError

from ...oracle.exact_sums import exact_sum
from .conftest import random_arrays

URL = "golden:coarse?entry_phits=4&memory_bytes=1MiB&exact=fp32,fp16,bf16"
FEW = 150  # elements that Python's integers sum


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("devices", "groups"), [(1, 2), (2, 1), (3, 2), (8, 2)])
def test_bits_are_those_of_integers_on_all_devices(devices: int, groups: int, wire: str) -> None:
    checked = 0
    with CoarsePool.open(f"{URL}&devices={devices}&groups={groups}") as pool:
        local = random_arrays(pool, 777, 50 + devices, special=True)
        columns = [[int(each.view(np.uint32)[i]) for each in local] for i in range(FEW)]
        for op, divisor in (("sum", 1), ("average", devices)):
            expected = [exact_sum(column, wire, divisor) for column in columns]
            for group in (None, 0):
                tensor = pool.tensor(local)
                pool.all_reduce(tensor, op, wire, group=group, exact=True)
                whole = tensor.read(0).view(np.uint32)
                assert whole[:FEW].tolist() == expected
                for device in range(devices):
                    assert (tensor.read(device).view(np.uint32) == whole).all()
                    checked += 1
    assert checked == 4 * devices


def test_a_sum_in_the_order_of_the_ring_is_as_without_exact_sums() -> None:
    found = []
    for name in (URL, URL.partition("&exact")[0]):
        with CoarsePool.open(f"{name}&devices=4") as pool:
            local = random_arrays(pool, 3000, 61, special=True)
            tensors = [pool.tensor(local) for _ in range(2)]
            if "exact" in name:  # its registers keep the numbers of addends
                pool.all_reduce(pool.tensor(local), exact=True)
            pool.all_reduce(tensors, "average", "bf16")
            found.append([each.read(1).view(np.uint32) for each in tensors])
    for exact, plain in zip(*found, strict=True):
        assert (exact == plain).all()
    assert len(found[0]) == 2


def test_each_link_carries_the_addends_of_its_parts() -> None:
    """With n devices a link has n (n - 1) / 2 entries of addends and n - 1 of results."""
    for devices, entries in ((2, 2), (3, 5), (4, 9), (8, 35)):
        with CoarsePool.open(f"{URL}&devices={devices}&groups=1") as pool:
            tensor = pool.tensor(devices * 3 * 32)  # three chunks of an entry of 32 bf16 each
            pool.all_reduce(tensor, wire="bf16", exact=True)
            counters = pool.counters().devices[0].links
            assert sum(each.received_entries for each in counters) == 1 + 3 * entries


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op": "max"}, "op of an exact sum must be sum or average, not 'max'"),
        ({"wire": "fp16"}, "wire of an exact sum must be bf16, not 'fp16'"),
    ],
)
def test_sums_that_the_devices_do_not_have_are_refused(options: dict, text: str) -> None:
    with CoarsePool.open("golden:coarse?memory_bytes=64KiB&exact=bf16") as pool:
        tensor = pool.tensor(random_arrays(pool, 100, 62))
        before = tensor.read(0)
        with pytest.raises(ExactSumError) as caught:
            pool.all_reduce(tensor, **({"wire": "bf16"} | options), exact=True)
        assert str(caught.value) == text
        assert (tensor.read(0) == before).all()
        pool.all_reduce(tensor, wire="bf16", exact=True)
    with CoarsePool.open("golden:coarse?memory_bytes=64KiB") as pool:
        tensor = pool.tensor(100)
        with pytest.raises(ExactSumError, match="none, as the devices were opened without exact="):
            pool.submit(tensor, exact=True)


def test_one_device_has_no_other_sums() -> None:
    with CoarsePool.open("golden:coarse?memory_bytes=64KiB&devices=1&exact=fp32") as pool:
        tensor = pool.tensor(100)
        with pytest.raises(ArgumentError, match="one device has no ring"):
            pool.all_reduce(tensor)


@pytest.mark.parametrize(
    "name",
    [
        "golden:coarse?exact=fp8",
        "golden:coarse?exact=fp16&wire_formats=fp32,bf16",
        "sim:coarse?exact=bf16&devices=1",
        "golden:coarse?devices=1",
    ],
)
def test_devices_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=r"exact|devices"):
        CoarsePool.open(name)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"addends": Addends(513, 64)}, JobRefusedError),  # 1026 in all
        ({"addends": Addends(1, 0, 1025)}, JobRefusedError),
        ({"addends": Addends(2, 32)}, JobRefusedError),  # the second array is not aligned
        ({"addends": Addends(2, 1 << 20)}, JobRefusedError),  # nor in the window
        ({"operation": "max"}, JobRefusedError),
        ({"wire": "fp16"}, JobRefusedError),
        ({"differs": Addends(1, 0, 2)}, JobMismatchError),
    ],
    ids=str,
)
def test_devices_refuse_jobs_that_were_not_checked(change: dict, error: type[Exception]) -> None:
    with CoarsePool.open("golden:coarse?devices=2&memory_bytes=64KiB&exact=bf16") as pool:
        tensor = pool.tensor(random_arrays(pool, 16, 63))
        before = tensor.read(0)

        def job(addends: Addends):
            return pool.rings.make_job(
                Part(group=0, start=0, stop=16),
                OPERATIONS[change.get("operation", "sum")],
                WIRES[change.get("wire", "bf16")],
                [tensor.front(device).address for device in range(2)],
                [tensor.back(device).address for device in range(2)],
                addends=addends,
            )

        first = job(change.get("addends", Addends()))
        pending = Pending(pool.rings, [first])
        pool.rings.begin(pending)
        pool.rings.push(first, 0)
        if "differs" in change:
            first.addends = change["differs"]
        pool.rings.push(first, 1)
        with pytest.raises(error):
            pending.wait()
        pool.reset()
        assert (tensor.read(0) == before).all()
        pool.all_reduce(tensor, wire="bf16", exact=True)
