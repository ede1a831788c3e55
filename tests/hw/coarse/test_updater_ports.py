# amaranth: UnusedElaboratable=no
"""The ports of a memory device with an update kernel; `tests/sim/coarse` runs it."""

import pytest

from nearstep_hw.coarse.device import HOST_ID_WIDTH, MemoryDevice
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.csr.model import ADDRESS_WIDTH


def members(**options):
    config = CoarseConfig(**options)
    return MemoryDevice(config, unit=None).signature.members


def test_without_rules_the_ports_are_those_of_a_device_without_kernel():
    plain = MemoryDevice(CoarseConfig()).signature.members
    assert (
        set(plain)
        == set(members())
        == {*("csr", "s_axi", "m_axi", "link_out", "link_in", "o_interrupt")}
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_kernel_has_registers_units_and_ids_at_the_memory_of_its_own(groups):
    plain, made = members(groups=groups), members(groups=groups, rules=("adam",))
    assert set(made) - set(plain) == {"fu"}
    assert "fu" not in MemoryDevice(CoarseConfig(rules=("adam",))).signature.members
    blocks = 1 << len(made["csr"].signature.create().address) - ADDRESS_WIDTH
    assert blocks >= groups + 2
    ids = len(made["m_axi"].signature.create().aw.payload.id)
    assert HOST_ID_WIDTH < ids <= 8  # what models of memory hold
