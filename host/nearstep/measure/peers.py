"""Optimizers of other projects on this machine's processor, beside torch's and `host:`."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

import nearstep.optim

Make = Callable[[Any, list[Tensor], dict[str, Any]], Any]
"""Makes an optimizer from a peer's module, parameters, and options of AdamW."""

OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKED = [1 << 12, 4099, 129, 1]
"""Elements of the tensors whose bits are compared."""

CHECKED_STEPS = 10


@dataclass(frozen=True)
class Peer:
    """An optimizer that is measured.

    Attributes
    ----------
    module : name for the import.
    package : name for pip.
    dtype : of parameters and gradients, a key of `FORMATS`.
    """

    name: str
    module: str
    package: str
    make: Make
    dtype: str = "fp32"


def _torch(_: Any, parameters: list[Tensor], options: dict[str, Any]) -> Any:
    return torch.optim.AdamW(parameters, fused=True, **options)


def _host(**more: Any) -> Make:
    return lambda _, parameters, options: nearstep.optim.AdamW(parameters, **options, **more)


PEERS = (
    Peer("torch, fused", "torch", "torch", _torch),
    Peer("nearstep host:", "nearstep_sim", "nearstep[sim]", _host()),
    Peer(
        "nearstep host:, 8-bit state",
        "nearstep_sim",
        "nearstep[sim]",
        _host(state_dtype=torch.uint8),
    ),
    Peer(
        "DeepSpeed CPUAdam",
        "deepspeed.ops.adam",
        "deepspeed",
        lambda module, p, options: module.DeepSpeedCPUAdam(p, **options),
    ),
    Peer(
        "torchao, 8-bit state",
        "torchao.optim",
        "torchao",
        lambda module, p, options: module.AdamW8bit(p, **options),
    ),
    Peer(
        "torchao, 4-bit state",
        "torchao.optim",
        "torchao",
        lambda module, p, options: module.AdamW4bit(p, **options),
    ),
    Peer(
        "torchao, CPU offload",
        "torchao.optim",
        "torchao",
        lambda module, p, options: module.CPUOffloadOptimizer(
            p, torch.optim.AdamW, fused=True, **options
        ),
    ),
    Peer(
        "bitsandbytes, 8-bit state",
        "bitsandbytes.optim",
        "bitsandbytes",
        lambda module, p, options: module.AdamW8bit(p, **options),
    ),
    Peer("torch, fused", "torch", "torch", _torch, "bf16"),
    Peer("nearstep host:", "nearstep_sim", "nearstep[sim]", _host(), "bf16"),
    Peer(
        "nearstep host:, stochastic",
        "nearstep_sim",
        "nearstep[sim]",
        _host(rounding="stochastic"),
        "bf16",
    ),
)


@dataclass(frozen=True, kw_only=True)
class PeerResult:
    """A row of the table.

    Attributes
    ----------
    problem : why the peer was not measured, or None.
    of_stream : bytes that a step reads and writes in a second of processor time, as a share of
        those of a stream, the median.
    bytes_per_parameter : of parameter, gradient and state.
    ulps : mean distance of parameters from those in fp64, in units in the last place, after
        `CHECKED_STEPS`.
    not_torch : share of parameters whose bits then differ from those of torch's fused step.
    """

    name: str
    dtype: str
    version: str | None = None
    problem: str | None = None
    parameters_per_s: float | None = None
    of_stream: float | None = None
    bytes_per_parameter: float | None = None
    ulps: float | None = None
    not_torch: float | None = None


def peer_results(
    sizes: Sequence[int],
    steps: int,
    peers: Sequence[Peer] = PEERS,
    report: Callable[[str], None] = lambda step: None,
) -> Iterator[PeerResult]:
    """Measure each peer; the result of a peer that is not installed, or does not run, has a
    `problem`.

    Parameters
    ----------
    sizes : elements of each tensor.
    steps : number of measured steps, after one that is not; each is compared with a stream of
        torch's operations that read and write the arrays of AdamW in fp32 in place.
    report : called with the name of a peer before it is measured.
    """
    for peer in peers:
        report(f"{peer.name}, {peer.dtype}")
        try:
            try:
                module = importlib.import_module(peer.module)
            except ImportError as error:
                problem = f"not installed ({error}): pip install {peer.package}"
                yield PeerResult(name=peer.name, dtype=peer.dtype, problem=problem)
                continue
            yield _measured(peer, module, sizes, steps)
        except Exception as error:  # of any kind: the code is another project's
            problem = f"does not run: {type(error).__name__}: {error}"
            yield PeerResult(name=peer.name, dtype=peer.dtype, problem=problem)


def _measured(peer: Peer, module: Any, sizes: Sequence[int], steps: int) -> PeerResult:
    bits = [_trained(make, module, peer.dtype) for make in (peer.make, _torch)]
    wide = _trained(_torch, module, peer.dtype, wide=True)
    dtype, count = FORMATS[peer.dtype], sum(sizes)
    parameters = _tensors(sizes, dtype)
    optimizer = peer.make(module, parameters, OPTIONS)
    optimizer.step()
    stored = sum(map(_nbytes, parameters)) + sum(
        _nbytes(value)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and key != "step"
    )
    gradients = count * dtype.itemsize
    stream, streamed = _stream(sizes)
    stream()
    took, shares = [], []
    for _ in range(steps):
        begun, wall = process_time(), perf_counter()
        optimizer.step()
        took.append(perf_counter() - wall)
        between = process_time()
        stream()
        rate = streamed / (process_time() - between)
        shares.append((2 * stored + gradients) / (between - begun) / rate)
    return PeerResult(
        name=peer.name,
        dtype=peer.dtype,
        version=importlib.metadata.version(peer.package.partition("[")[0]),
        parameters_per_s=count / median(took),
        of_stream=median(shares),
        bytes_per_parameter=(stored + gradients) / count,
        ulps=_ulps(bits[0], wide),
        not_torch=_differ(*bits),
    )


def _tensors(sizes: Sequence[int], dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        parameter = torch.randn(size, generator=generator).to(dtype)
        made.append(parameter.requires_grad_())
        parameter.grad = torch.randn(size, generator=generator).to(dtype)
    return made


def _trained(make: Make, module: Any, dtype: str, *, wide: bool = False) -> list[Tensor]:
    """Return parameters after `CHECKED_STEPS`; if `wide`, the steps are in fp64."""
    form = FORMATS[dtype]
    parameters = _tensors(CHECKED, form)
    if wide:
        parameters = [each.detach().double().requires_grad_() for each in parameters]
    optimizer = make(module, parameters, OPTIONS)
    for step in range(CHECKED_STEPS):
        for parameter, other in zip(parameters, _tensors(CHECKED, form, 2 + step), strict=True):
            assert other.grad is not None, "made with one"
            parameter.grad = other.grad.to(parameter.dtype)
        optimizer.step()
    return [each.detach() for each in parameters]


def _differ(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the share of elements with other bits."""
    words = {2: torch.int16, 4: torch.int32}
    pairs = [
        (each.view(words[each.itemsize]), other.view(words[other.itemsize]))
        for each, other in zip(found, expected, strict=True)
    ]
    return float(sum((a != b).sum() for a, b in pairs)) / sum(a.numel() for a, _ in pairs)


def _ulps(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the mean distance from numbers in fp64, in units in the last place of `found`."""
    exact, errors = torch.cat([*expected]), torch.cat([*found]).double()
    unit = torch.finfo(found[0].dtype).eps * torch.exp2(torch.floor(torch.log2(exact.abs())))
    return float(((errors - exact).abs() / unit).mean())


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; of a subclass, those of the tensors that it consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_nbytes(getattr(tensor, each)) for each in names)
    return tensor.nbytes


def _stream(sizes: Sequence[int]) -> tuple[Callable[[], None], int]:
    """Return a function that reads gradients, and reads and writes parameters and moments of AdamW
    in place, and the bytes of one call."""
    arrays = [[torch.ones(size, dtype=torch.int32) for size in sizes] for _ in range(4)]

    def run() -> None:
        for p, g, m, v in zip(*arrays, strict=True):
            p.bitwise_xor_(g)
            m.bitwise_xor_(1)
            v.bitwise_xor_(1)

    return run, 7 * 4 * sum(sizes)
