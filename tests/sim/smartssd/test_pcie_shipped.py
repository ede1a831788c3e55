"""`sim:smartssd?bus=pcie` with no other option: the card that `nearstep rtl` writes by default."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import nearstep
from nearstep import cli
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.smartssd.library import PCIE_TOP, shipped_verilog
from nearstep_sim.smartssd.pcie_card import PcieCardBackend
from nearstep_spec.smartssd.config import SmartssdConfig

from ...host.driver.job import Job

pytestmark = pytest.mark.deep

SMALL = ("--lanes", "4", "--chunk-bytes", "512", "--memory-bytes", "4MiB")


@pytest.mark.parametrize("options", [(), SMALL], ids=["default", "small"])
def test_the_device_is_what_the_command_writes(options: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "top.v"
    done = CliRunner().invoke(cli._app(), ["rtl", PCIE_TOP, *options, "-o", str(out)])
    assert done.exit_code == 0, done.output
    config = SmartssdConfig()
    if options:
        url = "sim:smartssd?bus=pcie&lanes=4&chunk_bytes=512&memory_bytes=4MiB"
        with nearstep.open(url) as device:
            config = device.backend.config
    text = out.read_text()
    assert text == shipped_verilog(PCIE_TOP, config).read_text()
    assert text.count("  smartssd_fu unit") == config.kernel.units
    assert f"module {PCIE_TOP}(" in text


def test_runs_with_its_sixteen_units_have_the_cycles_of_the_emulated_one() -> None:
    """Whole gradients of each format, and both forms of pairs: bits by the job, cycles here."""
    taken: dict[str, list[object]] = {}
    compared = 0
    for url in ("sim:smartssd?bus=pcie", "sim:smartssd?fu=native"):
        with nearstep.open(url) as device:
            assert isinstance(device, SmartssdDevice)
            assert isinstance(device.backend, PcieCardBackend) == ("pcie" in url)
            assert device.config.units == device.config.lanes == 16
            runs = []
            for gradient in (None, "fp16", "bf16"):
                job = Job(device, 9001, 5, gradient=gradient)
                run = job.run("adam", step=3)
                compared += job.check()
                runs.append((run.cycles, run.counters))
                job.free()
            for form in ("fused", "scatter"):
                job = Job(device, 9001, 6, arrays="pm")
                index = np.sort(job.rng.integers(0, 9001, 400)).astype(np.uint32)
                values = job.rng.standard_normal(400).astype(np.float32)
                pairs = job.pairs(index, values, form)
                run = job.run("sgd", g=pairs, momentum=0.9)
                compared += job.check()
                runs.append((run.cycles, run.counters, run.duplicates))
                job.free()
            taken[url] = runs
    first, second = taken.values()
    assert first == second
    assert compared == 2 * (3 * 3 * 9001 + 2 * 2 * 9001)
    assert all(isinstance(run, tuple) and isinstance(run[0], int) for run in first)
