"""`nearstep devices`: devices that can be opened, options of a device, and completion of names."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from typing import Annotated

import typer

from nearstep.backends.options import DeviceUrl, Family
from nearstep.cli.outcome import AsJson, print_json, print_table, reported, table_of
from nearstep.device import backend_of, backends
from nearstep.errors import UrlError
from nearstep_spec.codec import OptionRow, choices, describe

OPTION_COLUMNS = ("option", "values", "default", "meaning")

UNAVAILABLE = "unavailable: "


@dataclass(frozen=True)
class DeviceRow:
    """A device that can be opened, or a backend with the reason why it is unavailable."""

    name: str
    summary: str


def devices() -> list[DeviceRow]:
    """Every device of every installed backend, by name."""
    rows = []
    for entry in backends().values():
        try:
            families = families_of(entry)
        except ImportError as error:
            rows.append(DeviceRow(f"{entry.name}:", f"{UNAVAILABLE}{error}; see nearstep doctor"))
            continue
        for family in families.values():
            for each in family.variants:
                name = "?".join(filter(None, (family.name, each.query)))
                rows.append(DeviceRow(name, each.summary))
    return rows


def options(url: str) -> list[OptionRow]:
    """List every option of the device that `url` names, and check the given ones.

    Raises
    ------
    UrlError
    """
    name = DeviceUrl.parse(url)
    families = families_of(backend_of(name))
    if name.target not in families:
        raise UrlError(url, f"there is no family {name.target!r}", sorted(families))
    family = families[name.target]
    family.parse(name.options)
    return family.describe(name.options)


def complete(incomplete: str) -> list[str]:
    """Complete a device name by one part, for a shell."""
    name, question, query = incomplete.partition("?")
    if not question:
        rows = [row.name for row in devices() if not row.summary.startswith(UNAVAILABLE)]
        return [each for each in rows if each.startswith(incomplete)]
    backend, _, target = name.partition(":")
    if backend in backends():
        family = families_of(backends()[backend]).get(target)
        if family is not None:
            head, _, last = query.rpartition("&")
            done = f"{name}?{head}&" if head else f"{name}?"
            given = dict(item.partition("=")[::2] for item in head.split("&") if item)
            return [done + each for each in _endings(family, given) if each.startswith(last)]
    return []


DeviceName = Annotated[
    str,
    typer.Argument(
        help='Device name, such as "sim:axdimm?memory=ddr4-1600&channels=2"; in quotes, because of '
        "? and &.",
        autocompletion=complete,
    ),
]


def _endings(family: Family, given: Mapping[str, str]) -> Iterator[str]:
    """List `option=value` of options not given yet; `option=` if the option takes any value."""
    chosen = family.variant(given)
    for row in describe(chosen.options):
        if row.name in given:
            continue
        values = choices(chosen.options, row.name)
        yield from (f"{row.name}={value}" for value in values)
        if not values:
            yield f"{row.name}="
        for other in family.variants:
            if other is not chosen and other.when and other.when[0] == row.name:
                yield other.query


def families_of(entry: EntryPoint) -> Mapping[str, Family]:
    """List the families of a backend; empty if it does not declare any."""
    found: Mapping[str, Family] = getattr(importlib.import_module(entry.module), "DEVICES", {})
    return found


def command(
    url: Annotated[
        str | None,
        typer.Argument(
            help="Device name, such as sim:axdimm?memory=ddr4-1600; in quotes, because of ? and &.",
            show_default=False,
            autocompletion=complete,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the devices that can be opened; with a device name, every option of that device.

    Given options are checked; nothing is built or opened. A file in the name, as in
    rules=FILE.py:NAME, is executed.
    """
    with reported(failed=(ImportError,)):
        rows = devices() if url is None else options(url)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    columns = (
        ["device", "description"] if url is None else ["option", "values", "default", "meaning"]
    )
    texts = [[*map(str, asdict(row).values())] for row in rows]
    print_table(table_of(columns, texts, url, title_justify="left"))
