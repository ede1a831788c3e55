"""Small trainings whose state lies on drives in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import nearstep
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_set import create_set
from nearstep.storage.store import Store
from nearstep_sim.models.drive import Journal, MemoryBlocks

URL = "golden:axdimm?memory_bytes=8MiB&rules=adam,adam_amsgrad,sgd,sgd_momentum,adagrad"
DIMM = f"{URL}&channels=2&block_bytes=512"
BF16 = f"{URL}&gradient_formats=fp32,bf16&copy_out_formats=bf16"
PLAIN = URL.replace("axdimm", "smartssd").replace("8MiB", "1MiB") + "&chunk_bytes=512"
"""A card without drives."""


def card_url(cards: int, subgroup: int) -> str:
    """Cards whose drives are given with `drives=`."""
    return f"{PLAIN}&cards={cards}&subgroup_elements={subgroup}&drive=unused"


HOMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "host": (URL, URL, {"memory": 11_000}),
    "cards": (card_url(2, 128), PLAIN, {}),
    "processor": ("host:", "host:", {"memory": 11_000}),
}
"""Device with drives, the same without, and options: memory for one large parameter of the tests'
usual job, and not for two."""

OPTIMIZERS: dict[str, Any] = {
    "adamw": (nearstep.optim.AdamW, {"lr": 1e-2}),
    "amsgrad": (nearstep.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "sgd": (nearstep.optim.SGD, {"lr": 1e-2}),
    "momentum": (nearstep.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "adagrad": (nearstep.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.125}),
}


EARLY = {"updates": "in-backward"}


def images(drives: int, blocks: int = 600, owner: str = "a test") -> list[bytes]:
    """New drives."""
    places = [MemoryBlocks(bytes(blocks * BLOCK_BYTES), each) for each in range(drives)]
    create_set(places, drive_bytes=blocks * BLOCK_BYTES, owner=owner, extent_bytes=2 * BLOCK_BYTES)
    return [bytes(each.image) for each in places]


@dataclass
class Drives:
    """A store on drives in memory, which begin with these images."""

    images: Sequence[bytes]
    journal: Journal = field(default_factory=Journal)

    def __post_init__(self) -> None:
        self.places = [MemoryBlocks(each, at, self.journal) for at, each in enumerate(self.images)]
        self.store = Store.open(self.places, owner=None, queue_depth=2)


@contextmanager
def drives(count: int = 2, blocks: int = 600) -> Iterator[Drives]:
    """New drives in memory, opened."""
    made = Drives(images(count, blocks))
    try:
        yield made
    finally:
        made.store.close()


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes
    ----------
    skips : in step t, parameter i has no gradient if i + t is a multiple of it.
    early : a backward makes the gradients, and updates the parameters where the optimizer does so.
    """

    shapes: Sequence[tuple[int, ...]]
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float32
    skips: int = 0
    seed: int = 7
    early: bool = False

    def parameters(self) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            nn.Parameter(torch.randn(each, generator=generator).to(self.dtype))
            for each in self.shapes
        ]

    def make(self, parameters: Sequence[Tensor], device: Any, **on: Any) -> Any:
        """Two groups: every third parameter has another learning rate."""
        kind, options = OPTIMIZERS[self.optimizer]
        groups = [{"params": parameters[::3], "lr": 2e-2}]
        rest = [p for i, p in enumerate(parameters) if i % 3]
        if rest:
            groups.append({"params": rest})
        return kind(groups, device=device, **options, **on)

    def trained(self, device: Any, steps: int = 0, **on: Any) -> tuple[list[Any], Any]:
        """Parameters and an optimizer after some steps."""
        parameters = self.parameters()
        return parameters, self.go_on(parameters, self.make(parameters, device, **on), range(steps))

    def resumed(self, device: Any, resume: Any = True, **on: Any) -> tuple[list[Any], Any]:
        """Parameters and an optimizer that has resumed what drives hold."""
        again = [nn.Parameter(torch.zeros_like(p)) for p in self.parameters()]
        return again, self.make(again, device, resume=resume, **on)

    def after(self, device: Any, steps: int, **on: Any) -> dict[str, bytes]:
        """Bits after some steps."""
        return everything(*self.trained(device, steps, **on))

    def go_on(self, parameters: Sequence[Tensor], optimizer: Any, steps: Iterable[int]) -> Any:
        """Make further steps; the optimizer."""
        for step in steps:
            self.step(optimizer, parameters, step)
        return optimizer

    def gradients(self, parameters: Sequence[Tensor], step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        for index, p in enumerate(parameters):
            gradient = torch.randn(p.shape, generator=generator).to(self.dtype)
            p.grad = None if self.skips and not (index + step) % self.skips else gradient

    def step(self, optimizer: Any, parameters: Sequence[Tensor], step: int) -> None:
        if self.early:
            optimizer.zero_grad()
        self.gradients(parameters, step)
        if self.early:
            gradients = [p.grad for p in parameters]
            optimizer.zero_grad()
            pairs = zip(parameters, gradients, strict=True)
            torch.stack([(p * g).sum() for p, g in pairs if g is not None]).sum().backward()
        optimizer.step()


def bits(value: Tensor) -> bytes:
    if not value.numel():
        return b""
    return value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def everything(parameters: Sequence[Tensor], optimizer: Any) -> dict[str, bytes]:
    """Bits of all parameters and all state, and the options of groups."""
    saved = optimizer.state_dict()
    found = {f"p{i}": bits(p) for i, p in enumerate(parameters)}
    for index, state in saved["state"].items():
        for key, value in state.items():
            found[f"{index}.{key}"] = bits(value)
    found["groups"] = repr(saved["param_groups"]).encode()
    return found


def random_job(choose: np.random.Generator, optimizer: str, **more: Any) -> Job:
    """Two to six parameters with up to 3,000 elements, one of a single element among them."""
    shapes: list[tuple[int, ...]] = [(1,)]
    for _ in range(int(choose.integers(1, 6))):
        shapes.append((int(choose.integers(1, 31)), int(choose.integers(1, 101))))
    return Job(shapes, optimizer, skips=int(choose.choice([0, 0, 3])), **more)


def stack(
    device: Any, sizes: tuple[int, int, int, int] = (24, 40, 24, 8), **more: Any
) -> tuple[nn.Sequential, Any]:
    """A small model with AdamW."""
    torch.manual_seed(5)
    first, *others = (nn.Linear(*pair) for pair in pairwise(sizes))
    model = nn.Sequential(first, nn.Tanh(), *others)
    return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=device, **more)


def iteration(model: nn.Sequential, optimizer: Any, number: int, passes: int = 1) -> list[float]:
    """Forward and backward, and a step; losses."""
    optimizer.zero_grad()
    generator, losses = torch.Generator().manual_seed(number), []
    for _ in range(passes):
        loss = model(torch.randn(4, model[0].in_features, generator=generator)).square().mean()
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return losses
