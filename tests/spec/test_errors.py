"""Errors that declare a message and fields: what their constructors take, keep and say."""

import copy
import pickle
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, field

import pytest

from nearstep_spec.errors import Fielded, NearstepError


class MissingError(Fielded, NearstepError, KeyError):
    template = "{what} has no {name!r}{hint}"
    what: str
    name: str
    near: Iterable[str] = ()
    _: KW_ONLY
    codes: Mapping[str, int] = field(default_factory=dict)

    __str__ = Exception.__str__

    @property
    def hint(self) -> str:
        return f"; there is {', '.join(self.near)}" if self.near else ""


class MissingTableError(MissingError):
    template = "{what} has no table {name!r} at {place:#x}{hint}"
    _: KW_ONLY
    place: int


class OldError(NearstepError, MemoryError):
    def __init__(self, needed: int, there: int) -> None:
        self.needed, self.there = needed, there
        super().__init__(f"{needed} of {there}")


class FullError(NearstepError, OSError):
    def __init__(self, path: str, errno: int) -> None:
        super().__init__(f"{path} is full")
        self.path, self.errno = path, errno


class OddWarning(Fielded, UserWarning):
    template = "odd: {path}"
    path: str
    lost: Sequence[int]


def test_the_message_is_made_of_attributes_and_properties() -> None:
    error = MissingError("a file", "x", (each for each in "yz"), codes={"e": 2})
    assert str(error) == "a file has no 'x'; there is y, z"
    assert (error.what, error.name, error.near, error.codes) == (
        "a file",
        "x",
        ("y", "z"),
        {"e": 2},
    )
    assert str(MissingError("a file", "x")) == "a file has no 'x'"
    assert isinstance(error, KeyError)


def test_a_kind_of_an_error_takes_its_fields_and_more() -> None:
    error = MissingTableError("a file", "x", place=16)
    assert str(error) == "a file has no table 'x' at 0x10"
    with pytest.raises(TypeError, match="place"):
        MissingTableError("a file", "x")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "error",
    [
        MissingError("a file", "x", ["y"], codes={"e": 2}),
        MissingTableError("a file", "x", place=16),
        OldError(3, 2),
        FullError("/p", 28),
        OddWarning("/p", [1]),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("act", [copy.copy, lambda each: pickle.loads(pickle.dumps(each))])
def test_an_error_comes_back_from_pickle_as_it_was(error: Exception, act: object) -> None:
    again = act(error)  # type: ignore[operator]
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    assert getattr(again, "errno", None) == getattr(error, "errno", None)


def test_a_warning_can_declare_fields() -> None:
    with pytest.warns(OddWarning, match="odd: /p") as caught:
        warnings.warn(OddWarning("/p", [3, 4]), stacklevel=1)
    assert caught[0].message.lost == (3, 4)  # type: ignore[union-attr]
