"""The example with eight workers: trains, compares every average, and says no in plain words."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODULES = ("coarse_gpt", "trainer", "stdlib_text", "gpt")
SHORT = ("--steps", "3", "--batch", "2", "--context", "16")

GOLDEN = "golden:coarse?devices=8&groups=2"
RTL = (
    "sim:coarse?devices=8&groups=2&alus=4&entry_phits=8&buffer_entries=4&chunks_ahead=2&queue_jobs=2"
    "&memory_bytes=1MiB&snapshot_pages=64&window=direct&link_latency=8"
)
"""Devices of the same build as those of tests/host/coarse."""


@pytest.fixture
def train(monkeypatch):
    """Run the example with these arguments."""
    monkeypatch.syspath_prepend(EXAMPLES)
    app = typer.Typer()
    app.command()(importlib.import_module("coarse_gpt").main)
    yield lambda *arguments: CliRunner().invoke(app, [*SHORT, *arguments])
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_eight_workers_train_one_model(train, wire) -> None:
    result = train("--device", GOLDEN, "--wire", wire)
    losses = check(result, steps=3)
    assert losses[-1] < losses[0]


def test_eight_workers_train_one_model_on_the_rtl(train) -> None:
    check(train("--device", RTL, "--steps", "1"), steps=1)


def check(result, steps: int) -> list[float]:
    """All averages of a run had golden's bits; the losses of its steps."""
    assert result.exit_code == 0, result.output
    losses = [float(each) for each in re.findall(r"loss (\d+\.\d+)", result.output)]
    assert len(losses) == steps
    assert "weights of all workers are equal" in result.output
    different, compared = re.search(r"(\d+) of ([\d,]+) bits differ", result.output).groups()
    assert int(different) == 0
    assert int(compared.replace(",", "")) % (steps * 8 * 32) == 0
    assert int(compared.replace(",", "")) > steps * 10**7
    return losses


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--wire", "fp8"), "wire must be one of"),
        (("--size", "huge"), "--size must be one of"),
        (("--device", "golden:smartssd"), "must be driven by CoarseDevice"),
        (("--device", "golden:coarse?devices=8&memory_bytes=64KiB"), "cannot allocate"),
    ],
)
def test_wrong_arguments_are_refused_in_plain_words(train, arguments, words) -> None:
    result = train(*arguments)
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output
