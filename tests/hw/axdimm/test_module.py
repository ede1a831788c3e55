"""Shapes of the module and of a channel; `tests/host/driver` runs both."""

import pytest

from nearstep_hw.axdimm.channel import AxdimmChannel
from nearstep_hw.axdimm.module import AxdimmModule
from nearstep_spec.axdimm.registers import channel_maps, window_base
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig

CONFIG = UpdateKernelConfig(functional_units=1, block_bytes=512, windows=1, bursts_ahead=8)


def test_registers_of_a_channel_are_its_end() -> None:
    mapping = AddressMapping()
    maps = channel_maps(CONFIG, mapping, read_latency=9, write_latency=3)
    assert maps["arbiter"][0] == window_base(mapping) == (8 << 30) - 8192
    assert maps["adam"][0] == (8 << 30) - 4096


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"channels must be one of \(1, 2, 4\), not 3"):
        AxdimmModule(CONFIG, channels=3)
    with pytest.raises(ConfigError, match="lanes must be 16, a beat of the memory, not 8"):
        AxdimmChannel(UpdateKernelConfig(lanes=8))
