"""`sim:axdimm` in the ways that only it can be used."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import nearstep
from nearstep_spec.updater.registers import ARRAYS

SHAPE = "lanes=4&block_bytes=512&memory_bytes=4MiB"


def run_once(url: str, count: int = 5003, seed: int = 1) -> tuple[dict[str, bytes], int, dict]:
    """Results, cycles and the memory's own counters of one step."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, (4, count), dtype=np.uint32)
    bits[:, : count // 2] = rng.standard_normal((4, count // 2)).astype(np.float32).view(np.uint32)
    with nearstep.open(url) as device:
        buffers = {name: device.alloc(count) for name in ARRAYS}
        for name, row in zip(ARRAYS, bits, strict=True):
            buffers[name].write(row.view(np.float32))
        run = device.update(
            "adam", buffers, step=2, lr=0.01, weight_decay=0.1, decoupled_weight_decay=seed % 2 == 0
        )
        run.wait()
        counters = device.backend.memory_counters
        assert counters["read_beats"] == run.counters["read_beats"]
        assert counters["write_beats"] == run.counters["write_beats"]
        results = {name: buffers[name].read().tobytes() for name in ("p", "m", "v")}
        return results, run.cycles, counters


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("extra", ["", "&memory=halfduplex&stall=0.4"], ids=["ideal", "stalled"])
def test_native_units_give_the_bits_and_the_cycles_of_rtl(seed, extra):
    rtl = run_once(f"sim:axdimm?{SHAPE}{extra}&fu=rtl", seed=seed)
    native = run_once(f"sim:axdimm?{SHAPE}{extra}&fu=native", seed=seed)
    assert sum(map(len, rtl[0].values())) == 3 * 4 * 5003
    assert rtl == native


def test_stalls_change_the_cycles_and_not_the_results():
    free = run_once(f"sim:axdimm?{SHAPE}")
    stalled = run_once(f"sim:axdimm?{SHAPE}&stall=0.5&seed=3")
    assert free[0] == stalled[0]
    assert stalled[1] > free[1]
    assert stalled == run_once(f"sim:axdimm?{SHAPE}&stall=0.5&seed=3")


def test_two_devices_in_one_process_do_not_share_anything():
    with nearstep.open(f"sim:axdimm?{SHAPE}") as one, nearstep.open(f"sim:axdimm?{SHAPE}") as two:
        one.regs.adam0.count.value = 7
        assert two.regs.adam0.count.value == 0
        buffer, other = one.alloc(16), two.alloc(16)
        assert buffer.address == other.address
        buffer.fill(1.0)
        other.fill(2.0)
        assert buffer.read().sum() == 16.0


@pytest.mark.deep
@pytest.mark.parametrize("lanes", [1, 2, 8, 16])
@pytest.mark.parametrize("units", ["one", "all"])
def test_every_width_gives_the_bits_of_the_golden_device(lanes, units):
    shape = f"lanes={lanes}&functional_units={1 if units == 'one' else lanes}&block_bytes=512"
    size = "memory_bytes=4MiB"
    golden = nearstep.open(f"golden:axdimm?{shape}&{size}")
    rng = np.random.default_rng(lanes)
    host = np.abs(rng.standard_normal((4, 3001)).astype(np.float32))
    results = []
    with nearstep.open(f"sim:axdimm?{shape}&{size}") as sim, golden:
        for device in (golden, sim):
            buffers = {name: device.alloc(3001) for name in ARRAYS}
            for name, row in zip(ARRAYS, host, strict=True):
                buffers[name].write(row)
            device.update("adam", buffers, step=1).wait()
            results.append([buffers[name].read().tobytes() for name in ARRAYS])
    assert results[0] == results[1]


@pytest.mark.deep
def test_the_order_of_the_paper_gives_the_bits_of_the_golden_device():
    host = np.abs(np.random.default_rng(0).standard_normal((4, 999)).astype(np.float32))
    results = []
    for backend in ("golden", "sim"):
        with nearstep.open(f"{backend}:axdimm?{SHAPE}&order=paper") as device:
            buffers = {name: device.alloc(999) for name in ARRAYS}
            for name, row in zip(ARRAYS, host, strict=True):
                buffers[name].write(row)
            device.update("adam", buffers, step=4, weight_decay=0.1).wait()
            results.append([buffers[name].read().tobytes() for name in ARRAYS])
    assert results[0] == results[1]


TRACE = """
import runpy, sys
test = runpy.run_path(sys.argv[1])
test["run_once"](f"sim:axdimm?{test['SHAPE']}&trace={sys.argv[2]}", count=64)
"""


@pytest.mark.deep
def test_a_trace_is_written_where_it_was_asked_for(tmp_path):
    path = tmp_path / "waves" / "kernel.vcd"
    subprocess.run(
        [sys.executable, "-c", TRACE, __file__, str(path)],
        env={
            **os.environ,
            "MALLOC_PERTURB_": "69",  # glibc fills with the complement, 0xba, what it hands out
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        check=True,
    )
    text = path.read_text(encoding="ascii")
    assert "fu__i_en" in text
    assert "unit3" in text
    _, _, changes = text.partition("$enddefinitions $end")
    values = re.findall(r"^([^#$\s])\S*$|^b(\S+) \S+$", changes, re.M)
    assert len(values) > 1000
    assert {digit for scalar, vector in values for digit in scalar + vector} <= set("01xz")
