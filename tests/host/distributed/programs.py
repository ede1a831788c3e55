"""What processes of a group do with each other; each says how many checks it made."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from nearstep.coarse.service.errors import ClientLostError, JobError, OrderError, UnlikeError
from nearstep.errors import ArgumentError
from nearstep.torch.distributed import GlooFallbackWarning
from nearstep.torch.distributed.dual import DualAverage, _by_workers

DTYPES = (torch.float32, torch.bfloat16)


def works_and_futures() -> int:
    """What torch's tests of groups written in Python look at, and errors of arguments."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(size * (size + 1) // 2)
    work = dist.all_reduce(mine := torch.full((1000,), rank + 1.0), async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.get_future().wait()[0] is mine
    assert (mine == total).all()

    def twice(future: Any) -> Tensor:
        """A hook that waits for another collective, as PowerSGD's does."""
        found = future.value()[0].clone()
        dist.all_reduce(found)
        return found

    work = dist.all_reduce(torch.full((10,), rank + 1.0), async_op=True)
    assert (work.get_future().then(twice).wait() == size * total).all()
    strided = torch.zeros(6, 4)[:, ::2]
    strided += rank + 1.0
    dist.all_reduce(strided)
    assert (strided == total).all()
    with pytest.raises(ArgumentError, match=f"must have 2 x {size} elements"):
        dist.all_gather_into_tensor(torch.zeros(2 * size + 1), torch.zeros(2))
    return 8


def waits_or_fails(seconds: float) -> None:
    """Rank 0 waits, and not for the others; the last one fails."""
    if dist.get_rank() == 0:
        time.sleep(seconds)
    raise RuntimeError(f"rank {dist.get_rank()} fails")


def fallbacks() -> int:
    """Of what has no ring each kind is said once."""
    size = dist.get_world_size()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for dtype in (torch.float64, torch.int64):
                dist.all_reduce(found := torch.ones(5, dtype=dtype))
                assert (found == size).all()
            dist.all_reduce(found := torch.full((5,), 2.0), dist.ReduceOp.PRODUCT)
            assert (found == 2.0**size).all()
            dist.all_reduce(torch.ones(5))
    said = [str(each.message) for each in caught if each.category is GlooFallbackWarning]
    assert len(said) == 3, said
    return 3


def sparse() -> int:
    """Backward can use the values of a sum, unless it was made in inference mode."""
    size, weights = dist.get_world_size(), torch.ones(3, requires_grad=True)
    dist.all_reduce(given := torch.eye(3).to_sparse())
    (weights * given._values()).sum().backward()
    assert (weights.grad == size).all()
    with torch.inference_mode():
        dist.all_reduce(given := torch.eye(3).to_sparse())
        assert (given.to_dense() == size * torch.eye(3)).all()
    return 2


def messages() -> int:
    """Point to point, from a named rank and from any."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.full((7,), rank), 0)
        dist.barrier()
        dist.send(torch.full((3,), -rank), 0, tag=5)
        return 0
    seen = []
    for _ in range(1, size):
        found = torch.zeros(7, dtype=torch.int64)
        source = dist.recv(found)
        assert (found == source).all()
        seen.append(source)
    assert sorted(seen) == list(range(1, size))
    works = []
    for _ in range(1, size):
        found = torch.zeros(3, dtype=torch.int64)
        works.append((dist.irecv(found, tag=5), found))
    dist.barrier()
    for work, found in works:
        work.wait()
        assert (found == -work._source_rank()).all()
    assert sorted(work._source_rank() for work, _ in works) == list(range(1, size))
    return 2 * size


def groups() -> int:
    """Subgroups, a mesh, objects; the ranks outside of a group do not join it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for root in range(size):
        dist.reduce(given := torch.full((9,), float(rank)), root)
        assert rank != root or (given == size * (size - 1) / 2).all()
    subgroup = dist.new_group([1])
    if rank == 1:
        dist.all_reduce(alone := torch.ones(3), group=subgroup)
        assert (alone == 1).all()
        dist.destroy_process_group(subgroup)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    dist.all_reduce(found := torch.ones(4), group=mesh.get_group("data"))
    assert (found == size).all()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == list(range(size))
    said = [f"of {rank}"]
    dist.broadcast_object_list(said, src=size - 1)
    assert said == [f"of {size - 1}"]
    with dist._coalescing_manager():
        many = [torch.full((n + 1,), rank + 1.0) for n in range(3)]
        for each in many:
            dist.all_reduce(each)
    assert all((each == size * (size + 1) / 2).all() for each in many)
    return size + 6


def calls_with_one_tensor() -> int:
    """The forms of collectives that take a tensor, and a reduction or a root, in the place of lists
    and options: DDP's `join` calls one of them."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    total = float(size * (size + 1) // 2)
    for dtype in (torch.float32, torch.int32):
        group.allreduce(found := torch.full((5,), rank + 1, dtype=dtype)).wait()
        assert (found == total).all()
        group.allreduce(found := torch.full((5,), rank + 1, dtype=dtype), dist.ReduceOp.MAX).wait()
        assert (found == size).all()
    group.allreduce(found := torch.ones(3), timeout=timedelta(seconds=60)).wait()
    assert (found == size).all()
    group.broadcast(found := torch.full((2, 3), float(rank)), size - 1).wait()
    assert (found == size - 1).all()
    group.reduce(found := torch.full((4,), rank + 1.0), 0, dist.ReduceOp.MAX).wait()
    assert rank or (found == size).all()
    places = [torch.zeros(2) for _ in range(size)]
    group.allgather(places, torch.full((2,), float(rank))).wait()
    assert [float(each.sum()) for each in places] == [2.0 * each for each in range(size)]
    group.gather(places if rank == 1 else [], torch.full((2,), rank + 1.0), 1).wait()
    assert rank != 1 or [float(each[0]) for each in places] == [each + 1.0 for each in range(size)]
    given = [torch.full((2,), each + 7.0) for each in range(size)]
    group.scatter(found := torch.zeros(2), given if rank == 0 else [], 0).wait()
    assert (found == rank + 7).all()
    group.reduce_scatter(found, [each * 0 + rank + 1 for each in given]).wait()
    assert (found == total).all()
    return 11


def not_the_same() -> int:
    """Processes that do not do the same: refused where it can be, else the end of that group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    with pytest.raises(UnlikeError, match=r"clients \[0\]: sum of 5 elements"):
        dist.all_reduce(torch.ones(5 + rank), group=group)
    with pytest.raises(UnlikeError, match="bfloat16"):
        dist.all_reduce(torch.ones(5, dtype=DTYPES[rank % 2]), group=group)
    for length in (5, 6):
        dist.all_reduce(found := torch.ones(length), group=group)
        assert (found == size).all()
    for _ in range(2):  # what is refused once is refused for good
        with pytest.raises(OrderError, match=r"sum of 5 elements of float32.*sum of 6|sum of 6"):
            dist.all_reduce(torch.ones(6 if rank else 5), group=group)
    with pytest.raises(OrderError):
        dist.barrier(group=group)
    dist.all_reduce(found := torch.ones(6))  # other groups go on
    assert (found == size).all()
    return 5


def late() -> int:
    """Who is not waited for any longer finds the group ended; the others learn who it was."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=30))
    dist.barrier(group=group)
    if rank == 0:
        dist.barrier()
        with pytest.raises(ClientLostError):
            dist.all_reduce(torch.ones(5), group=group)
        return 1
    group.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(JobError) as found:
        dist.all_reduce(torch.ones(5), group=group)
    with pytest.raises(JobError):
        dist.all_reduce(torch.ones(5), group=group)
    dist.barrier()
    assert dist.get_world_size() > 2 or found.value.ranks == (0,)  # else who was given up first
    return 1


def lost() -> list[str]:
    """The last process ends without a word: what the others get; in DDP, from backward, too."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(1)
    with pytest.raises(ClientLostError) as lost:
        dist.all_reduce(torch.ones(100))
    assert lost.value.ranks == (dist.get_world_size() - 1,)
    with pytest.raises(ClientLostError) as in_backward:
        model(torch.ones(1, 4)).sum().backward()
    return [str(lost.value), str(in_backward.value)]


def a_group_that_ends_in_mid_sum() -> int:
    """Gloo's thread lets a function go last: with the group in it, it would join itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dual = DualAverage(dist.group.WORLD, 0)
    workers, held = dual.workers, weakref.ref(dual)
    part = torch.ones(3)
    if rank:
        dist.barrier()
    future = _by_workers(dual, part)
    del dual
    assert held() is None
    if not rank:
        dist.barrier()
    future.wait()
    assert (part == size * torch.tensor(1 / size)).all()
    del workers
    return 2


def all_of_them() -> tuple[int, list[str]]:
    """Counts of checks, and what `lost` gives."""
    checks = works_and_futures() + fallbacks() + sparse() + messages() + groups()
    checks += calls_with_one_tensor() + a_group_that_ends_in_mid_sum() + not_the_same() + late()
    dist.barrier()
    return checks, lost()
