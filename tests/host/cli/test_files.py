"""Files that commands write: refused before anything is computed, and not made before."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from nearstep.cli.files import check_writable
from nearstep.cli.paper_rows import chosen


def test_a_file_that_was_not_there_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "picture.png"
    check_writable("--picture", path)
    assert path.parent.is_dir()
    assert not path.exists()


def test_a_file_that_was_there_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"old")
    check_writable("--picture", path)
    assert path.read_bytes() == b"old"


def test_a_name_that_is_given_twice_is_chosen_once() -> None:
    assert chosen("b,a,b", "abc", "--only") == ("b", "a")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "picture.png"):
        with pytest.raises(typer.BadParameter, match="cannot be written"):
            check_writable("--picture", path)
