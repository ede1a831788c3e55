"""Profiles as data: what is missing or wrong is named."""

import json
import math

import pytest

from nearstep.memferry.errors import ProfileError
from nearstep.memferry.profile import MOST_SECONDS, fingerprint, from_json

from .profiles import layer, made_of

TIMES = (
    "load_s",
    "send_s",
    "forward_s",
    "backward_s",
    "forward_dha_s",
    "backward_dha_s",
    "backward_write_s",
    "backward_dha_write_s",
    "between_forward_s",
    "between_backward_s",
    "update_s",
)


def test_a_profile_comes_back_as_it_was() -> None:
    made = made_of(layer("a"), layer("b", forward_dha_s=None, backward_dha_s=None,
                                     backward_dha_write_s=None))  # fmt: skip
    assert from_json(made.to_json()) == made
    assert from_json(made.to_json()).to_json() == made.to_json()


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize(
    "value", [-1e-9, math.nan, math.inf, -math.inf, 2 * MOST_SECONDS, "1", True]
)
def test_a_time_that_is_none_is_refused_with_layer_and_field(name: str, value: object) -> None:
    with pytest.raises(ProfileError) as caught:
        layer("b", **{name: value})
    assert (caught.value.layer, caught.value.field) == ("b", name)
    assert caught.value.actual is value
    table = json.loads(made_of(layer("a"), layer("b")).to_json())
    table["layers"][1][name] = value
    with pytest.raises(ProfileError) as caught:
        from_json(json.dumps(table))  # Python's JSON has NaN and Infinity
    assert (caught.value.layer, caught.value.field) == ("b", name)


@pytest.mark.parametrize("name", [*TIMES, "name", "parameter_bytes", "gradient_bytes"])
def test_a_field_that_is_missing_is_named(name: str) -> None:
    table = json.loads(made_of(layer("a"), layer("b")).to_json())
    del table["layers"][1][name]
    with pytest.raises(ProfileError, match="must be given") as caught:
        from_json(json.dumps(table))
    assert (caught.value.layer, caught.value.field) == ("1" if name == "name" else "b", name)


@pytest.mark.parametrize("value", [-1, 1.5, None, True])
def test_bytes_are_whole_numbers(value: object) -> None:
    with pytest.raises(ProfileError, match="parameter_bytes"):
        layer(parameter_bytes=value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": 2}, "version"),
        ({"source": "guessed"}, "source"),
        ({"layers": []}, "layers"),
        ({"layers": None}, "layers"),
        ({"fingerprint": ""}, "fingerprint"),
        ({"extra": 1}, "extra"),
        ({"activation_bytes": -1}, "activation_bytes"),
    ],
)
def test_what_is_no_profile_is_refused(change: dict[str, object], field: str) -> None:
    table = {**json.loads(made_of(layer()).to_json()), **change}
    with pytest.raises(ProfileError) as caught:
        from_json(json.dumps(table))
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "[]", "{", "1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ProfileError):
        from_json(text)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ProfileError, match="one layer alone"):
        made_of(layer("a"), layer("a"))
    with pytest.raises(ProfileError, match="send_s"):
        layer(gradient_bytes=0)
    with pytest.raises(ProfileError, match="backward_dha_s"):
        layer(forward_dha_s=None)


def test_a_fingerprint_is_of_names_shapes_and_dtypes() -> None:
    base = [("a", (2, 3), "fp32"), ("b", (3,), "fp32")]
    others = [
        [("a", (3, 2), "fp32"), base[1]],
        [("c", (2, 3), "fp32"), base[1]],
        [("a", (2, 3), "fp16"), base[1]],
        base[::-1],
        base[:1],
    ]
    assert fingerprint(base) == fingerprint(list(base))
    assert len({fingerprint(each) for each in [base, *others]}) == 6
