"""Device names, and options of device names as typed, checked dataclass fields.

A backend offers its devices as ``DEVICES``, families by name, in the module of its entry point.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from nearstep.errors import OptionError, UrlError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
Opened = TypeVar("Opened")

_SUFFIXES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BOOLEANS = {"0": False, "no": False, "false": False, "1": True, "yes": True, "true": True}


@dataclass(frozen=True, kw_only=True)
class Option:
    """What an option is for and what it may be, beside its type: ``Annotated[int, Option(...)]``.

    Attributes
    ----------
    meaning: str
        A line, without a full stop.
    low, high: float | None
        Bounds of a number; :func:`check_bounds` holds to them.
    choices: Sequence[object]
        All values, where the type is no ``Literal``; with ``several`` any of them, with commas.
    allowed: str
        What else is to be said of its values, or all where the others say nothing.
    unset: str
        What it is unless given, if its default does not tell.
    """

    meaning: str
    low: float | None = None
    high: float | None = None
    choices: Sequence[object] = ()
    several: bool = False
    allowed: str = ""
    unset: str = ""


@dataclass(frozen=True)
class OptionRow:
    """An option of a device as text, for people: :func:`describe`."""

    name: str
    values: str
    default: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A device of a family.

    Attributes
    ----------
    options: type
        Dataclass of its options.
    summary: str
        A line.
    opens: str
        ``module:name`` of what makes the device of its options; not imported before.
    when: tuple[str, str] | None
        The option and its value that stand for this device; None for the one that is meant
        without.
    """

    options: type[DataclassInstance]
    summary: str
    opens: str
    when: tuple[str, str] | None = None

    @property
    def query(self) -> str:
        """``option=value``, or nothing."""
        return "=".join(self.when or ())


@dataclass(frozen=True)
class Family:
    """Devices that have one name and differ in an option.

    Attributes
    ----------
    name: str
        ``backend:family``.
    variants: Sequence[Variant]
        The first is the one that is meant without an option.
    """

    name: str
    variants: Sequence[Variant]

    def variant(self, options: Mapping[str, str]) -> Variant:
        """The device that these options mean."""
        for each in self.variants:
            if each.when and options.get(each.when[0]) == each.when[1]:
                return each
        return self.variants[0]

    def parse(self, options: Mapping[str, str]) -> DataclassInstance:
        """As :func:`parse_options`, of the device that they mean.

        Raises
        ------
        OptionError
        """
        chosen = self.variant(options)
        device = "?".join(filter(None, (self.name, chosen.query)))
        others = [each for each in self.variants if each is not chosen]
        return parse_options(chosen.options, device, options, others)

    def describe(self, options: Mapping[str, str]) -> list[OptionRow]:
        """As :func:`describe`, of the device that they mean; values of others stand there, too."""
        rows = []
        for row in describe(self.variant(options).options):
            more = [
                each.when[1] for each in self.variants if each.when and each.when[0] == row.name
            ]
            missing = [value for value in more if value not in row.values.split(", ")]
            values = ", ".join([row.values, *(f"{value} (other options)" for value in missing)])
            rows.append(dataclasses.replace(row, values=values))
        return rows


@dataclass(frozen=True)
class DeviceUrl:
    """A parsed device name: ``backend:target?option=value&option=value``."""

    url: str
    backend: str
    target: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, url: str) -> DeviceUrl:
        """Parse ``url``.

        Raises
        ------
        UrlError
            It has no backend or target, or an option is malformed or given twice.
        """
        name, _, query = url.partition("?")
        backend, colon, target = name.partition(":")
        if not (backend and colon and target):
            raise UrlError(url, "a device name reads backend:target?option=value")
        options: dict[str, str] = {}
        for item in query.split("&") if query else ():
            key, equals, value = item.partition("=")
            if not (key and equals):
                raise UrlError(url, f"option must read name=value, not {item!r}")
            if key in options:
                raise UrlError(url, f"option {key} is given twice")
            options[key] = value
        return cls(url=url, backend=backend, target=target, options=options)


def parse_options(
    kind: type[Options],
    device: str,
    options: Mapping[str, str],
    others: Sequence[Variant] = (),
) -> Options:
    """Make a frozen dataclass of type ``kind`` from the text of options.

    Fields may be ``int`` (decimal, ``0x``, ``_``, suffixes KiB, MiB, GiB, TiB), ``float``,
    ``bool``, ``str``, a ``Literal`` of strings, or one of those ``| None``. ``ValueError`` of the
    dataclass's own checks becomes an :class:`OptionError`, of the option that its message begins
    with, or of the only one, or of ``combination``. ``others`` are devices of the same name, for
    errors to say what they have.

    Raises
    ------
    OptionError
        An option is unknown (the valid names are listed) or its value is not of its type.
    """
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name not in names:
            raise _unknown(device, name, text, names, others)
        values[name] = _parse(hints[name], device, name, text, _choices_of(others, name))
    try:
        return kind(**values)
    except OptionError:
        raise
    except ValueError as error:
        given = "&".join(f"{name}={text}" for name, text in options.items())
        named = str(error).partition(" ")[0]
        wrong = {name: text for name, text in options.items() if name == named or len(options) == 1}
        option, value = next(iter(wrong.items()), ("combination", given))
        raise OptionError(device, option, value, str(error)) from error


def open_family(
    backend: str,
    families: Mapping[str, Family],
    family: str,
    options: Mapping[str, str],
    kind: type[Opened],
) -> Opened:
    """Open ``<backend>:<family>``, a ``kind``.

    Raises
    ------
    UrlError
        The backend has no such family.
    OptionError
    """
    if family not in families:
        name = f"{backend}:{family}"
        raise UrlError(name, f"there is no family {family!r}", sorted(families))
    parsed = families[family].parse(options)
    module, _, name = families[family].variant(options).opens.partition(":")
    device = getattr(importlib.import_module(module), name)(parsed)
    assert isinstance(device, kind)
    return device


def check_bounds(options: DataclassInstance) -> None:
    """Raise ``ValueError`` if a number lies outside the bounds of its :class:`Option`."""
    for name, option, _ in _options(type(options)):
        value = getattr(options, name)
        if value is not None and option.low is not None and option.high is not None:
            if not option.low <= value <= option.high:
                raise ValueError(f"{name} must lie in {_bounds(option)}, not {value}")


def describe(kind: type[DataclassInstance]) -> list[OptionRow]:
    """Every option of ``kind``: its values, its default and what it means, as a user writes it."""
    defaults = {each.name: each.default for each in dataclasses.fields(kind)}
    return [
        OptionRow(name, _values(option, hint), _default(option, defaults[name]), option.meaning)
        for name, option, hint in _options(kind)
    ]


def choices(kind: type[DataclassInstance], name: str) -> tuple[str, ...]:
    """Values that can be listed: those of a ``Literal``, a boolean, or an option with choices."""
    for each, option, hint in _options(kind):
        if each == name:
            if hint is bool:
                return ("yes", "no")
            given = typing.get_args(hint) if _is_literal(hint) else option.choices
            return tuple(map(str, given))
    return ()


def _options(kind: type[DataclassInstance]) -> list[tuple[str, Option, Any]]:
    """Name, description and type of each option; one without description has an empty one."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = []
    for each in dataclasses.fields(kind):
        hint, extras = hints[each.name], getattr(hints[each.name], "__metadata__", ())
        option = next((extra for extra in extras if isinstance(extra, Option)), Option(meaning=""))
        if extras:
            hint = typing.get_args(hint)[0]
        found.append((each.name, option, _bare(hint)))
    return found


def _bare(hint: Any) -> Any:
    """A type without ``| None``."""
    if isinstance(hint, types.UnionType):
        return next(arm for arm in typing.get_args(hint) if arm is not type(None))
    return hint


def _is_literal(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Literal


def _bounds(option: Option) -> str:
    return f"[{_number(option.low)}, {_number(option.high)}]"


def _number(value: float | None) -> str:
    if isinstance(value, int) and value >= 1 << 40:
        return f"2**{value.bit_length()} - 1" if value & (value + 1) == 0 else str(value)
    return str(value)


def _values(option: Option, hint: Any) -> str:
    known = ""
    if hint is bool:
        known = "yes, no"
    elif _is_literal(hint):
        known = ", ".join(typing.get_args(hint))
    elif option.choices:
        known = ", ".join(map(str, option.choices)) + (", with commas" if option.several else "")
    elif option.low is not None:
        known = f"{_number(option.low)} to {_number(option.high)}"
    return "; ".join(filter(None, (known, option.allowed)))


def _default(option: Option, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value >= 1 << 20:
        for suffix, factor in reversed(_SUFFIXES.items()):
            if value % factor == 0:
                return f"{value // factor}{suffix}"
    return option.unset or ("" if value is None else str(value))


def _unknown(
    device: str, name: str, text: str, names: Sequence[str], others: Sequence[Variant]
) -> OptionError:
    """The error about an option that the device has not, and one of the same name may have."""
    elsewhere: dict[str, list[str]] = {}
    for other in others:
        for each in dataclasses.fields(other.options):
            if each.name not in names:
                elsewhere.setdefault(each.name, []).append(other.query)
    if name not in elsewhere:
        also = [f"{each} ({' or '.join(needs)})" for each, needs in elsewhere.items() if all(needs)]
        return OptionError(device, name, text, "there is no such option", [*names, *also])
    needs = [query for query in elsewhere[name] if query]
    reason = (
        f"needs {' or '.join(needs)}" if needs else f"does not go with {device.partition('?')[2]}"
    )
    return OptionError(device, name, text, reason)


def _choices_of(others: Sequence[Variant], name: str) -> tuple[str, ...]:
    """Values of an option that stand for other devices."""
    return tuple(
        value for each in others if each.when for key, value in (each.when,) if key == name
    )


def _parse(hint: Any, device: str, name: str, text: str, more: Sequence[str] = ()) -> Any:
    """The value that ``text`` stands for, of type ``hint``."""
    hint = _bare(hint)
    if _is_literal(hint):
        known = typing.get_args(hint)
        if text not in known:
            raise OptionError(device, name, text, "there is no such choice", (*known, *more))
        return text
    if hint is bool:
        if text.lower() not in _BOOLEANS:
            raise OptionError(device, name, text, "must be a boolean", ("0", "1"))
        return _BOOLEANS[text.lower()]
    if hint is int:
        number, scale = text, 1
        for suffix, factor in _SUFFIXES.items():
            if text.endswith(suffix):
                number, scale = text.removesuffix(suffix), factor
        try:
            return int(number, 0) * scale
        except ValueError:
            raise OptionError(device, name, text, "must be a whole number") from None
    if hint is float:
        try:
            return float(text)
        except ValueError:
            raise OptionError(device, name, text, "must be a number") from None
    return text
