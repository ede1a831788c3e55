"""The base of every deliberate error of the four packages, and errors made of fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MemberDescriptorType
from typing import Any, ClassVar, dataclass_transform

__all__ = ["Fielded", "NearstepError"]


def _reduced(error: BaseException) -> tuple[Any, ...]:
    """Reduce an error with its attributes, including those of `OSError`, for pickle and copy."""
    found = [(name, each) for kind in type(error).__mro__ for name, each in vars(kind).items()]
    names = [name for name, each in found if isinstance(each, MemberDescriptorType)]
    slots = {name: getattr(error, name) for name in names if getattr(error, name) is not None}
    return _restored, (type(error), error.args), {**slots, **vars(error)}


def _restored(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Restore a pickled error without a call of its constructor."""
    base: Any = kind  # the base with its memory layout: not `MemoryError` beside others
    while "__new__" not in vars(base):
        base = base.__base__
    made: BaseException = base.__new__(kind, *args)
    made.args = args
    return made


class NearstepError(Exception):
    """Base of every deliberate error of nearstep."""

    __reduce__ = _reduced


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

    __reduce__ = _reduced


_KEPT: Mapping[str, Any] = {"Iterable": tuple, "Sequence": tuple, "Mapping": dict}
"""Type of a field's value, by the beginning of its annotation."""


class _Attributes(dict[str, Any]):
    """Attributes of an object, for a format string."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __missing__(self, name: str) -> Any:
        return getattr(self._owner, name)
