"""Every figure that the AXDIMM and the Smart-Infinity paper print is a row, or is named.

Figures are transcribed here a second time: those of tables as rows of the section in order, those
of the text by place, with `>` and `<` of bounds. A figure of the text is a row with this value and
unit, or words of an input or of the figures that are not modelled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest

from nearstep.paper import axdimm_design, axdimm_kernel, axdimm_training, smart_infinity
from nearstep.paper.axdimm_training import Comparison
from nearstep.paper.rows import Input, Row, labelled
from nearstep.paper.smart_infinity import Evaluation
from nearstep.paper.smart_infinity_case import Phases
from nearstep.paper.smart_infinity_machine import Options
from nearstep.paper.smart_infinity_measured import measured
from nearstep.plan.iteration import Iteration

AXDIMM_TABLES = {
    "Table 4": """
        0.76 3.0 6.1
        1.3 5.2 10.4
        2.7 10.8 20.2
        6.7 26.8 53.6
        13.0 52.0 104.0""",
    "Table 5": "228.57 914.29 140.32 61.4 789.38 86.3",
    "Table 6": """
        0.78 8.01 8.79 0.80 4.60 5.40 1.74 1.63 0.9
        2.12 19.31 21.42 2.14 13.28 15.43 1.45 1.39 9.8
        4.78 43.09 47.87 4.79 30.45 35.23 1.42 1.36 26.1
        13.12 115.17 128.29 13.55 88.17 101.72 1.31 1.26 78.4
        25.24 221.62 246.86 26.21 166.25 192.45 1.33 1.28 153.1""",
}
AXDIMM_TEXT = {
    "abstract": "1.63 x",
    "1": "175 billion; 700 GB; 100 GB; 5.6 x; 1.26 x; 1.63 x",
    "2.2": "4; 3",
    "3": "32 GiB",
    "Table 1": "Tables 1; 10 chips; 32Gb; 2666 Mbps",
    "3.1": "400 MHz; 200 MHz; 512 bits; 800 MHz; 2; 16 GiB",
    "3.3": "16; 31 DSPs; 128 cycles; 512 bits; 4; 3",
    "3.4": "16 KiB; 2",
    "4.1": "64 bytes; 4 bytes; 32 bytes",
    "6.1, Table 3": "800 MT/s; 32 GB; 2 TB; figure 5",
    "Table 4, shapes": "layers, widths, heads, batches, contexts",
    "6.2": "4; 3; 28 bytes; 5.6 x; 86.3 %; 61.4 %; 2; 2 x; 4 x",
    "6.3": "16 GB; 8 GB a channel; 1.74 x; 1.28 x; 1.63 x",
    "7.2": "1.5 times",
    "8": "5.6 x; 1.26 x; 1.63 x",
}
CSD_TABLES = {
    "Table I": "6 6 2 2 2 0 0 2 2 0 0 0.04",
    "Table III": "33.66 27.13 34.38 11.03 34.12 27.13 35.94 11.03",
    "Table IV": """
        1.10 1.23 1.34 1.38 1.40
        1.11 1.23 1.29 1.35 1.44
        1.29 1.45 1.54 1.54 1.53""",
}
CSD_TEXT = {
    "I": "80 GB; 2 TB; 100 TB; a few GB/s; > 88 %; 75 %; 2.11 x",
    "II-A": "6 M; 2 M; 345M; 530B",
    "III": "> 80 %; 1 x",
    "IV, IV-A": "8 M; 2 M; 6 M",
    "IV-C": "1 %",
    "VII-A, Table II": "10 SmartSSDs; 4 TB; 3.0 x4; DRAM of 4 GB; 24, 40 and 16 GB; 522K LUTs; "
    "984 BRAMs; 1968 DSPs; Table II; 2 %; 1 %; batch of 4",
    "Table III, chip; VII-B": "128 URAMs; a quarter",
    "VII-C, figure 9": "8.4B; 75.57 %; 1 x; 1.18 x; 1.24 x; 1.54 x; 1.60 x; 1.66 x; 1.22 x; "
    "1.31 x; 1.85 x; 1.98 x",
    "VII-D, figure 10": "16.6B; 33.0B; 1.37 x; 1.88 x",
    "VII-E, figure 11": "4.0B; 1 x; < 1 x; > 1 x; 2.11 x",
    "VII-F, figure 12": "0.75 x; < 1 x",
    "VII-G, figure 13": "1.32 x; 1.85 x",
    "VII-H, figure 14": "> 7 GB/s; > 1 x; rates of the SSD",
    "VII-I, figure 15": "$45,000; $2,000; $7,000; $2,400; $400; 6 x; < 1 x; > 1 x",
    "VII-J, Table IV": "10, 12 and 3; 0.34B; 0.77B; 1.6B; accuracy",
    "VII-K, figure 16": "1 %; Figure 16",
    "VIII-A, figure 17": "1.16B; 1.66 x; 1.86 x",
}


class Quick(Evaluation):
    """Rows without the time of a model."""

    def phases(self, model, method, drives, **others):
        return Phases(1.0, 2.0, 3.0)

    def _moving(self, model, drives):
        return 0.9


def axdimm_rows() -> Sequence[Row]:
    none = Iteration(1.0, 1.0)
    compared = (
        Comparison(model=model, printed=printed, baseline=none, axdimm=none, peak_on_drives=0)
        for model, printed in axdimm_training.TABLE_6.items()
    )
    rows = chain.from_iterable(each.rows() for each in compared)
    design = axdimm_design.design(), axdimm_design.table_4()
    return [*chain(*design, axdimm_kernel.rows(axdimm_kernel.PRINTED), rows)]


def csd_rows(folder: Path) -> Sequence[Row]:
    return [*Quick(Options(gpu=0.5)).rows(), *measured(folder)]


def uncovered(text: str, rows: Sequence[Row], words: str) -> bool:
    """Whether a figure is neither a row nor named. A number without a unit must be a row."""
    found = re.fullmatch(r"(?:([<>]) )?([\d.]+) ?([^\d\s]*)", text)
    if found is not None:
        figure = found[1] or "=", float(found[2]), found[3]
        if any((row.relation, row.paper, row.unit) == figure for row in rows):
            return False
        if not figure[2]:
            return True
    return re.search(rf"(?<![\w.]){re.escape(text)}(?!\w)", words) is None


@pytest.mark.parametrize(
    ("paper", "tables", "text", "counts"),
    [
        ("axdimm", AXDIMM_TABLES, AXDIMM_TEXT, (66, 54, 83)),
        ("smart_infinity", CSD_TABLES, CSD_TEXT, (35, 77, 84)),
    ],
)
def test_every_printed_figure_is_a_row_or_named(
    paper: str,
    tables: dict[str, str],
    text: dict[str, str],
    counts: tuple[int, int, int],
    tmp_path: Path,
) -> None:
    module = axdimm_training if paper == "axdimm" else smart_infinity
    rows = axdimm_rows() if paper == "axdimm" else csd_rows(tmp_path)
    inputs: Sequence[Input] = (
        axdimm_training.INPUTS if paper == "axdimm" else Evaluation(Options(gpu=0.5)).inputs
    )
    words = " ".join([*chain(*module.NOT_MODELLED.items()), *(each.value for each in inputs)])
    in_tables = 0
    for section, figures in tables.items():
        printed = [float(each) for each in figures.split()]
        assert [row.paper for row in rows if row.section == section] == printed, section
        in_tables += len(printed)
    places = [(place, each) for place, of in text.items() for each in of.split("; ")]
    assert [each for each in places if uncovered(each[1], rows, words)] == []
    assert all(uncovered(each, rows, words) for each in ("5.7 x", "7", "> 2 %", "5 GB"))
    assert len({(row.name, row.section) for row in rows}) == len(rows)
    assert (in_tables, len(places), len(rows)) == counts
    named = {row.name for row in rows}
    assert {name for each in inputs for name in each.on} <= named
    kinds = [row.kind for row in labelled(rows, inputs)]
    assert kinds.count("fitted") == sum(len({*e.on}) for e in inputs if e.label == "fitted")
