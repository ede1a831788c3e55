"""`nearstep registers`: what it writes, and how it says no."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from nearstep.cli.registers import command
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.csr.export import FORMATS
from nearstep_spec.smartssd.config import UPDATER
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import adam_kernel_map


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command(context_settings=command.context_settings)(command)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_goes_to_standard_output(form: str) -> None:
    done = run("axdimm", "--format", form)
    assert done.exit_code == 0
    assert done.stdout == FORMATS[form](adam_kernel_map(UpdateKernelConfig()))


def test_options_shape_the_map_and_the_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "map.json"
    arguments = "--format json --lanes 4 --functional-units 2 --order paper --windows 2"
    done = run("axdimm", *arguments.split(), "-o", str(path))
    assert done.exit_code == 0
    config = UpdateKernelConfig(lanes=4, functional_units=2, order="paper", windows=2)
    assert json.loads(path.read_text())["hash"] == adam_kernel_map(config).hash()


def test_the_arbiter_has_a_map_of_its_own() -> None:
    done = run("axdimm-arbiter", "--format", "json", "--density", "16Gb")
    assert done.exit_code == 0
    _, arbiter = DimmConfig(density="16Gb").maps()["arbiter0"]
    assert json.loads(done.stdout)["hash"] == arbiter.hash()


def test_the_card_has_the_map_of_its_updater() -> None:
    done = run("smartssd", "--format", "json", "--lanes", "4")
    assert done.exit_code == 0
    kernel = replace(UPDATER, lanes=4, functional_units=None)
    assert json.loads(done.stdout)["hash"] == adam_kernel_map(kernel).hash()


@pytest.mark.parametrize("form", FORMATS)
def test_a_kernel_of_several_rules_is_named_by_them(form: str) -> None:
    card, dimm = run("smartssd", "--format", form).stdout, run("axdimm", "--format", form).stdout
    text = "An update kernel near the memory; rules: adam, sgd, sgd_momentum, adagrad."
    assert text in " ".join(card.replace(" * ", " ").split())
    assert "AXDIMM" not in card
    assert "An Adam/AdamW kernel near the memory (AXDIMM paper" in dimm
