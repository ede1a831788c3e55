"""The figures in docs/benchmarks.md are the numbers of the record that `make bench` leaves:
the page's sections, which carry digests of their text, and the files of areas; each to as many
digits as the table prints."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "bench" / "figures.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
AREA = json.loads((ROOT / "hw" / "area.json").read_text(encoding="utf-8"))["blocks"]

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SECTION = re.compile(
    r"^<!-- (?P<name>\w+) -->\n(?P<text>.*?)\n"
    r"<!-- (?P=name) is as it was written: (?P<seal>\w+) -->$",
    re.MULTILINE | re.DOTALL,
)


def sections(page: str) -> dict[str, tuple[str, str]]:
    """Text and digest of every section of the benchmarks' page."""
    return {each["name"]: (each["text"], each["seal"]) for each in SECTION.finditer(page)}


def digest(text: str) -> str:
    """Of a section, as bench/page.py makes it."""
    return hashlib.sha256(text.rstrip().encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Of:
    """Where a figure stands: a section of the benchmarks and the one match of a pattern in it,
    whose group is the figure; the table's is so many times that.

    Without a section it is a pattern of docs/training.md.
    """

    section: str
    pattern: str
    times: float = 1.0

    def text(self, page: str) -> str:
        """The figure, as it is printed there; nothing if there is not one match."""
        where = sections(page)[self.section][0] if self.section else TRAINING
        found = re.findall(self.pattern, where, re.MULTILINE)
        return str(found[0]) if len(found) == 1 else ""


@dataclass(frozen=True)
class InArea:
    """A column of a row of hw/area.json."""

    row: str
    column: str
    times: float = 1.0

    def text(self, page: str) -> str:
        """The figure."""
        return str(AREA[self.row][self.column])


def cell(label: str, column: int) -> str:
    """Pattern of a cell of a table: of the row with this label, so many cells behind it."""
    skipped = r"[^|\n]*\|" * (column - 1)
    return rf"^\| {re.escape(label)} \|{skipped} ([\d,.]+)"


MILLION = 1e6
STEP = "2, 1,048,576"
FIGURES: Mapping[str, tuple[Of | InArea, ...]] = {
    "functional unit, Adam and AdamW": (InArea("adam_fu", "dsp"),),
    "functional unit: latency": (InArea("adam_fu", "latency"),),
    "kernel on `ideal`": (Of("kernel", cell("`ideal`", 4)),),
    "kernel on `halfduplex`": (Of("kernel", cell("`halfduplex`", 5)),),
    "kernel behind the mode arbiter": (Of("module", cell("8Gb x8, 16, 2", 1)),),
    "the same on 16Gb x8": (Of("module", cell("16Gb x8, 16, 2", 1)),),
    "the same on the paper's parts": (Of("module", cell("32Gb x16, 16, 2", 1)),),
    "both channels at 200 MHz, 8Gb x8": (Of("module", cell("8Gb x8, 16, 2", 11)),),
    "the same with 4 functional units": (Of("module", cell("8Gb x8, 4, 2", 11)),),
    "both channels at 200 MHz, the paper's parts": (Of("module", cell("32Gb x16, 16, 2", 11)),),
    "two ranks a channel": (
        Of("module_ranks", cell("8Gb x8, 2, 16", 1)),
        Of("module_ranks", cell("8Gb x8, 2, 4", 1)),
    ),
    "two ranks of 16Gb x8": (
        Of("module_ranks", cell("16Gb x8, 2, 16", 1)),
        Of("module_ranks", cell("32Gb x16, 2, 16", 1)),
    ),
    "two ranks of 8Gb x8": (Of("module_ranks", cell("8Gb x8, 2, 16", 4)),),
    "AdamW with m and v in bf16": (
        Of("formats", cell("m, v bf16", 5)),
        Of("formats", cell("p, g, m, v bf16", 5)),
    ),
    "AdamW with the same states, rounded stochastically": (
        Of("formats", cell("m, v bf16, stochastic", 5)),
        Of("formats", cell("p, g, m, v bf16, stochastic", 5)),
    ),
    "AdamW with m and v in 8 bits": tuple(
        Of("formats", rf"^Moments in 8 bits are {'[0-9.]+(?:,| and) ' * before}([\d.]+)")
        for before in range(3)
    ),
    "step of AdamW on both channels": (Of("step", cell(STEP, 7)), Of("step", cell(STEP, 6))),
    "host in normal mode, streaming loads": (
        Of("module_host", cell("in-order, streaming loads", 3)),
        Of("module_host", cell("fr-fcfs, streaming loads", 3)),
    ),
    "the same with two ranks a channel": (
        Of("module_ranks", cell("in-order, streaming loads", 3)),
        Of("module_ranks", cell("fr-fcfs, streaming loads", 3)),
    ),
    "host in normal mode, random, 1/3 stores": (
        Of("module_host", cell("in-order, random, 1/3 stores", 3)),
        Of("module_host", cell("fr-fcfs, random, 1/3 stores", 3)),
    ),
    "host in normal mode, one random load": (
        Of("module_host", cell("in-order, random loads, one at a time", 3)),
        Of("module_host", cell("fr-fcfs, random loads, one at a time", 3)),
    ),
    "`sim:axdimm?memory=ddr4-1600&channels=2`": (
        Of("kernel", cell("`sim:axdimm?memory=ddr4-1600&channels=2&fu=rtl`", 2), MILLION),
    ),
    "`sim:axdimm`, all units in RTL": (
        Of("kernel", cell("`sim:axdimm?lanes=16&memory=ideal&fu=rtl`", 2), MILLION),
    ),
    "`golden:axdimm` over torch fused": (
        Of("kernel", r"`golden:axdimm` runs at ([\d.]+) of torch"),
    ),
    "whole `optimizer.step()`": (Of("", cell("`golden:axdimm`, 10^8 parameters, dense", 3)),),
    "the same on `golden:smartssd`": (
        Of("", cell("`golden:smartssd`, 10^8 parameters, dense", 3)),
    ),
    "card, Adam, share of a beat": (Of("smartssd", r"^\| adam, dense \|.*?\|.*?\| ([\d.]+) %"),),
    "card, Adam at 200 MHz": (Of("smartssd", r"^\| adam, dense \|(?:[^|]*\|){5} ([\d.]+) \|"),),
    "card, Adam, 1 % of the gradients": (
        Of("smartssd", r"^\| adam, fused \| 1 % \|(?:[^|]*\|){2} ([\d.]+) \|"),
    ),
    "card with a drive": (
        Of("handler", r"^\| SU\+O \| [\d,]+ \| (\d\.\d{3}) \|"),
        Of("handler", r"^\| SU, naive \| [\d,]+ \| (\d\.\d{3}) \|"),
    ),
    "card, scatter": (Of("smartssd", cell("8, random", 5)),),
    "`sim:smartssd`, units in RTL": (
        Of("smartssd", r"parameters at ([\d.]+) M/s, \*measured\*", MILLION),
    ),
    "memory devices, sum of 4 MiB": (Of("coarse", cell("4, 4 MiB", 3)),),
    "the same, share of cycles in which a link": (Of("coarse", cell("4, 4 MiB", 4)),),
    "the same with 1 % of all frames lost": (Of("coarse", cell("1 %", 2)),),
    "push, sync and pull of 64 MiB": (
        Of("coarse_pipeline", cell("64 MiB, in shards", 5)),
        Of("coarse_pipeline", cell("64 MiB, whole", 5)),
    ),
    "the same, share of cycles in which a direction": (
        Of("coarse_pipeline", cell("64 MiB, in shards", 6)),
        Of("coarse_pipeline", cell("64 MiB, whole", 6)),
    ),
    "sync core, beats of its ALUs": (Of("coarse_wire", cell("fp16, 8 ALUs, `ideal`", 6)),),
    "sync core, a lane of its ALUs": (
        Of("coarse_area", cell("8 lanes, divided", 2)),
        Of("coarse_area", cell("8 lanes, divided", 1)),
    ),
    "`sim:coarse?devices=4&window=direct`": (
        Of("coarse", cell("`sim:coarse?devices=4&window=direct`", 2)),
    ),
}
"""By how a row of the table begins: where each number of its column *measured* comes from."""

TESTED: Mapping[str, str] = {
    "values that differ from torch fused": (
        "tests/system/test_optim_on_rtl.py::test_ten_steps_of_a_million_parameters_equal_torch_fused"
    ),
    "AdamW of bf16 parameters with bf16 state": (
        "tests/host/optim/test_state_formats.py::test_bf16_parameters_train_as_with_torchs_fused_adamw"
    ),
}
"""Rows that a test asserts."""


def rows(text: str) -> Iterator[tuple[str, str]]:
    """Label and measured cell of the table of numbers."""
    table = text.partition("| | goal | measured | paper |\n|---|---:|---:|---:|\n")[2]
    assert table
    for line in table.partition("\n\n")[0].splitlines():
        label, _, measured, _ = (each.strip() for each in line.strip("|").split(" | "))
        yield label, measured


def printed(text: str) -> tuple[float, float]:
    """A number, and half a unit of its last digit; zeros before a missing point are none."""
    plain = text.replace(",", "")
    if "." in plain:
        return float(plain), 0.5 * 10.0 ** -len(plain.partition(".")[2])
    zeros = len(plain) - len(plain.rstrip("0")) if len(plain) > 3 else 0
    return float(plain), 0.5 * 10.0**zeros


def wrong(text: str, page: str) -> tuple[list[str], int]:
    """What is wrong with the table's figures, and how many were compared."""
    found, compared, seen = [], 0, set()
    for label, measured in rows(text):
        names = [name for name in (*FIGURES, *TESTED) if label.startswith(name)]
        if not names:
            found.append(f"{label}: nothing says where it comes from")
            continue
        name = max(names, key=len)
        seen.add(name)
        if name in TESTED:
            continue
        numbers, sources = NUMBER.findall(measured), FIGURES[name]
        if len(numbers) != len(sources):
            found.append(f"{label}: {measured} has {len(numbers)} figures, not {len(sources)}")
            continue
        for number, source in zip(numbers, sources, strict=True):
            value, half = printed(number)
            if not source.text(page):
                found.append(f"{label}: {source} is not in the record once")
                continue
            of = float(source.text(page).replace(",", "")) * source.times
            if abs(value - of) > half * (1 + 1e-9):
                found.append(f"{label}: {number} in the table, {of:g} in the record")
            compared += 1
    found += [f"{name}: no row of the table begins so" for name in {*FIGURES, *TESTED} - seen]
    return found, compared


def test_every_section_is_as_it_was_written() -> None:
    found = sections(BENCHMARKS)
    names = re.findall(r"^<!-- (\w+) -->$", BENCHMARKS, re.MULTILINE)
    assert list(found) == names, "bench/page.py ends each section with a digest"
    assert [name for name, (text, seal) in found.items() if digest(text) != seal] == []
    assert len(found) >= 20


def test_figures_of_the_table_are_those_of_the_record() -> None:
    found, compared = wrong(TABLE, BENCHMARKS)
    assert TABLE in BENCHMARKS, "bench/page.py puts the table into the page"
    print(f"{compared} figures compared")
    assert found == []
    assert compared >= 34


def test_rows_that_a_test_asserts_have_that_test() -> None:
    for name in TESTED.values():
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("| 78 | 128 |", "| 79 | 128 |", "79 in the table, 78 in the record"),
        ("97.3 %", "97.4 %", "97.4 in the table, 97.27 in the record"),
        ("14 bytes | 1.38 | 1.40; 2.00", "14 bytes | 1.38 | 1.40", "has 1 figures, not 2"),
        ("| functional unit: latency", "| unit: latency", "nothing says where it comes from"),
        ("| card, scatter", "| a card, scatter", "nothing says where"),
    ],
)
def test_a_figure_that_is_another_one_is_found(before: str, after: str, said: str) -> None:
    assert TABLE.count(before) == 1
    found, _ = wrong(TABLE.replace(before, after), BENCHMARKS)
    assert any(said in each for each in found), found


def test_a_record_that_changed_is_found() -> None:
    old = "| 1 % | 51,953 | 97.27 % | 38 |"
    assert BENCHMARKS.count(old) == 1
    changed = BENCHMARKS.replace(old, old.replace("97.27", "96.27"))
    assert any("97.3 in the table, 96.27" in each for each in wrong(TABLE, changed)[0])
    text, seal = sections(changed)["coarse"]
    assert digest(text) != seal
