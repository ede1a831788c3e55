"""Table 5 of the AXDIMM paper, and the RTL beside it."""

import pytest

from nearstep.paper.axdimm_kernel import (
    BYTES_PER_PARAMETER,
    CHANNEL_BYTES_PER_S,
    DEVICES,
    PRINTED,
    measured,
)


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
