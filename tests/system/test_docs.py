"""The code and the commands of the pages run, and print what the pages say.

What a `python` block prints is the `text` block behind it; what a command prints stands below it in
its `console` block. A comment before the block that has the output may say of it::

    <!-- output: deep -->                   it is compared in the deep test alone
    <!-- output: varies [0-9.]+ s a step --> what matches is of the run or the machine
    <!-- output: deep, varies ... -->       both

In the fast test, devices that would be simulated are the golden ones of the same shape.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
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

WITHOUT_GOLDEN = (
    "memory=ideal",
    "commands=",
    "inject_link",
    "ring.pull",
    "drive_read_bytes_per_s",
    "bus=pcie",
)
"""What only a simulated device has: code with it runs in the deep test."""

FENCE = re.compile(
    r"(?:^<!-- output: (?P<deep>deep)?(?:, )?(?:varies (?P<varies>.*?))? -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page.

    Attributes
    ----------
    page, language, text
    deep : whether its output is compared in the deep test alone.
    varies : pattern of what is not compared; nothing if empty.
    """

    page: str
    language: str
    text: str
    deep: bool
    varies: str

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each line at a prompt, with what is printed below it."""
        found = re.findall(r"^\$ (.*\n)((?:(?!\$ ).*\n)*)", self.text, re.MULTILINE)
        return [(line.strip(), printed) for line, printed in found]

    def check(self, expected: str, printed: str) -> int:
        """Compare an output with that of the page, and count it."""
        both = [re.sub(" +$", "", each, flags=re.M).rstrip() for each in (expected, printed)]
        if self.varies:
            both = [re.sub(self.varies, "...", each) for each in both]
        assert both[0] == both[1], f"{self.page}: printed\n{printed}\nnot\n{expected}"
        return 1


def fences(page: Path) -> list[Fence]:
    text = page.read_text(encoding="utf-8")
    return [
        Fence(page.name, each["language"], each["text"], bool(each["deep"]), each["varies"] or "")
        for each in FENCE.finditer(text)
    ]


def run_page(page: Path, *, golden: bool) -> tuple[int, int]:
    """Blocks that ran, and outputs that were compared."""
    names: dict[str, object] = {}
    ran = compared = 0
    found = fences(page)
    for fence, behind in zip_longest(found, found[1:]):
        if fence.language == "console" and any(printed for _, printed in fence.commands):
            if not (golden and fence.deep):
                compared += run_console(fence)
                ran += 1
        elif fence.language == "python":
            code = fence.text
            if golden:
                if any(each in code for each in WITHOUT_GOLDEN):
                    continue
                for name, stands_for in GOLDEN.items():
                    code = code.replace(name, stands_for)
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, f"{page.name}: {code.splitlines()[0]}", "exec"), names)
            ran += 1
            if out.getvalue() and not (golden and behind is not None and behind.deep):
                assert behind is not None
                assert behind.language == "text", f"{page.name}: {out.getvalue()} is not there"
                compared += behind.check(behind.text, out.getvalue())
    return ran, compared


def run_console(fence: Fence) -> int:
    """Run the commands of a block in the working directory; `nearstep serve` goes on until then."""
    compared = 0
    with contextlib.ExitStack() as served:
        for line, expected in fence.commands:
            command = re.sub(r"^make run(.*)", r"\1 .venv/bin/python .ci/run_with_args.py "
                             "examples/train_gpt.py", line)  # fmt: skip
            process = subprocess.Popen(
                f"exec 2>&1; {command}", shell=True, text=True, stdout=subprocess.PIPE,
                start_new_session=True, executable="/bin/bash",
            )  # fmt: skip
            assert process.stdout is not None
            if " serve " in line:
                served.callback(process.wait, 60)
                served.callback(os.killpg, process.pid, signal.SIGINT)
                printed = "".join(process.stdout.readline() for _ in expected.splitlines())
            else:
                printed = process.communicate()[0]
            if expected:
                compared += fence.check(expected, printed)
    return compared


RUN = [
    page
    for page in PAGES
    if any(each.language == "python" or each.commands for each in fences(page))
]


def _checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder where pages find programs and examples by the names of a checkout."""
    (folder / ".venv").symlink_to(sys.prefix)
    for name in (".ci", "examples"):
        (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _checkout(tmp_path, monkeypatch)
    ran, compared = run_page(page, golden=True)
    print(f"{page.name}: {ran} blocks, {compared} outputs")


@pytest.mark.deep
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_runs_on_the_devices_that_it_names(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _checkout(tmp_path, monkeypatch)
    ran, compared = run_page(page, golden=False)
    print(f"{page.name}: {ran} blocks, {compared} outputs")
    if page.name == "dram-traces.md":
        for channel in (0, 1):
            done = CliRunner().invoke(cli._app(), ["dram-replay", f"build/commands.{channel}"])
            assert "no violation" in done.output


def test_every_output_stands_behind_what_prints_it() -> None:
    """So that none is left out: a block that prints has its text, and each text has its block."""
    printing = texts = consoles = 0
    for page in PAGES:
        found = fences(page)
        for fence, behind in zip_longest(found, found[1:]):
            if fence.language == "python" and re.search(r"\bprint\(", fence.text):
                assert behind is not None, fence
                assert behind.language == "text", f"{page.name}:\n{fence.text}"
                printing += 1
            texts += fence.language == "text"
            consoles += any(printed for _, printed in fence.commands)
    print(f"{printing} blocks print, {consoles} commands have outputs")
    assert printing == texts >= 40
    assert consoles >= 8


def test_an_output_that_is_another_one_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "```python\nprint(1.5, 2)\n```\n\nIt prints\n\n{mark}```text\n{printed}\n```\n"
    for mark, printed, passes in (
        ("", "1.5 2", True),
        ("", "1.5 3", False),
        ("<!-- output: varies \\d\\.\\d -->\n", "9.9 2", True),
        ("<!-- output: varies \\d\\.\\d -->\n", "9.9 3", False),
        ("<!-- output: deep -->\n", "3", True),
    ):
        page.write_text(text.format(mark=mark, printed=printed))
        with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match="printed"):
            assert run_page(page, golden=True) == (1, "deep" not in mark)
    page.write_text("```console\n$ echo one\none\n$ echo two\nthree\n```\n")
    with pytest.raises(AssertionError, match=r"printed\s+two"):
        run_page(page, golden=True)


def commands() -> Iterator[tuple[Path, str]]:
    """Every line of a page that is typed at a prompt."""
    for page in PAGES:
        yield from ((page, line) for fence in fences(page) for line, _ in fence.commands)


def test_commands_of_the_pages_run_in_a_fresh_checkout(tmp_path: Path) -> None:
    """Without an activated environment; each starts what is there."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    built: set[str] = set()
    checks = 0
    for page, line in commands():
        words = shlex.split(line, comments=True)
        for option, value in pairwise(words):  # no tracked file is written
            assert option not in ("-o", "-p") or value.startswith("build/"), (page, line)
        if words[0] == "sed":
            continue
        if words[0] == "make":
            assert words[1] in targets, (page, line)
        elif words[0] == "openFPGALoader":
            assert words[1:3][0] == "--board", (page, line)
        elif words[0] == "dfu-util":
            assert words[1:4] == ["-a", "0", "-D"], (page, line)
        elif words[0] == "gcc":
            (source,) = (word for word in words if word.endswith(".c"))
            assert (ROOT / source).exists(), (page, line)
            built.add(words[words.index("-o") + 1])
        elif words[0].startswith("build/"):
            assert words[0] in built, (page, line)
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
    elif words[:2] == ["card", "serve"]:  # until Ctrl-C, where there is a folder for the socket
        nowhere = ["--socket", str(folder / "nothing" / "card")]
        done = CliRunner().invoke(cli._app(), [*words, *nowhere])
        assert done.exit_code == 2, (words, done.output)
        assert "nothing" in done.output, (words, done.output)
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
        f"NEARSTEP_{each}"
        for each in ("SEED", "STALL", "CHANNELS", "RANKS", "WHOLE", "CHANNEL_ALONE")
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
