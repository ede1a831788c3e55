"""The base of every error that the four packages raise on purpose, and errors made of fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

__all__ = ["Fielded", "NearstepError"]


class NearstepError(Exception):
    """Base of every error that nearstep raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args), vars(self)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class Fielded:
    """Mixin of an error or a warning that declares a message and fields.

    A subclass is a dataclass: annotated names are the parameters of its constructor and attributes
    of the error. A field of a `Sequence` or an `Iterable` is kept as a tuple, one of a `Mapping` as
    a dict.

    Attributes
    ----------
    template : format string of the message, which names attributes and properties.
    """

    template: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        dataclass(eq=False, repr=False, match_args=False)(cls)

    def __post_init__(self) -> None:
        for each in fields(self):
            if (kind := str(each.type).partition("[")[0].rpartition(".")[2]) in _KEPT:
                setattr(self, each.name, _KEPT[kind](getattr(self, each.name)))
        self.args = (self._text(),)

    def _text(self) -> str:
        return self.template.format_map(_Attributes(self))

    def __reduce__(self) -> tuple[Any, ...]:
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return _restored, (type(self), self.args), {**named, **vars(self)}


_KEPT: Mapping[str, Any] = {"Iterable": tuple, "Sequence": tuple, "Mapping": dict}
"""Type that the value of a field has, by the beginning of its annotation."""


class _Attributes(dict[str, Any]):
    """Attributes of an object, for a format string."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __missing__(self, name: str) -> Any:
        return getattr(self._owner, name)


def _restored(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An error that was pickled, without a call of its constructor."""
    base: Any = kind  # the class whose layout it has: `MemoryError` beside others is not that
    while "__new__" not in vars(base):
        base = base.__base__
    made: BaseException = base.__new__(kind, *args)
    return made
