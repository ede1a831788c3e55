"""Dual synchronization: the memory devices sum the first gradients, the workers the rest.

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
from nearstep.coarse.schedule import taken_by_devices
from nearstep.scalars import check_whole
from nearstep.torch.distributed.hook import averaged, group_beside
from nearstep.torch.distributed.process_group import CoarseProcessGroup

PROBED_BYTES = 4 << 20


class DualAverage:
    """State of the hook.

    Parameters
    ----------
    m : bytes of float32 gradients that the devices sum, the first ones of backward.

    Attributes
    ----------
    workers : gloo's group that sums the rest.
    device_bytes, worker_bytes : bytes of float32 gradients averaged by either.
    """

    def __init__(self, group: CoarseProcessGroup, m: int) -> None:
        self.group = group
        self.m = m
        self.workers = group.make_gloo()
        self.device_bytes = 0
        self.worker_bytes = 0
        self._before = 0

    def split(self, bucket: GradBucket) -> int:
        """Return the number of a bucket's elements for the devices; called once for each bucket in
        turn."""
        if bucket.index() == 0:
            self._before = 0
        nbytes = 4 * bucket.buffer().numel()
        taken = taken_by_devices(self._before, nbytes, self.m)
        self._before += nbytes
        return (taken if taken == nbytes else taken // SHARD_ALIGNMENT * SHARD_ALIGNMENT) // 4


Hook = Callable[[DualAverage, GradBucket], Future[Tensor]]


def dual_hook(
    group: dist.ProcessGroup | None = None,
    *,
    m: int,
    wire: str | None = None,
    timeout_s: float | None = None,
) -> tuple[DualAverage, Hook]:
    """Return state and hook, for `model.register_comm_hook(*dual_hook(m=...))`.

    The memory devices average the first `m` bytes of the gradients, as with `ddp_hook`; the workers
    average the rest with gloo, at the same time. Each part has one order of additions, so all
    workers have the same bits; both averages are the sum times float32(1 / processes). Gradients of
    16 bits are summed as float32.

    Parameters
    ----------
    group : as for `ddp_hook`.
    m : bytes of float32 gradients, in the order in which DDP gives its buckets; in a bucket that is
        cut, a multiple of 2048. `best_split(measure_dual(...))` is the closed form's.
    wire, timeout_s : as for `ddp_hook`.

    Ref: COARSE paper, section III-F.
    """
    check_whole("m", m, 0)
    return DualAverage(group_beside(group, wire, timeout_s), m), average


def average(state: DualAverage, bucket: GradBucket) -> Future[Tensor]:
    """Begin to average a bucket's gradients, in both parts."""
    whole = bucket.buffer()
    cut = state.split(bucket)
    parts: list[Future[Any]] = []
    if cut:
        parts.append(averaged(state.group, whole[:cut]))
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
    summed = part if part.dtype is torch.float64 else part.float()
    scale = torch.tensor(1 / state.group.getSize(), dtype=summed.dtype, device="cpu")
    workers = state.workers
    works = [workers.group.allreduce([summed])]

    def scaled() -> None:
        workers.wait(works)
        part.copy_(summed.mul_(scale))

    return state.group.beside("dual all_reduce", scaled).get_future()


def measure_dual(
    group: CoarseProcessGroup, nbytes: int, *, forward_s: float, backward_s: float, repeats: int = 3
) -> DualInputs:
    """Measure the inputs of the closed form of m; all processes call it and get the same.

    The devices and the workers each sum 4 MiB, once and then `repeats` times. The shortest time of
    a process counts, and of these the longest.

    Parameters
    ----------
    nbytes : of the gradients as float32.
    forward_s, backward_s : of this process, without synchronization; the longest of all count.

    Ref: COARSE paper, section III-F.
    """
    check_whole("repeats", repeats, 1)
    workers = group.make_gloo().group
    probe = torch.zeros(PROBED_BYTES // 4, dtype=torch.float32, device="cpu")
    seconds = []
    for sums in (group.allreduce, workers.allreduce):
        times = []
        for _ in range(1 + repeats):
            group.barrier().wait()
            began = time.perf_counter()
            sums([probe]).wait()
            times.append(time.perf_counter() - began)
        seconds.append(min(times[1:]))
    slowest = torch.tensor([forward_s, backward_s, *seconds], dtype=torch.float64, device="cpu")
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.MAX)
    workers.allreduce([slowest], options).wait()
    forward, backward, devices_s, workers_s = slowest.tolist()
    size = group.getSize()
    moved = 2 * (size - 1) / size * PROBED_BYTES if size > 1 else float(PROBED_BYTES)
    return DualInputs(
        workers=size,
        nbytes=nbytes,
        forward_s=forward,
        backward_s=backward,
        proxy_bytes_per_s=moved / devices_s,
        worker_bytes_per_s=moved / workers_s,
    )
