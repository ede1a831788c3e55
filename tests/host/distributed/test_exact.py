"""Exact sums of process groups: the same bits with any number of processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import nearstep.torch.distributed as coarse
from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import ExactSumError
from nearstep.coarse.service import Client, Server
from nearstep.torch.distributed.rendezvous import default_device
from nearstep.torch.distributed.tensors import TensorsError

from ...oracle.exact_sums import exact_sum
from .processes import on_processes

ROWS, ELEMENTS, FEW = 8, 3000, 50
WIRES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def addends(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(71)
    rows = torch.randn(ROWS, ELEMENTS, generator=generator)
    rows *= torch.exp2(torch.randint(-8, 9, (ROWS, ELEMENTS), generator=generator))
    rows[1] = -rows[0]
    return rows.to(dtype)


def sums(group: coarse.CoarseProcessGroup) -> list[torch.Tensor]:
    """Sums and averages of the rows of all processes; where each has one, of collectives, too."""
    rank, size = group.getRank(), group.getSize()
    found = []
    for dtype in WIRES:
        rows = addends(dtype)[rank::size]
        out, average = torch.empty(ELEMENTS, dtype=dtype), torch.empty(ELEMENTS, dtype=dtype)
        group.reduce_addends(rows, out).wait()
        group.reduce_addends(rows.T.contiguous().T, average, "average").wait()
        found += [out, average]
        for bad in (rows[:0], rows[:, 1:], rows.double()):
            with pytest.raises(TensorsError):
                group.reduce_addends(bad, out)
        with pytest.raises(ExactSumError):
            group.reduce_addends(rows, out, "max")
        if size == ROWS:
            whole, part = rows[0].clone(), torch.empty(ELEMENTS // size, dtype=dtype)
            group.allreduce([whole]).wait()
            assert torch.equal(whole, out)
            group.reduce_scatter_single(part, rows[0].clone()).wait()
            assert torch.equal(part, out.view(size, -1)[rank])
    greatest = torch.tensor([float(rank)])
    group.allreduce([greatest], dist.ReduceOp.MAX).wait()  # has no order, and is not exact
    assert greatest == size - 1
    return found


@pytest.mark.parametrize("devices", [2, 3])
def test_bits_are_those_of_integers_with_any_number_of_processes(
    tmp_path: Path, devices: int
) -> None:
    """Groups of threads, which need no processes."""
    expected = []
    for dtype, wire in WIRES.items():
        words = addends(dtype)[:, :FEW].float().numpy().view(np.uint32).T.tolist()
        expected += [[exact_sum(each, wire, divisor) for each in words] for divisor in (1, ROWS)]
    url = f"golden:coarse?devices={devices}&memory_bytes=4MiB&exact=fp32,bf16,fp16"
    place, token, timeout = f"unix:{tmp_path}/socket", "of a test", timedelta(seconds=120)
    checked, whole = 0, {}
    with Server(CoarsePool.open(url), place, token):
        for count in (1, 2, 4, 8):
            store, job = dist.HashStore(), f"of {count}"

            def one(rank: int, count=count, store=store, job=job) -> list[torch.Tensor]:
                def connect() -> Client:
                    return Client(place, token, job=job, rank=rank, clients=count)

                group = coarse.CoarseProcessGroup(
                    connect, job, rank, count, store, timeout, exact=True
                )
                try:
                    return sums(group)
                finally:
                    group.shutdown()

            with ThreadPoolExecutor(count) as threads:
                results = [*threads.map(one, range(count))]
            for found in results:
                for number, each in enumerate(found):
                    bits = each.float().numpy().view(np.uint32)
                    assert bits[:FEW].tolist() == expected[number]
                    assert (bits == whole.setdefault(number, bits)).all()
                    checked += 1
    assert checked == (1 + 2 + 4 + 8) * 2 * len(WIRES)


def refusals() -> None:
    state, _ = coarse.ddp_hook(exact=True)
    state.exchanges.wire = "bf16"
    with pytest.raises(ExactSumError, match="wire of an exact sum must be fp32 or fp16"):
        dist.all_reduce(torch.ones(10, dtype=torch.float16))
    with pytest.raises(ExactSumError, match="at most 1024, not 1026"):
        state.reduce_addends(torch.ones(513, 4), torch.empty(4)).wait()
    ones = torch.ones(10)
    dist.all_reduce(ones)
    assert (ones == 2).all()


def test_mixed_formats_and_too_many_addends_are_refused() -> None:
    exact = {"NEARSTEP_COARSE_EXACT": "1"}
    assert on_processes(2, refusals, variables=exact) == [None, None]


def test_devices_are_exact_only_if_they_are_asked_for() -> None:
    assert "exact" not in default_device(4)
    assert default_device(4, exact=True) == default_device(4) + "&exact=fp32,fp16,bf16"
