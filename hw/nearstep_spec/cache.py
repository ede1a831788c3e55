"""The build cache: its folder, and files that are complete or absent.

The cache is the folder `$NEARSTEP_CACHE`, else `$XDG_CACHE_HOME/nearstep`, else
`~/.cache/nearstep`. An entry is named by the hash of all its inputs, built under a lock in a
private folder and renamed into place, with a checksum beside the entry: parallel processes and
interrupted builds never see half a file, and an entry that was truncated or damaged later is
rebuilt before it is loaded. A read-only cache serves existing entries.

The manifest in the cache lists every entry before it is built. Files that are not listed are never
overwritten or removed, whatever folder `$NEARSTEP_CACHE` is, except `platform/this.toml`, which
`nearstep platform this` overwrites. Entries are loaded as machine code, so a folder or file that
another user owns or can write is refused.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nearstep_spec.errors import NearstepError

__all__ = [
    "CACHE",
    "MANIFEST",
    "CacheError",
    "Kind",
    "UntrustedCacheError",
    "cache_dir",
    "claim",
    "clear",
    "kinds",
    "listed",
    "make_folder",
    "once",
    "stored",
    "unwritable",
    "write_whole",
    "yowasp_dir",
    "yowasp_environment",
]

CACHE = "NEARSTEP_CACHE"
"""Environment variable that names the cache; relative to the working directory."""

YOWASP = "YOWASP_CACHE_DIR"
"""Environment variable of the YoWASP tools: folder of their machine code."""

MANIFEST = "nearstep-cache.txt"
"""File in the cache that names its entries, one a line, such as `lib/name-<24 hex digits>.so`."""

_TITLE = "# Made by nearstep in this folder; `nearstep cache clear` removes it, and nothing else.\n"
_ENTRY = re.compile(r"[a-z]+/([^/]+-)?[0-9a-f]{24}(\.\w+)*|yowasp")
_BUILD = "build-"
_SUM = ".sum"
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class CacheError(NearstepError, RuntimeError):
    """The cache cannot be used for an operation.

    Attributes
    ----------
    folder : the folder or file at fault.
    """

    def __init__(self, folder: Path, reason: str, fault: str = "cannot be written") -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(
            f"the build cache {folder} {fault}: {reason}; {CACHE} can name another folder"
        )


class UntrustedCacheError(CacheError):
    """Another user owns or can write a folder or file of the cache."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason, "is not trusted")


@dataclass(frozen=True)
class Kind:
    """One folder of the cache: its entries and bytes."""

    name: str
    pieces: int
    nbytes: int


def cache_dir() -> Path:
    """The cache folder, absolute; it need not exist.

    Raises
    ------
    CacheError : neither the environment nor the system names a home folder.
    """
    if given := os.environ.get(CACHE):
        return Path(os.path.abspath(os.path.expanduser(given)))
    base = Path(os.environ.get("XDG_CACHE_HOME") or ".")
    if not base.is_absolute():  # the XDG specification: ignore relative paths
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            raise CacheError(Path("~/.cache/nearstep"), str(error)) from None
    return base / "nearstep"


def once(
    target: Path,
    build: Callable[[Path], Path],
    *,
    meanwhile: AbstractContextManager[None] | None = None,
) -> Path:
    """Return `target`, complete; if needed, `build` makes it in an empty folder.

    The context `meanwhile` is active until this or another process has made `target`.

    Raises
    ------
    CacheError : the cache cannot be written, or has an unlisted file at this path.
    UntrustedCacheError
    """
    if _whole(target):
        return target
    with meanwhile or nullcontext(), _exclusive(target):
        if not _whole(target):
            claim(target)
            _sweep(target.parent)
            folder = _build_of(target)
            try:
                with _writes(target.parent):
                    _remove(folder)  # left by a killed build: we hold the lock
                    folder.mkdir(mode=0o700)
                made = build(folder)
                with _writes(target.parent):
                    for each in _inside(made):
                        each.chmod(each.stat().st_mode & ~_BY_OTHERS)
                    mark = folder / _SUM
                    mark.write_text(_sum(made), encoding="ascii")
                    mark.chmod(mark.stat().st_mode & ~_BY_OTHERS)
                    os.replace(mark, _sum_of(target))
                    _remove(target)
                    os.replace(made, target)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return target


def claim(target: Path) -> Path:
    """List `target`, `<kind>/<name>` in the cache, in the manifest before it is made.

    Raises
    ------
    CacheError : the target exists and is not listed, or the cache cannot be written.
    UntrustedCacheError
    """
    name = target.relative_to(cache_dir()).as_posix()
    with _manifest() as names:
        if name not in names:
            if not _ENTRY.fullmatch(name) or os.path.lexists(target):
                raise CacheError(target, f"{MANIFEST} does not name it", "is not to be overwritten")
            names.append(name)
    return target


def stored(kind: str, files: Mapping[str, str]) -> Path:
    """Return a folder of the cache with these texts, by file name; named by their contents.

    Raises
    ------
    CacheError
    """
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:24]

    def build(folder: Path) -> Path:
        made = folder / "files"
        made.mkdir()
        for name, text in files.items():
            (made / name).write_text(text, encoding="utf-8")
        return made

    return once(cache_dir() / kind / digest, build)


def yowasp_dir() -> Path:
    """Return the folder of the YoWASP tools' machine code: in the cache, unless their own variable
    names another one.
    """
    given = os.environ.get(YOWASP)
    return Path(given) if given else cache_dir() / "yowasp"


def yowasp_environment() -> dict[str, str]:
    """Return variables for a YoWASP tool, whose machine code exists or can be stored.

    Raises
    ------
    CacheError : neither holds; the tool would print a long traceback.
    UntrustedCacheError
    """
    folder = yowasp_dir()
    if not os.environ.get(YOWASP):
        _check(cache_dir())
        if not folder.exists():
            claim(folder)
            with _writes(folder), suppress(FileExistsError):
                folder.mkdir(mode=0o700)  # the tools write files with the modes of the umask
    if folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) == 0o700:
        _check(folder)
    else:
        _check(*_inside(folder))
    if (reason := unwritable(folder)) and not any(folder.glob("*/*/*")):
        raise CacheError(folder, reason)
    return {YOWASP: str(folder)}


def make_folder(folder: Path) -> None:
    """Make missing folders of a path, writable by this user only."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(mode=0o755, exist_ok=True)


def unwritable(folder: Path) -> str:
    """Return the reason why files cannot be made in `folder`, which is made if missing; empty if
    they can.
    """
    try:
        make_folder(folder)
        probe = folder / f".{secrets.token_hex(8)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def kinds() -> list[Kind]:
    """List existing entries of the manifest, a row for each kind.

    Raises
    ------
    CacheError
    """
    rows: dict[str, Kind] = {}
    for name in sorted(listed()):
        target = cache_dir() / name
        if nbytes := sum(map(_bytes, _pieces(target))):
            kind = name.partition("/")[0]
            row = rows.get(kind, Kind(kind, 0, 0))
            rows[kind] = Kind(kind, row.pieces + target.exists(), row.nbytes + nbytes)
    return list(rows.values())


def clear() -> int:
    """Remove the entries of the manifest, except those that another process is building.

    Returns
    -------
    int : bytes freed.

    Raises
    ------
    CacheError
    """
    freed = 0
    if listed():
        with _manifest() as names:
            for name in tuple(names):
                target = cache_dir() / name
                _check(target.parent)
                with _free(target) as free, _writes(target):
                    if free:
                        for piece in _pieces(target):
                            freed += _bytes(piece)
                            _remove(piece)
                        names.remove(name)
    return freed


@contextmanager
def _manifest() -> Iterator[list[str]]:
    """Yield the names in the manifest, to be changed, under a lock."""
    path = cache_dir() / MANIFEST
    with _exclusive(path):
        names = listed()
        before = tuple(names)
        try:
            yield names
        finally:
            if tuple(names) != before:
                write_whole(path, _TITLE + "".join(f"{name}\n" for name in names))


def listed() -> list[str]:
    """List the entries in the manifest; after `clear`, those that another process is building.

    Raises
    ------
    CacheError
    """
    path = cache_dir() / MANIFEST
    _check(path.parent, path)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise CacheError(path, str(error), "cannot be read") from None
    if not text.startswith(_TITLE):
        raise CacheError(path, f"its first line is not {_TITLE.strip()!r}", "cannot be read")
    return [line for line in text.splitlines() if _ENTRY.fullmatch(line)]


def write_whole(path: Path, text: str) -> None:
    """Write a file of the cache, or leave the old one.

    Raises
    ------
    CacheError
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with _writes(path):
        make_folder(path.parent)
        try:
            opened = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with open(opened, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


def _sum_of(target: Path) -> Path:
    return target.with_name(f"{target.name}{_SUM}")


def _lock_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")


def _build_of(target: Path) -> Path:
    return target.with_name(f"{_BUILD}{target.name}")


def _pieces(target: Path) -> list[Path]:
    """List the possible files of an entry, except its lock."""
    if target == cache_dir() / "yowasp":
        return [target]
    return [target, _sum_of(target), _build_of(target)]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _inside(path: Path) -> list[Path]:
    """List a path and, of a folder, all of its contents."""
    return [path, *sorted(path.rglob("*"))]


def _check(*paths: Path) -> None:
    """Check that existing paths, and targets of links, belong to this user or root, and that no one
    else can write them.

    Raises
    ------
    UntrustedCacheError
    """
    for path in paths:
        with suppress(OSError):  # without a status it cannot be loaded
            for found in (path.lstat(), path.stat()):
                if found.st_uid not in (os.geteuid(), 0):
                    raise UntrustedCacheError(path, f"it belongs to user {found.st_uid}")
                if found.st_mode & _BY_OTHERS and not stat.S_ISLNK(found.st_mode):
                    mode = stat.filemode(found.st_mode)
                    raise UntrustedCacheError(path, f"others can write it ({mode}): chmod go-w it")


def _bytes(path: Path) -> int:
    """Sum bytes of files that still exist: another process may be making or removing them."""
    inner = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    total = 0
    for each in inner if path.is_dir() else [path]:
        with suppress(FileNotFoundError):
            total += each.lstat().st_size
    return total


def _whole(target: Path) -> bool:
    """Whether `target` has its original bytes."""
    mark = _sum_of(target)
    _check(cache_dir(), target.parent, mark, *_inside(target))
    try:
        return mark.read_text(encoding="ascii") == _sum(target)
    except (OSError, UnicodeDecodeError):
        return False


def _sum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for each in _inside(path):
        if each.is_file() or (each == path and not path.is_dir()):
            found = each.stat()
            name = each.relative_to(path).as_posix() if each != path else ""
            part = _sum_of_file(each, found.st_ino, found.st_size, found.st_mtime_ns)
            digest.update(f"{name}\0{found.st_size}\0{part}\0".encode())
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _sum_of_file(path: Path, inode: int, size: int, modified: int) -> str:
    """Read once for each change of the file's status."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


@contextmanager
def _writes(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(path, error.strerror or str(error)) from error


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of `target`: other processes wait to make it."""
    while True:
        with _writes(target.parent):
            make_folder(target.parent)
        with _lock(target) as handle:
            with _writes(target.parent):
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_lock(handle, target):
                try:
                    yield
                finally:
                    _lock_of(target).unlink(missing_ok=True)
                return


@contextmanager
def _free(target: Path) -> Iterator[bool]:
    """Yield whether no process is making `target`, and keep it so."""
    if not target.parent.is_dir():
        yield True
        return
    with _lock(target) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        free = _is_lock(handle, target)
        try:
            yield free
        finally:
            if free:
                _lock_of(target).unlink(missing_ok=True)


@contextmanager
def _lock(target: Path) -> Iterator[int]:
    """Open the lock of `target`, made if missing; links are not followed, files not changed."""
    path = _lock_of(target)
    if path.is_symlink():
        raise UntrustedCacheError(path, "a lock is no symbolic link")
    with _writes(target.parent):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        _check(path)
        yield handle
    finally:
        os.close(handle)


def _is_lock(handle: int, target: Path) -> bool:
    """Whether an open lock is still the one in the folder: its holder removes it at the end."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(_lock_of(target)))
    except FileNotFoundError:
        return False


def _sweep(folder: Path) -> None:
    """Remove folders and locks of killed builds."""
    for name in listed():
        target = cache_dir() / name
        left = _build_of(target).exists() or _lock_of(target).exists()
        if target.parent == folder and left:
            with suppress(OSError, CacheError), _free(target) as free:  # another user's is kept
                if free:
                    _remove(_build_of(target))
