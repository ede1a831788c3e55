"""Gradients of 16 bits, and scaled ones, through the driver, on every emulated device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.emulated import Injection
from nearstep.errors import ArgumentError, ConfigurationError, DtypeError, OptionError
from nearstep_spec.updater.registers import ErrorCause, GradientFormat, Stream

from .conftest import SIM_CARD_SHAPE, chosen
from .job import Job, accelerated
from .patterns import FORMATS, NARROW

ALL = "rules=adam,sgd,sgd_momentum,adagrad&gradient_formats=fp32,fp16,bf16&gradient_scale=yes"
URLS = {
    "golden-numpy": f"golden:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&engine=numpy&{ALL}",
    "golden-cpp": f"golden:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&{ALL}",
    "golden-dimm": f"golden:axdimm?channels=2&block_bytes=512&memory_bytes=2MiB&{ALL}",
    "sim-ideal": f"sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&{ALL}",
    "sim-halfduplex": (
        "sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&memory=halfduplex&fu=native"
        f"&stall=0.2&seed=3&{ALL}"
    ),
    "sim-dimm": f"sim:axdimm?memory=ddr4-1600&block_bytes=1024&functional_units=4&{ALL}",
    "golden-card": "golden:smartssd?lanes=4&chunk_bytes=512&memory_bytes=1MiB",
    "sim-card": f"sim:smartssd?{SIM_CARD_SHAPE}",
    "pcie-card": f"sim:smartssd?{SIM_CARD_SHAPE}&bus=pcie",
}


DEEP = ("sim-ideal", "sim-halfduplex", "sim-dimm", "pcie-card")
EMULATED = [name for name in URLS if name != "sim-dimm"]


@pytest.fixture(params=chosen(URLS, DEEP))
def device(request: pytest.FixtureRequest) -> Iterator[AxdimmDevice]:
    with nearstep.open(URLS[request.param]) as opened:
        yield opened


def test_gradients_of_16_bits_take_half_the_beats(device):
    lanes = device.config.lanes
    for count in (1, lanes + 1, 2 * lanes, 2 * lanes + 1, 3 * lanes, 4096, 4099):
        beats = -(-count // lanes)
        reads = {}
        for form in FORMATS:
            work = Job(device, count, 5, gradient=form)
            run = work.run("adam", step=1)
            reads[form] = run.counters["read_beats"]
            assert run.counters["write_beats"] == 3 * beats
            work.free()
        halved = 3 * beats + -(-count // (2 * lanes))
        assert reads == {"fp32": 4 * beats, "fp16": halved, "bf16": halved}


@pytest.mark.deep
@pytest.mark.parametrize("url", ["sim-ideal", "sim-halfduplex"])
def test_halved_gradients_are_no_slower(url):
    """With one beat a cycle the reads bound a run."""
    cycles = {}
    for form in FORMATS:
        with nearstep.open(URLS[url]) as device:
            cycles[form] = Job(device, 8192, 9, gradient=form).run("adam", step=1).cycles
    print(cycles)
    bound = 0.95 * 3.5 / 4 if url == "sim-ideal" else 0.97 * 6.5 / 7
    for form in NARROW:
        assert cycles[form] < cycles["fp32"]
        assert cycles[form] > bound * cycles["fp32"]


def _prepare(work):
    """The kernel, configured by a run that has ended; windows are open again."""
    work.run("adam", step=1)
    work.upload()
    kernel = work.device.channels[0].kernel
    for index, name in enumerate("pgmv"):
        _window(work, index, name, work.buffers[name].nbytes)
    return kernel


def _window(work, index, name, nbytes):
    kernel, beat = work.device.channels[0].kernel, work.device.config.beat_bytes
    base = work.buffers[name].address
    kernel[f"window{index}_base"].value = base
    kernel[f"window{index}_limit"].value = base + -(-nbytes // beat) * beat
    kernel[f"window{index}_permissions"].bits = 0b111


def _outcome(work):
    """Cause, stream and address of a START."""
    kernel = work.device.channels[0].kernel
    with accelerated(work.device):
        kernel.start.go = 1
        work.device.backend.wait([kernel.status.poll(busy=0)], 50_000)
    return kernel.error.cause, kernel.error.stream, kernel.error_address.value


DONE = (ErrorCause.NONE, Stream.NONE, 0)


@pytest.mark.parametrize("form", NARROW)
def test_windows_are_asked_for_half_the_bytes(device, form):
    for count in (300, 16 * device.config.lanes, 17 * device.config.lanes):
        work = Job(device, count, 3, gradient=form)
        kernel = _prepare(work)
        assert _outcome(work) == DONE
        g = work.buffers["g"]
        _window(work, 1, "g", g.nbytes - device.config.beat_bytes)
        assert _outcome(work) == (ErrorCause.WINDOW, Stream.G_READ, g.address)
        _window(work, 1, "g", g.nbytes)
        kernel.formats.gradient = GradientFormat.FP32  # twice the bytes
        assert _outcome(work)[:2] == (ErrorCause.WINDOW, Stream.G_READ)
        work.free()


def test_arrays_may_follow_right_behind_half_of_the_bytes(device):
    beat, lanes = device.config.beat_bytes, device.config.lanes
    count = 4 * lanes
    work = Job(device, count, 4, gradient="fp16")
    _prepare(work)
    arena = device.alloc(6 * beat // 4)
    arena.write(np.zeros(arena.size, np.float32))
    kernel = device.channels[0].kernel
    kernel.g_address.value = arena.address
    kernel.m_address.value = arena.address + 2 * beat
    for index in (1, 2):
        kernel[f"window{index}_base"].value = arena.address
        kernel[f"window{index}_limit"].value = arena.address + 6 * beat
    assert _outcome(work) == DONE
    kernel.m_address.value = arena.address + beat
    assert _outcome(work) == (ErrorCause.OVERLAP, Stream.M_READ, arena.address + beat)
    kernel.m_address.value = arena.address
    kernel.g_address.value = arena.address + 3 * beat  # the last of the four beats of m
    assert _outcome(work) == (ErrorCause.OVERLAP, Stream.M_READ, arena.address)
    kernel.g_address.value = arena.address + 4 * beat
    assert _outcome(work) == DONE
    kernel.m_address.value = arena.address + 2 * beat
    kernel.g_address.value = arena.address
    kernel.formats.gradient = GradientFormat.FP32
    assert _outcome(work)[0] == ErrorCause.OVERLAP


def test_the_last_half_may_end_with_the_address_space(device):
    work = Job(device, 4 * device.config.lanes, 4, gradient="fp16")
    kernel = _prepare(work)
    whole = getattr(device, "dimm", None) or getattr(device, "card", None)
    end = 1 << 34 if whole is None else whole.memory_bytes
    for form, beats, over in ((1, 2, False), (1, 1, True), (0, 3, True), (0, 4, False)):
        kernel.formats.gradient = form
        kernel.g_address.value = at = end - beats * device.config.beat_bytes
        cause = ErrorCause.ADDRESS_RANGE if over else ErrorCause.WINDOW
        assert _outcome(work) == (cause, Stream.G_READ, at)


@pytest.mark.parametrize("value", [3, 7, 15])
def test_a_format_that_nobody_knows_is_refused_by_the_kernel(device, value):
    work = Job(device, 100, 4, gradient="fp16")
    kernel = _prepare(work)
    kernel.formats.bits = value
    assert _outcome(work) == (ErrorCause.UNSUPPORTED, Stream.NONE, 0)


@pytest.mark.parametrize(
    "url", ["golden:axdimm?engine=numpy&", pytest.param("sim:axdimm?", marks=pytest.mark.deep)]
)
def test_a_format_of_another_kernel_is_refused_by_this_one(url):
    shape = "lanes=1&block_bytes=32&memory_bytes=1MiB&gradient_formats=fp32,bf16"
    with nearstep.open(f"{url}{shape}") as device:
        assert device.channels[0].kernel.capabilities.gradient_formats == 0b101
        assert device.channels[0].kernel.configuration.gradient_scale == 0
        for count in (1, 2, 3, 8, 9, 100):
            work = Job(device, count, 4, gradient="bf16")
            work.run("adam", step=1)
            assert work.check() == 3 * count
        kernel = _prepare(work)
        kernel.formats.gradient = GradientFormat.FP16
        assert _outcome(work)[0] == ErrorCause.UNSUPPORTED
        kernel.formats.gradient = GradientFormat.BF16
        kernel.gradient_scale.value = 2.0
        assert _outcome(work)[0] == ErrorCause.UNSUPPORTED


@pytest.mark.parametrize("device", chosen(EMULATED, DEEP), indirect=True)
def test_an_error_in_the_gradients_leaves_blocks_whole(device):
    work = Job(device, 1500, 6, gradient="bf16")
    backend = device.backend
    at = work.buffers["g"].address + 2 * 777
    backend.inject(Injection(kind="slverr", write=False, base=at, limit=at + 1))
    with pytest.raises(nearstep.errors.BusResponseError) as caught:
        work.run("adam", step=1)
    backend.heal()
    assert caught.value.stream == "G_READ"
    done = caught.value.committed
    assert done <= 777
    assert done % device.config.block_elements == 0
    assert work.check(0, done) == 3 * done
    work.upload()
    work.run("adam", step=1)
    assert work.check() == 3 * 1500


@pytest.mark.parametrize(
    "device",
    ["sim-card", *chosen(DEEP, DEEP)],
    indirect=True,
)
@pytest.mark.parametrize("cycles", [50, 301, 302, 303, 700])
def test_nothing_of_an_aborted_run_is_left_in_the_next(device, cycles):
    """Whatever half of a beat of gradients is in turn when the run ends."""
    work = Job(device, 3001, 8, gradient="fp16")
    with accelerated(device):
        run = work.start("adam", step=1)
        with pytest.raises(nearstep.errors.WaitTimeoutError):
            device.backend.wait([device.channels[0].kernel.status.poll(done=1)], cycles)
        run.abort()
    assert isinstance(run.error, nearstep.errors.AbortedError)
    work.upload()
    work.run("adam", step=1)
    assert work.check() == 3 * 3001


WRONG = {
    "no such format": ("fp16", {"gradient_format": "fp8"}, ArgumentError, "one that the kernel"),
    "bfloat16 in float16": ("fp16", {"gradient_format": "bf16"}, DtypeError, "must be uint16"),
    "half in float32": ("fp32", {"gradient_format": "fp16"}, DtypeError, "must be float16"),
    "text for a scale": ("fp16", {"gradient_scale": "1"}, ArgumentError, "must be a number"),
    "infinite scale": ("fp16", {"gradient_scale": float("inf")}, ArgumentError, "finite"),
    "NaN for a scale": ("fp32", {"gradient_scale": float("nan")}, ArgumentError, "finite"),
    "scale beyond binary32": ("fp32", {"gradient_scale": 1e39}, ArgumentError, "overflow binary32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_fail_before_the_device_is_touched(case, monkeypatch):
    form, hyper, error, text = WRONG[case]
    with nearstep.open(URLS["golden-numpy"]) as device:
        work = Job(device, 16, 3, gradient=form)
        touched = []
        monkeypatch.setattr(device.backend, "write_register", lambda *args: touched.append(args))
        with pytest.raises(error, match=text) as caught:
            work.run("sgd", **hyper)
        print(caught.value)
        assert touched == []


@pytest.mark.parametrize(
    ("options", "form", "hyper", "error", "text"),
    [
        ("", "fp16", {}, DtypeError, "must be float32, not float16"),
        ("", "fp16", {"gradient_format": "fp16"}, ArgumentError, "has \\(fp32\\), not 'fp16'"),
        ("", "bf16", {}, ArgumentError, "has \\(fp32\\), not 'bf16'"),
        ("", "fp32", {"gradient_scale": 2.0}, ArgumentError, "gradient_scale=yes"),
        ("&gradient_formats=fp32,fp16", "bf16", {}, ArgumentError, "gradient_formats="),
        ("&gradient_formats=fp32,bf16", "fp16", {}, DtypeError, "uint16 with gradient_format"),
    ],
)
def test_what_the_kernel_does_not_have_is_refused_at_once(
    options, form, hyper, error, text, monkeypatch
):
    with nearstep.open(f"golden:axdimm?engine=numpy&memory_bytes=1MiB{options}") as device:
        work = Job(device, 16, 3, gradient=form)
        touched = []
        monkeypatch.setattr(device.backend, "write_register", lambda *args: touched.append(args))
        with pytest.raises(error, match=text) as caught:
            work.run("adam", step=1, **hyper)
        assert not isinstance(caught.value, ConfigurationError)
        assert touched == []


@pytest.mark.parametrize("formats", ["", "fp16", "fp32,fp32", "fp32,fp8", "fp32,"])
def test_formats_that_cannot_be(formats):
    with pytest.raises((OptionError, nearstep.errors.UrlError)):
        nearstep.open(f"golden:axdimm?gradient_formats={formats}")
