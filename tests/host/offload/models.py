"""Models of many kinds, each with what a training step does with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Stack(nn.Module):
    """Linear layers with norms between; `depth` of them."""

    def __init__(self, depth: int, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + functional.gelu(layer(norm(x)))
        return x


class Tied(nn.Module):
    """An embedding whose weights are those of the last layer, too, and a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :8].abs() * 100).long() % 32
        hidden = self.layer(torch.tanh(self.layer(self.embedding(tokens))))
        return self.head(hidden)


class Functional(nn.Module):
    """Parameters of the root, weights of children used by themselves, views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(()))
        self.child = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.shift
        x = functional.linear(x, self.child.weight.t() * 0.5, self.child.bias)
        x = torch.tanh(x @ self.other.weight.t())
        half = self.other.weight[: WIDTH // 2]
        first, second = self.child.weight.chunk(2)
        return functional.linear(x, half) + functional.linear(x, first - second)


class Frozen(nn.Module):
    """Frozen layers between others, one of them in no group of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.frozen(torch.relu(self.first(x)))))


class Checkpointed(nn.Module):
    """Blocks whose activations are computed anew in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Stack(2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Recurrent(nn.Module):
    """What torch computes in one call with many parameters: an LSTM and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, -1, WIDTH)
        x = x + self.lstm(x)[0]
        return self.attention(x, x, x, need_weights=False)[0]


class Convolutions(nn.Module):
    """Convolutions, batch norms with their buffers, and a layer with a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Conv1d(4, 2, 3, padding=1)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x[:, None])))
        return self.last(self.second(x).flatten(1))


class Saver(torch.autograd.Function):
    """A function of the user's that saves a parameter."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Custom(nn.Module):
    """Layers that a function of the user's computes, with a hook on what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(3))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(Saver.apply(x, weight))

        def halved(saved: Tensor) -> Tensor:
            return saved * 0.5

        with torch.autograd.graph.saved_tensors_hooks(halved, lambda kept: kept):
            return self.layer(torch.tanh(x))


class Unlucky(nn.Module):
    """Gives what it gets, and raises in forward or in backward if `where` says so."""

    def __init__(self, kind: type[BaseException] = OSError) -> None:
        super().__init__()
        self.where: str | None = None
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            self.fail()
        if self.where == "backward":
            x = x.clone()
            x.register_hook(self.fail)
        return x

    def fail(self, *_: Tensor) -> None:
        raise self.kind("in the user's program")


KINDS: dict[str, Callable[[], nn.Module]] = {
    "stack": lambda: Stack(4),
    "tied": Tied,
    "functional": Functional,
    "frozen": Frozen,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant": lambda: Checkpointed(reentrant=True),
    "recurrent": Recurrent,
    "convolutions": Convolutions,
    "custom": Custom,
}
