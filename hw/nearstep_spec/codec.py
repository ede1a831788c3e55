"""The one codec of configurations: text and JSON to frozen dataclasses, and back.

A configuration is a frozen dataclass. Meaning and valid values of a field are declared beside its
type, `Annotated[int, Option(...)]`; a field without an `Option` is no option. The options of a
field that is a configuration itself are listed beside those of the outer one
(`Annotated[KernelConfig, Nested()]`). Device names, the command line, manifests and build keys
derive from the declarations, so that an option has one name, one grammar and one message.

As text an option is `int` (decimal, `0x`, `_`, suffixes KiB, MiB, GiB, TiB), `float`, `bool` (yes,
no, true, false, 1, 0), `str`, one of a `Literal`, or names with commas between them
(`tuple[str, ...]`). In JSON an option is a number, a boolean, a string, a list, or null if not set.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from nearstep_spec.errors import NearstepError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "CodecError",
    "Entry",
    "Nested",
    "Option",
    "OptionRow",
    "check_bounds",
    "check_used",
    "choices",
    "describe",
    "digest",
    "entries",
    "from_arguments",
    "from_json",
    "from_text",
    "make",
    "texts_of",
    "to_json",
    "to_text",
]

Config = TypeVar("Config", bound="DataclassInstance")

SUFFIXES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
BOOLEANS = {"0": False, "no": False, "false": False, "1": True, "yes": True, "true": True}
DIGEST_DIGITS = 16


class CodecError(NearstepError, ValueError):
    """An option that is unknown or has a bad value.

    Attributes
    ----------
    valid : tuple[str, ...]. Valid names or values, if they can be listed.
    """

    def __init__(self, option: str, value: str, reason: str, valid: Iterable[str] = ()) -> None:
        self.option = option
        self.value = value
        self.reason = reason
        self.valid = tuple(valid)
        hint = f"; valid: {', '.join(self.valid)}" if self.valid else ""
        super().__init__(f"option {option}={value!r}: {reason}{hint}")


@dataclass(frozen=True, kw_only=True)
class Option:
    """Meaning and valid values of an option, beside its type.

    Attributes
    ----------
    meaning : a line, without a full stop.
    low, high : bounds of a number.
    choices : all values, if the type is no `Literal`; a tuple may have any of them.
    allowed : further text on valid values, or all of it without bounds and choices.
    unset : text for the default value, if the default itself is None.
    optional : left out of JSON while it has its default, as in manifests older than the option.
    """

    meaning: str
    low: float | None = None
    high: float | None = None
    choices: Sequence[object] = ()
    allowed: str = ""
    unset: str = ""
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Nested:
    """A configuration inside another, whose options stand beside those of the outer one.

    Attributes
    ----------
    rename : names of some options in the outer configuration.
    omit : options that the outer configuration does not offer.
    defaults : other defaults in the outer configuration.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    omit: Sequence[str] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """An option of a configuration.

    Attributes
    ----------
    name : in texts.
    path : names of fields, from the outermost configuration.
    hint : type, without `None`.
    """

    name: str
    path: tuple[str, ...]
    hint: Any
    option: Option
    default: object

    @property
    def several(self) -> bool:
        """Whether the value is a tuple of names."""
        return typing.get_origin(self.hint) is tuple

    @property
    def literals(self) -> tuple[str, ...]:
        """Values of a `Literal`."""
        return typing.get_args(self.hint) if typing.get_origin(self.hint) is typing.Literal else ()


@dataclass(frozen=True)
class OptionRow:
    """An option in the texts of `describe`."""

    name: str
    values: str
    default: str
    meaning: str


@cache
def entries(kind: type[DataclassInstance]) -> tuple[Entry, ...]:
    """List every option of `kind`, including inner configurations, in order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found: list[Entry] = []
    for each in dataclasses.fields(kind):
        hint = hints[each.name]
        bare, *extras = typing.get_args(hint) if _is_annotated(hint) else (hint,)
        for extra in extras:
            if isinstance(extra, Option):
                found.append(Entry(each.name, (each.name,), _bare(bare), extra, _default_of(each)))
            elif isinstance(extra, Nested):
                found += [
                    Entry(
                        extra.rename.get(inner.name, inner.name),
                        (each.name, *inner.path),
                        inner.hint,
                        inner.option,
                        extra.defaults.get(inner.name, inner.default),
                    )
                    for inner in entries(bare)
                    if inner.name not in extra.omit
                ]
    return tuple(found)


def make(kind: type[Config], values: Mapping[str, object]) -> Config:
    """Make the configuration with these values of options, by name, and defaults for the others.

    Raises
    ------
    CodecError : there is no such option.
    ValueError : a configuration's own checks fail.
    """
    known = {each.name: each for each in entries(kind)}
    for name, value in values.items():
        if name not in known:
            raise CodecError(name, _text(value), "there is no such option", known)
    return _made(kind, {each.path: values.get(name, each.default) for name, each in known.items()})


def from_text(kind: type[Config], texts: Mapping[str, str], more: Iterable[str] = ()) -> Config:
    """Parse texts of options, by name, to a configuration.

    `more` are further names for the list in an error about an unknown one. A `ValueError` of the
    configuration's own checks is raised as a `CodecError` of the option that begins the message, or
    of the only option, or of `combination`.

    Raises
    ------
    CodecError : an option is unknown (the valid names are listed), or its value has another type or
        is not allowed.
    """
    known = {each.name: each for each in entries(kind)}
    values = {}
    for name, text in texts.items():
        if name not in known:
            raise CodecError(name, text, "there is no such option", [*known, *more])
        values[name] = _parsed(known[name], text)
    try:
        return make(kind, values)
    except CodecError:
        raise
    except ValueError as error:
        given = "&".join(f"{name}={text}" for name, text in texts.items())
        named = str(error).partition(" ")[0]
        wrong = {name: text for name, text in texts.items() if name == named or len(texts) == 1}
        option, value = next(iter(wrong.items()), ("combination", given))
        raise CodecError(option, value, str(error)) from error


def from_arguments(kind: type[Config], arguments: Sequence[str]) -> Config:
    """Parse words of a command line to a configuration, see `texts_of`.

    Raises
    ------
    CodecError
    """
    return from_text(kind, texts_of(kind, arguments))


def texts_of(kind: type[DataclassInstance], arguments: Sequence[str]) -> dict[str, str]:
    """Parse words of a command line to texts of options by name: `--lanes 4`, `--lanes=4`,
    `--scan`, `--no-scan`; `_` may be `-`.

    Names and values are not checked.

    Raises
    ------
    CodecError
    """
    flags = {each.name for each in entries(kind) if each.hint is bool}
    texts: dict[str, str] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--"):
            raise CodecError(word, "", "an option reads --name value")
        if name.removeprefix("no_") in flags and name not in flags and not equals:
            name, text = name.removeprefix("no_"), "no"
        elif name in flags and not equals and (not words or words[0].startswith("--")):
            text = "yes"
        elif not equals:
            if not words:
                raise CodecError(name, "", "a value must follow")
            text = words.pop(0)
        if name in texts:
            raise CodecError(name, text, "is given twice")
        texts[name] = text
    return texts


def check_used(
    kind: type[DataclassInstance], given: Mapping[str, object], used: Iterable[str]
) -> None:
    """Raise `CodecError` if an option of `kind` is given that is not among `used`."""
    idle = {each.name for each in entries(kind)} - set(used)
    for name, value in given.items():
        if name in idle:
            raise CodecError(name, _text(value), "changes nothing here", used)


def to_text(config: DataclassInstance) -> dict[str, str]:
    """Format options that differ from their defaults, such that `from_text` returns `config`."""
    return {
        each.name: _text(value)
        for each in entries(type(config))
        if (value := _value(config, each)) != each.default and value is not None
    }


def to_json(config: DataclassInstance) -> dict[str, Any]:
    """Convert options by name, for `json.dumps`: all but the optional ones that are not set."""
    values = {each: _value(config, each) for each in entries(type(config))}
    return {
        each.name: list(value) if isinstance(value, tuple) else value
        for each, value in values.items()
        if not each.option.optional or value != each.default
    }


def from_json(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """Make the configuration that `to_json` converted; missing options have defaults.

    Raises
    ------
    CodecError : an option is unknown, or its value has another type or is not allowed.
    """
    known = {each.name: each for each in entries(kind)}
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise CodecError(name, _text(value), "there is no such option", known)
        checked[name] = _checked(known[name], value)
    try:
        return make(kind, checked)
    except CodecError:
        raise
    except ValueError as error:
        raise CodecError(str(error).partition(" ")[0], _text(dict(values)), str(error)) from error


def digest(config: DataclassInstance) -> str:
    """Compute a build key of `config`: equal for equal configurations."""
    text = json.dumps([type(config).__name__, dataclasses.asdict(config)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]


def check_bounds(config: DataclassInstance) -> None:
    """Raise `ValueError` if a number lies outside the bounds of its `Option`."""
    for each in entries(type(config)):
        if len(each.path) > 1:
            continue  # its own configuration checks it
        value, low, high = _value(config, each), each.option.low, each.option.high
        if value is not None and low is not None and high is not None:
            if not low <= value <= high:
                raise ValueError(f"{each.name} must lie in {_bounds(each.option)}, not {value}")


def describe(kind: type[DataclassInstance]) -> list[OptionRow]:
    """Describe every option of `kind`: its values, default and meaning, in the user's notation."""
    return [
        OptionRow(each.name, _values(each), _default(each), each.option.meaning)
        for each in entries(kind)
    ]


def choices(kind: type[DataclassInstance], name: str) -> tuple[str, ...]:
    """List the values of a `Literal`, a boolean, or an option with choices."""
    for each in entries(kind):
        if each.name == name:
            if each.hint is bool:
                return ("yes", "no")
            return each.literals or tuple(map(str, each.option.choices))
    return ()


def _made(kind: type[Config], values: Mapping[tuple[str, ...], object]) -> Config:
    """Make the configuration with values by path."""
    hints = typing.get_type_hints(kind, include_extras=True)
    arguments: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in values):
        inner = {path[1:]: value for path, value in values.items() if path[0] == name}
        if () in inner:
            arguments[name] = inner[()]
            continue
        bare, *extras = typing.get_args(hints[name])
        nested = next(extra for extra in extras if isinstance(extra, Nested))
        here = {each.path: nested.defaults.get(each.name, each.default) for each in entries(bare)}
        try:
            arguments[name] = _made(bare, here | inner)
        except ValueError as error:
            first, space, rest = str(error).partition(" ")
            if first not in nested.rename:
                raise
            raise type(error)(nested.rename[first] + space + rest) from None
    return kind(**arguments)


def _value(config: Any, entry: Entry) -> Any:
    for name in entry.path:
        config = getattr(config, name)
    return config


def _default_of(each: dataclasses.Field[Any]) -> object:
    if each.default_factory is not dataclasses.MISSING:
        return each.default_factory()
    return None if each.default is dataclasses.MISSING else each.default


def _is_annotated(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Annotated


def _bare(hint: Any) -> Any:
    """Remove `| None` from a type."""
    if isinstance(hint, types.UnionType):
        return next(arm for arm in typing.get_args(hint) if arm is not type(None))
    return hint


def _parsed(entry: Entry, text: str) -> Any:
    """Parse `text` to a value."""
    name = entry.name
    if entry.literals:
        if text not in entry.literals:
            raise CodecError(name, text, "there is no such choice", entry.literals)
        return text
    if entry.hint is bool:
        if text.lower() not in BOOLEANS:
            raise CodecError(name, text, "must be a boolean", ("0", "1"))
        return BOOLEANS[text.lower()]
    if entry.hint is int:
        number, scale = text, 1
        for suffix, factor in SUFFIXES.items():
            if text.endswith(suffix):
                number, scale = text.removesuffix(suffix), factor
        try:
            return int(number, 0) * scale
        except ValueError:
            raise CodecError(name, text, "must be a whole number") from None
    if entry.hint is float:
        try:
            return float(text)
        except ValueError:
            raise CodecError(name, text, "must be a number") from None
    if entry.several:
        return tuple(text.split(",")) if text else ()
    return text


def _checked(entry: Entry, value: Any) -> Any:
    """Convert a JSON value to that of the option."""
    if value is None and entry.default is None:
        return None
    if entry.several:
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise CodecError(entry.name, _text(value), "must be a list of names")
    kind = str if entry.literals else entry.hint
    number = kind is float and isinstance(value, int | float) and not isinstance(value, bool)
    if not (number or type(value) is kind):
        raise CodecError(entry.name, _text(value), f"must be of type {kind.__name__}")
    if entry.literals and value not in entry.literals:
        raise CodecError(entry.name, value, "there is no such choice", entry.literals)
    return float(value) if number else value


def _text(value: object) -> str:
    """Format a value for `from_text`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)


def _bounds(option: Option) -> str:
    return f"[{_number(option.low)}, {_number(option.high)}]"


def _number(value: float | None) -> str:
    if isinstance(value, int) and value >= 1 << 40:
        return f"2**{value.bit_length()} - 1" if value & (value + 1) == 0 else str(value)
    return str(value)


def _values(entry: Entry) -> str:
    option, known = entry.option, ""
    if entry.hint is bool:
        known = "yes, no"
    elif entry.literals:
        known = ", ".join(entry.literals)
    elif option.choices:
        known = ", ".join(map(str, option.choices)) + (", with commas" if entry.several else "")
    elif option.low is not None:
        known = f"{_number(option.low)} to {_number(option.high)}"
    return "; ".join(filter(None, (known, option.allowed)))


def _default(entry: Entry) -> str:
    value = entry.default
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20:
        for suffix, factor in reversed(SUFFIXES.items()):
            if value % factor == 0:
                return f"{value // factor}{suffix}"
    if value is None or value == ():
        return entry.option.unset
    return entry.option.unset if isinstance(value, str) and not value else _text(value)
