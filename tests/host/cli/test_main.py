"""The `nearstep` script ends with a line and a status, whatever goes wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from nearstep import cli
from nearstep.errors import NearstepError
from nearstep_sim.verilate.build import BuildError
from nearstep_spec.cache import CacheError
from nearstep_spec.rule.file import RuleFileError

DEEP = {"json": "[" * 100_000, "toml": "a = " + "[" * 100_000}
LONG = "1" * 5000
"""More digits than Python turns into a number."""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_at_standard_output_is_a_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nearstep", "registers", "axdimm"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


def test_closed_streams_are_empty() -> None:
    serve = "coarse serve --device golden:coarse --listen unix: --until-eof"
    calls = {"--version >&- 2>&-": 0, f"{serve} <&-": 2}
    for words, status in calls.items():
        done = subprocess.run(
            ["sh", "-c", f'exec "$0" -m nearstep {words}', sys.executable],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, (words, done)
        assert "Traceback" not in done.stderr, words
        assert done.stdout == ""
    assert "token" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    ["config check {json}", "plan {json}", "plan bert-base --plan {json}", "platform check {toml}"],
)
def test_a_file_that_is_nested_deeply_or_has_a_long_number_is_a_line(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for text in ("{deep}", "{long}"):
        names = {}
        for kind, deep in DEEP.items():
            path = tmp_path / f"a.{kind}"
            path.write_text(deep if text == "{deep}" else deep[:5].strip("[") + LONG)
            names[kind] = str(path)
        monkeypatch.setattr(sys, "argv", ["nearstep", *arguments.format(**names).split()])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        said = capsys.readouterr().err + f"{caught.value.code}"
        assert caught.value.code not in (0, None)
        assert said.startswith("error: ")
        assert said.count("\n") <= 1


@pytest.mark.parametrize(
    "error",
    [
        BuildError(["g++"], 1, "no space"),
        CacheError(Path("/cache"), "read-only"),
        RuleFileError("rule.py:3: wrong"),
        RecursionError("too deep"),
        MemoryError(),
        OverflowError("too large"),
        OSError(28, "No space left on device", "file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_a_command_is_its_message_and_status(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_app", lambda: fail)
    monkeypatch.setattr(cli.os, "dup2", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == (2 if isinstance(error, ValueError) else 1)
    assert capsys.readouterr().err == f"error: {str(error) or 'MemoryError'}\n"


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(cli, "_app", lambda: fail)
    with pytest.raises(KeyError):
        cli.main()


@pytest.mark.parametrize("kind", [BuildError, CacheError, RuleFileError])
def test_errors_of_every_package_have_one_base(kind: type[Exception]) -> None:
    assert issubclass(kind, NearstepError)
