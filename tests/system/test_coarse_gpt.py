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

DEVICES = {"golden": "golden:coarse?devices=8&groups=2"}


@pytest.fixture
def train(monkeypatch):
    """Runs the example with these arguments."""
    monkeypatch.syspath_prepend(EXAMPLES)
    app = typer.Typer()
    app.command()(importlib.import_module("coarse_gpt").main)
    yield lambda *arguments: CliRunner().invoke(app, [*SHORT, *arguments])
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_eight_workers_train_one_model(train, device, wire) -> None:
    result = train("--device", DEVICES[device], "--wire", wire)
    assert result.exit_code == 0, result.output
    losses = [float(each) for each in re.findall(r"loss (\d+\.\d+)", result.output)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "weights of all workers are equal" in result.output
    different, compared = re.search(r"(\d+) of ([\d,]+) bits differ", result.output).groups()
    assert int(different) == 0
    assert int(compared.replace(",", "")) % (3 * 8 * 32) == 0
    assert int(compared.replace(",", "")) > 10**7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--wire", "fp8"), "wire must be one of"),
        (("--size", "huge"), "--size must be one of"),
        (("--device", "golden:smartssd"), "must be a COARSE pool"),
        (("--device", "golden:coarse?devices=8&memory_bytes=64KiB"), "cannot allocate"),
    ],
)
def test_wrong_arguments_are_refused_in_plain_words(train, arguments, words) -> None:
    result = train(*arguments)
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output
