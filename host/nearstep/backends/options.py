"""Device names, and options of device names as typed, checked dataclass fields."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from nearstep.errors import OptionError, UrlError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

_SUFFIXES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BOOLEANS = {"0": False, "no": False, "false": False, "1": True, "yes": True, "true": True}


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


def parse_options(kind: type[Options], device: str, options: Mapping[str, str]) -> Options:
    """Make a frozen dataclass of type ``kind`` from the text of options.

    Fields may be ``int`` (decimal, ``0x``, ``_``, suffixes KiB, MiB, GiB, TiB), ``float``,
    ``bool``, ``str``, a ``Literal`` of strings, or one of those ``| None``. ``ValueError`` of the
    dataclass's own checks becomes an :class:`OptionError`, of the option that its message begins
    with, or of the only one, or of ``combination``.

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
            raise OptionError(device, name, text, "there is no such option", names)
        values[name] = _parse(hints[name], device, name, text)
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


def _parse(hint: Any, device: str, name: str, text: str) -> Any:
    """The value that ``text`` stands for, of type ``hint``."""
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if text not in choices:
            raise OptionError(device, name, text, "there is no such choice", choices)
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
