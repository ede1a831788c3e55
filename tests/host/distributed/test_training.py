"""DDP and FSDP over the memory devices: bits of the rings, on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nearstep.coarse.pool import CoarsePool
from nearstep.torch.distributed.rendezvous import default_device

from ..coarse.service.oracle import expected_sum
from .processes import on_processes
from .training import SMALL, Case, Result, train_all

PLAIN = [
    Case(kind="ddp", group="gloo", options=SMALL),
    Case(kind="ddp", options=SMALL),
    Case(kind="hook", options=SMALL | {"gradient_as_bucket_view": True}),
    Case(kind="hook", group="gloo", options=SMALL),
    Case(kind="ddp", drives=True, options=SMALL),
    Case(kind="fsdp"),
    Case(kind="fsdp", drives=True),
    Case(kind="collectives", group="gloo"),
    Case(kind="collectives", group="gloo", drives=True),
    Case(kind="hook", measure=4, options=SMALL),
    *(Case(kind="dual", group="gloo", m=m, options=SMALL) for m in (0, 7000, 1 << 30)),
    Case(kind="dual", m=10_000, measure=3, options=SMALL),
]
"""The same training: two processes have one order of a sum, and so the same bits in all of them."""

OTHERS = [
    Case(kind="ddp", passes=3, options=SMALL),
    Case(kind="ddp", choose=True, options=SMALL | {"find_unused_parameters": True}),
    Case(kind="hook", passes=2, choose=True, options=SMALL | {"find_unused_parameters": True}),
    Case(kind="ddp", options=SMALL | {"static_graph": True}),
    Case(kind="ddp", uneven=True, options=SMALL),
    Case(kind="ddp", dtype=torch.bfloat16, options=SMALL),
    Case(kind="hook", group="gloo", dtype=torch.bfloat16, options=SMALL),
]


def check(count: int, case: Case, results: list[Result]) -> int:
    """Each sum has the bits of the rings, all ranks' gradients those of the sums; counts sums."""
    first = results[0]
    for each in results[1:]:
        for mine, its in zip(first.parameters, each.parameters, strict=True):
            np.testing.assert_array_equal(mine, its, err_msg=str(case))
        for mine, its in zip(first.gradients, each.gradients, strict=True):
            assert case.uneven or (mine == its).all(), case
    with CoarsePool.open(default_device(count)) as pool:
        config, devices = pool.device.config, pool.devices
    checked = 0
    flat = [[each for step in result.sums for each in step] for result in results]
    for sums in zip(*flat, strict=True):
        expected = expected_sum(
            [each.given for each in sums],
            devices=devices,
            operation=sums[0].operation,
            wire="fp32",
            shard_bytes=sums[0].shard_bytes,
            config=config,
            places=[each.place for each in sums],
        )
        rounded = torch.from_numpy(expected).to(sums[0].dtype).float().numpy()
        for each in sums:
            np.testing.assert_array_equal(each.got.view(np.uint32), rounded.view(np.uint32))
        checked += 1
    of_last = first.sums[case.steps - 1]
    if of_last and not case.uneven and case.kind != "dual":
        summed = torch.from_numpy(np.concatenate([each.got for each in of_last]))
        kind = torch.int32 if case.dtype == torch.float32 else torch.int16
        through = np.sort(summed.to(case.dtype).view(kind).numpy())
        np.testing.assert_array_equal(np.sort(np.concatenate(first.gradients)), through)
    return checked


def run(count: int, cases: list[Case]) -> list[list[Result]]:
    """Results of each case, by rank; each was checked."""
    found = on_processes(count, train_all, cases)
    by_case = [list(each) for each in zip(*found, strict=True)]
    for case, results in zip(cases, by_case, strict=True):
        through_rings = case.group == "coarse" or case.kind in ("hook", "collectives")
        through_rings |= case.m > 0
        checked = check(count, case, results)
        assert (checked >= case.steps) == through_rings, (case, checked)
    return by_case


def test_two_processes_train_to_the_same_bits_by_gloo_and_by_the_devices() -> None:
    results = run(2, PLAIN + OTHERS)
    plain = results[: len(PLAIN)]
    checked = 0
    for each in plain[1:]:
        for mine, its in zip(plain[0][0].parameters, each[0].parameters, strict=True):
            np.testing.assert_array_equal(mine, its)
            checked += 1
    assert checked == 8 * (len(PLAIN) - 1)


@pytest.mark.deep
@pytest.mark.parametrize("count", [3, 4, 8])
def test_more_processes_have_the_bits_of_the_rings(count: int) -> None:
    run(count, PLAIN + OTHERS)
