"""Endpoints under cocotb: random requests beside the model, in four stall modes."""

from functools import cache
from pathlib import Path

import pytest

from nearstep_hw.serial.byte_endpoint import ByteEndpoint
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.verilate.build import verilog_of

from .model_board import ADDRESS_WIDTH, MANIFEST, WINDOW

HERE = Path(__file__).parent
TOP = "byte_endpoint"


@cache
def verilog(width: int) -> Path:
    dut = ByteEndpoint(
        manifest=MANIFEST,
        address_width=ADDRESS_WIDTH,
        data_width=width,
        window=WINDOW,
        timeout_cycles=4000,
    )
    return verilog_of(f"{TOP} {width}", lambda: to_verilog(dut, TOP))


def run(width: int, mode: str, seed: int, count: int) -> None:
    environment = {
        "NEARSTEP_STALL": mode,
        "NEARSTEP_SEED": str(seed),
        "NEARSTEP_BEAT_BYTES": str(width // 8),
        "NEARSTEP_COUNT": str(count),
    }
    result = run_cocotb(
        top=TOP, verilog=verilog(width), test_module=HERE / "cocotb_endpoint.py", env=environment
    )
    assert result.tests


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["free", "source", "sink", "both"])
@pytest.mark.parametrize("width", [32, 128])
def test_random_requests_are_answered_as_the_model_does(width: int, mode: str) -> None:
    run(width, mode, seed=width, count=150)


@pytest.mark.deep
@pytest.mark.parametrize("width", [64, 512])
def test_other_widths_of_memory(width: int) -> None:
    run(width, "both", seed=width, count=60)
