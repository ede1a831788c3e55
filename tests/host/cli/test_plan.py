"""`nearstep plan`."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nearstep.cli.plan import command
from nearstep.memferry.profile import from_json

PARAMETERS = 437_928_960
"""Bytes of BERT-base's, in fp32."""

RUNNER = CliRunner()
APP = typer.Typer()
APP.command()(command)


def run(*arguments: object) -> tuple[int, str]:
    done = RUNNER.invoke(APP, [*map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_a_model_is_planned_and_what_is_written_is_read_again(tmp_path: Path) -> None:
    plan, profile = tmp_path / "new" / "plan.json", tmp_path / "profile.json"
    trace, image = tmp_path / "trace.json", tmp_path / "timeline.png"
    code, output = run(
        *("bert-base", "--planner", "greedy", "-o", plan, "--profile", profile),
        *("--trace", trace, "--picture", image),
    )
    assert code == 0, output
    assert "(modelled)" in output
    assert "embedding.word" in output
    assert output.count("Algorithm 1") == 1
    made = from_json(profile.read_text(encoding="utf-8"))
    assert len(json.loads(plan.read_text(encoding="utf-8"))["layers"]) == len(made.layers)
    names = {each["name"] for each in json.loads(trace.read_text())["traceEvents"]}
    assert {"load block0.qkv", "forward embedding.word", "update head.pooler"} <= names
    assert image.read_bytes()[1:4] == b"PNG"
    code, again = run(profile, "--plan", plan, "--system", "zero-offload")
    assert code == 0, again
    line = next(each for each in output.splitlines() if each.startswith("this plan"))
    assert line in again


def test_the_exact_plan_says_what_it_proves() -> None:
    code, output = run("bert-base", "--reserve", 0, "--planner", "exact")
    assert code == 0, output
    assert "no plan is faster" in output
    assert output.count("Algorithm 1") == 8


def test_gradients_are_kept_on_request() -> None:
    code, output = run("bert-base", "--planner", "greedy", "--keep-gradients")
    assert code == 0, output
    assert " host " not in output
    assert output.count(" GPU ") > 70


def test_with_hardly_a_budget_everything_stays_in_host_memory() -> None:
    code, output = run("bert-base", "--budget", 100, "--planner", "greedy")
    assert code == 0, output
    assert " 0 bytes of parameters and gradients on the GPU" in output


@pytest.mark.parametrize("budget", ["64MiB", "67108864", "15.33%"])
def test_a_budget_is_text_as_of_offload(budget: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, output = run("bert-base", "--budget", budget, "--planner", "greedy", "--output", path)
    assert code == 0, output
    found = json.loads(path.read_text())["budget_bytes"]
    assert found == (1 << 26 if "%" not in budget else int(Fraction("15.33") * PARAMETERS / 100))


def test_an_edited_plan_is_refused_with_its_first_fault(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("bert-base", "--planner", "greedy", "-o", plan)
    plan.write_text(plan.read_text().replace('"mode": "GFGB"', '"mode": "CPU"', 1))
    code, output = run("bert-base", "--plan", plan)
    assert code == 1
    assert "layer block0.qkv: mode must be one of GFGB, DHA, DFGB, not 'CPU'" in output
    code, output = run("roberta-base", "--plan", plan)
    assert code == 1
    assert "fingerprint" in output


def test_ranks_are_rows(tmp_path: Path) -> None:
    image = tmp_path / "ranks.png"
    options = ("--platform", "coarse-p3", "--dtype", "fp16", "--sequence", 64)
    code, output = run("bert-base", *options, "--ranks", "1,8,16", "-p", image)
    assert code == 0, output
    rows = [line.split("│")[1:8] for line in output.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["1", "8", "16"]
    assert [row[1].strip() for row in rows] == ["1", "1", "2"]
    assert float(rows[0][6]) == float(rows[1][6]) == 0 < float(rows[2][6])
    assert image.read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "x"), "integers from 1 with commas between, not 'x'"),
        (("--ranks", "9"), "at most 8 or a multiple of it"),
        (("--ranks", "16"), "no part 'network'"),
        (("--ranks", "8", "--state", "tape"), "memory or drives"),
        (("--ranks", "8", "--budget", "25%"), "does not go with --budget"),
        (("--network", "1e9"), "need --ranks"),
    ],
)
def test_ranks_that_cannot_be_are_refused(arguments: tuple[str, ...], words: str) -> None:
    code, output = run("bert-base", "--sequence", 64, *arguments)
    assert code == 2, output
    assert words in " ".join(output.replace("│", " ").split())
