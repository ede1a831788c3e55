"""Descriptions of machines in TOML: reading, checking, and the descriptions of the package.

A figure is `{ value = 12e9, origin = "datasheet", source = "v100" }`, where `source` is a key of
the table `sources` or a text. A name such as `ssd{0..9}` stands for ten parts, and the ends of such
a link are one name or as many. Errors name file and line.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from nearstep_spec.cache import cache_dir
from nearstep_spec.platform.machine import (
    DTYPES,
    DUPLEX,
    ORIGINS,
    Dimm,
    Drive,
    Figure,
    Link,
    Platform,
    PlatformError,
    Processor,
)

PARTS: Mapping[str, type[Any]] = {
    "processors": Processor,
    "dimms": Dimm,
    "drives": Drive,
    "links": Link,
}
THIS = "this"
"""Name of the machine that `nearstep platform this` measures."""

MAY_BE_ZERO = ("latency_s", "read_latency_s", "write_latency_s")
MOST = 1e30
"""Largest valid figure; infinity is invalid."""

MOST_NAMES = 1024
"""Most parts of a range."""

_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")

EntryPath = tuple[str, ...]


def shipped() -> tuple[str, ...]:
    """List the machines of the package."""
    folder = files("nearstep_spec.platform") / "machines"
    return tuple(sorted(each.name[:-5] for each in folder.iterdir() if each.name.endswith(".toml")))


def measured_path() -> Path:
    """Return the path of the measured description of this machine.

    Raises
    ------
    CacheError
    """
    return cache_dir() / "platform" / f"{THIS}.toml"


def load(name: str | Path) -> Platform:
    """Load a machine by name, or from a file.

    Parameters
    ----------
    name : one of `shipped`, `this`, or the path of a TOML file.

    Raises
    ------
    PlatformError : no such machine, or an unreadable or invalid file; with file, line and entry.
    """
    known = shipped()
    if isinstance(name, str) and name in known:
        source = files("nearstep_spec.platform") / "machines" / f"{name}.toml"
        return parse(source.read_text(encoding="utf-8"), f"{name}.toml")
    path = measured_path() if name == THIS else Path(name)
    if name == THIS and not path.is_file():
        raise PlatformError(f"this machine is not measured: run `nearstep platform this` ({path})")
    if not path.is_file():
        names = ", ".join([*known, THIS])
        raise PlatformError(f"there is no machine {str(name)!r}: {names}, or a file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlatformError(f"{path}: cannot be read: {error}") from None
    return parse(text, str(path))


def parse(text: str, where: str) -> Platform:
    """Parse a TOML text that describes a machine.

    Parameters
    ----------
    where : name of the file, for errors.

    Raises
    ------
    PlatformError
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlatformError(f"{where}: not TOML: {error}") from None
    return _Reader(text, where).platform(table)


def expand(name: str) -> list[str]:
    """Expand a name with a range: `ssd{0..2}` is three names.

    Raises
    ------
    ValueError : the range ends before it begins, or has more than `MOST_NAMES` names.
    """
    found = _RANGE.search(name)
    if found is None:
        return [name]
    first, last = int(found[1]), int(found[2])
    if last < first:
        raise ValueError(f"{found[0]} must not end before it begins")
    if last - first >= MOST_NAMES:
        raise ValueError(f"{found[0]} must stand for {MOST_NAMES} at most")
    return [f"{name[: found.start()]}{i}{name[found.end() :]}" for i in range(first, last + 1)]


class _Reader:
    """Converts a table to a machine, and finds the line of an entry."""

    def __init__(self, text: str, where: str) -> None:
        self.where = where
        self.sources: Mapping[str, Any] = {}
        self.lines: dict[EntryPath, int] = {}
        table: EntryPath = ()
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith("["):
                table = _keys(line) or table
                for length in range(len(table)):
                    self.lines.setdefault(table[: length + 1], number)
            elif key := _KEY.match(line):
                self.lines.setdefault((*table, *_keys(f"{key[1]}=0")), number)

    def fail(self, path: EntryPath, reason: str) -> PlatformError:
        """Make an error about an entry, with its line or that of the enclosing entry."""
        inner = path
        while inner and inner not in self.lines:
            inner = inner[:-1]
        line = f":{self.lines[inner]}" if inner else ""
        entry = f"{'.'.join(path)}: " if path else ""
        return PlatformError(f"{self.where}{line}: {entry}{reason}", path)

    def platform(self, table: Mapping[str, Any]) -> Platform:
        known = {"name", "title", "sources", "switches", *PARTS}
        for key in table:
            if key not in known:
                raise self.unknown((key,), known)
        self.sources = self.table(table, "sources")
        for key, source in self.sources.items():
            self.text(("sources", key), source)
        switches = table.get("switches", [])
        if not isinstance(switches, list) or not all(isinstance(each, str) for each in switches):
            raise self.fail(("switches",), f"must be a list of names, not {switches!r}")
        of: dict[EntryPath, EntryPath] = {}  # written entries, by the expanded ones
        parts: dict[str, dict[str, Any]] = {key: {} for key in PARTS}
        for key, kind in PARTS.items():
            for name, entries in self.table(table, key).items():
                part = self.part(kind, (key, name), entries)
                for each, made in self.expanded((key, name), part):
                    if each in parts[key]:
                        raise self.fail((key, name), f"{each} is declared twice")
                    parts[key][each] = made
                    of[key, each] = (key, name)
        title = {key: self.text((key,), table.get(key)) for key in ("name", "title")}
        names = [one for each in switches for one in self.names(("switches",), each)]
        try:
            return Platform(**title, switches=tuple(names), **parts)  # type: ignore[arg-type]
        except PlatformError as error:
            written = of.get(error.path[:2], error.path[:2])
            raise self.fail((*written, *error.path[2:]), str(error)) from None

    def names(self, path: EntryPath, name: str) -> list[str]:
        try:
            return expand(name)
        except ValueError as error:
            raise self.fail(path, str(error)) from None

    def expanded(self, path: EntryPath, part: Any) -> Iterator[tuple[str, Any]]:
        """Expand a part with a range in its name."""
        names = self.names(path, path[1])
        if not isinstance(part, Link):
            yield from ((name, part) for name in names)
            return
        ends = [self.names((*path, "ends"), end) for end in part.ends]
        for end in ends:
            if len(end) not in (1, len(names)):
                reason = f"must be one name or {len(names)}, as the link, not {len(end)}"
                raise self.fail((*path, "ends"), reason)
        for i, name in enumerate(names):
            here, there = (end[i % len(end)] for end in ends)
            values = {each.name: getattr(part, each.name) for each in fields(part)}
            yield name, Link(**{**values, "ends": (here, there)})

    def table(self, table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        found = table.get(key, {})
        if not isinstance(found, dict):
            raise self.fail((key,), f"must be a table, not {found!r}")
        return found

    def unknown(self, path: EntryPath, known: Iterable[str]) -> PlatformError:
        return self.fail(path, f"there is no such entry; there are {', '.join(sorted(known))}")

    def part(self, kind: type[Any], path: EntryPath, entries: object) -> Any:
        if not isinstance(entries, dict):
            raise self.fail(path, f"must be a table, not {entries!r}")
        known = {each.name: each for each in fields(kind)}
        for key in entries:
            if key not in known:
                raise self.unknown((*path, key), known)
        values = {}
        for name, each in known.items():
            if name not in entries:
                if each.default is MISSING and each.default_factory is MISSING:
                    raise self.fail((*path, name), "is missing")
                continue
            values[name] = self.value((*path, name), entries[name])
        return kind(**values)

    def value(self, path: EntryPath, value: object) -> Any:
        match path[-1]:
            case "title":
                return self.text(path, value)
            case "duplex":
                return self.choice(path, value, DUPLEX)
            case "ends":
                if not (isinstance(value, list) and len(value) == 2):
                    raise self.fail(path, f"must be two names, not {value!r}")
                return tuple(self.text(path, each) for each in value)
            case "flops":
                if not isinstance(value, dict):
                    raise self.fail(path, f"must be a table, not {value!r}")
                for dtype in value:
                    self.choice((*path, dtype), dtype, DTYPES)
                return {dtype: self.figure((*path, dtype), each) for dtype, each in value.items()}
        return self.figure(path, value)

    def figure(self, path: EntryPath, value: object) -> Figure:
        if not isinstance(value, dict):
            raise self.fail(path, f"must be {{ value, origin, source }}, not {value!r}")
        for key in value:
            if key not in ("value", "origin", "source"):
                raise self.unknown((*path, key), ("value", "origin", "source"))
        for key in ("value", "origin", "source"):
            if key not in value:
                raise self.fail((*path, key), "is missing")
        number = value["value"]
        zero = path[-1] in MAY_BE_ZERO
        good = isinstance(number, int | float) and not isinstance(number, bool)
        if not good or not 0 <= number <= MOST or (number == 0 and not zero):
            least = "a number from 0" if zero else "a number above 0"
            raise self.fail(path, f"must be {least}, not {number!r}")
        origin = self.choice(path, value["origin"], ORIGINS)
        source = self.text(path, value["source"])
        if re.fullmatch(r"[\w-]+", source) and source not in self.sources:
            known = ", ".join(self.sources) or "none"
            raise self.fail(path, f"there is no source {source!r}; there are {known}")
        return Figure(value=number, origin=origin, source=self.sources.get(source, source))

    def choice(self, path: EntryPath, value: object, allowed: tuple[str, ...]) -> Any:
        if value not in allowed:
            raise self.fail(path, f"must be one of {', '.join(allowed)}, not {value!r}")
        return value

    def text(self, path: EntryPath, value: object) -> str:
        if value is None:
            raise self.fail(path, "is missing")
        if not isinstance(value, str) or not value:
            raise self.fail(path, f"must be a text, not {value!r}")
        return value


def _keys(line: str) -> EntryPath:
    """Return the keys in a line of TOML, such as two in `[links."a.b"]`; none if the line is
    invalid by itself.
    """
    try:
        inner: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    keys: list[str] = []
    while isinstance(inner, dict) and inner:
        key, inner = next(iter(inner.items()))
        keys.append(key)
    return tuple(keys)
