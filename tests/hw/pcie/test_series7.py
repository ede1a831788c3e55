"""The adapter to the 7-series block: the benches of the endpoint run through it."""

import pytest

from .test_endpoint import COUNTS, bench


@pytest.mark.deep
@pytest.mark.cocotb
@pytest.mark.parametrize("module", ["cocotb_endpoint", "cocotb_endpoint_errors", "cocotb_endpoint_order", "cocotb_endpoint_msix"])
def test_the_endpoint_behind_the_adapter(module):
    assert len(bench(module, series7=True).tests) == COUNTS[module]
