"""Examination of each key of a configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearstep.deepspeed.errors import (
    AUTO,
    AutoValueError,
    ConfigError,
    RepeatedKeyError,
    UnknownKeyError,
    UnsupportedKeyError,
)
from nearstep.deepspeed.keys import Key, Keys, keys


@dataclass(frozen=True)
class KeyFate:
    """The fate of one key.

    Attributes
    ----------
    key : its path, such as `optimizer.params.lr`.
    value : as given; the caller's in the place of `auto`.
    fate : `used`, `ignored`, `left out` or `refused`.
    text : its use, or the reason.
    """

    key: str
    value: Any
    fate: str
    text: str


@dataclass
class Examined:
    """A configuration key by key.

    Attributes
    ----------
    auto : values in the place of `auto`, by path.
    ignore : paths of keys that are left out.
    values : of keys that are used, by path.
    rows : every key that is not a table with keys of its own, in the order of the file.
    problems : in the same order.
    """

    auto: Mapping[str, Any]
    ignore: Collection[str]
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[KeyFate] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)

    def examine(self, table: Mapping[str, Any]) -> None:
        """Examine each key separately."""
        self._table(table, keys(self._filled(table, "")), "")
        for name, given in (("auto", self.auto), ("ignore", self.ignore)):
            for key in given:
                if key not in self._used:
                    expected = f'"{AUTO}"' if name == "auto" else "there"
                    error = ConfigError(key, f"{expected} to be in {name}=", "something else")
                    self.refuse(error, None)

    def refuse(self, error: ConfigError, value: object) -> None:
        """Refuse a key, whatever its fate so far."""
        self.problems.append(error)
        self.rows = [row for row in self.rows if row.key != error.key]
        self.rows.append(KeyFate(error.key, value, "refused", str(error)))

    def _filled(self, table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """The table with the caller's values in the place of `auto`."""
        return {
            name: self._filled(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else (self.auto.get(f"{prefix}{name}", value) if _is_auto(value) else value)
            for name, value in table.items()
        }

    def _table(self, table: Mapping[str, Any], known: Keys, prefix: str) -> None:
        for name, value in table.items():
            key = f"{prefix}{name}"
            if key in self.ignore:
                self._used.add(key)
                self.rows.append(KeyFate(key, value, "left out", "the caller says so"))
            elif name in getattr(table, "repeated", ()):
                self.refuse(RepeatedKeyError(key), value)
            elif name not in known:
                self.refuse(UnknownKeyError(key, known), value)
            else:
                self._entry(key, value, known[name])

    def _entry(self, key: str, value: object, known: Key | Keys) -> None:
        try:
            if not isinstance(known, Key):
                if not isinstance(value, Mapping):
                    raise ConfigError(key, "a table", "null" if value is None else value)
                self._table(value, known, f"{key}.")
                return
            if _is_auto(value):
                value = self._given(key, known)
            self._one(key, value, known)
        except ConfigError as error:
            self.refuse(error, value)

    def _given(self, key: str, known: Key) -> object:
        if key in self.auto:
            self._used.add(key)
            return self.auto[key]
        if known.fate == "ignored":
            return AUTO
        raise AutoValueError(key)

    def _one(self, key: str, value: object, known: Key) -> None:
        for where in _not_json(key, value):
            raise ConfigError(where, "a finite number", "NaN or an infinity")
        fate = "used"
        if known.fate == "ignored":
            fate = "ignored"
            if not _is_auto(value):
                known.kind.read(key, value)
        elif known.fate == "refused":
            raise UnsupportedKeyError(key, "left out", value, known.text)
        elif known.fate == "off":
            _check_off(key, known.kind.read(key, value), known.text)
            fate = "ignored"
        else:
            found = known.kind.read(key, value)
            if known.fate == "only" and found not in known.accepted:
                expected = " or ".join(map(json.dumps, known.accepted))
                raise UnsupportedKeyError(key, expected, value, known.text)
            self.values[key] = found
        self.rows.append(KeyFate(key, value, fate, known.text))


class _Table(dict[str, Any]):
    """A table of a JSON text, with its repeated keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.repeated = [name for name in self if names.count(name) > 1]


def read(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the table of a configuration.

    Raises
    ------
    ConfigError : there is no such file, or it is no table in JSON.
    """
    table: Any = source
    if isinstance(source, str | Path):
        try:
            text = Path(source).read_text(encoding="utf-8")
            table = json.loads(text, object_pairs_hook=_Table)
        except OSError as error:
            raise ConfigError(
                "", "a file that can be read", f"{source}: {error.strerror}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError("", "JSON", f"{source}: {error}") from None
    if not isinstance(table, Mapping):
        raise ConfigError("", "a table", table)
    return table


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == AUTO


def _check_off(key: str, table: Mapping[str, Any], text: str) -> None:
    enabled = table.get("enabled")
    if enabled is True or enabled is None:
        raise UnsupportedKeyError(f"{key}.enabled", "false", enabled, text)
    if enabled is not False:
        raise ConfigError(f"{key}.enabled", "true or false", enabled)


def _not_json(key: str, value: object) -> Iterator[str]:
    """Paths of numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield key
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _not_json(f"{key}.{name}", each)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _not_json(f"{key}[{index}]", each)
