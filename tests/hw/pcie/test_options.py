"""Options that contradict each other are errors that say so."""

import pytest

from nearstep_hw.pcie.endpoint import PcieEndpoint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 32}, "one of .* bits, not 32"),
        ({"width": 512, "data_width": 256}, "at least 512 bits, not 256"),
        ({"address_width": 12}, "at least 13 bits, not 12"),
        ({"memory_bytes": 4098}, "multiple of 4 bytes .* not 4098 bytes"),
        ({"memory_bytes": 0}, "not 0 bytes"),
        ({"address_width": 16, "memory_bytes": 1 << 17}, "fit 16 bits of address, not 131072"),
        ({"vectors": 129}, "1 to 128, not 129"),
        ({"store_bytes": 1024}, "1024 bytes at any alignment, not 16 beats of 64 bytes"),
        ({"landing_bytes": 512}, "must hold 1024 bytes, not 8 beats of 64 bytes"),
        ({"requests": 12}, "power of two, not 12"),
    ],
)
def test_options_that_do_not_fit_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        PcieEndpoint(**options).elaborate(None)
