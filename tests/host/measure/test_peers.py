"""Optimizers of other projects beside torch's and `host:`."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from nearstep.cli.peers import command
from nearstep.measure import peers
from nearstep.measure.peers import PEERS, Peer, PeerResult, peer_results

SIZES = [100, 17]
RUNNER = CliRunner()
APP = typer.Typer()
APP.command()(command)


def measured(*chosen: Peer) -> list[PeerResult]:
    return list(peer_results(SIZES, 2, chosen))


def named(name: str, dtype: str) -> Peer:
    (found,) = (each for each in PEERS if (each.name, each.dtype) == (name, dtype))
    return found


@pytest.mark.parametrize(("dtype", "nbytes"), [("fp32", 16.0), ("bf16", 8.0)])
def test_bits_of_the_processor_are_torchs(dtype: str, nbytes: int) -> None:
    theirs, ours = measured(named("torch, fused", dtype), named("nearstep host:", dtype))
    assert theirs.problem is None
    assert ours.problem is None
    assert theirs.not_torch == ours.not_torch == 0.0
    assert theirs.ulps == ours.ulps
    assert 0.1 < ours.ulps < 3.0
    assert theirs.bytes_per_parameter == ours.bytes_per_parameter == nbytes
    assert ours.parameters_per_s > 0.0
    assert ours.of_stream > 0.0


def test_an_optimizer_with_other_bits_is_seen() -> None:
    def one_is_off(_: Any, parameters: list[torch.Tensor], options: dict[str, Any]) -> Any:
        with torch.no_grad():
            parameters[0][0] += 64.0 * torch.finfo(torch.float32).eps * parameters[0][0]
        return torch.optim.AdamW(parameters, fused=True, **options)

    theirs, other = measured(named("torch, fused", "fp32"), Peer("", "torch", "torch", one_is_off))
    assert other.not_torch == 1 / sum(peers.CHECKED)
    assert 16 < (other.ulps - theirs.ulps) * sum(peers.CHECKED) < 256


def test_a_peer_that_cannot_be_measured_is_a_row_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nearstep_no_cuda.py").write_text("raise RuntimeError('CUDA_HOME is not set')")
    monkeypatch.syspath_prepend(tmp_path)

    def broken(module: Any, parameters: Any, options: Any) -> Any:
        raise RuntimeError("needs another processor")

    missing, stopped, failed = measured(
        Peer("a", "nearstep_no_such_module", "no-such-package", broken),
        Peer("c", "nearstep_no_cuda", "no-cuda", broken),
        Peer("b", "torch", "torch", broken),
    )
    assert missing.problem is not None
    assert missing.problem.endswith(": pip install no-such-package")
    assert missing.problem.startswith("not installed (No module named ")
    assert stopped.problem == "does not run: RuntimeError: CUDA_HOME is not set"
    assert failed.problem == "does not run: RuntimeError: needs another processor"
    assert missing.parameters_per_s is failed.parameters_per_s is None


def test_bytes_of_a_subclass_are_those_of_its_tensors() -> None:
    class Quantized(torch.Tensor):
        @staticmethod
        def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
            made.codes, made.scales = codes, scales
            return made

        def __tensor_flatten__(self) -> Any:
            return ["codes", "scales"], None

        @classmethod
        def __torch_dispatch__(cls, call: Any, *_: Any) -> Any:
            raise NotImplementedError(call)

    each = Quantized(torch.zeros(512, dtype=torch.uint8), torch.zeros(2))
    assert each.nbytes == 2048
    assert peers._nbytes(each) == 520


def test_tensors_are_whole_groups_so_that_states_in_8_bits_are(monkeypatch) -> None:
    monkeypatch.setattr(peers, "PEERS", [named("nearstep host:, 8-bit state", "fp32")])
    done = RUNNER.invoke(APP, ["--parameters", "9000", "--tensors", "2", "--steps", "1"])
    assert done.exit_code == 0, done.output
    assert "AdamW of 8,704 parameters" in done.output


def test_the_command_prints_a_table_and_every_problem(monkeypatch) -> None:
    chosen = [named("torch, fused", "fp32"), Peer("other", "nearstep_no_such", "no-such", None)]
    monkeypatch.setattr(peers, "PEERS", chosen)
    options = ["--parameters", "117", "--tensors", "2", "--steps", "1"]
    done = RUNNER.invoke(APP, options, env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    assert f"torch, fused ({version('torch')})" in done.output  # without the build's suffix
    assert "AdamW of 116 parameters" in done.output
    assert done.output.endswith("pip install no-such\n")
    rows = json.loads(RUNNER.invoke(APP, [*options, "--json"]).stdout)
    assert [row["name"] for row in rows] == ["torch, fused", "other"]
    assert rows[0]["not_torch"] == 0.0
    done = RUNNER.invoke(APP, [*options, "--json", "--only", "none"], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert "--only must be part of one of torch, fused, other, not 'none'" in done.output
