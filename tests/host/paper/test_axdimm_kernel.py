"""Table 5 of the AXDIMM paper, and the RTL beside it."""

import pytest

from nearstep.paper.axdimm_kernel import (
    AXDIMM,
    BYTES_PER_PARAMETER,
    CHANNEL_BYTES_PER_S,
    CPU,
    DEVICES,
    PRINTED,
    measured,
    this_core,
)
from nearstep_spec.platform.load import load


def test_the_printed_rates_are_those_of_the_platform() -> None:
    machine = load("axdimm")
    cpu, dimm = machine.processors["cpu"], machine.dimms["axdimm"]
    assert float(cpu.adam_params_per_s or 0) == CPU.achieved
    assert float(dimm.adam_params_per_s) == AXDIMM.achieved
    assert float(dimm.channel_bytes_per_s) == CHANNEL_BYTES_PER_S
    for rate, limit in (
        (CPU, float(cpu.memory_bytes_per_s or 0)),
        (AXDIMM, float(dimm.channels) * float(dimm.channel_bytes_per_s)),
    ):
        assert rate.theoretical == pytest.approx(limit / BYTES_PER_PARAMETER, rel=1e-5)


def test_a_thread_of_this_machine_is_measured_and_the_others_come_back() -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rate = this_core(1 << 12)
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert rate is not None
    assert rate.achieved > 0
    assert "4096 parameters" in rate.source
    assert after == 3


def test_the_printed_limits_are_those_of_the_memory() -> None:
    cpu, axdimm = PRINTED
    assert cpu.theoretical == pytest.approx(6.4e9 / BYTES_PER_PARAMETER, rel=1e-4)
    assert axdimm.theoretical == pytest.approx(
        2 * CHANNEL_BYTES_PER_S / BYTES_PER_PARAMETER, rel=1e-4
    )
    assert cpu.efficiency == pytest.approx(0.614, abs=5e-4)
    assert axdimm.efficiency == pytest.approx(0.863, abs=5e-4)


@pytest.mark.deep
def test_the_kernel_beats_the_printed_rate_on_the_papers_chips() -> None:
    rates = list(measured(1 << 17))
    assert [rate.name for rate in rates] == [f"AXDIMM, {name}" for name in DEVICES]
    for rate in rates:
        print(rate)
        assert rate.efficiency is not None
        assert PRINTED[1].efficiency is not None
        assert PRINTED[1].efficiency < rate.efficiency < 1
    assert rates[0].achieved < rates[1].achieved  # refreshes of larger dies take longer
