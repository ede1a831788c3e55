"""Gradients of a small model from eight workers in one process."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

from nearstep.coarse import CoarsePool
from nearstep_sim.coarse.pool_values import Floats, compare, reduced

WORKERS = 8
POOLS = {"golden": f"golden:coarse?devices={WORKERS}&groups=2&entry_phits=16&memory_bytes=1MiB"}


def naive_ring_sum(pool: CoarsePool, arrays: list[Floats]) -> Floats:
    """The sum as a ring adds it, piece by piece in a loop, in plain float32."""
    flat = [each.reshape(-1) for each in arrays]
    entry, devices = pool.device.config.entry_elements("fp32"), len(arrays)
    result = np.empty_like(flat[0])
    for part in pool.split(result.size):
        step = -1 if part.reverse else 1
        for chunk in range(part.start, part.stop, devices * entry):
            stop = min(chunk + devices * entry, part.stop)
            beats = -(-(stop - chunk) // 16)
            piece = 16 * -(-beats // devices)
            for number, start in enumerate(range(chunk, stop, piece)):
                where = slice(start, min(start + piece, stop))
                order = [step * (number + hop) % devices for hop in range(devices)]
                total = flat[order[0]][where]
                for device in order[1:]:
                    total = total + flat[device][where]
                result[where] = total
    return result.reshape(arrays[0].shape)


def gradients_of(worker: int) -> list[torch.Tensor]:
    """Gradients of a worker's batch; all have the same model."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(33, 61), nn.GELU(), nn.LayerNorm(61), nn.Linear(61, 10))
    generator = torch.Generator().manual_seed(100 + worker)
    x = torch.randn(16, 33, generator=generator)
    y = torch.randint(10, (16,), generator=generator)
    nn.functional.cross_entropy(model(x), y).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture(params=POOLS)
def wide_pool(request):
    with CoarsePool.open(POOLS[request.param]) as opened:
        yield opened


def test_eight_workers_sum_their_gradients(wide_pool) -> None:
    """Each worker is a thread that writes its own gradients, and reads the sums."""
    pool, local = wide_pool, [gradients_of(worker) for worker in range(WORKERS)]
    tensors = [pool.tensor(tuple(each.shape)) for each in local[0]]
    read: dict[int, list[Floats]] = {}

    def reduce() -> None:
        for tensor in tensors:
            pool.all_reduce(tensor)

    together = threading.Barrier(WORKERS, reduce)

    def work(worker: int) -> None:
        for tensor, gradient in zip(tensors, local[worker], strict=True):
            tensor.write(worker, gradient)
        together.wait()
        read[worker] = [tensor.read(worker) for tensor in tensors]

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compared = 0
    for number, tensor in enumerate(tensors):
        arrays = [each[number].numpy() for each in local]
        expected = reduced(pool, arrays)
        compared += compare(tensor, expected)
        bits = naive_ring_sum(pool, arrays).view(np.uint32)
        np.testing.assert_array_equal(expected.view(np.uint32), bits)
        for worker in range(WORKERS):
            np.testing.assert_array_equal(read[worker][number].view(np.uint32), bits)
    assert compared == WORKERS * sum(each.numel() for each in local[0])


@pytest.mark.parametrize(
    "wire", ["fp16", *(pytest.param(wire, marks=pytest.mark.deep) for wire in ("fp32", "bf16"))]
)
def test_eight_workers_average_their_gradients(wide_pool, wire) -> None:
    pool, local = wide_pool, [gradients_of(worker) for worker in range(WORKERS)]
    arrays = [[each[n].numpy() for each in local] for n in range(len(local[0]))]
    tensors = [pool.tensor(each) for each in arrays]
    pool.all_reduce(tensors, "average", wire)
    compared = 0
    for number, (tensor, each) in enumerate(zip(tensors, arrays, strict=True)):
        group = number % pool.groups
        compared += compare(tensor, reduced(pool, each, "average", wire, group))
        mean = np.mean([a.astype(np.float64) for a in each], axis=0)
        error = np.abs(tensor.read(0) - mean).max()
        assert error <= np.abs(each).max() * {"fp32": 1e-6, "fp16": 4e-3, "bf16": 3e-2}[wire]
    assert compared == WORKERS * sum(each.numel() for each in local[0])


def test_the_naive_sum_would_notice_another_order(wide_pool) -> None:
    arrays = [gradients_of(worker)[0].numpy() for worker in range(WORKERS)]
    other = naive_ring_sum(wide_pool, arrays[::-1])
    assert (other != naive_ring_sum(wide_pool, arrays)).any()
