"""Dual synchronization: the memory devices sum what backward makes first, the workers the rest.

Ref: COARSE paper, section III-F.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, GradBucket, ReduceOp
from torch.futures import Future, collect_all

from nearstep.coarse.dual import DualInputs
from nearstep.coarse.routing import SHARD_ALIGNMENT
from nearstep.coarse.service.client import TIMEOUT_S
from nearstep.scalars import check_whole
from nearstep.torch.distributed.hook import group_beside
from nearstep.torch.distributed.process_group import CoarseProcessGroup

PROBED_BYTES = 4 << 20


class DualAverage:
    """Where the gradients of a model go.

    Parameters
    ----------
    m : bytes of float32 gradients that go to the devices, of those that backward makes first.

    Attributes
    ----------
    workers : the group that sums the rest.
    device_bytes, worker_bytes : of gradients, as float32, that either have averaged.
    """

    def __init__(self, group: CoarseProcessGroup, m: int) -> None:
        self.group = group
        self.m = m
        self.workers = group.gloo.make()
        self.device_bytes = 0
        self.worker_bytes = 0
        self._before = 0

    def split(self, bucket: GradBucket) -> int:
        """How many elements of a bucket go to the devices; called once for each bucket in turn."""
        if bucket.index() == 0:
            self._before = 0
        size = bucket.buffer().numel()
        left = max(0, self.m - self._before)
        self._before += 4 * size
        return size if left >= 4 * size else left // SHARD_ALIGNMENT * (SHARD_ALIGNMENT // 4)


Hook = Callable[[DualAverage, GradBucket], Future[Tensor]]


def dual_hook(
    group: dist.ProcessGroup | None = None,
    *,
    m: int,
    wire: str = "fp32",
    timeout_s: float = TIMEOUT_S,
) -> tuple[DualAverage, Hook]:
    """State and hook, for `model.register_comm_hook(*dual_hook(m=...))`.

    The first `m` bytes of the gradients go to the memory devices, as with `ddp_hook`; the workers
    sum the rest in a ring of their own (gloo), at the same time. Each part has one order of
    additions, so all workers have the same bits; both averages are the sum times float32(1 /
    processes). Gradients of 16 bits are summed as float32.

    Parameters
    ----------
    group : as for `ddp_hook`.
    m : bytes of float32 gradients, in the order in which DDP gives its buckets; in a bucket that is
        cut, a multiple of 2048. `best_split(measure_dual(...))` is the closed form's.
    wire : format on the links of the devices.
    timeout_s : of each wait.

    Ref: COARSE paper, section III-F.
    """
    check_whole("m", m, 0)
    return DualAverage(group_beside(group, wire, timeout_s), m), average


def average(state: DualAverage, bucket: GradBucket) -> Future[Tensor]:
    """The average of a bucket's gradients, when both parts have come back."""
    whole = bucket.buffer()
    cut = state.split(bucket)
    parts: list[Future[Any]] = []
    if cut:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.AVG)
        parts.append(state.group.allreduce([whole[:cut]], options).get_future())
        state.device_bytes += 4 * cut
    if cut < whole.numel():
        parts.append(_by_workers(state, whole[cut:]))
        state.worker_bytes += 4 * (whole.numel() - cut)

    def ended(future: Future[list[Future[Any]]]) -> Tensor:
        for each in future.value():
            each.value()  # raises what a part failed with
        return whole

    return collect_all(parts).then(ended)


def _by_workers(state: DualAverage, part: Tensor) -> Future[Any]:
    summed = part.float()
    scale = torch.tensor(1 / state.group.client.clients, dtype=torch.float32)
    future: Future[Any] = state.workers.allreduce([summed]).get_future()

    def scaled(ended: Future[Any]) -> None:
        """In gloo's thread, so it must not hold the group, whose end waits for that thread."""
        ended.value()
        part.copy_(summed.mul_(scale))

    done: Future[Any] = future.then(scaled)
    return done


def measure_dual(
    group: CoarseProcessGroup, nbytes: int, *, forward_s: float, backward_s: float, repeats: int = 3
) -> DualInputs:
    """What the closed form of m needs, the same in all processes, which all call it.

    Both ways sum 4 MiB, `repeats` times after once. Each process's shortest time counts, and of
    these the longest.

    Parameters
    ----------
    nbytes : of the gradients as float32.
    forward_s, backward_s : of this process, without synchronization; the longest of all count.

    Ref: COARSE paper, section III-F.
    """
    check_whole("repeats", repeats, 1)
    workers = group.gloo.make()
    probe = torch.zeros(PROBED_BYTES // 4)
    seconds = []
    for sums in (group.allreduce, workers.allreduce):
        times = []
        for _ in range(1 + repeats):
            group.barrier().wait()
            began = time.perf_counter()
            sums([probe]).wait()
            times.append(time.perf_counter() - began)
        seconds.append(min(times[1:]))
    slowest = torch.tensor([forward_s, backward_s, *seconds], dtype=torch.float64)
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.MAX)
    workers.allreduce([slowest], options).wait()
    forward, backward, devices_s, workers_s = slowest.tolist()
    size = group.client.clients
    moved = 2 * (size - 1) / size * PROBED_BYTES if size > 1 else float(PROBED_BYTES)
    return DualInputs(
        workers=size,
        nbytes=nbytes,
        forward_s=forward,
        backward_s=backward,
        proxy_bytes_per_s=moved / devices_s,
        worker_bytes_per_s=moved / workers_s,
    )
