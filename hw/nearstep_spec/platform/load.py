"""Descriptions of machines in TOML: reading, checking, and those that come with the package.

A figure is `{ value = 12e9, origin = "datasheet", source = "v100" }`, where `source` is a key of
the table `sources` or a text. An error names the file and the line.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, get_type_hints

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
MAY_BE_ZERO = ("latency_s", "read_latency_s", "write_latency_s")
_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*=")


def shipped() -> tuple[str, ...]:
    """Names of the machines that come with the package."""
    folder = files("nearstep_spec.platform") / "machines"
    return tuple(sorted(each.name[:-5] for each in folder.iterdir() if each.name.endswith(".toml")))


def load(name: str | Path) -> Platform:
    """The machine of a name, or in a file.

    Parameters
    ----------
    name : one of `shipped`, or the path of a TOML file.

    Raises
    ------
    PlatformError : there is none, or it is wrong: with file, line and entry.
    """
    known = shipped()
    if isinstance(name, str) and name in known:
        source = files("nearstep_spec.platform") / "machines" / f"{name}.toml"
        return parse(source.read_text(encoding="utf-8"), f"{name}.toml")
    path = Path(name)
    if not path.is_file():
        raise PlatformError(f"there is no machine {str(name)!r}: {', '.join(known)}, or a file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlatformError(f"{path}: cannot be read: {error}") from None
    return parse(text, str(path))


def parse(text: str, where: str) -> Platform:
    """The machine that a TOML text describes.

    Parameters
    ----------
    text
    where : name of the file, for errors.

    Raises
    ------
    PlatformError
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlatformError(f"{where}: not TOML: {error}") from None
    return _Reader(text, where).platform(table)


class _Reader:
    """Makes a machine of a table, and knows which line an entry stands in."""

    def __init__(self, text: str, where: str) -> None:
        self.where = where
        self.sources: Mapping[str, Any] = {}
        self.lines: dict[str, int] = {}
        table = ""
        for number, line in enumerate(text.splitlines(), 1):
            if header := _HEADER.match(line):
                table = header[1].strip()
                self.lines.setdefault(table, number)
            elif key := _KEY.match(line):
                self.lines.setdefault(f"{table}.{key[1]}".lstrip("."), number)

    def fail(self, path: str, reason: str) -> PlatformError:
        """An error about an entry, with the line of it or of what it should be in."""
        name = path
        while name and name not in self.lines:
            name = name.rpartition(".")[0]
        line = f":{self.lines[name]}" if name else ""
        return PlatformError(f"{self.where}{line}: {path}: {reason}")

    def platform(self, table: Mapping[str, Any]) -> Platform:
        known = {"name", "title", "sources", "switches", *PARTS}
        for key in table:
            if key not in known:
                raise self.fail(key, f"there is no such entry; there are {_listed(known)}")
        self.sources = self.table(table, "sources")
        for key, source in self.sources.items():
            self.text(f"sources.{key}", source)
        switches = table.get("switches", [])
        if not isinstance(switches, list) or not all(isinstance(each, str) for each in switches):
            raise self.fail("switches", f"must be a list of names, not {switches!r}")
        parts: dict[str, Any] = {
            key: {
                name: self.part(kind, f"{key}.{name}", entries)
                for name, entries in self.table(table, key).items()
            }
            for key, kind in PARTS.items()
        }
        title = {key: self.text(key, table.get(key)) for key in ("name", "title")}
        try:
            return Platform(**title, switches=tuple(switches), **parts)
        except PlatformError as error:
            raise PlatformError(f"{self.where}: {error}") from None

    def table(self, table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        found = table.get(key, {})
        if not isinstance(found, dict):
            raise self.fail(key, f"must be a table, not {found!r}")
        return found

    def part(self, kind: type[Any], path: str, entries: object) -> Any:
        if not isinstance(entries, dict):
            raise self.fail(path, f"must be a table, not {entries!r}")
        known = {each.name: each for each in fields(kind)}
        hints = get_type_hints(kind)
        for key in entries:
            if key not in known:
                raise self.fail(f"{path}.{key}", f"there is no such entry; there are {_listed(known)}")
        values = {}
        for name, each in known.items():
            if name not in entries:
                if each.default is MISSING and each.default_factory is MISSING:
                    raise self.fail(f"{path}.{name}", "is missing")
                continue
            values[name] = self.value(hints[name], f"{path}.{name}", entries[name])
        return kind(**values)

    def value(self, hint: Any, path: str, value: object) -> Any:
        last = path.rpartition(".")[2]
        if last == "title":
            return self.text(path, value)
        if last == "duplex":
            return self.choice(path, value, DUPLEX)
        if last == "ends":
            if not (isinstance(value, list) and len(value) == 2):
                raise self.fail(path, f"must be two names, not {value!r}")
            return tuple(self.text(path, each) for each in value)
        if last == "flops":
            if not isinstance(value, dict):
                raise self.fail(path, f"must be a table, not {value!r}")
            for dtype in value:
                self.choice(f"{path}.{dtype}", dtype, DTYPES)
            return {dtype: self.figure(f"{path}.{dtype}", each) for dtype, each in value.items()}
        return self.figure(path, value)

    def figure(self, path: str, value: object) -> Figure:
        if not isinstance(value, dict) or set(value) != {"value", "origin", "source"}:
            raise self.fail(path, f"must be {{ value, origin, source }}, not {value!r}")
        number = value["value"]
        name = path.rpartition(".")[2]
        good = isinstance(number, int | float) and not isinstance(number, bool)
        if not good or not isfinite(number) or number < 0 or (number == 0 and name not in MAY_BE_ZERO):
            least = "a number from 0" if name in MAY_BE_ZERO else "a number above 0"
            raise self.fail(path, f"must be {least}, not {number!r}")
        origin = self.choice(path, value["origin"], ORIGINS)
        source = self.text(path, value["source"])
        return Figure(value=number, origin=origin, source=self.sources.get(source, source))

    def choice(self, path: str, value: object, allowed: tuple[str, ...]) -> Any:
        if value not in allowed:
            raise self.fail(path, f"must be one of {', '.join(allowed)}, not {value!r}")
        return value

    def text(self, path: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise self.fail(path, f"must be a text, not {value!r}")
        return value


def _listed(names: object) -> str:
    return ", ".join(sorted(names))  # type: ignore[call-overload]
