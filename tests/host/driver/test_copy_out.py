"""Copies of the parameters in 16 bits, on every device whose kernel can write them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import (
    AlignmentError,
    ArgumentError,
    BusResponseError,
    BusyError,
    DtypeError,
    OptionError,
    OverlapError,
    ShapeError,
)
from nearstep_spec.updater.registers import CopyOutFormat

from .job import Job, accelerated
from .patterns import FORMATS, NARROW

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1001, 4099)
KIND = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("form", NARROW)
def test_a_copy_of_any_length_is_the_rounded_parameters(full, form):
    lanes, compared = full.config.lanes, 0
    for count in COUNTS:
        work = Job(full, count, 200 + count, gradient="fp32")
        copy = work.copy(form)
        run = work.run("adam", step=1, copy_out=copy)
        compared += work.check()
        beats = 3 * -(-count // lanes) + -(-count // (2 * lanes))
        assert (run.committed, run.counters["write_beats"]) == (count, beats)
        assert run.counters["read_beats"] == 4 * -(-count // lanes)
        work.free(copy)
    assert compared == 4 * sum(COUNTS)


@pytest.mark.parametrize("form", NARROW)
def test_every_rounding_is_that_of_torch(full, form):
    """Every pattern of 16 bits, what is halfway to the next, and what is beside that."""
    fmt, _ = FORMATS[form]
    drop = 23 - fmt.mantissa
    half = np.uint32(1 << (drop - 1))
    tops = np.arange(0, 1 << 32, 1 << 17, dtype=np.uint64).astype(np.uint32)
    p = np.concatenate([tops + offset for offset in (0, half - 1, half, half + 1, 3 * half)])
    p = p.astype(np.uint32).view(np.float32)
    work = Job(full, 40_000, 3)
    copy = work.copy(form)
    work.buffers["g"].fill(0.0)
    compared = nans = 0
    for first in range(0, p.size, 40_000):
        part = np.resize(p[first : first + 40_000], 40_000)
        work.buffers["p"].write(part)
        work.run("sgd", lr=0.0, copy_out=copy)
        theirs = torch.from_numpy(part).to(KIND[form])
        number = ~np.isnan(part)
        got = copy.read().view(np.uint16)
        wanted = theirs.view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(got[number], wanted[number])
        assert np.all(got[~number] == fmt.quiet_nan)
        compared += got.size
        nans += np.count_nonzero(~number)
    assert compared >= p.size
    assert nans > 100


@pytest.mark.parametrize("form", NARROW)
def test_every_rule_writes_a_copy(full, form):
    work = Job(full, 777, 4, gradient="fp32")
    copy = work.copy(form)
    for name, hyper in (
        ("sgd", {"lr": 0.3}),
        ("sgd", {"lr": 0.1, "momentum": 0.9, "first": True}),
        ("adagrad", {"step": 2}),
    ):
        work.run(name, copy_out=copy, **hyper)
        assert work.check() == 4 * 777


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("count", [1, 7, 130, 301])
def test_bytes_behind_the_last_element_are_not_written(full, form, count):
    work = Job(full, count, 5)
    whole = full.alloc(2 * count + 64, FORMATS[form][1])
    pattern = np.arange(whole.size, dtype=np.uint16).view(whole.dtype)
    whole.write(pattern)
    first = 32  # whole beats
    work.run("adam", step=1, copy_out=whole[first : first + count])
    assert work.check() == 4 * count
    after = whole.read()
    assert after[:first].tobytes() == pattern[:first].tobytes()
    assert after[first + count :].tobytes() == pattern[first + count :].tobytes()


def test_a_run_without_a_copy_writes_none(full):
    work = Job(full, 300, 6)
    copy = work.put(np.full(300, 7, np.float16))
    work.run("adam", step=1, copy_out=copy)
    assert work.check() == 1200
    copy.fill(7)
    run = work.run("adam", step=1)
    assert work.check() == 900
    assert np.all(copy.read() == 7)
    assert run.counters["write_beats"] == 3 * -(-300 // full.config.lanes)
    assert full.channels[0].kernel.formats.copy_out == CopyOutFormat.NONE


def test_the_window_of_a_copy_grants_writing_alone_and_is_closed(full):
    work = Job(full, 300, 6)
    copy = work.copy("fp16")
    kernel = full.channels[0].kernel
    with accelerated(full):
        run = work.start("adam", step=1, copy_out=copy)
        granted = {
            kernel[f"window{i}_base"].value: kernel[f"window{i}_permissions"].bits
            for i in range(full.config.windows)
        }
        run.wait()
    assert granted[copy.address - full.channels[0].base] == 0b110
    closed = [kernel[f"window{i}_permissions"].bits for i in range(full.config.windows)]
    assert closed == [0] * full.config.windows


def test_a_copy_in_the_making_cannot_be_used(full):
    work = Job(full, 4000, 7)
    copy = work.copy("fp16")
    with accelerated(full):
        run = work.start("adam", step=1, copy_out=copy)
        with pytest.raises(BusyError, match="uses it as copy_out, has not ended"):
            copy.free()
        assert run.sharing(copy[10:20]) == ["copy_out"]
        run.wait()
    assert work.check() == 4 * 4000
    copy.free()


def test_an_error_response_to_the_copy_is_not_done(full):
    count = 40 * full.config.block_elements + 3
    work = Job(full, count, 8)
    copy = work.copy("fp16")
    copy.fill(0)
    last = copy.address + 2 * (count - 1)
    full.backend.inject(Injection(kind="slverr", write=True, base=last, limit=last + 2))
    with pytest.raises(BusResponseError) as caught:
        work.run("adam", step=1, copy_out=copy)
    full.backend.heal()
    error = caught.value
    assert (error.cause, error.stream) == ("WRITE_RESPONSE", "COPY_OUT")
    assert last - full.config.burst_bytes < error.address <= last
    assert error.committed == count - 3
    work.upload()
    work.run("adam", step=1, copy_out=copy)
    assert work.check() == 4 * count


def test_a_run_of_no_elements_writes_no_copy(full):
    work = Job(full, 300, 9)
    copy = work.put(np.full(300, 7, np.float16))
    work.buffers = {name: buffer[0:0] for name, buffer in work.buffers.items()}
    run = work.run("adam", step=1, copy_out=copy[0:0])
    assert (run.done, run.counters["write_beats"]) == (True, 0)
    assert np.all(copy.read() == 7)


WRONG = {
    "a format without a copy": (None, {"copy_out_format": "fp16"}, ArgumentError, "needs a copy"),
    "no buffer": (
        lambda work: np.zeros(work.count, np.float16), {}, DtypeError, "copy_out: dtype must be B"
    ),
    "float32": (
        lambda work: work.device.alloc(work.count), {}, DtypeError, "float16 or uint16 with copy_o"
    ),
    "bf16 unnamed": (lambda work: work.copy("bf16"), {}, DtypeError, "copy_out_format='bf"),
    "bf16 in float16": (
        lambda work: work.copy("fp16"), {"copy_out_format": "bf16"}, DtypeError, "uint16"
    ),
    "no such format": (
        lambda work: work.copy("fp16"), {"copy_out_format": "fp32"}, ArgumentError, "one th"
    ),
    "another size": (
        lambda work: work.device.alloc(work.count + 1, np.float16), {}, ShapeError, "like p"
    ),
    "misaligned": (
        lambda work: work.device.alloc(work.count + 1, np.float16)[1:], {}, AlignmentError, "copy"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_fail_before_the_device_is_touched(full, case, monkeypatch):
    make, others, error, text = WRONG[case]
    work = Job(full, 100, 1)
    copy = None if make is None else make(work)
    touched = []
    monkeypatch.setattr(full.backend, "write_register", lambda *args: touched.append(args))
    with pytest.raises(error, match=text) as caught:
        full.update("adam", work.buffers, step=1, copy_out=copy, **others)
    print(caught.value)
    assert touched == []


def test_a_copy_over_gradients_is_refused(full):
    work = Job(full, 100, gradient="fp16")
    with pytest.raises(OverlapError):
        full.update("adam", work.buffers, step=1, copy_out=work.buffers["g"])


def test_what_the_kernel_does_not_have_is_refused_at_once():
    for options, text in (("", "copy_out must be None"), ("&copy_out_formats=bf16", "uint16 with")):
        with nearstep.open(f"golden:axdimm?engine=numpy&memory_bytes=1MiB{options}") as device:
            work = Job(device, 100)
            with pytest.raises(ArgumentError, match=text):
                device.update("adam", work.buffers, step=1, copy_out=work.copy("fp16"))


@pytest.mark.parametrize("formats", ["fp32", "fp16,fp16", "fp16,"])
def test_formats_that_cannot_be(formats):
    with pytest.raises(OptionError):
        nearstep.open(f"golden:axdimm?copy_out_formats={formats}")
