"""Rows of printed figures, their errors, and the labels of inputs."""

from __future__ import annotations

import pytest

from nearstep.errors import ArgumentError
from nearstep.paper.rows import Input, Row, errors, labelled


def row(name: str, paper: float, found: float | None, **others) -> Row:
    values = {"section": "a", "unit": "x", "paper": paper, "found": found}
    return Row(name=name, **{**values, **others})


def test_errors_are_of_rows_that_the_mean_counts() -> None:
    rows = [
        row("a", 2.0, 2.2, mean=True),
        row("b", 2.0, 1.4, mean=True),
        row("c", 1.0, 9.0),
        row("d", 1.0, 2.0, relation="<", mean=True),
        row("e", 1.0, None, mean=True),
        row("f", 50.0, 60.0, unit="%"),
    ]
    found = errors(rows)
    assert found is not None
    assert found.mean == pytest.approx(0.2)
    assert (found.largest.name, found.count) == ("b", 2)
    assert [each.holds for each in rows] == [None, None, None, False, None, None]
    assert row("g", 3.0, 4.0, relation=">").holds
    assert errors(rows[2:]) is None


@pytest.mark.parametrize(
    ("unit", "error", "fraction", "off"),
    [
        ("x", 0.25, 0.25, "+25.0%"),
        ("%", 5.0, 0.25, "+5.0 points"),
        ("+%", 5 / 120, 5 / 120, "+4.2%"),
        ("M", 5.0, 0.25, "+5.0000"),
    ],
)
def test_an_error_is_a_difference_or_a_fraction(
    unit: str, error: float, fraction: float, off: str
) -> None:
    found = row("a", 20.0, 25.0, unit=unit)
    assert found.error == pytest.approx(error)
    assert found.fraction == pytest.approx(fraction)
    assert found.off == off
    assert row("a", -40.0, -25.0, unit="+%").here == "-25.00 %"
    zero = row("a", 0.0, 1.0, unit=unit)
    assert zero.fraction == (0.01 if unit == "+%" else None)


def test_a_row_that_an_input_is_from_is_left_out_of_the_second_mean() -> None:
    inputs = [
        Input(name="i", value="1 GB/s", label="paper", source="figure 1", on=("a",)),
        Input(name="j", value="2", label="fitted", source="once", on=("b",)),
        Input(name="k", value="3", label="chosen", source="no source", on=("c", "d")),
        Input(name="l", value="4", label="chosen", source="a datasheet"),
    ]
    found = [row(name, 1.0, 1.0 + i / 10, mean=True) for i, name in enumerate("abcde", start=1)]
    rows = [*labelled(found, inputs)]
    assert [each.kind for each in rows] == ["input", "fitted", "chosen", "chosen", "modelled"]
    every, apart = errors(rows), errors(rows, apart=True)
    assert every is not None
    assert apart is not None
    assert (every.count, every.mean) == (5, pytest.approx(0.3))
    assert (apart.count, apart.mean, apart.largest.name) == (1, pytest.approx(0.5), "e")


def test_a_row_of_several_inputs_has_the_label_that_says_most() -> None:
    inputs = [
        Input(name=label, value="1", label=label, source="once", on=("a",))  # type: ignore[arg-type]
        for label in ("fitted", "chosen", "paper")
    ]
    kinds = []
    for given in (inputs, inputs[::-1], inputs[1:]):
        (found,) = labelled([row("a", 1.0, 1.0)], given)
        kinds.append(found.kind)
    assert kinds == ["fitted", "fitted", "chosen"]


def test_a_fitted_input_names_its_rows() -> None:
    with pytest.raises(ArgumentError, match="'n' is fitted"):
        Input(name="n", value="1", label="fitted", source="once")
