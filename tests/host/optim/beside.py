"""An optimizer of nearstep beside torch's fused one: the same acts on both, then the same bits.

Kinds of optimizers, homes and programs of acts are data: one more of each is one more row.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import nearstep

from .conftest import SEED, bits

SHAPES = ((32, 48), (64,), (16, 3, 5))
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW": ("AdamW", {"lr": 1e-2}),
    "amsgrad": ("AdamW", {"lr": 1e-2, "amsgrad": True}),
    "SGD": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
}
"""Name of the class, and options."""


def tensors(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """The same contents at every call."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The same at every call."""
    return [each.to(dtype).requires_grad_() for each in tensors(shapes)]


def equal_bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> int:
    """Compare two lists of tensors; the number of values compared."""
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, theirs, strict=True))
    compared = sum(each.numel() for each in ours)
    assert compared > 0
    return compared


def clone(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p.detach().clone().requires_grad_() for p in parameters]


def alone(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """A group for each: torch's fused step starts all momentum buffers of a group at once."""
    return [{"params": [p]} for p in parameters]


def through_a_file(state_dict: dict[str, Any]) -> Any:
    """As it is after torch.save and torch.load with weights_only, the default."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def bare(kind: str, parameters: Any, device: Any = None, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of nearstep on a device, or torch's fused one, of the class of a kind."""
    name, _ = KINDS[kind]
    if device is None:
        return getattr(torch.optim, name)(parameters, **{"fused": True, **options})
    return getattr(nearstep.optim, name)(parameters, device=device, **options)


def made(kind: str, parameters: Any, device: Any = None, **options: Any) -> torch.optim.Optimizer:
    """The same with the options of the kind."""
    return bare(kind, parameters, device, **{**KINDS[kind][1], **options})


@dataclass
class Side:
    """Parameters and their optimizer."""

    parameters: list[Tensor]
    optimizer: Any

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]


class Beside:
    """Two optimizers with equal parameters and gradients, of magnitudes from 1e-12 to 1e3.

    Parameters
    ----------
    kind : of `KINDS`.
    device : of the first one.
    contents : of the parameters.
    dtype : of the first one's parameters; those of torch are their fp32 masters.
    grouped : makes groups of parameters.
    own : options of the first one.
    options : of both.

    Attributes
    ----------
    beyond : keys of state that torch's optimizer has not.
    """

    beyond: Sequence[str] = ()

    def __init__(
        self,
        kind: str,
        device: Any,
        contents: Sequence[Tensor] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        grouped: Callable[[list[Tensor]], Any] = list,
        own: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        print(f"seed {SEED}")
        self.kind, self.device = kind, device
        self.generator = torch.Generator().manual_seed(SEED + 1)
        given = tensors() if contents is None else contents
        ours = [each.to(dtype, copy=True).requires_grad_() for each in given]
        theirs = [
            each.detach().float().clone(memory_format=torch.contiguous_format).requires_grad_()
            for each in ours
        ]
        self.mine = Side(ours, made(kind, grouped(ours), device, **{**options, **(own or {})}))
        self.torchs = Side(theirs, made(kind, grouped(theirs), **options))

    def __iter__(self) -> Iterator[Side]:
        return iter((self.mine, self.torchs))

    def give(self, skip: Sequence[int] = ()) -> None:
        """Give both the same gradients, and some none."""
        for index, (a, b) in enumerate(
            zip(self.mine.parameters, self.torchs.parameters, strict=True)
        ):
            exponent = torch.rand(a.shape, generator=self.generator) * 15 - 12
            values = torch.randn(a.shape, generator=self.generator) * 10**exponent
            a.grad = b.grad = None
            if index not in skip:
                a.grad = values.to(a.dtype)
                b.grad = a.grad.to(b.dtype, copy=True)

    def step(self, times: int = 1, skip: Sequence[int] = ()) -> None:
        for _ in range(times):
            self.give(skip)
            for side in self:
                side.optimizer.step()

    def check(self, state: bool = True, gradients: bool = True) -> int:
        """Compare parameters, gradients and state, bit for bit; the number of values compared."""
        compared = 0
        for a, b in zip(self.mine.parameters, self.torchs.parameters, strict=True):
            assert torch.equal(bits(a), bits(b.detach().to(a.dtype)))
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None and gradients:
                assert torch.equal(bits(a.grad), bits(b.grad.to(a.grad.dtype)))
            compared += a.numel()
            mine, other = self.mine.state.get(a, {}), self.torchs.state.get(b, {})
            assert [key for key in mine if key not in self.beyond] == list(other)
            for key, value in other.items() if state else ():
                if key == "step":
                    assert mine[key] == value
                    assert mine[key].dtype == value.dtype
                    continue
                assert mine[key].dtype == value.dtype
                assert torch.equal(bits(mine[key]), bits(value)), key
                compared += a.numel()
        assert compared > 0
        print(f"{compared} values compared, bit for bit")
        return compared


Act = Callable[[Beside], object]


def steps(times: int = 1, skip: Sequence[int] = ()) -> Act:
    return lambda beside: beside.step(times, skip)


def each(act: Callable[[Side], object]) -> Act:
    return lambda beside: [act(side) for side in beside]


def alike(act: Callable[[Side], object]) -> Act:
    """Act on both, and compare what it returns."""

    def compare(beside: Beside) -> None:
        mine, other = (act(side) for side in beside)
        assert mine == other

    return compare


def options(**changed: Any) -> Act:
    return each(lambda side: side.group.update(changed))


def give(beside: Beside) -> None:
    beside.give()


def same(beside: Beside) -> None:
    beside.check()


step_alone = each(lambda side: side.optimizer.step())
"""Of the gradients that are there, or of none."""
