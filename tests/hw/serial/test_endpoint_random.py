"""Endpoints under cocotb: random requests beside the model, in four stall modes."""

from functools import cache
from pathlib import Path

import pytest

from nearstep_hw.serial.byte_endpoint import ByteEndpoint
from nearstep_hw.serial.endpoint import SerialEndpoint
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.verilate.build import verilog_of
from nearstep_spec.serial.protocol import MOST_DATA

from .model_board import ADDRESS_WIDTH, MANIFEST, WINDOW

HERE = Path(__file__).parent
SHAPE = {
    "manifest": MANIFEST,
    "address_width": ADDRESS_WIDTH,
    "window": WINDOW,
    "timeout_cycles": 4000,
}


@cache
def verilog(width: int, divisor: int) -> tuple[str, Path]:
    if divisor:
        top = "serial_endpoint"
        dut = SerialEndpoint(**SHAPE, data_width=width, divisor=divisor)
    else:
        top = "byte_endpoint"
        dut = ByteEndpoint(**SHAPE, data_width=width)
    return top, verilog_of(f"{top} {width} {divisor}", lambda: to_verilog(dut, top))


def run(
    width: int,
    mode: str,
    seed: int,
    count: int,
    *,
    most: int = MOST_DATA,
    divisor: int = 0,
    rate: float = 1.0,
) -> None:
    """Run `count` steps of the bench; with a `divisor` over a UART, `rate` times as fast."""
    top, path = verilog(width, divisor)
    environment = {
        "NEARSTEP_STALL": mode,
        "NEARSTEP_SEED": str(seed),
        "NEARSTEP_BEAT_BYTES": str(width // 8),
        "NEARSTEP_COUNT": str(count),
        "NEARSTEP_MOST": str(most),
        "NEARSTEP_BIT_CYCLES": str(divisor / rate),
    }
    result = run_cocotb(
        top=top, verilog=path, test_module=HERE / "cocotb_endpoint.py", env=environment
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


@pytest.mark.deep
@pytest.mark.parametrize("rate", [0.98, 1.0, 1.02])
@pytest.mark.parametrize("divisor", [4, 33])
def test_a_host_may_be_off_by_two_percent(divisor: int, rate: float) -> None:
    run(32, "both", seed=4, count=10, most=8, divisor=divisor, rate=rate)
