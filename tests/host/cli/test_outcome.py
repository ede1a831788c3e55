"""What all commands do alike: exit statuses, `--json`, whole tables, progress."""

import json
import math
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from rich.table import Table
from typer.testing import CliRunner, Result

import nearstep
from nearstep import cli
from nearstep.cli.outcome import print_json, print_table, table_of
from nearstep.cli.trace import timeline_of

ROOT = Path(__file__).resolve().parents[3]
LION = str(ROOT / "examples" / "lion.py")
TERNARY = str(ROOT / "examples" / "ternary.py")
PROFILE = '{"layers": []}'
VIOLATION = """# nearstep DDR4 command trace 1
# DDR4-1600 8Gb x8 CL=11 CWL=9
10 ACT 0 1 2 77 -
11 RD 0 1 2 77 8
"""

STATUSES = (
    ("area", "--json --md", 2),
    ("axdimm library", "-o text/folder", 2),
    ("bitstream", "nosuch", 2),
    ("bitstream", "ulx3s_85f --memory none", 2),
    ("cache", "--nosuch", 2),
    ("cache clear", "more", 2),
    ("cache prepare", "more", 2),
    ("card serve", "golden:smartssd --socket s --drive text", 2),
    ("card serve", "golden:smartssd --socket text --drive new", 2),
    ("card serve", "serial:nosuch --socket s --drive new", 1),
    ("coarse serve", "--device golden:coarse?devices=0 --listen unix:", 2),
    ("coarse serve", "--device golden:axdimm --listen unix:", 2),
    ("coarse serve", "--device serial:nosuch --listen unix:", 1),
    ("config check", "text", 2),
    ("config check", "refused.json", 1),
    ("decompressor check", "missing.py:NAME", 2),
    ("decompressor check", "text:NAME", 2),
    ("decompressor check", "wrong.py:TERNARY", 1),
    ("devices", "golden:axdimm?lanes=3", 2),
    ("devices", "golden:axdimm?rules=missing.py:RULE", 2),
    ("doctor", "more", 2),
    ("dram-replay", "missing", 2),
    ("dram-replay", "text", 2),
    ("dram-replay", "violation", 1),
    ("offload", "golden:axdimm --layers 0", 2),
    ("offload", "golden:axdimm --picture x.docx", 2),
    ("offload", "serial:nosuch --layers 1 --width 16 --batch 1", 1),
    ("open", "nvme:nosuch", 1),
    ("open", "serial:nosuch", 1),
    ("paper axdimm", "--output text/rows.json", 2),
    ("plan", "text.json", 2),
    ("peers", "--parameters 0", 2),
    ("plan", "bert-base --plan plan.json", 1),
    ("platform check", "missing.toml", 2),
    ("platform check", "text", 1),
    ("platform list", "more", 2),
    ("platform show", "nosuch", 2),
    ("platform show", "text.toml", 2),
    ("registers", "axdimm -o text/map.md", 2),
    ("rtl", "nosuch", 2),
    ("rtl", "fp32_add --depth 0", 2),
    ("rule check", "missing.py", 2),
    ("rule check", "text", 2),
    ("rule check", "reads_nothing.py", 1),
    ("serve", "golden:axdimm?lanes=3", 2),
    ("serve", "serial:nosuch", 1),
    ("storage check", "missing", 2),
    ("storage check", "text", 2),
    ("storage export", "missing -o out", 2),
    ("storage export", "text -o out", 2),
    ("trace", "serial:nosuch", 1),
)
"""Words of each command, in a folder with the files of `files`, and its exit status."""

REFUSED = {
    "paper axdimm": {
        "--models gpt3-large,gpt4": "gpt4",
        "--policy random": "random",
        "--picture x.docx": ".docx",
        "--output x.json --trace t.json --picture x.docx": ".docx",
        "--output /dev/null/x.json": "/dev/null/x.json",
    },
    "paper memferry": {
        "--models bert-base,gpt4": "gpt4",
        "--output /dev/null/x.json": "/dev/null",
        "--bars x.docx --output x.json": ".docx",
        "--csv --json": "--json",
    },
    "paper coarse": {
        "--only figure-8,figure-9": "figure-9",
        "--output /dev/null/x.json": "/dev/null",
        "--picture x.docx": ".docx",
        "--picture x.png --no-timeline": "--no-timeline",
        "--picture x.png --only figure-8": "--only",
    },
    "paper smart-infinity": {
        "--only table-1,figure-4": "figure-4",
        "--picture x.docx --output x.json": ".docx",
        "--output /dev/null/x.json": "/dev/null",
        "--bench .": "bench_smartssd.py",
    },
    "offload": {
        "golden:axdimm --layers 1 --width 1000000000 --batch 1": "torch must be able to allocate",
    },
    "sweep": {
        "missing.toml": "No such file",
        "grid.toml --backend threads": "must be of loky",
        "grid.toml --picture x.docx": ".docx",
    },
    "plan": {
        "bert-base --ranks 9": "multiple of it",
        "bert-base --ranks 8 --reserve 0 --keep-gradients": "with --reserve, --keep-gradients",
        "bert-base --ranks 8 --planner exact --system zero-offload": "--planner, --system",
        "bert-base --plan plan.json --budget 25% --planner greedy": "with --budget, --planner",
        "bert": "no model 'bert'",
        "resnet50": "no model 'resnet50'",
        "missing.json": "missing.json",
        "bert-base --planner fast": "not 'fast'",
        "bert-base --system none": "not 'none'",
        "bert-base --dtype fp8": "dtype must be",
        "bert-base --platform none": "no machine",
        "bert-base --reserve 2": "reserve",
        "bert-base --sequence 4096": "sequence",
        "bert-base --picture x.docx": ".docx",
    },
    "registers": {
        "nothing": "must be one of axdimm",
        "axdimm --format pdf": "json, rdl, c, md",
        "axdimm --lanes 3": "axdimm: option lanes='3': lanes must be one of",
        "axdimm --order fast": "option order='fast': there is no such choice; valid: default",
        "axdimm-arbiter --density 2Gb": "option density='2Gb': there is no such choice",
        "axdimm-arbiter --lanes 8": "lanes must be 16",
        "coarse --lanes 16": "coarse: option lanes='16': there is no such option; valid: groups",
        "coarse-sync --order default": "option order='default': there is no such option",
        "smartssd --density 8Gb": "option density='8Gb': there is no such option",
        "smartssd --chunk-bytes 1000": "option chunk_bytes='1000': chunk_bytes must be a power",
        "axdimm --mapping x": "option mapping='x': there is no such option",
        "axdimm --bursts-ahead 32": "option bursts_ahead='32': changes nothing in this map",
        "axdimm --lanes 4 --bursts-ahead 8": "bursts_ahead='8': changes nothing in this map",
    },
    "trace": {
        "golden:axdimm": "has no clock",
        "golden:nothing": "nothing",
        "sim:axdimm --sizes 0": "sizes must be",
        "sim:axdimm --sizes many": "many",
        "sim:axdimm --steps 0": "steps must be",
        "sim:axdimm --optimizer RMSprop": "optimizer must be of",
        "sim:axdimm --sizes 1000000000000": "torch must be able to allocate sizes",
        "sim:axdimm --sizes 1000000000000000000000000000000": "torch must be able to allocate",
    },
    "open": {
        "golden:axdimm?lanes=3": "lanes must be one of",
        "golden:nothing": "there is no family",
        "nothing": "a device name reads backend:target",
    },
    "card serve": {
        "golden:nothing --socket s --drive new": "there is no family 'nothing'",
        "golden:smartssd?cards=2 --socket s --drive new": "one channel",
        "golden:smartssd --socket s --drive new --serial #": "letters and digits",
        "golden:smartssd --socket s --drive text --drive-mib 1": "4 bytes of text, not 1",
        "golden:smartssd --socket s --drive new --queues silicon": "queues must be one of python",
    },
    "config check": {
        "missing.json": "No such file",
        "refused.json --auto lr": "must be KEY=VALUE",
    },
    "devices": {
        "sim": "backend:target",
        "nothing:axdimm": "there is no backend 'nothing'",
        "sim:nothing": "there is no family 'nothing'",
    },
    "platform this": {
        "--directory missing": "is no folder",
    },
}
"""What is said of wrong words, with status 2, before anything is computed or written."""

READS_NOTHING = """
from nearstep_spec.rule.rule import Rule

FILL = Rule("fill", lambda *, value: {"q": value}, states=(), outputs=("q",), scalars=("value",))
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the working directory."""
    for name in ("text", "text.json", "text.toml"):
        (tmp_path / name).write_text("text")
    (tmp_path / "refused.json").write_text('{"optimizer": {"type": "Nosuch"}}')
    (tmp_path / "violation").write_text(VIOLATION)
    (tmp_path / "smartssd.json").write_text("{}")
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "reads_nothing.py").write_text(READS_NOTHING)
    ternary = Path(TERNARY).read_text()
    assert ternary.count("lanes=lanes, records=records))") == 1
    (tmp_path / "wrong.py").write_text(
        ternary.replace("lanes=lanes, records=records))", "lanes=1, records=records))")
    )
    (tmp_path / "grid.toml").write_text('run = "train"\n[axes]\nseed = [1]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(cli._app(), list(words), env={"COLUMNS": "300"})


def written(folder: Path) -> set[Path]:
    return {each for each in folder.rglob("*") if folder / "cache" not in (each, *each.parents)}


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command, by its words."""

    def walk(words: tuple[str, ...], command: click.Command) -> Iterator[tuple[str, click.Command]]:
        inner = getattr(command, "commands", {})
        if not inner or getattr(command, "invoke_without_command", False):
            yield " ".join(words), command
        for name, each in inner.items():
            yield from walk((*words, name), each)

    yield from walk((), typer.main.get_command(cli._app()))


def test_wrong_arguments_and_failures_have_the_same_status_everywhere(files: Path) -> None:
    wrong = []
    calls = [*STATUSES, *((n, words, 2) for n, each in REFUSED.items() for words in each)]
    for name, words, status in calls:
        before = written(files)
        done = run(*name.split(), *words.split())
        raised = done.exception is not None and not isinstance(done.exception, SystemExit)
        if done.exit_code != status or raised:
            wrong.append((name, words, done.exit_code, status, done.exception, done.output))
        elif not re.search("error|usage|violation|refused", done.output, re.IGNORECASE):
            wrong.append((name, words, "says no error", done.output))
        said = " ".join(done.output.replace("│", " ").split())
        if REFUSED.get(name, {}).get(words, "") not in said:
            wrong.append((name, words, "does not say why", said))
        if name in REFUSED and status == 2 and written(files) != before:
            wrong.append((name, words, "wrote", written(files) - before))
    assert wrong == []
    assert {name for name, _, status in calls if status == 2} == {n for n, _ in commands() if n}
    failing = {name for name, _, status in calls if status == 1}
    print(f"{len(calls)} calls; fail: {', '.join(sorted(failing))}")
    assert len(failing) >= 11


def test_json_is_a_flag_everywhere_and_prints_json_alone(files: Path) -> None:
    takes = {}
    for name, command in commands():
        for parameter in command.params:
            if "--json" in parameter.opts:
                assert parameter.is_flag, name  # type: ignore[attr-defined]
                takes[name] = command
    (files / "config.json").write_text('{"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}')
    with nearstep.open("golden:smartssd?memory_bytes=1MiB&drive=drives") as device:
        assert device.config
    words = {
        "area": "",
        "config check": "config.json",
        "devices": "golden:axdimm",
        "doctor": None,
        "open": "golden:axdimm?memory_bytes=1MiB",
        "paper axdimm": None,
        "paper coarse": "--only figure-8 --no-sensitivity --no-timeline",
        "paper memferry": "--models bert-base --no-rows --no-sensitivity",
        "paper smart-infinity": "--only table-1",
        "peers": "--parameters 1000 --tensors 2 --steps 1 --only torch",
        "platform show": "axdimm",
        "rtl": "fp32_add",
        "storage check": None,
        "sweep": "grid.toml --backend threading",
    }
    assert set(words) == set(takes)
    printed = 0
    for name, rest in words.items():
        if rest is not None:  # the others have tests of their own
            done = run(*name.split(), *rest.split(), "--json")
            assert done.exit_code == 0, done.output
            assert json.loads(done.stdout), name
            printed += 1
    assert printed == 11


def test_texts_are_printed_as_they_are_and_json_has_its_numbers_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(table_of(("a",), [(":100:",), ("[b]",)], ":smile:"))
    out = capsys.readouterr().out
    for text in (":100:", "[b]", ":smile:"):
        assert text in out
    numbers = [math.nan, math.inf, -math.inf, 1.5, 2]
    print_json([{"a": numbers, "b": (math.nan,)}])
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == [{"a": ["nan", "inf", "-inf", 1.5, 2], "b": ["nan"]}]


@pytest.mark.parametrize("name", ["COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_table_that_is_not_on_a_terminal_is_whole(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    table = Table("name", "what it is", title="all of it")
    words = [f"word{number}" for number in range(200)]
    table.add_row("x" * 90, " ".join(words))
    print_table(table)
    (line,) = (each for each in capsys.readouterr().out.splitlines() if words[0] in each)
    assert "x" * 90 in line
    assert " ".join(words) in line
    printed = 0
    for each in ("devices", "devices sim:axdimm", "platform list", "platform show axdimm", "area"):
        done = run(*each.split())
        assert done.exit_code == 0, done.output
        assert "…" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) > 80
        printed += 1
    assert printed == 5


WORKS = """
import sys, time
from nearstep.cli.outcome import working
with working("first part", total=2) as told:
    time.sleep(0.3)
    told("second part")
    time.sleep(0.3)
print("done")
"""


def test_a_terminal_sees_what_is_under_way_and_a_file_does_not() -> None:
    arguments = [sys.executable, "-c", WORKS]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as running:
        os.close(theirs)
        seen = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            seen += part
        assert running.stdout is not None
        assert running.stdout.read() == b"done\n"
    os.close(ours)
    assert running.returncode == 0
    assert b"first part" in seen
    assert b"second part" in seen


def test_the_page_has_every_command_and_what_its_statuses_mean() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    for name, _ in commands():
        assert not name or f"`{name}" in page, name
    assert "## Exit status" in page


def test_what_takes_long_says_what_it_is_doing() -> None:
    said: list[str] = []
    timeline_of(
        "sim:axdimm?lanes=1&block_bytes=512&memory=ideal", [16], steps=2, progress=said.append
    )
    assert said == ["step 1 of 2", "step 2 of 2"]
