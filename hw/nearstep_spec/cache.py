"""The build cache: where it is, and files in it that are whole or not there.

It lies in `$NEARSTEP_CACHE`, else in `$XDG_CACHE_HOME/nearstep`, else in `~/.cache/nearstep`.
What is in it is named by the hash of all that went in, made in a folder of its own under a lock,
and renamed into place, with a sum of its bytes beside it: parallel processes and interrupted
builds never see half a file, and one that was cut off or damaged later is made again before
anything loads it. A cache that cannot be written serves what it holds.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = [
    "CACHE",
    "CacheError",
    "Kind",
    "cache_dir",
    "clear",
    "kinds",
    "once",
    "stored",
    "unwritable",
    "yowasp_dir",
    "yowasp_environment",
]

CACHE = "NEARSTEP_CACHE"
"""Environment variable that names the cache; relative to the working directory."""

YOWASP = "YOWASP_CACHE_DIR"
"""Environment variable of the YoWASP tools: where their machine code is kept."""

_BUILD = "build-"
_SUM = ".sum"
_FOLDERS = (
    "rtl",
    "litedram",
    "lib",
    "rule",
    "design",
    "stream",
    "cocotb",
    "formal",
    "runs",
    "yowasp",
)
_TARGET = r"(.*-)?[0-9a-f]{24}(\.\w+)*"
_UNFINISHED = re.compile(rf"{_BUILD}{_TARGET}")
_OURS = re.compile(rf"{_TARGET}|{_BUILD}.*|\..*\.lock|yowasp_\w+|\w+_(bmc|prove|cover)")
"""Names that the cache gives; `clear` takes nothing else, wherever `$NEARSTEP_CACHE` points."""


class CacheError(RuntimeError):
    """The cache cannot be written, and does not hold what was asked for.

    Attributes
    ----------
    folder
    reason
    """

    def __init__(self, folder: Path, reason: str) -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(
            f"the build cache {folder} cannot be written: {reason}; {CACHE} can name another folder"
        )


@dataclass(frozen=True)
class Kind:
    """One folder of the cache: what it holds, in pieces and bytes."""

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
    if not base.is_absolute():  # the specification: relative ones are to be ignored
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
    """`target`, whole; made by `build`, in the empty folder that it is given, if need be.

    Until it is made, by this process or another one, `meanwhile` is entered.

    Raises
    ------
    CacheError
    """
    if _whole(target):
        return target
    with meanwhile or nullcontext(), _exclusive(target):
        if not _whole(target):
            _sweep(target.parent)
            folder = target.parent / f"{_BUILD}{target.name}"
            try:
                with _writes(target.parent):
                    if folder.exists():  # of a build that was killed: the lock is ours
                        shutil.rmtree(folder)
                    folder.mkdir()
                made = build(folder)
                with _writes(target.parent):
                    mark = folder / _SUM
                    mark.write_text(_sum(made), encoding="ascii")
                    os.replace(mark, _sum_of(target))
                    if target.is_dir():
                        shutil.rmtree(target)
                    os.replace(made, target)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return target


def stored(kind: str, files: Mapping[str, str]) -> Path:
    """A folder of the cache that holds these texts, by file name; named by their contents.

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
    """Where the YoWASP tools keep their machine code: in the cache, unless their own variable
    names another folder."""
    given = os.environ.get(YOWASP)
    return Path(given) if given else cache_dir() / "yowasp"


def yowasp_environment() -> dict[str, str]:
    """Variables for a YoWASP tool, whose machine code can be kept or is there.

    Raises
    ------
    CacheError : it is neither; the tool would print a long traceback.
    """
    folder = yowasp_dir()
    if (reason := unwritable(folder)) and not any(folder.glob("*/*/*")):
        raise CacheError(folder, reason)
    return {YOWASP: str(folder)}


def unwritable(folder: Path) -> str:
    """Why files cannot be made in `folder`, which is made if need be; empty if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{secrets.token_hex(8)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def kinds() -> list[Kind]:
    """What is in the cache, a row for each folder that is not empty."""
    rows = []
    for name in _FOLDERS:
        pieces = _pieces(cache_dir() / name)
        whole = [piece for piece in pieces if not piece.name.endswith((_SUM, ".lock"))]
        if pieces:
            rows.append(Kind(name, len(whole), sum(_bytes(piece) for piece in pieces)))
    return rows


def clear() -> int:
    """Empty the cache, but for what another process is building now.

    Returns
    -------
    int : bytes freed.

    Raises
    ------
    CacheError
    """
    freed = 0
    for name in _FOLDERS:
        folder = cache_dir() / name
        with _writes(folder):
            for piece in _pieces(folder):
                target = _target_of(piece)
                if piece == _lock_of(target):
                    continue
                with _free(target) as free:
                    if free and piece.exists():
                        freed += _bytes(piece)
                        _remove(piece)
            for lock in folder.glob(".*.lock"):
                with _free(_target_of(lock)):
                    pass  # a lock that is free goes when it is let go of
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
    return freed


def _pieces(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _OURS.fullmatch(path.name))


def _target_of(piece: Path) -> Path:
    """What a sum, a lock or a folder of a build belongs to."""
    name = piece.name.removeprefix(_BUILD).removesuffix(_SUM)
    if name.startswith(".") and name.endswith(".lock"):
        name = name[1:].removesuffix(".lock")
    return piece.with_name(name)


def _sum_of(target: Path) -> Path:
    return target.with_name(f"{target.name}{_SUM}")


def _lock_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _bytes(path: Path) -> int:
    """Of what is still there: another process may be making it, or removing it."""
    inner = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    total = 0
    for each in inner if path.is_dir() else [path]:
        with suppress(FileNotFoundError):
            total += each.lstat().st_size
    return total


def _whole(target: Path) -> bool:
    """Whether `target` has the bytes that it had when it was made."""
    try:
        return _sum_of(target).read_text(encoding="ascii") == _sum(target)
    except (OSError, UnicodeDecodeError):
        return False


def _sum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for each in _files(path):
        stat = each.stat()
        name = each.relative_to(path).as_posix() if each != path else ""
        part = _sum_of_file(each, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        digest.update(f"{name}\0{stat.st_size}\0{part}\0".encode())
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _sum_of_file(path: Path, inode: int, size: int, modified: int) -> str:
    """Read once for each change of the file that its status tells."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


@contextmanager
def _writes(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(folder, error.strerror or str(error)) from error


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of `target`: whoever else wants to make it waits."""
    while True:
        with _writes(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            handle = open(_lock_of(target), "w")  # noqa: SIM115 - closed below
        with handle:
            with _writes(target.parent):
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_lock(handle.fileno(), target):
                try:
                    yield
                finally:
                    _lock_of(target).unlink(missing_ok=True)
                return


@contextmanager
def _free(target: Path) -> Iterator[bool]:
    """Whether nobody makes `target` now; while this lasts, nobody does."""
    with open(_lock_of(target), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        free = _is_lock(handle.fileno(), target)
        try:
            yield free
        finally:
            if free:
                _lock_of(target).unlink(missing_ok=True)


def _is_lock(handle: int, target: Path) -> bool:
    """Whether an open lock is still the one in the folder: its holder removes it at the end."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(_lock_of(target)))
    except FileNotFoundError:
        return False


def _sweep(folder: Path) -> None:
    """Remove what builds left that were killed: their folders and locks."""
    for piece in folder.iterdir():
        unfinished = _UNFINISHED.fullmatch(piece.name)
        if unfinished or (piece.name.startswith(".") and piece.name.endswith(".lock")):
            with suppress(OSError), _free(_target_of(piece)) as free:  # another user's stays
                if free and unfinished:
                    shutil.rmtree(piece)
