"""Device names, and the devices of a backend.

A backend lists its devices in `DEVICES`, families by name, in the module of its entry point.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from nearstep.errors import OptionError, UrlError
from nearstep_spec.codec import CodecError, OptionRow, describe, entries, from_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HOST = "host"
"""Backend whose name has no target: there is one processor."""

Options = TypeVar("Options", bound="DataclassInstance")
Opened = TypeVar("Opened")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A device of a family.

    Attributes
    ----------
    options : dataclass of its options.
    summary : a line.
    opens : `module:name` of the function that makes the device from its options; imported on use.
    when : the option and its value that select this device; None: the default.
    """

    options: type[DataclassInstance]
    summary: str
    opens: str
    when: tuple[str, str] | None = None

    @property
    def query(self) -> str:
        """`option=value`, or nothing."""
        return "=".join(self.when or ())


@dataclass(frozen=True)
class Family:
    """Devices of one name that an option selects.

    Attributes
    ----------
    name : `backend:family`.
    variants : the first is the default.
    """

    name: str
    variants: Sequence[Variant]

    def variant(self, options: Mapping[str, str]) -> Variant:
        """Select the device by options."""
        for each in self.variants:
            if each.when and options.get(each.when[0]) == each.when[1]:
                return each
        return self.variants[0]

    def parse(self, options: Mapping[str, str]) -> DataclassInstance:
        """Parse options, as `parse_options`, of the device that they select.

        Raises
        ------
        OptionError
        """
        chosen = self.variant(options)
        device = "?".join(filter(None, (self.name, chosen.query)))
        others = [each for each in self.variants if each is not chosen]
        return parse_options(chosen.options, device, options, others)

    def describe(self, options: Mapping[str, str]) -> list[OptionRow]:
        """Describe options, as `describe`, of the device that they select, with values of other
        variants.
        """
        rows = []
        for row in describe(self.variant(options).options):
            more = [
                each.when[1] for each in self.variants if each.when and each.when[0] == row.name
            ]
            missing = [value for value in more if value not in row.values.split(", ")]
            values = ", ".join([row.values, *(f"{value} (other options)" for value in missing)])
            rows.append(dataclasses.replace(row, values=values))
        return rows


class Paths(Mapping[str, Family]):
    """One family for every path of this machine; lists have a placeholder."""

    def __init__(self, placeholder: str, family: Family) -> None:
        self._placeholder, self._family = placeholder, family

    def __getitem__(self, name: str) -> Family:
        return self._family

    def __iter__(self) -> Iterator[str]:
        return iter((self._placeholder,))

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True)
class DeviceUrl:
    """A parsed device name: `backend:target?option=value&option=value`.

    Attributes
    ----------
    target : empty in `host:`.
    """

    url: str
    backend: str
    target: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, url: str) -> DeviceUrl:
        """Parse `url`.

        Raises
        ------
        UrlError : it has no backend or target, or an option is malformed or given twice.
        """
        name, _, query = url.partition("?")
        backend, colon, target = name.partition(":")
        if not (backend and colon and bool(target) != (backend == HOST)):
            raise UrlError(
                url, f"a device name reads backend:target?option=value, or {HOST}:?option=value"
            )
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
    """Parse options, as `nearstep_spec.codec.from_text`; errors list the options of `others`,
    devices of the same name.

    Raises
    ------
    OptionError
    """
    names = [each.name for each in entries(kind)]
    elsewhere: dict[str, list[str]] = {}
    for other in others:
        for each in entries(other.options):
            if each.name not in names:
                elsewhere.setdefault(each.name, []).append(other.query)
    also = [f"{each} ({' or '.join(needs)})" for each, needs in elsewhere.items() if all(needs)]
    try:
        return from_text(kind, options, also)
    except CodecError as error:
        name, value, reason, valid = error.option, error.value, error.reason, error.valid
        if name in elsewhere:
            needs = [query for query in elsewhere[name] if query]
            alone = f"cannot be used with {device.partition('?')[2]}"
            raise OptionError(
                device, name, value, f"needs {' or '.join(needs)}" if needs else alone
            ) from error
        if name in names and valid:
            valid = (*valid, *_choices_of(others, name))
        raise OptionError(device, name, value, reason, valid) from error


def open_family(
    backend: str,
    families: Mapping[str, Family],
    family: str,
    options: Mapping[str, str],
    kind: type[Opened],
) -> Opened:
    """Open `<backend>:<family>`, a `kind`.

    Raises
    ------
    UrlError : the backend has no such family.
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


def _choices_of(others: Sequence[Variant], name: str) -> tuple[str, ...]:
    """List values of an option that select other devices."""
    return tuple(
        value for each in others if each.when for key, value in (each.when,) if key == name
    )
