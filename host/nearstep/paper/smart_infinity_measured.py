"""Table III and figure 14 of the Smart-Infinity paper beside the benches' measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nearstep.errors import ArgumentError
from nearstep.paper.rows import Relation, Row, row
from nearstep.paper.smart_infinity_machine import Machine, Options

FOLDER = Path("build/bench")
"""Folder that benches of a checkout write to."""

TABLE_3: Mapping[str, Mapping[str, float]] = {
    "Adam": {"lut": 33.66, "bram36": 27.13, "uram": 34.38, "dsp": 11.03},
    "Adam with Top-K": {"lut": 34.12, "bram36": 27.13, "uram": 35.94, "dsp": 11.03},
}
"""Shares of a KU15P in percent."""

UNITS = 16
FORMS = {"Adam": None, "Adam with Top-K": "fused"}
AREA = ("smartssd_area", "`.venv/bin/python bench/bench_smartssd_area.py` makes it")
CARD = ("smartssd", "`.venv/bin/python bench/bench_smartssd.py` makes it")
SPREAD = "random"


def measured(folder: Path = FOLDER) -> Iterator[Row]:
    """Make rows from the benches' files, without figures of benches that have not run.

    Parameters
    ----------
    folder : of `smartssd.json` and `smartssd_area.json`.

    Raises
    ------
    ArgumentError : a file is not that of its bench.
    """
    yield from _figure_14(folder)
    yield from _table_3(folder)


def _figure_14(folder: Path) -> Iterator[Row]:
    def updater(results: Any) -> float:
        (run,) = (r for r in results["runs"] if (r["rule"], r["form"]) == ("adam", "dense"))
        return float(run["bytes_per_s_at_200_mhz"]) / 1e9

    def decompressor(results: Any) -> float:
        rates = (r["bytes_per_s_at_200_mhz"] for r in results["scatter"] if r["indices"] == SPREAD)
        return float(min(rates)) / Machine(Options()).read_bytes_per_s

    where = "VII-H, figure 14"
    note = "RTL cycles at 200 MHz"
    rows = (
        ("Adam's updater, reads and writes", "GB/s", 7.0, updater),
        ("Decompressor's pairs over the SSD's reads", "x", 1.0, decompressor),
    )
    for name, unit, paper, of in rows:
        yield _row(folder, CARD, of, note, name, where, unit, paper, relation=">")


def _table_3(folder: Path) -> Iterator[Row]:
    for name, printed in TABLE_3.items():
        for resource, paper in printed.items():

            def share(results: Any, name: str = name, resource: str = resource) -> float:
                wanted = (UNITS, FORMS[name])
                (found,) = (r for r in results["area"] if (r["units"], r["top_k"]) == wanted)
                return 100 * float(found["of_chip"][resource])

            title = f"{name}: {resource.removesuffix('36').upper()}"
            if resource == "uram":
                note = "not counted: memories are block RAM and LUTs here"
                yield row(title, "Table III", "%", paper, None, kind="measured", note=note)
            else:
                note = "synth_xilinx -family xcup, 16 units"
                yield _row(folder, AREA, share, note, title, "Table III", "%", paper)


def _row(
    folder: Path,
    bench: tuple[str, str],
    of: Any,
    note: str,
    name: str,
    section: str,
    unit: str,
    paper: float,
    relation: Relation = "=",
) -> Row:
    path, command = folder / f"{bench[0]}.json", bench[1]
    found = None
    if path.is_file():
        try:
            found = of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise ArgumentError(
                f"{path} must be what {command.removesuffix(' makes it')} writes, not a file "
                f"without {name}: {error!r}"
            ) from None
    note = note if found is not None else command
    return row(name, section, unit, paper, found, relation=relation, kind="measured", note=note)
