"""The card as it is shipped, Verilated as one object, and the one whose units are joined to it in
C++: a command for a command they show the same bits and the same cycles.

So the card with its units outside, on which most tests and benchmarks run, stands for what
`nearstep rtl smartssd_card` writes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import nearstep
from nearstep import cli
from nearstep_sim.smartssd.library import TOP, shipped_verilog
from nearstep_spec.smartssd.config import SmartssdConfig

from ...host.driver.wholes import check_a_cycle_is_seen, random_runs
from .test_card import OPTIONS

SHIPPED = "sim:smartssd?seed=7&stall=0.2"
SMALL = f"sim:smartssd?{OPTIONS}&memory=ideal"
DEEDS = (
    "end",
    "fused",
    "scatter",
    "scan",
    "abort",
    "reset",
    "memory",
    "unwritten",
    "host",
    "drive",
)


@pytest.mark.deep
@pytest.mark.parametrize("options", [(), ("--lanes", "4", "--chunk-bytes", "512")], ids=str)
def test_what_is_verilated_is_what_is_shipped(options: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "top.v"
    done = CliRunner().invoke(cli._app(), ["rtl", TOP, *options, "-o", str(out)])
    assert done.exit_code == 0, done.output
    config = SmartssdConfig()
    if options:
        with nearstep.open("sim:smartssd?lanes=4&chunk_bytes=512") as device:
            config = device.backend.config
    text = out.read_text()
    assert text == shipped_verilog(TOP, config).read_text()
    assert text.count("  smartssd_fu unit") == config.kernel.units
    assert f"module {TOP}(" in text


@pytest.mark.deep
@pytest.mark.parametrize("url", [SHIPPED, SMALL], ids=["16 units, stalled", "4 lanes"])
def test_random_runs_and_faults_show_the_same(url: str) -> None:
    urls = (f"{url}&top=parts", f"{url}&top=whole")
    assert len(random_runs(urls, 3, DEEDS, 4 * len(DEEDS))) >= 3


@pytest.mark.deep
def test_a_difference_of_one_cycle_is_seen() -> None:
    check_a_cycle_is_seen((f"{SMALL}&top=parts", f"{SMALL}&top=whole"))
