"""Real text that every machine has: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Text:
    """Byte tokens split into a training and a validation part.

    `sha256` identifies the text: it depends on the Python release, so two machines can compare
    their losses only where it is equal.
    """

    training: Tensor
    validation: Tensor
    files: int
    source: str
    sha256: str


def load_text(*, validation_share: float = 0.05) -> Text:
    """Read the top-level modules of the standard library in the order of their names.

    Raises
    ------
    FileNotFoundError : this Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.glob("*.py"))
    if not paths:
        raise FileNotFoundError(f"no *.py in {root}: this Python has no standard library sources")
    content = b"".join(path.read_bytes() for path in paths)
    tokens = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
    split = round(len(tokens) * (1.0 - validation_share))
    return Text(
        training=tokens[:split],
        validation=tokens[split:],
        files=len(paths),
        source=f"standard library of Python {platform.python_version()}",
        sha256=hashlib.sha256(content).hexdigest(),
    )


class Batches:
    """Seeded random windows of `tokens`: int64, (batch, context + 1), the same for every run."""

    def __init__(self, tokens: Tensor, *, batch: int, context: int, seed: int) -> None:
        if len(tokens) <= context + 1:
            raise ValueError(f"context must be below the {len(tokens)} tokens, not {context}")
        self._tokens = tokens
        self._window = torch.arange(context + 1)
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> Tensor:
        last = len(self._tokens) - len(self._window)
        starts = torch.randint(last + 1, (self._batch, 1), generator=self._generator)
        return self._tokens[starts + self._window].long()
