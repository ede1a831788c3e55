"""The code of the pages runs as it is printed.

In the fast test, devices that would be simulated are the golden ones of the same shape.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import nearstep
from nearstep import cli
from nearstep_hw.generate import GENERATORS
from nearstep_spec.boards.board import BOARDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GOLDEN = {
    "sim:axdimm?memory=ddr4-1600&channels=2": "golden:axdimm?channels=2",
    "sim:axdimm": "golden:axdimm",
    "sim:smartssd": "golden:smartssd",
    "sim:coarse?": "golden:coarse?",
    "sim:board?design=coarse&baud=6250000": "golden:coarse?devices=2&groups=1",
}
"""What stands for a simulated device, the longest name first."""

WITHOUT_GOLDEN = ("commands=", "inject_link", "ring.pull", "drive_read_bytes_per_s", "bus=pcie")
"""What only a simulated device has: code with it runs in the deep test."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def run_blocks(page: Path, *, golden: bool) -> int:
    names: dict[str, object] = {}
    ran = 0
    for block in blocks(page, "python"):
        code = block
        if golden:
            if any(each in block for each in WITHOUT_GOLDEN):
                continue
            for name, stands_for in GOLDEN.items():
                code = code.replace(name, stands_for)
        exec(compile(code, f"{page.name}: {block.splitlines()[0]}", "exec"), names)
        ran += 1
    return ran


WITH_PYTHON = [page for page in PAGES if blocks(page, "python") and page.name != "coarse.md"]
"""docs/coarse.md has a test of its own, which looks at what is printed, too."""


def _beside_examples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder where pages find the examples by the name that they have in a checkout."""
    (folder / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.deep] if page.name == "nitefury.md" else [])
        for page in WITH_PYTHON
    ],
    ids=lambda page: page.name,
)
def test_the_python_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _beside_examples(tmp_path, monkeypatch)
    assert len(WITH_PYTHON) == 12
    assert run_blocks(page, golden=True) >= 1


@pytest.mark.deep
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_as_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _beside_examples(tmp_path, monkeypatch)
    assert run_blocks(page, golden=False) == len(blocks(page, "python"))
    if page.name == "dram-traces.md":
        for channel in (0, 1):
            done = CliRunner().invoke(cli._app(), ["dram-replay", f"build/commands.{channel}"])
            assert "no violation" in done.output


def commands() -> Iterator[tuple[Path, str]]:
    """Every line of a page that is typed at a prompt."""
    for page in PAGES:
        for block in blocks(page, r"\w*"):
            yield from ((page, line[2:]) for line in block.splitlines() if re.match(r"\$ \S", line))


def test_commands_of_the_pages_run_in_a_fresh_checkout(tmp_path: Path) -> None:
    """Without an activated environment; each starts what is there."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    checks = 0
    for page, line in commands():
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert words[1] in targets, (page, line)
        elif words[0] == "openFPGALoader":
            assert words[1:3][0] == "--board", (page, line)
        elif words[0] == "dfu-util":
            assert words[1:4] == ["-a", "0", "-D"], (page, line)
        elif words[0] == ".venv/bin/torchrun":
            (script,) = (word for word in words if word.endswith(".py"))
            assert (ROOT / script).exists(), (page, line)
        elif words[0] == ".venv/bin/python" and words[1] != "-m":
            assert (ROOT / words[1]).exists(), (page, line)
        else:
            module = words[:3] == [".venv/bin/python", "-m", "nearstep"]
            assert module or words[0] == ".venv/bin/nearstep", (page, line)
            _check_command(words[3:] if module else words[1:], tmp_path)
        checks += 1
    assert checks >= 25, checks


def _check_command(words: list[str], folder: Path) -> None:
    """Run what takes no time; of the others, see that they would find what they name."""
    name, arguments = words[0], words[1:]
    if name == "rtl" and "--list" not in arguments:
        assert arguments[0] == "--all" or arguments[0] in GENERATORS, words
    elif name == "bitstream":
        assert arguments[0] in BOARDS, words
    elif name in ("serve", "open") and ("serial:" in arguments[0] or name == "serve"):
        assert arguments[0].partition(":")[0] in ("golden", "sim", "serial"), words
    elif name in ("rule", "decompressor"):
        file = arguments[1].partition(":")[0]
        assert arguments[0] == "check", words
        assert file == "my_rule.py" or (ROOT / file).exists(), words
    elif name == "trace":  # a device without a clock is refused when all else has been read
        done = CliRunner().invoke(cli._app(), [name, "golden:axdimm", *arguments[1:]])
        assert arguments[0].startswith("sim:"), words
        assert "has no clock" in done.output, (words, done.output)
    elif name == "offload":
        done = CliRunner().invoke(cli._app(), [*words, "--layers", "0"])
        assert "layers must be" in done.output, (words, done.output)
    elif name == "paper":  # options are read in their order, so the wrong one is the last
        wrong = "--only" if arguments[0] in ("smart-infinity", "coarse") else "--models"
        done = CliRunner().invoke(cli._app(), [*words, wrong, "none"])
        assert "not 'none'" in done.output, (words, done.output)
    elif words[:2] == ["platform", "this"]:  # which takes a while where the folder is one
        done = CliRunner().invoke(cli._app(), [*words, "--directory", str(folder / "nothing")])
        assert "is no folder" in done.output, (words, done.output)
    elif name != "dram-replay":  # what that prints is not of a file that a reader has
        done = CliRunner().invoke(cli._app(), words, env={"NEARSTEP_CACHE": str(folder)})
        assert done.exit_code == 0, (words, done.output)


def test_prose_names_programs_by_where_they_are() -> None:
    checks = 0
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            if code.startswith("nearstep "):  # a name of a command, as docs/command-line.md has it
                assert page.name == "command-line.md", (page, code)
            assert not re.match(r"(pip|python3?) (?!bench/)", code), (page, code)
            checks += 1
    assert checks > 500, checks


def test_variables_that_the_code_reads_are_on_the_page() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    sources = [path for tree in ("hw", "sim", "host") for path in (ROOT / tree).rglob("*.py")]
    read = {
        name
        for path in sources
        for name in re.findall(r'"((?:NEARSTEP|YOWASP)_[A-Z_]+|CXX|WAVES)"', path.read_text())
    }
    assert {"NEARSTEP_CACHE", "NEARSTEP_OPTIMISE", "CXX", "WAVES"} <= read
    private = {
        f"NEARSTEP_{each}" for each in ("SEED", "STALL", "CHANNELS", "WHOLE", "CHANNEL_ALONE")
    }  # between a test and its own cocotb bench, and macros of C++
    assert {name for name in read - private if f"`{name}" not in page} == set()


def test_what_the_pages_say_of_nan_is_so() -> None:
    """Where torch has a NaN the device has the default one; all else is equal."""
    words = [0x7FC12345, 0xFFC00001, 0x7F812345, 0x7F800000, 0xFF800000, 0x3F000000] * 8
    gradient = torch.from_numpy(np.array(words, np.uint32).view(np.float32))
    ours, theirs = (torch.nn.Parameter(torch.ones(48)) for _ in range(2))
    ours.grad, theirs.grad = gradient.clone(), gradient.clone()
    optimizer = nearstep.optim.AdamW([ours], device="golden:axdimm?engine=numpy")
    fused = torch.optim.AdamW([theirs], fused=True)
    optimizer.step()
    fused.step()
    nans = 0
    for got, expected in [
        (ours.detach(), theirs.detach()),
        *((optimizer.state[ours][k], fused.state[theirs][k]) for k in ("exp_avg", "exp_avg_sq")),
    ]:
        same = torch.isnan(expected)
        bits = got.numpy().view(np.uint32)
        assert (bits[same.numpy()] == 0x7FC00000).all()
        assert (bits == expected.numpy().view(np.uint32))[~same.numpy()].all()
        nans += int(same.sum())
    assert nans >= 3 * 24, nans
