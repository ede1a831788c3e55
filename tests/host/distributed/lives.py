"""Groups that begin and end: programs of each process."""

from __future__ import annotations

import gc
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import async_save, load
from torch.distributed.fsdp import FullyShardedDataParallel

from nearstep.torch.distributed.rendezvous import ADDRESS, TOKEN_FILE

TIMEOUT = timedelta(seconds=60)


def overlapping() -> int:
    """Groups of two of three processes, in a world of gloo's: each process is in two of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([n, (n + 1) % size], backend="coarse") for n in range(size)]
    sums = []
    for each in groups:
        dist.all_reduce(
            found := torch.ones(5) if rank in ranks(each) else torch.zeros(5), group=each
        )
        sums.append(float(found.sum()))
    assert sorted(sums) == [0.0, 10.0, 10.0], sums
    for each in groups:
        if rank in ranks(each):
            dist.destroy_process_group(each)
    return 1


def ranks(group: Any) -> list[int]:
    none = dist.GroupMember.NON_GROUP_MEMBER
    return [] if group is none else dist.get_process_group_ranks(group)


def nothing_is_left() -> int:
    """Descriptors, threads and shared memory of a process are as many after each group."""
    seen = []
    dist.barrier()  # the first collective of the default group, which connects it
    for _ in range(4):
        group = dist.new_group(backend="coarse")
        dist.all_reduce(torch.ones(2000), group=group)
        dist.all_reduce(torch.ones(3, dtype=torch.int64), group=group)
        dist.broadcast(torch.ones(3), 0, group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:nearstep")
        seen.append([len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task")] + [maps])
        dist.barrier()
    assert all(last <= first for last, first in zip(seen[-1], seen[0], strict=True)), seen
    return 1


def again() -> int:
    """The default group begins again, with the keys of the one before in its store."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port: list[Any] = [None]
    if rank == 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port[0] = free.getsockname()[1]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port[0])}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    kept = dist.TCPStore("localhost", port[0], size, rank == 0, TIMEOUT, multi_tenant=True)
    for life in range(2):
        dist.init_process_group("coarse", timeout=TIMEOUT)
        dist.all_reduce(found := torch.full((5,), rank + life))
        assert (found == size * (size - 1) // 2 + size * life).all()
        dist.all_reduce(found := torch.full((5,), float(rank + life)))
        assert (found == size * (size - 1) / 2 + size * life).all()
        dist.destroy_process_group()
    del kept
    return 2


def checkpoints(folder: str) -> int:
    """DCP writes in another thread, through a group of its own."""
    group = dist.new_group(backend="coarse")
    values, found = {"x": torch.arange(10.0)}, {"x": torch.zeros(10)}
    async_save(values, checkpoint_id=folder, process_group=group).result()
    load(found, checkpoint_id=folder, process_group=group)
    assert (found["x"] == values["x"]).all()
    return 1


def sharded() -> int:
    """FSDP1 frees and allocates what its collectives have filled, such as the first parameters."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    group, cpu = dist.new_group(backend="coarse"), torch.device("cpu")
    shared = FullyShardedDataParallel(model, group, device_id=cpu)
    for _ in range(2):
        shared(torch.ones(2, 6)).sum().backward()
        with FullyShardedDataParallel.summon_full_params(shared):
            mine = torch.cat([each.detach().reshape(-1) for each in shared.parameters()])
            its = mine.clone()
            dist.broadcast(its, 0, group=group)
            assert (mine == its).all()
    return 1


def all_of_them(address: str, token_file: str, folder: str) -> int:
    """Counts what was done: with a service that stands by itself, and with some that begin."""
    os.environ |= {ADDRESS: address, TOKEN_FILE: token_file}
    checks = nothing_is_left() + checkpoints(folder) + sharded()
    del os.environ[ADDRESS]
    return checks + overlapping() + again()
