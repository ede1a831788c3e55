"""Benchmarks: what they print agrees with what they measure, and the gate names what fell."""

import ast
import dataclasses
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nearstep.coarse.pipeline import LinkUse
from nearstep_sim.models.dram.device import BusClocks
from nearstep_sim.synthesis import AREA
from nearstep_sim.timing import CELLS
from nearstep_spec.updater.config import UpdateKernelConfig

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import check
import harness
import measuring
import page

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
COUNT = 1000
RULES = ("adam", "adam_amsgrad", "sgd", "sgd_momentum", "adagrad")
SCRIPTS = sorted(path.stem for path in BENCH.glob("bench_*.py"))
CLASSES = (BusClocks, LinkUse)
IMPORTED = {*AREA, *CELLS, *(field.name for of in CLASSES for field in dataclasses.fields(of))}
"""Keys that come from the simulator; rows that are a mapping have `key` and `value`."""

FIELD = re.compile(r"\{(\w+(?:\[[^\]]*\])*)\??(?::[^{}]*)?\}")


@pytest.mark.parametrize(
    ("rule", "read", "written"),
    [("adam", 4, 3), ("adam_amsgrad", 5, 4), ("sgd", 2, 1), ("sgd_momentum", 3, 2),
     ("adagrad", 3, 2)],
)  # fmt: skip
def test_an_update_needs_each_array_once(rule: str, read: int, written: int) -> None:
    config = UpdateKernelConfig(rules=RULES, compression=("fused",))
    assert measuring.update_bytes(config, rule, COUNT) == 4 * COUNT * (read + written)
    # an index and a value for each pair, once, in place of whole gradients
    with_pairs = measuring.update_bytes(config, rule, COUNT, pairs=10)
    assert with_pairs == 4 * COUNT * (read - 1 + written) + 8 * 10


def test_a_scan_needs_the_gradients() -> None:
    assert measuring.scan_bytes(COUNT) == 4 * COUNT


def sources(script: str) -> Iterator[ast.Module]:
    """The script, and what it imports of bench/."""
    tree = ast.parse((BENCH / f"{script}.py").read_text(encoding="utf-8"))
    yield tree
    for node in ast.walk(tree):
        name = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
        if name and name != "harness" and (BENCH / f"{name}.py").exists():
            yield from sources(name)


def keys(script: str) -> re.Pattern[str]:
    """Strings and arguments that can be keys of results; what is formatted may be any text."""
    found = {"key", "value", *IMPORTED}
    for tree in sources(script):
        for node in ast.walk(tree):
            match node:
                case ast.Constant(str(text)):
                    found.add(re.escape(text))
                case ast.JoinedStr(parts):
                    texts = [str(p.value) if isinstance(p, ast.Constant) else "" for p in parts]
                    if len("".join(texts)) >= 3:
                        found.add("".join(re.escape(text) or ".+" for text in texts))
                case ast.keyword(str(name)) | ast.arg(name):
                    found.add(re.escape(name))
    return re.compile("|".join(sorted(found - {""})), re.DOTALL)


def fields(template: str) -> set[str]:
    """Keys of all values in the paragraphs and tables of a section."""
    found = FIELD.findall(template)
    names = {name for each in found for name in re.split(r"[\[\]]+", each) if name}
    return {name for name in names if not name.isdecimal()}


REPORTED = re.compile(r'^ +report\(\n? *"(\w+)"', re.MULTILINE)
OF = {
    name: script
    for script in SCRIPTS
    for name in REPORTED.findall((BENCH / f"{script}.py").read_text(encoding="utf-8"))
}
"""Script of each section."""


def test_every_value_of_a_section_is_measured() -> None:
    compared, missing = 0, {}
    for name, script in OF.items():
        known, wanted = keys(script), fields(harness.SECTIONS[name][1])
        if found := {each for each in wanted if not known.fullmatch(each)}:
            missing[name] = found
        compared += len(wanted)
    print(f"{compared} values")
    assert missing == {}
    assert compared > 400


def test_a_value_of_a_section_that_nothing_measures_is_found() -> None:
    template = harness.SECTIONS["link"][1]
    assert "wire" in fields(template)
    renamed = fields(template.replace("{wire:", "{on_the_wire:"))
    missing = {name for name in renamed if not keys("bench_link").fullmatch(name)}
    assert missing == {"on_the_wire"}


def test_every_section_is_reported_by_one_script() -> None:
    assert sorted(OF) == sorted(harness.SECTIONS)
    assert sorted(set(SCRIPTS) - set(OF.values())) == ["bench_area"]
    assert len(page.SECTIONS) == len(harness.SECTIONS) - len(page.ELSEWHERE)


@pytest.mark.parametrize(
    "command",
    ["accuracy --count 64 --steps 2", "link --parameters 1024"],
)
def test_json_terminal_and_page_have_the_same_table(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *arguments = command.split()
    script = importlib.import_module(f"bench_{name}")
    monkeypatch.setattr(harness, "FOLDER", tmp_path)
    app = typer.Typer()
    app.command()(script.main)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    path = tmp_path / f"{name}.json"
    found = harness.read(path)
    assert set(harness.META) < set(found)
    section = "\n".join(page.render(path))
    for table in found["tables"]:
        assert f"| {' | '.join(column for column, _ in table)} |" in section
    changed = json.loads(path.read_text())
    changed["tables"][0][0][0] = "another column"
    path.write_text(json.dumps(changed))
    with pytest.raises(harness.BenchError, match=r"columns must be .* not .*another column"):
        harness.read(path)


RATIOS = """
[{"run": "bench_link.py", "seconds": 1, "ratios": [
  ["rate of a", "link:rows/case=a/ratio", 0.9, 0.05, "higher"],
  ["cycles of b", "link:rows/case=b, c/ratio", 2.5, 0.01, "lower"]
]}, {"run": "bench_cards.py", "seconds": 500, "ratios": []}]
"""


@pytest.mark.parametrize(
    ("a", "b", "fell"),
    [
        (0.9, 2.5, None),
        (0.86, 2.52, None),
        (1.9, 1.5, None),
        (0.85, 2.5, r"rate of a: expected at least 0\.855 .*0\.9 with .*5\.0%.*, not 0\.85"),
        (0.9, 2.53, r"cycles of b: expected at most 2\.525 .*, not 2\.53"),
        (0.9, "none", r"cycles of b: .* must be a number, not 'none'"),
        (None, 2.5, r"rate of a: .* must be a number, not None"),
    ],
)
def test_the_gate_names_what_fell(
    a: float | None,
    b: float | str,
    fell: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"case": "a", "ratio": a}, {"case": "b, c", "ratio": b}]
    results = {"command": "python bench/bench_link.py", "rows": rows}
    (tmp_path / "link.json").write_text(json.dumps(results))
    (tmp_path / "ratios.json").write_text(RATIOS)
    monkeypatch.setattr(check, "FOLDER", tmp_path)
    monkeypatch.setattr(check, "FILE", tmp_path / "ratios.json")
    app = typer.Typer()
    app.command()(check.main)
    result = CliRunner().invoke(app, ["--measured"])
    assert result.exit_code == (0 if fell is None else 1), result.output
    assert fell is None or re.search(fell, result.output), result.output


@pytest.mark.parametrize(
    ("results", "first", "second"),
    [
        (None, "there is no ", "there is no "),
        (
            {"command": "python bench/bench_link.py", "rows": [{"case": "a", "ratio": 0.9}]},
            None,
            "there is no 'case=b, c' of 'rows/case=b, c/ratio'",
        ),
        ({"command": "python bench/bench_link.py --x"}, ".* must be of `.*", ".* not of `.* --x`"),
    ],
)
def test_the_gate_names_what_is_not_there(
    results: object, first: str | None, second: str, tmp_path: Path
) -> None:
    (run, _) = check.runs(RATIOS)
    if results:
        (tmp_path / "link.json").write_text(json.dumps(results))
    *fell, last = check.compare([run], tmp_path, measure=False)
    assert re.match(f"cycles of b: {second}", last), last
    assert (first is None and fell == []) or re.match(f"rate of a: {first}", fell[0]), fell


def test_quick_and_only_choose_runs() -> None:
    every = check.runs(RATIOS)
    commands = lambda some: [run.command for run in some]  # noqa: E731
    assert commands(check.chosen(every, quick=True, only="")) == ["bench_link.py"]
    assert commands(check.chosen(every, quick=False, only="cards")) == ["bench_cards.py"]
    assert commands(check.chosen(every, quick=False, only="rate of a")) == ["bench_link.py"]
    assert check.chosen(every, quick=True, only="cards") == []


def test_committed_ratios_are_of_benchmarks_that_there_are() -> None:
    ratios = 0
    for run in check.runs(check.FILE.read_text(encoding="utf-8")):
        script = run.command.partition(".py")[0]
        names = {name for name, of in OF.items() if of == script}
        assert {ratio.path.partition(":")[0] for ratio in run.ratios} <= names, run.command
        known = keys(script)
        for ratio in run.ratios:
            for part in ratio.path.partition(":")[2].split("/"):
                key = part.partition("=")[0]
                assert key.isdecimal() or known.fullmatch(key), (ratio.path, part)
        ratios += len(run.ratios)
    assert ratios >= 20


def test_a_run_that_fails_is_named() -> None:
    run = check.Run("bench_link.py --no-such-option", 1, ())
    (said,) = check.compare([run], ROOT, measure=True)
    assert said == "bench/bench_link.py --no-such-option ended with 2"


@pytest.mark.deep
@pytest.mark.parametrize(
    "command",
    [
        "handler --subgroup 8192 --count 3",
        "formats --count 10000",
        "memferry --profiles 5 --exact-profiles 1",
        "coarse_update --kib 16",
        "step --steps 1 --largest 65536",
        "smartssd --count 10000",
        "coarse --largest 1",
        "coarse_exact --kib 16",
        "overflow --count 8 --elements 65536 --steps 1 --times 2",
        "storage --megabytes 8 --rounds 1",
        "cards --elements 1048576 --subgroup 65536 --steps 2 --paced-elements 1048576",
        "compression --steps 3 --seeds 1",
        "coarse_service --mib 0.0625,1 --rounds 3 --processes 2",
        "host --parameters 1000000 --steps 2 --only dense --no-memory",
        "offload --most 1",
    ],
)
def test_benchmarks_run(command: str) -> None:
    """The terminal is printed from the JSON, so that a section which does not fit it fails."""
    name, *arguments = command.split()
    program = [sys.executable, f"bench/bench_{name}.py", *arguments]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"written: .*\.json", done.stdout)
