"""Rows of the journal are as they were recorded: some in a quick test, all in a deep one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .__main__ import differences, recorded, rows
from .coarse import coarse_rows
from .rows import rows as optimizer_rows
from .rows import run

EVERY = 9
"""Of the rows of emulated devices without a clock, the share that a quick test has."""


def test_every_row_has_a_record_and_a_name_of_its_own() -> None:
    names = [row.name for row in rows()]
    assert len(names) == len(set(names)) > 300
    assert set(names) == set(recorded())


def test_a_row_that_differs_is_named() -> None:
    first = next(optimizer_rows())
    known = recorded()
    known[first.name] = {**known[first.name], "sha256": "0"}
    (line,) = differences([first], known)
    assert line.startswith(f"{first.name}: sha256: 0 was expected, ")


def test_rows_on_golden_devices_are_as_recorded() -> None:
    table = [row for row in optimizer_rows() if not row.device.startswith("rtl")][::EVERY]
    assert len(table) > 30
    assert differences(table, recorded()) == []


def test_rows_without_a_device_have_the_bits_of_those_on_one() -> None:
    """With tensors of whole vectors: of others torch computes the rest by other code, which `host:`
    follows and devices do not."""
    compared = 0
    for row in optimizer_rows():
        if row.device == "host":
            whole = replace(row, shapes=((40, 16), (16,), (30, 20), (8,), (160, 128)))
            on_one = replace(whole, device="kernel")
            assert run(whole)["sha256"] == run(on_one)["sha256"], row.name
            compared += 1
    assert compared > 12


def test_rows_of_memory_devices_are_as_recorded() -> None:
    table = [row for row in coarse_rows() if not row.is_slow]
    assert len(table) > 15
    assert differences(table, recorded()) == []


@pytest.mark.deep
def test_all_rows_are_as_recorded() -> None:
    table = list(rows())
    assert len(table) > 300
    assert differences(table, recorded()) == []
