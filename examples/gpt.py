"""A small GPT in plain PyTorch: pre-norm decoder blocks over byte tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """Shape of the model.

    `width` is the model dimension, `context` the longest sequence in tokens. Every parameter
    tensor has a multiple of 16 elements when `width` is a multiple of 16, which is the condition
    under which the device and torch's fused AdamW agree in every bit.
    """

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int = 256

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads: {self.width} % {self.heads} != 0")


SIZES: dict[str, tuple[int, int, int]] = {
    # name: layers, heads, width
    "tiny": (2, 2, 64),
    "small": (4, 4, 128),
    "medium": (6, 6, 192),
    "large": (8, 8, 384),
}


def sized(size: str, *, context: int) -> GptConfig:
    """Return the configuration called `size`, one of `SIZES`."""
    layers, heads, width = SIZES[size]
    return GptConfig(layers=layers, heads=heads, width=width, context=context)


class Attention(nn.Module):
    """Causal self-attention, (batch, time, width) to the same shape."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, each on a normalised input with a residual."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Gpt(nn.Module):
    """Decoder-only transformer; the output layer shares the token embedding's weights."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, time, vocabulary) for int64 `tokens` (batch, time)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.token_embedding.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy in nats of each next token; `tokens` is (batch, time + 1)."""
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def decay_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Parameter groups: decay for matrices, none for vectors (biases and norms)."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        return [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
