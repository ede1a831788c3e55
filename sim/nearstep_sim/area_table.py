"""`nearstep area`: blocks and whole products on two families of FPGAs, beside papers' figures."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from nearstep.cli.outcome import AsJson, print_json, print_table

if TYPE_CHECKING:
    from nearstep_sim.row_file import Row

__all__ = ["CHIPS", "PAPERS", "PRODUCTS", "Figures", "Label", "Product", "command", "table"]


class Label(StrEnum):
    """Origin of figures."""

    PAPER = "paper"
    MEASURED = "measured (Yosys)"
    MODELLED = "modelled"


COLUMNS = {
    "lut": "LUT",
    "ff": "FF",
    "dsp": "multipliers",
    "bram": "block RAM, Kib",
    "uram": "URAM",
}
"""Resources. LUT have six inputs on UltraScale+ and four on ECP5, where carries count as two each;
multipliers are DSP48E2 and MULT18X18D; block RAM is in units of 36 and 18 Kib.
"""
BRAM_KIB = {"bram36": 36, "bram18": 18}
CHIPS = {
    "KU15P": {"lut": 522_720, "dsp": 1968, "bram": 984 * 36, "uram": 128},
    "LFE5U-85F": {"lut": 83_640, "ff": 83_640, "dsp": 156, "bram": 208 * 18},
}
"""Resources of chips (DS922; nextpnr's data base)."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A row of the table.

    Attributes
    ----------
    name, what : name and description of the block or product.
    family : of FPGAs, or the chip that a paper names.
    values : by resource; missing if not published or zero.
    share : of the chip that the paper names, by resource.
    latency : cycles, if defined.
    source : source of the figures, or how they were summed.
    """

    name: str
    what: str
    family: str
    label: Label
    values: Mapping[str, float]
    share: Mapping[str, float] = field(default_factory=dict)
    latency: int | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product, as the sum of blocks that are measured separately.

    Attributes
    ----------
    parts : number of instances of each block.
    """

    what: str
    parts: Mapping[str, int]


PRODUCTS: Mapping[str, Product] = {
    "AXDIMM kernel": Product(
        what="Adam kernel with its 16 units", parts={"adam_kernel": 1, "adam_fu": 16}
    ),
    "AXDIMM module": Product(
        what="two channels with all their units", parts={"axdimm_module": 1, "adam_fu": 32}
    ),
    "SmartSSD updater, Adam": Product(
        what="kernel and 16 units, whole gradients", parts={"adam_kernel": 1, "adam_fu": 16}
    ),
    "SmartSSD updater, Adam, Top-K": Product(
        what="kernel, 16 units and the decompressor of sorted pairs",
        parts={"adam_kernel": 1, "adam_fu": 16, "decompress_fused": 1},
    ),
    "SmartSSD updater, every rule, Top-K": Product(
        what="16 units of every rule, both decompressors, PCIe endpoint",
        parts={
            "adam_kernel": 1,
            "smartssd_fu": 16,
            "decompress_fused": 1,
            "decompress_scatter": 1,
            "pcie_endpoint": 1,
        },
    ),
    "COARSE sync cores": Product(
        what="the two of a memory device with their ALUs, without link layer and snapshots",
        parts={"coarse_sync_core": 2},
    ),
}

PAPERS = (
    Figures(
        name="AXDIMM functional unit",
        what="Adam, FP32; 16 of them in a kernel",
        family="ZU19EG",
        label=Label.PAPER,
        values={"dsp": 31},
        latency=128,
        source="AXDIMM, section 3.3; the paper prints no LUT and no memory",
    ),
    Figures(
        name="SmartSSD updater, Adam",
        what="updater",
        family="KU15P",
        label=Label.PAPER,
        values={},
        share={"lut": 0.3366, "dsp": 0.1103, "bram": 0.2713, "uram": 0.3438},
        source="Smart-Infinity, Table III",
    ),
    Figures(
        name="SmartSSD updater, Adam, Top-K",
        what="updater with Top-K decompressor",
        family="KU15P",
        label=Label.PAPER,
        values={},
        share={"lut": 0.3412, "dsp": 0.1103, "bram": 0.2713, "uram": 0.3594},
        source="Smart-Infinity, Table III",
    ),
    Figures(
        name="COARSE sync cores",
        what="FPGA prototype without sync cores",
        family="-",
        label=Label.PAPER,
        values={},
        source="COARSE, section 5.1, prints no resources",
    ),
)
"""Printed figures; numbers are computed from shares of a chip in `CHIPS`."""


def table() -> list[Figures]:
    """Return every row: blocks and products of each family, and papers after the first family."""
    from nearstep_sim import area
    from nearstep_sim.row_file import read_rows

    rows: list[Figures] = []
    for family in area.FAMILIES.values():
        _, found = read_rows(family.file)
        blocks = {name: _values(row) for name, row in found.items()}
        rows += [
            Figures(
                name=name,
                what=row["what"],
                family=family.title,
                label=Label.MEASURED,
                values=blocks[name],
                latency=row.get("latency"),
                source=_without(row),
            )
            for name, row in found.items()
        ]
        rows += _products(family.title, blocks)
        if family is area.ULTRASCALE_PLUS:
            rows += [_from_shares(each) for each in PAPERS]
    return rows


def _values(row: "Row") -> dict[str, float]:
    values = {key: row[key] for key in ("lut", "ff", "dsp")}
    for key, kib in BRAM_KIB.items():
        if key in row:
            values["bram"] = row[key] * kib
    return values


def _without(row: "Row") -> str:
    boxes = row.get("without", {})
    return f"without {', '.join(f'{n} {box}' for box, n in boxes.items())}" if boxes else ""


def _products(family: str, blocks: Mapping[str, Mapping[str, float]]) -> Iterator[Figures]:
    """Yield the products whose parts all have a row."""
    for name, product in PRODUCTS.items():
        if set(product.parts) <= set(blocks):
            yield Figures(
                name=name,
                what=product.what,
                family=family,
                label=Label.MODELLED,
                values={
                    key: sum(n * blocks[part][key] for part, n in product.parts.items())
                    for key in ("lut", "ff", "dsp", "bram")
                },
                source=" + ".join(
                    part if n == 1 else f"{n} {part}" for part, n in product.parts.items()
                ),
            )


def _from_shares(row: Figures) -> Figures:
    """Convert a paper's shares of a chip to numbers."""
    if not row.share:
        return row
    chip = CHIPS[row.family]
    return Figures(
        **{
            **asdict(row),
            "label": row.label,
            "values": {key: round(share * chip[key]) for key, share in row.share.items()},
        }
    )


def _cells(row: Figures) -> Iterator[str]:
    yield from (row.name, row.family, row.label.value)
    for key in COLUMNS:
        value = row.values.get(key)
        text = "" if value is None else f"{value:,.0f}"
        yield f"{text} ({row.share[key]:.2%})" if key in row.share else text
    yield "" if row.latency is None else str(row.latency)
    yield "; ".join(filter(None, (row.what, row.source)))


HEADS = ("block or product", "FPGA", "how", *COLUMNS.values(), "latency", "what")


def command(
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--md", help="Print Markdown.")] = False,
) -> None:
    """Area of every block and product on UltraScale+ and ECP5, beside the papers' figures.

    Measured rows are those of hw/area.json and hw/area-ecp5.json; modelled ones are their sums.
    """
    if as_json and as_markdown:
        raise typer.BadParameter("--json and --md cannot both be given")
    rows = table()
    if not any(row.label is Label.MEASURED for row in rows):
        raise typer.BadParameter("there is no hw/area.json: this command is for a checkout")
    if as_json:
        print_json([asdict(row) for row in rows])
    elif as_markdown:
        typer.echo(f"| {' | '.join(HEADS)} |\n|{'---|' * 3}{'---:|' * (len(COLUMNS) + 1)}---|")
        for row in rows:
            typer.echo(f"| {' | '.join(_cells(row))} |")
    else:
        _print(rows)


def _print(rows: list[Figures]) -> None:
    shown = Table(title="Area. LUT have six inputs on UltraScale+ and KU15P, four on ECP5.")
    for place, head in enumerate(HEADS):
        number = 3 <= place < len(HEADS) - 1
        shown.add_column(head, justify="right" if number else "left")
    for _, group in groupby(rows, key=lambda row: row.label):
        for row in group:
            shown.add_row(*_cells(row))
        shown.add_section()
    print_table(shown)
