"""Scans of gradients through the driver, on every device whose kernel can scan."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nearstep_sim.golden.scan import scan

from .job import Job, accelerated
from .patterns import FORMATS, gradients, narrowed, widened

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1001, 4099)
NAN, INFINITE = 0x7FF8_0000_0000_0000, 0x7FF0_0000_0000_0000


def scanned(device, g, form=None):
    """A whole scan."""
    with accelerated(device):
        return device.scan(g, form if form == "bf16" else None).wait()


def outcome(run):
    """What a scan tells, the sum as a pattern."""
    return run.found_inf, int(np.float64(run.sum_of_squares).view(np.uint64))


def expected(values, form, lanes):
    found, total = scan(widened(values, form), lanes=lanes)
    return found, NAN if math.isnan(total) else int(np.float64(total).view(np.uint64))


@pytest.mark.parametrize("form", FORMATS)
def test_a_scan_of_any_length_gives_the_bits_of_the_model(full, form):
    lanes, seen = full.config.lanes, set()
    for count in COUNTS:
        rng = np.random.default_rng(count)
        values = gradients(rng, count, form)
        if count % 2:  # finite: no special
            values = narrowed(rng.uniform(-9, 9, count).astype(np.float32), form)
        g = full.alloc(count, values.dtype)
        g.write(values)
        run = scanned(full, g, form)
        assert outcome(run) == expected(values, form, lanes)
        assert run.what == f"scan of {count} elements"
        assert (run.done, run.committed, run.count) == (True, 0, count)
        beats = -(-values.nbytes // full.config.beat_bytes)
        assert [run.counters[name] for name in ("read_beats", "write_beats")] == [beats, 0]
        assert g.read().tobytes() == values.tobytes()
        seen.add(run.found_inf)
        g.free()
    assert seen == {False, True}
    kernel = full.channels[0].kernel
    closed = [kernel[f"window{i}_permissions"].bits for i in range(full.config.windows)]
    assert closed == [0] * full.config.windows


def test_the_sum_is_within_its_bound_of_float64(full):
    lanes = full.config.lanes
    bound = (1 + math.log2(lanes)) * 2.0**-24
    for seed in range(5):
        values = np.random.default_rng(seed).lognormal(sigma=3.0, size=10_000 + seed)
        values = values.astype(np.float32)
        g = full.alloc(values.size)
        g.write(values)
        exact = math.fsum(np.square(values.astype(np.float64)))
        error = abs(scanned(full, g).sum_of_squares / exact - 1.0)
        print(f"seed {seed}: error {error:.2e}, bound {bound:.2e}")
        assert 0.0 < error <= bound
        g.free()


def test_what_is_not_finite_is_found_and_what_is_behind_the_last_element_is_not(full):
    g = full.alloc(1001)
    for value, stop, told in (
        (1.0, 0, (False, 0)),
        (np.inf, 1001, (True, INFINITE)),
        (-np.inf, 1001, (True, INFINITE)),
        (np.nan, 1001, (True, NAN)),
        (2e19, 16, (False, INFINITE)),  # of squares, though no gradient is
    ):
        g.fill(value)
        assert outcome(scanned(full, g[:stop])) == told, value
    for position in (0, 1, 127, 128, 255, 999, 1000):
        g.fill(1.0)
        g[position : position + 1].fill(np.inf)
        assert scanned(full, g).found_inf
    g.fill(np.nan)
    g[:301].fill(0.5)
    run = scanned(full, g[:301])
    assert (run.found_inf, run.sum_of_squares) == (False, 301 * 0.25)


def test_updates_and_scans_in_turn_do_not_see_each_other(full):
    """Nor does a scan look at a register of a rule."""
    work = Job(full, 777, 5)
    g = work.buffers["g"]
    kernel = full.channels[0].kernel
    for _ in range(2):
        work.run("sgd", lr=0.3, gradient_scale=0.5)
        assert (kernel.scan.found_inf, kernel.sum_of_squares.value) == (0, 0)
        assert work.check() == 3 * 777
        kernel.rule.value = 77
        kernel.gradient_scale.bits = 0
        for register in ("p", "m", "v", "index", "copy_out"):
            kernel[f"{register}_address"].value = 4  # neither aligned nor granted
        kernel.pairs.value = 1 << 40
        assert outcome(scanned(full, g)) == expected(g.read(), "fp32", full.config.lanes)
        assert kernel.sum_of_squares.value != 0
