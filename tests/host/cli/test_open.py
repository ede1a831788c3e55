"""`nearstep open`: a device says what it is, and its manifest opens it again."""

import json

import pytest
import typer
from typer.testing import CliRunner, Result

import nearstep
from nearstep.cli.devices import options
from nearstep.cli.open import command, manifest
from nearstep_sim.backends.golden import DEVICES
from nearstep_spec.codec import entries, from_json, to_json


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


URLS = {
    "axdimm": "golden:axdimm?lanes=0x4&block_bytes=1KiB&engine=numpy&memory_bytes=1MiB&scan=no",
    "smartssd": "golden:smartssd?lanes=4&chunk_bytes=512&memory_bytes=1MiB&engine=numpy",
    "coarse": "golden:coarse?devices=2&groups=1&memory_bytes=64KiB",
}


@pytest.mark.parametrize(("family", "url"), URLS.items())
def test_a_manifest_opens_the_same_device(family: str, url: str) -> None:
    done = run(url, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["family"] == family
    assert said["memory_bytes"] > 0
    (variant,) = DEVICES[family].variants
    unset = {each.name for each in entries(variant.options) if each.option.optional}
    assert set(said["options"]) == {row.name for row in options(url)} - unset
    assert said["registers"]
    assert manifest(said["device"]) == said
    assert to_json(from_json(variant.options, said["options"])) == said["options"]


def test_the_name_in_a_manifest_has_what_differs_from_the_defaults_alone() -> None:
    said = manifest(URLS["axdimm"])
    assert said["device"] == (
        "golden:axdimm?lanes=4&block_bytes=1024&memory_bytes=1048576&engine=numpy"
    )
    with nearstep.open(URLS["axdimm"]) as device:
        hashes = {name: f"{block.map.hash():#010x}" for name, block in device.blocks.items()}
    assert {name: row["map_hash"] for name, row in said["registers"].items()} == hashes


def test_without_it_there_is_a_table() -> None:
    done = run(URLS["coarse"])
    assert done.exit_code == 0
    assert all(f"device{number}.sync0" in done.stdout for number in range(2))
    assert "131072 bytes of memory" in done.stdout
