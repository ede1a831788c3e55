"""`nearstep config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nearstep import cli

CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "scheduler": {"type": "WarmupLR"},
}


def run(*arguments: object) -> Result:
    words = ["config", "check", *map(str, arguments)]
    return CliRunner().invoke(cli._app(), words, env={"COLUMNS": "200"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "ds_config.json"


def test_each_key_is_a_row_and_all_that_is_refused_is_named(file: Path) -> None:
    done = run(file)
    assert done.exit_code == 1
    for text in ("optimizer.type", '"AdamW"', "zero_optimization.overlap_comm", "ignored"):
        assert text in done.stdout
    assert "torch.optim.lr_scheduler" in done.stdout
    assert "auto={'optimizer.params.lr': ...}" in done.stdout
    assert "2 of 5 keys are refused" in done.stderr


@pytest.mark.parametrize("value", ["0.5", '"0.5"'])
def test_values_and_keys_to_leave_out_are_options(file: Path, value: str) -> None:
    done = run(file, "--auto", f"optimizer.params.lr={value}", "--ignore", "scheduler", "--json")
    rows = {row["key"]: row for row in json.loads(done.stdout)}
    assert len(rows) == 5
    assert rows["scheduler"]["fate"] == "left out"
    assert rows["optimizer.params.lr"]["value"] == json.loads(value)
    assert done.exit_code == (value[0] == '"')


def test_processes_count(file: Path) -> None:
    file.write_text(json.dumps({"optimizer": {"type": "SGD"}, "train_batch_size": 6}))
    assert run(file, "--world-size", 3).exit_code == 0
    done = run(file, "--world-size", 4)
    assert done.exit_code == 1
    assert "a multiple of 4 processes" in done.stdout
