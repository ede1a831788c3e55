"""A communication hook of DDP: COARSE's memory devices average the gradients of a bucket."""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, GradBucket, PrefixStore, ReduceOp
from torch.futures import Future

from nearstep.coarse.service.client import TIMEOUT_S
from nearstep.errors import ArgumentError
from nearstep.torch.distributed.process_group import CoarseProcessGroup
from nearstep.torch.distributed.rendezvous import create

Hook = Callable[[CoarseProcessGroup, GradBucket], Future[Tensor]]


def ddp_hook(
    group: dist.ProcessGroup | None = None,
    *,
    wire: str | None = None,
    exact: bool = False,
    timeout_s: float | None = None,
) -> tuple[CoarseProcessGroup, Hook]:
    """Return state and hook for `model.register_comm_hook(*ddp_hook())`.

    All processes of the group call this function. The average is the sum, in the order of the
    rings, times float32(1 / processes); DDP without a hook divides each gradient before the sum.

    Parameters
    ----------
    group : the model's group; None: the default group. For a group of another backend, such as
        gloo, a group of the memory devices with the same processes is made.
    wire : format on the links of the devices: `fp32`, `fp16`, `bf16`; None: the given group's, or
        that of `init_process_group("coarse")`.
    exact : average exactly, rounded once; so are all later sums and averages of a given group.
    timeout_s : limit of each wait, in seconds; None: the given group's, or 1800.

    Raises
    ------
    ArgumentError : a given group of the memory devices has another `wire` or `timeout_s`.
    """
    return group_beside(group, wire, timeout_s, exact=exact), average


def group_beside(
    group: dist.ProcessGroup | None,
    wire: str | None,
    timeout_s: float | None,
    *,
    exact: bool = False,
) -> CoarseProcessGroup:
    """Return a group of the memory devices with the same processes: the given one or a new one.

    Raises
    ------
    ArgumentError : the given one has another `wire` or `timeout_s`.
    """
    chosen = dist.distributed_c10d._get_default_group() if group is None else group
    if isinstance(chosen, CoarseProcessGroup):
        _check_own("wire", wire, chosen.exchanges.wire)
        _check_own("timeout_s", timeout_s, chosen.timeout_s)
        chosen.exchanges.exact |= exact
        return chosen
    store = dist.distributed_c10d._world.pg_map[chosen][1]
    prefix = PrefixStore(f"nearstep/beside/{chosen.group_name}", store)
    state = create(
        prefix,
        dist.get_rank(chosen),
        dist.get_world_size(chosen),
        timedelta(seconds=TIMEOUT_S if timeout_s is None else timeout_s),
        exact=exact,
    )
    if wire is not None:
        state.exchanges.wire = wire
    return state


def _check_own(name: str, given: object, own: object) -> None:
    """Raise `ArgumentError` if an option is given, and not that of the given group."""
    if given not in (None, own):
        raise ArgumentError(f"{name} must be {own}, of the given group, not {given!r}")


def averaged(group: CoarseProcessGroup, gradients: Tensor) -> Future[Tensor]:
    """Begin to average gradients in the devices, in place."""
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.AVG)
    return group.allreduce([gradients], options).get_future().then(lambda each: each.value()[0])


def average(state: CoarseProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Begin to average a bucket's gradients."""
    return averaged(state, bucket.buffer())
