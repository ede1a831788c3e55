"""Scans of gradients through the driver, on every device whose kernel can scan."""

from __future__ import annotations

import math

import numpy as np
import pytest

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import (
    AbortedError,
    AlignmentError,
    ArgumentError,
    BusResponseError,
    BusyError,
    DtypeError,
    ForeignBufferError,
    FreedBufferError,
    UninitialisedError,
)
from nearstep_sim.golden.scan import scan

from .conftest import FULL
from .job import Job, accelerated, host_reaches
from .patterns import FORMATS, gradients, widened

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1001, 4099)
NAN = 0x7FF8_0000_0000_0000


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
            values = rng.uniform(-9, 9, count).astype(np.float16)
            values = values if form == "fp16" else values.astype(np.float32)
            if form == "bf16":
                values = (values.view(np.uint32) >> 16).astype(np.uint16)
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


def test_the_sum_is_within_its_bound_of_float64(full):
    lanes = full.config.lanes
    bound = (1 + math.log2(lanes)) * 2.0**-24
    for seed in range(5):
        values = (
            np.random.default_rng(seed).lognormal(sigma=3.0, size=10_000 + seed).astype(np.float32)
        )
        g = full.alloc(values.size)
        g.write(values)
        exact = math.fsum(np.square(values.astype(np.float64)))
        error = abs(scanned(full, g).sum_of_squares / exact - 1.0)
        print(f"seed {seed}: error {error:.2e}, bound {bound:.2e}")
        assert 0.0 < error <= bound
        g.free()


def test_a_scan_of_nothing_finds_nothing(full):
    g = full.alloc(64)
    run = scanned(full, g[0:0])
    assert (run.done, outcome(run)) == (True, (False, 0))
    assert run.counters["read_beats"] == 0


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_nothing_but_infinities_or_nan(full, special):
    g = full.alloc(1001)
    g.fill(special)
    run = scanned(full, g)
    pattern = NAN if np.isnan(special) else 0x7FF0_0000_0000_0000
    assert outcome(run) == (True, pattern)


def test_one_infinity_anywhere_is_found(full):
    count = 300
    g = full.alloc(count)
    values = np.ones(count, np.float32)
    for position in (0, 1, 127, 128, 255, 298, 299):
        g.fill(1.0)
        g[position : position + 1].fill(np.inf)
        assert scanned(full, g).found_inf
    g.write(values)
    run = scanned(full, g[: count - 1])
    assert outcome(run) == expected(values[:-1], "fp32", full.config.lanes)


def test_squares_that_overflow_are_infinite_though_no_gradient_is(full):
    g = full.alloc(16)
    g.fill(2e19)
    run = scanned(full, g)
    assert (run.found_inf, run.sum_of_squares) == (False, np.inf)


def test_what_lies_behind_the_last_element_does_not_count(full):
    g = full.alloc(400)
    g.fill(np.nan)
    g[:301].fill(0.5)
    run = scanned(full, g[:301])
    assert (run.found_inf, run.sum_of_squares) == (False, 301 * 0.25)


def test_updates_and_scans_in_turn_do_not_see_each_other(full):
    work = Job(full, 777, 5)
    g = work.buffers["g"]
    kernel = full.channels[0].kernel
    for _ in range(2):
        work.run("sgd", lr=0.3, gradient_scale=0.5)
        assert (kernel.scan.found_inf, kernel.sum_of_squares.value) == (0, 0)
        assert work.check() == 3 * 777
        assert outcome(scanned(full, g)) == expected(g.read(), "fp32", full.config.lanes)
        assert kernel.sum_of_squares.value != 0


def test_a_scan_looks_at_no_register_of_a_rule(full):
    g = full.alloc(300)
    g.fill(2.0)
    kernel = full.channels[0].kernel
    kernel.rule.value = 77
    kernel.gradient_scale.bits = 0
    for register in ("p_address", "m_address", "v_address", "index_address", "copy_out_address"):
        kernel[register].value = 4  # neither aligned nor granted
    kernel.pairs.value = 1 << 40
    run = scanned(full, g)
    assert (run.found_inf, run.sum_of_squares) == (False, 1200.0)


def test_windows_are_closed_after_a_scan(full):
    g = full.alloc(300)
    g.fill(1.0)
    scanned(full, g)
    kernel = full.channels[0].kernel
    closed = [kernel[f"window{i}_permissions"].bits for i in range(full.config.windows)]
    assert closed == [0] * full.config.windows


def test_what_a_scan_finds_is_known_at_its_end_only(full):
    count = 40_000  # more than the host's accesses take, through PCIe too
    g = full.alloc(count)
    g.fill(1.0)
    with accelerated(full):
        run = full.scan(g)
        for use in (lambda: run.found_inf, lambda: run.sum_of_squares):
            with pytest.raises(BusyError, match=f"scan of {count} elements has not ended"):
                use()
        with pytest.raises(BusyError, match=f"cannot run scan: scan of {count} elements has not"):
            full.scan(g)
        run.wait()
        assert (run.found_inf, run.sum_of_squares) == (False, float(count))


def test_gradients_of_a_scan_may_be_read_but_not_changed(full):
    g = full.alloc(40_000)
    g.fill(1.0)
    with accelerated(full):
        run = full.scan(g)
        with pytest.raises(BusyError, match="which uses it as g, has not ended"):
            g.free()
        if host_reaches(full):
            with pytest.raises(BusyError, match="which uses it as g, has not ended"):
                g.fill(0.0)
            assert np.all(g.read() == 1.0)
        run.wait()
    g.free()


def test_an_aborted_scan_tells_nothing_and_the_next_is_right(full):
    g = full.alloc(20_000)
    g.fill(np.inf)
    with accelerated(full):
        run = full.scan(g)
        run.abort()
    assert isinstance(run.error, AbortedError)
    with pytest.raises(AbortedError):
        _ = run.found_inf
    kernel = full.channels[0].kernel
    assert (kernel.scan.found_inf, kernel.sum_of_squares.value) == (0, 0)
    g.fill(1.0)
    run = scanned(full, g)
    assert (run.found_inf, run.sum_of_squares) == (False, 20_000.0)


def test_an_error_response_ends_a_scan(full):
    g = full.alloc(5000)
    g.fill(1.0)
    hit = g.address + 4 * 3333
    full.backend.inject(Injection(kind="slverr", write=False, base=hit, limit=hit + 4))
    with pytest.raises(BusResponseError) as caught:
        scanned(full, g)
    full.backend.heal()
    assert caught.value.stream == "G_READ"
    assert hit - full.config.burst_bytes < caught.value.address <= hit
    assert caught.value.committed == 0
    assert scanned(full, g).sum_of_squares == 5000.0


def test_gradients_that_nobody_wrote_are_a_fault(full):
    g = full.alloc(300)
    with pytest.raises(UninitialisedError) as caught:
        scanned(full, g)
    assert caught.value.address == g.address
    full.reset()
    g.fill(1.0)
    assert scanned(full, g).sum_of_squares == 300.0


WRONG = {
    "no buffer": (lambda device: np.ones(4, np.float32), {}, DtypeError),
    "float64": (lambda device: device.alloc(4, np.float64), {}, DtypeError),
    "bf16 unnamed": (lambda device: device.alloc(4, np.uint16), {}, DtypeError),
    "no such format": (lambda device: device.alloc(4), {"gradient_format": "fp8"}, ArgumentError),
    "half in float32": (lambda device: device.alloc(4), {"gradient_format": "fp16"}, DtypeError),
    "misaligned": (lambda device: device.alloc(4)[1:], {}, AlignmentError),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_fail_before_the_device_is_touched(full, case, monkeypatch):
    make, named, error = WRONG[case]
    g = make(full)
    touched = []
    monkeypatch.setattr(full.backend, "write_register", lambda *args: touched.append(args))
    with pytest.raises(error) as caught:
        full.scan(g, **named)
    print(caught.value)
    assert touched == []


def test_freed_and_foreign_gradients_are_refused(full):
    g = full.alloc(4)
    g.free()
    with pytest.raises(FreedBufferError):
        full.scan(g)
    with nearstep.open(FULL["golden-numpy"]) as other, pytest.raises(ForeignBufferError):
        full.scan(other.alloc(4))


def test_a_kernel_that_cannot_scan_says_so():
    with nearstep.open("golden:axdimm?engine=numpy&memory_bytes=1MiB") as device:
        assert "scan" not in [register.name for register in device.regs.adam0]
        with pytest.raises(ArgumentError, match="scan=yes"):
            device.scan(device.alloc(4))
