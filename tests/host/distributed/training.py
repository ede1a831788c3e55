"""Training in each of several processes; all that went through the rings is recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nearstep
from nearstep.storage.store import Store
from nearstep.torch.distributed import CoarseProcessGroup, ddp_hook, dual_hook, process_group
from nearstep.torch.distributed.fsdp import fsdp_reduce_scatter

WIDTH = 24
SMALL: dict[str, Any] = {"bucket_cap_mb": 0.004}
"""Several buckets, that are rebuilt after the first step."""


class Branches(nn.Module):
    """Layers; each process uses others of the branches in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor, choose: bool = False) -> Tensor:
        self.calls += 1
        for number, branch in enumerate(self.branches):
            if not choose or number == (self.calls + dist.get_rank()) % 2:
                x = torch.tanh(branch(self.first(x)))
        return self.last(x)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is trained.

    Attributes
    ----------
    kind : `ddp`, `hook` (DDP, its gradients averaged by `ddp_hook`), `dual` (by `dual_hook`),
        `fsdp`, `collectives` (FSDP, with `fsdp_reduce_scatter`).
    group : backend of the model's.
    m : bytes of gradients that go to the devices, of kind `dual`.
    measure : sums after which routing is measured again.
    uneven : each process takes as many steps more as its rank is (DDP's `join`).
    drives : parameters and state of each process are on a drive.
    """

    kind: str
    group: str = "coarse"
    m: int = 0
    measure: int = 0
    passes: int = 1
    choose: bool = False
    uneven: bool = False
    drives: bool = False
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 3


@dataclass(frozen=True, kw_only=True)
class Sum:
    """One sum through the rings.

    Attributes
    ----------
    given, got : float32.
    place : device that it was pushed to.
    shard_bytes
    dtype : that `got` was rounded to.
    """

    operation: str
    given: NDArray[np.float32]
    got: NDArray[np.float32]
    place: int
    shard_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one process.

    Attributes
    ----------
    parameters, gradients : at the end, whole, as bits; the gradients are of the last step.
    sums : in their order; of each step, and those after the last one.
    """

    parameters: list[NDArray[Any]]
    gradients: list[NDArray[Any]]
    sums: list[list[Sum]]


def record(group: CoarseProcessGroup, sums: list[Sum]) -> None:
    """Have a group record what it sums."""
    original = type(group)._sum

    def recorded(source: Tensor, operation: Any, take: Callable[[int, int, Tensor], None]) -> None:
        given = source.float().numpy().copy()
        got = np.full_like(given, np.nan)

        def both(start: int, stop: int, values: Tensor) -> None:
            got[start:stop] = values.float().numpy()
            take(start, stop, values)

        original(group, source, operation, both)
        client, table = group.client, group.client.routing
        place = client.own_device if table is None else table.proxy_of(given.nbytes)
        shard_bytes = group.exchanges.shard_bytes or client.shard_bytes
        sums.append(
            Sum(
                operation=operation,
                given=given,
                got=got,
                place=place,
                shard_bytes=shard_bytes,
                dtype=source.dtype,
            )
        )

    group._sum = recorded  # type: ignore[method-assign]


def optimizer_of(case: Case, model: nn.Module, opened: ExitStack) -> torch.optim.Optimizer:
    named = model.named_parameters()
    if not case.drives:
        return torch.optim.AdamW(named, lr=1e-2, fused=True)
    file = Path(opened.enter_context(TemporaryDirectory())) / "drive"
    store = Store.create([file], drive_bytes=4 << 20, owner="a test", direct=False)
    opened.enter_context(store)
    return nearstep.optim.AdamW(named, lr=1e-2, drives=store, memory="50%")


def train(case: Case) -> Result:
    """A process's share of it."""
    with ExitStack() as opened:
        return _train(case, opened)


def _train(case: Case, opened: ExitStack) -> Result:
    torch.manual_seed(7)
    model: Any = Branches().to(case.dtype)
    group: Any = dist.group.WORLD if case.group == "coarse" else dist.new_group(backend="gloo")
    state = group
    dual = None
    if case.kind in ("ddp", "hook", "dual"):
        model = DistributedDataParallel(model, process_group=group, **case.options)
        if case.kind == "hook":
            state, hook = ddp_hook(group)
            model.register_comm_hook(state, hook)
        elif case.kind == "dual":
            dual, dual_average = dual_hook(group, m=case.m)
            state = dual.group
            model.register_comm_hook(dual, dual_average)
        if case.measure:
            state.measure_routing(case.measure, (4096, 65536))
    else:
        mesh = dist.DeviceMesh.from_group(group, "cpu")
        parts = [model.first, *model.branches]
        for part in [*parts, model]:
            fully_shard(part, mesh=mesh)
        if case.kind == "collectives":
            scatter = fsdp_reduce_scatter(group)
            state = scatter.state
            for part in [*parts, model]:
                part.set_custom_reduce_scatter(scatter)
        else:
            for part in [*parts, model]:
                part.set_allocate_memory_from_process_group_for_comm(True)
    now: list[Sum] = []
    sums = []
    if isinstance(state, CoarseProcessGroup):
        record(state, now)
    optimizer = optimizer_of(case, model, opened)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    with model.join() if case.uneven else nullcontext():
        for _ in range(case.steps + case.uneven * dist.get_rank()):
            optimizer.zero_grad()
            for number in range(case.passes):
                x = torch.randn(5, WIDTH, generator=data).to(case.dtype)
                last = number == case.passes - 1
                with nullcontext() if last else model.no_sync():
                    (model(x, case.choose) ** 2).mean().backward()
            sums.append(now.copy())
            now.clear()
            optimizer.step()
    sums.append(now)
    if case.measure:
        assert state.exchanges.measured > 1
        state.route(None).wait()
        state.measure_routing(0, (4096, 65536)).wait()
        state.route(None).wait()
    if dual is not None:
        nbytes = 4 * sum(each.numel() for each in model.parameters())
        taken = case.steps * min(case.m, nbytes)
        assert taken - case.steps * 2048 < dual.device_bytes <= taken
        assert dual.device_bytes + dual.worker_bytes == case.steps * nbytes
    if case.kind == "fsdp" and isinstance(group, CoarseProcessGroup):
        assert group.gathered_bytes > 0
    if state is not group:
        state.shutdown()
    elif isinstance(group, CoarseProcessGroup):
        del group._sum
    return Result(
        parameters=[bits(each) for each in model.parameters()],
        gradients=[bits(each.grad) for each in model.parameters()],
        sums=sums,
    )


def bits(tensor: Any) -> NDArray[Any]:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    kind = torch.int32 if whole.dtype == torch.float32 else torch.int16
    found: NDArray[Any] = whole.detach().contiguous().view(kind).numpy().copy().reshape(-1)
    return found


def train_all(cases: list[Case]) -> list[Result]:
    process_group.GATHER_BYTES = 1
    return [train(each) for each in cases]
