"""A DIMM of two channels: its memory, what is refused at open, and what the host's traffic is."""

from __future__ import annotations

import numpy as np
import pytest

import nearstep
from nearstep.errors import ArgumentError, MismatchError, OutOfBoundsError
from nearstep_sim.axdimm.dimm import DimmBackend
from nearstep_sim.models.dram.replay import replay
from nearstep_sim.models.dram.trace import read_trace
from nearstep_sim.updater.golden import GoldenBackend
from nearstep_spec.updater.registers import ARRAYS

from .conftest import DIMMS
from .job import Job


@pytest.mark.parametrize("block", ["arbiter1", "adam0"])
@pytest.mark.parametrize("name", DIMMS)
def test_another_register_map_is_refused_at_open(name, block, monkeypatch):
    backend = GoldenBackend if name.startswith("golden") else DimmBackend
    read = backend.read_register

    def other(self, address):
        base, registers = self.config.maps()[block]
        return read(self, address) ^ (address == base + registers["map_hash"].offset)

    monkeypatch.setattr(backend, "read_register", other)
    with pytest.raises(MismatchError, match=rf"{block}.map_hash must be 0x"):
        nearstep.open(DIMMS[name])


def test_every_size_and_place_of_a_copy_leaves_its_neighbours(dimm):
    rng = np.random.default_rng(11)
    whole = dimm.alloc(400, np.uint8, channel=1)
    shadow = rng.integers(0, 256, 400).astype(np.uint8)
    whole.write(shadow)
    checks = 0
    for start in (0, 1, 63, 64, 65, 130):
        for size in (0, 1, 62, 63, 64, 65, 127, 128, 200):
            part = rng.integers(0, 256, size).astype(np.uint8)
            whole[start : start + size].write(part)
            shadow[start : start + size] = part
            np.testing.assert_array_equal(whole.read(), shadow)
            np.testing.assert_array_equal(whole[start : start + size].read(), part)
            checks += 1
    assert checks == 54


def test_copies_between_channels_and_devices(dimm):
    data = np.arange(1000, dtype=np.float32)
    first, second = dimm.alloc(1000, channel=0), dimm.alloc(1000, channel=1)
    first.write(data)
    second.copy_from(first)
    np.testing.assert_array_equal(second.read(), data)
    with nearstep.open("golden:axdimm?engine=numpy&memory_bytes=1MiB") as other:
        third = other.alloc(1000)
        third.copy_from(second)
        np.testing.assert_array_equal(third.read(), data)


def test_memory_is_allocated_by_channel(dimm):
    free = dimm.free_bytes
    regions = dimm.backend.regions
    for channel, (base, size) in enumerate(regions):
        buffer = dimm.alloc(100, channel=channel, align=1024)
        assert base <= buffer.address < base + size
        assert (buffer.address - base) % 1024 == 0
        buffer.free()
    assert dimm.free_bytes == free
    dimm.alloc(4, channel=np.int64(1), align=np.int64(64)).free()
    for wrong in ({"channel": 2}, {"channel": -1}, {"channel": "0"}, {"align": 32}):
        with pytest.raises(ArgumentError):
            dimm.alloc(4, **wrong)
    base, size = regions[1]
    with pytest.raises(OutOfBoundsError):
        dimm.backend.write_memory(dimm.backend.config.channel_bytes * 2 - 32, np.zeros(64, "u1"))


def test_commands_of_each_channel_are_written_and_keep_the_rules(tmp_path):
    stem = tmp_path / "new" / "trace"
    with nearstep.open(f"{DIMMS['sim-dimm']}&commands={stem}") as dimm:
        work = Job(dimm, 300, channel=1)
        work.start().wait()
        assert work.check() == 900
    for channel in range(2):
        found = list(read_trace(f"{stem}.{channel}"))
        assert len(found) > (100 if channel else 0)
        assert replay(f"{stem}.{channel}").violation is None


def test_host_traffic_is_whole_lines_and_registers_are_written_by_the_line():
    with nearstep.open(DIMMS["sim-dimm"]) as dimm:
        backend = dimm.backend
        buffer = dimm.alloc(1000)
        before = backend.host_statistics
        buffer.write(np.zeros(1000, np.float32))
        between = backend.host_statistics
        buffer.read()
        after = backend.host_statistics
        assert between.stores - before.stores == 63
        assert between.loads - before.loads == 0  # the last line was new: nothing to keep
        assert after.loads - between.loads == 63
        kernel = dimm.regs.adam0
        before = backend.host_statistics
        for name in ARRAYS:
            kernel[f"{name}_address"].value = 1 << 20
        kernel.count.value = 5
        backend.read_register(kernel.count.address)
        after = backend.host_statistics
        assert (after.stores - before.stores, after.loads - before.loads) == (1, 2)
