"""Rows of the Smart-Infinity paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nearstep.errors import ArgumentError
from nearstep.paper import smart_infinity
from nearstep.paper.rows import errors
from nearstep.paper.smart_infinity import FITTED_SHARE, Evaluation, gpt2
from nearstep.paper.smart_infinity_case import METHODS, Phases
from nearstep.paper.smart_infinity_machine import Options
from nearstep.paper.smart_infinity_measured import measured
from nearstep.paper.smart_infinity_picture import draw


def test_two_constants_are_fitted_on_section_3_alone() -> None:
    evaluation = Evaluation()
    rows = {row.name: row for row in evaluation.rows(["figure-3"])}
    update = rows["One SSD: update"]
    assert update.found is not None
    assert 100 * FITTED_SHARE <= update.found < 100 * FITTED_SHARE + 0.01
    assert rows["One SSD: data to and from storage"].holds
    assert rows["Update on ten SSDs over four"].error == pytest.approx(0, abs=0.05)
    assert sum(row.kind == "fitted" for row in rows.values()) == 2
    assert not any(row.mean for row in rows.values())
    assert Evaluation(Options(gpu=0.3)).options.gpu == 0.3


def test_what_is_counted_is_what_is_printed() -> None:
    rows = [*Evaluation(Options(gpu=0.5)).rows(["table-1"])]
    assert len(rows) == 23
    assert {row.kind for row in rows} == {"counted"}
    for row in rows:
        assert row.error == pytest.approx(0, abs=1e-6), row.name
    table = [row for row in rows if row.section == "Table I"]
    assert len(table) == 12
    exact = [row for row in table if row.name != "SmartComp, 2 %: gradients written"]
    assert all(row.error == 0 for row in exact)  # pairs are rounded up, on each card


@pytest.mark.parametrize("billions", sorted(smart_infinity.WIDTHS))
def test_models_of_a_size_have_it(billions: float) -> None:
    layers = gpt2(billions).layers(1, 1024)
    assert sum(layer.parameter_count for layer in layers) == pytest.approx(billions * 1e9, rel=0.02)


def test_an_assumption_decides_what_it_is_about() -> None:
    named = smart_infinity.VARIANTS
    assert [each for each in named.values() if each == Options()] == [named["as assumed"]]
    model = gpt2(1.16)
    base = Evaluation(Options(gpu=0.5))
    overlapped = Evaluation(Options(gpu=0.5, overlap=True))
    assert (
        overlapped.phases(model, "base", 6).backward < 0.9 * base.phases(model, "base", 6).backward
    )
    slow = Evaluation(Options(gpu=0.5, decompressor=0.1))
    assert slow.speedup(model, "su+o+c", 6) < base.speedup(model, "su+o+c", 6)
    assert slow.speedup(model, "su+o", 6) == base.speedup(model, "su+o", 6)
    first = {"su": 1, "su+o": 0, "su+o+c": 0}
    for name, waits in (("allocation_s", first), ("tasklet_s", dict.fromkeys(first, 1))):
        more = Evaluation(Options(gpu=0.5, **{name: 0.25}))  # type: ignore[arg-type]
        for method, times in waits.items():  # each card has one subgroup
            added = more.phases(model, method, 6).update - base.phases(model, method, 6).update  # type: ignore[arg-type]
            assert added == pytest.approx(0.25 * times, abs=1e-9)


def test_what_benches_have_measured_is_beside_table_3_and_figure_14(tmp_path: Path) -> None:
    rows = [*measured(tmp_path)]
    assert len(rows) == 10
    assert all(row.found is None and row.note for row in rows)
    card = {
        "runs": [
            {"rule": "adam", "form": "dense", "bytes_per_s_at_200_mhz": 6.5e9},
            {"rule": "adam", "form": "fused", "bytes_per_s_at_200_mhz": 9e9},
        ],
        "scatter": [
            {"indices": "even", "bytes_per_s_at_200_mhz": 1.6e9},
            {"indices": "random", "bytes_per_s_at_200_mhz": 6.4e9},
        ],
    }
    share = {"lut": 0.3, "bram36": 0.05, "dsp": 0.1}
    area = [
        {"units": 16, "top_k": None, "of_chip": share},
        {"units": 16, "top_k": "fused", "of_chip": {**share, "lut": 0.4}},
        {"units": 4, "top_k": None, "of_chip": {**share, "lut": 0.9}},
    ]
    (tmp_path / "smartssd.json").write_text(json.dumps(card), encoding="utf-8")
    (tmp_path / "smartssd_area.json").write_text(json.dumps({"area": area}), encoding="utf-8")
    found = {row.name: row for row in measured(tmp_path)}
    updater = found["Adam's updater, reads and writes"]
    assert (updater.found, updater.holds) == (6.5, False)
    assert found["Decompressor's pairs over the SSD's reads"].found == pytest.approx(2.0)
    assert found["Adam: LUT"].error == pytest.approx(30 - 33.66)
    assert found["Adam with Top-K: LUT"].found == pytest.approx(40)
    assert found["Adam: URAM"].found is None


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": [], "scatter": []}'])
def test_a_file_that_is_none_of_a_bench_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "smartssd.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"smartssd\.json must be what .*bench_smartssd\.py"):
        list(measured(tmp_path))


def test_the_picture_has_methods_and_drives(tmp_path: Path) -> None:
    asked = set()

    class Quick(Evaluation):
        def phases(self, model, method, drives, **others):
            asked.add((model.name, method, drives, *others.get("gpus", ())))
            return Phases(1.0, 2.0, 30.0 / drives)

    path = tmp_path / "figures.svg"
    draw(Quick(Options(gpu=0.5)), path)
    assert "<svg" in path.read_text(encoding="utf-8")
    bars = {each for each in asked if len(each) == 3}
    assert {each[1:] for each in bars} == {(m, n) for m in METHODS for n in (6, 10)}
    lines = asked - bars
    assert len(lines) == 2 * 3 * 10


@pytest.mark.deep
def test_printed_speedups_are_met_within_seven_percent() -> None:
    rows = [*Evaluation().rows()]
    assert len(rows) == len({(row.name, row.section) for row in rows}) == 74
    found = errors(rows)
    print(f"mean {found.mean:.3%} of {found.count}, largest {found.largest}")
    assert found.count == 32
    assert found.mean < 0.07
    assert abs(found.largest.error or 1) < 0.17
