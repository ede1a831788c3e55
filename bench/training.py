"""What the benchmarks share that train the small GPT of the examples, and compare losses."""

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from harness import ROOT, Results, track

sys.path.insert(0, str(ROOT / "examples"))

from gpt import Gpt as Gpt
from gpt import GptConfig as GptConfig
from gpt import sized
from stdlib_text import Batches, Text, load_text
from trainer import Trainer

SIZE = "tiny"
BATCH, CONTEXT = 8, 64
VALIDATION_BATCHES = 16

Optimizer = Any


def train(
    optimizer_of: Callable[[Gpt], Optimizer],
    text: Text,
    *,
    steps: int,
    seed: int,
    last: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Results, Optimizer]:
    """Train once; the training loss is the mean of the `last` steps."""
    torch.manual_seed(seed)
    model = Gpt(sized(SIZE, context=CONTEXT)).to(dtype)
    optimizer = optimizer_of(model)
    trainer = Trainer(model, optimizer, steps)
    batches = Batches(text.training, batch=BATCH, context=CONTEXT, seed=seed)
    for _ in range(steps):
        trainer.train(batches.draw())
    unseen = Batches(text.validation, batch=BATCH, context=CONTEXT, seed=seed)
    found = {
        "seed": seed,
        "losses": trainer.losses,
        "training_loss": statistics.mean(trainer.losses[-last:]),
        "validation_loss": trainer.validate([unseen.draw() for _ in range(VALIDATION_BATCHES)]),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    return found, optimizer


def summary(runs: list[Results]) -> Results:
    """Mean and spread over the seeds."""
    row: Results = {"runs": runs}
    for name in ("training_loss", "validation_loss"):
        values = [run[name] for run in runs]
        row[name] = statistics.mean(values)
        row[f"{name}_spread"] = max(values) - min(values)
    return row


def trained(
    cases: Iterable[Any], row: Callable[[Any, Text], Results], steps: int, seeds: int
) -> Results:
    """Measure a row for each case, with one thread, and note what all have in common."""
    torch.set_num_threads(1)
    text = load_text()
    begun = time.perf_counter()
    rows = [row(case, text) for case in track(cases, "training")]
    return {"size": SIZE, "parameters": rows[0]["runs"][0]["parameters"], "batch": BATCH,
        "context": CONTEXT, "steps": steps, "seeds": seeds, "text": text.source,
        "text_sha256": text.sha256, "aten_capability": torch.backends.cpu.get_cpu_capability(),
        "seconds": time.perf_counter() - begun, "rows": rows}  # fmt: skip
