"""`nearstep devices`: every option with its values, default and meaning; completion of names."""

import json
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner, Result

import nearstep
from nearstep import cli
from nearstep.backends.nvme import DEVICES as NVME
from nearstep.backends.options import Variant
from nearstep.backends.pci import DEVICES as PCI
from nearstep.backends.serial import DEVICES as SERIAL
from nearstep.cli.devices import command, complete, devices, options
from nearstep.errors import OptionError, UrlError
from nearstep_sim.backends.golden import DEVICES as GOLDEN
from nearstep_sim.backends.host import DEVICES as HOST
from nearstep_sim.backends.sim import DEVICES as SIM
from nearstep_spec.codec import OptionRow, choices, entries

OFFERED = (
    *GOLDEN.values(), *HOST.values(), *NVME.values(), *PCI.values(), *SERIAL.values(),
    *SIM.values(),
)  # fmt: skip
VARIANTS = {
    "?".join(filter(None, (family.name, each.query))): each
    for family in OFFERED
    for each in family.variants
}
FAMILIES = {family.name: family for family in OFFERED}


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def parse(url: str, text: str) -> object:
    name, _, query = url.partition("?")
    given = dict(item.split("=") for item in (query, *text.split("&")) if item)
    return FAMILIES[name].parse(given)


def test_every_device_is_listed() -> None:
    done = run()
    assert done.exit_code == 0
    assert len(VARIANTS) == 14
    assert {row.name for row in devices()} == set(VARIANTS)
    for name, variant in VARIANTS.items():
        assert name in done.stdout
        assert variant.summary in done.stdout


@pytest.mark.parametrize(("url", "variant"), VARIANTS.items(), ids=VARIANTS)
def test_every_option_of_a_device_is_listed_with_all_that_is_to_be_said(
    url: str, variant: Variant
) -> None:
    rows = [OptionRow(**row) for row in json.loads(run(url, "--json").stdout)]
    assert [row.name for row in rows] == [each.name for each in entries(variant.options)]
    for row in rows:
        assert row.values, row
        assert row.default, row
        assert row.meaning, row
    table = run(url).stdout
    assert all(row.name in table for row in rows)


COMPANIONS = {
    "engine=cpp": "",
    "copy_out_formats=": "",
    "gradient_formats=fp16": "fp32,fp16",
    "gradient_formats=bf16": "fp32,bf16",
    "wire_formats=fp16": "fp32,fp16",
    "wire_formats=bf16": "fp32,bf16",
}
"""Values that a list has only together with others."""

NEEDS = {
    "lanes": "&functional_units=1",
    "lanes=1": "&compression=&functional_units=1",
    "stochastic_rounding=yes": "&state_format=bf16",
    "density=32Gb": "&width=x16",
    "top=channel": "&channels=1",
    "board=orangecrab_85f": "&memory=blockram",  # of DDR3 there is no model
}

NEEDS_IN_A_POOL = {"devices=1": "&rules=adam", "fu=native": "&rules=adam"}


@pytest.mark.parametrize(("url", "variant"), VARIANTS.items(), ids=VARIANTS)
def test_values_that_are_listed_are_those_that_are_taken(url: str, variant: Variant) -> None:
    taken = refused = 0
    for name in [each.name for each in entries(variant.options)]:
        known = choices(variant.options, name)
        for value in known:
            if url.endswith("ddr4-1600") and name in ("lanes", "memory"):
                continue  # 16 alone, as it says; and the one of its name
            item = f"{name}={value}"
            text = f"{name}={COMPANIONS.get(item) or value}"
            if ":coarse" in url:
                text += NEEDS_IN_A_POOL.get(item, "")
            else:
                text += NEEDS.get(item, NEEDS.get(name, ""))
            parse(url, text)
            taken += 1
        if known and "any other order" not in str(options(url)):
            with pytest.raises(OptionError, match=name):
                parse(url, f"{name}=7")
            refused += 1
    for row in options(url):
        low, to, high = row.values.partition(" to ")
        if to and low.replace(".", "").isdecimal():
            top = "9223372036854775807" if high.startswith("2**63") else high
            for value in (low, top):
                try:
                    item = f"{row.name}={value}"
                    parse(url, item + (NEEDS_IN_A_POOL.get(item, "") if ":coarse" in url else ""))
                except OptionError as error:
                    moves = "buffer_entries" in row.values or "channel of DDR4" in row.meaning
                    assert moves, error  # noqa: PT017 - the bound moves
            with pytest.raises(OptionError, match=f"{row.name}="):
                parse(url, f"{row.name}=-1")
            taken, refused = taken + 2, refused + 1
    assert taken >= (4 if url == "host:" else 7), taken
    assert refused >= 1, refused


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sim:axdimm?channels=2", "channels='2': needs memory=ddr4-1600"),
        ("sim:axdimm?memory=ideal&commands=x", "commands='x': needs memory=ddr4-1600"),
        ("sim:axdimm?memory=ddr4", "valid: ideal, halfduplex, ddr4-1600"),
        (
            "sim:axdimm?memory=ddr4-1600&latency=3",
            "latency='3': cannot be used with memory=ddr4-1600",
        ),
        ("sim:axdimm?memory=ddr4-1600&memory_bytes=64", "cannot be used with memory=ddr4-1600"),
        ("sim:axdimm?chanels=2", r"valid: lanes, .*channels \(memory=ddr4-1600\)"),
        ("sim:axdimm?stall=2", r"stall must lie in \[0, 0.95\], not 2.0"),
        ("sim:axdimm?memory=ddr4-1600&postpone=9", r"postpone must lie in \[1, 8\], not 9"),
        ("sim:coarse?drop=1.5", r"drop must lie in \[0, 1\], not 1.5"),
        ("golden:coarse?devices=1", r"devices must lie in \[2, 64\] without rules, not 1"),
    ],
)
def test_an_option_says_what_it_needs(url: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        nearstep.open(url)
    with pytest.raises(OptionError, match=message):
        options(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sim", "backend:target"),
        (
            "nothing:axdimm",
            "there is no backend 'nothing'; valid: golden, host, nvme, pci, serial, sim",
        ),
        ("sim:nothing", "there is no family 'nothing'; valid: axdimm, board, coarse, smartssd"),
    ],
)
def test_a_name_of_no_device_is_refused(url: str, message: str) -> None:
    with pytest.raises(UrlError, match=message):
        options(url)
    done = run(url)
    assert done.exit_code == 2
    assert message.split(";")[0] in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("gol", {"golden:axdimm", "golden:coarse", "golden:smartssd"}),
        ("ho", {"host:"}),
        ("host:?order=", {"host:?order=default", "host:?order=paper"}),
        ("sim:ax", {"sim:axdimm", "sim:axdimm?memory=ddr4-1600"}),
        ("sim:axdimm?fu=", {"sim:axdimm?fu=rtl", "sim:axdimm?fu=native"}),
        (
            "sim:axdimm?memory=",
            {f"sim:axdimm?memory={each}" for each in ("ideal", "halfduplex", "ddr4-1600")},
        ),
        (
            "sim:axdimm?memory=ddr4-1600&ch",
            {f"sim:axdimm?memory=ddr4-1600&channels={each}" for each in (1, 2, 4)},
        ),
        ("golden:axdimm?scan=yes&sc", set()),
        ("golden:axdimm?block", {"golden:axdimm?block_bytes="}),
        ("nothing:x?y", set()),
    ],
)
def test_a_name_is_completed(typed: str, offered: set[str]) -> None:
    assert set(complete(typed)) == offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("nearstep devices gold", "golden:axdimm"),
        ("nearstep rtl fp32_f", "fp32_fma"),
        ("nearstep registers coarse-", "coarse-sync"),
    ],
)
def test_the_shell_completes(words: str, offered: str) -> None:
    asked = {"_NEARSTEP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "2"}
    done = CliRunner().invoke(cli._app(), prog_name="nearstep", env=asked)
    assert offered in done.stdout.split()


@pytest.mark.parametrize(
    "arguments",
    ["--help", "devices golden:axdimm", "cache", pytest.param("doctor", marks=pytest.mark.deep)],
)
def test_the_package_runs_as_a_module_and_in_an_ascii_terminal(arguments: str) -> None:
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "nearstep", *arguments.split()],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("ascii").strip()
    assert b"?" not in done.stdout.replace(b"memory=ddr4-1600?", b"")
    assert b"Traceback" not in done.stderr
