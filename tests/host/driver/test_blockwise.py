"""States in 8 bits through the driver."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import nearstep
from nearstep import blockwise
from nearstep.buffer import Buffer
from nearstep.errors import DtypeError, ShapeError
from nearstep.updater.command import Command
from nearstep.updater.device import KernelDevice
from nearstep_sim.golden import blockwise as golden
from nearstep_sim.golden import fp
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.fp import BF16, FP16
from nearstep_spec.rule.rules import OPTIMIZERS
from nearstep_spec.updater.registers import Operation

from .conftest import chosen
from .job import accelerated

REST = (
    "rules=adam,adam_amsgrad&state_format=dynamic8&gradient_formats=fp32,bf16"
    "&copy_out_formats=fp16,bf16&compression=fused"
)
URLS = {
    "golden-numpy": f"golden:axdimm?{REST}&block_bytes=1024&lanes=4&engine=numpy",
    "golden-cpp": f"golden:axdimm?{REST}&block_bytes=2048",
    "golden-dimm": f"golden:axdimm?{REST}&block_bytes=4096&channels=2",
    "golden-card": f"golden:smartssd?{REST}&lanes=4&chunk_bytes=2048",
    "sim-stalled": f"sim:axdimm?{REST}&lanes=4&block_bytes=1024&memory=halfduplex&stall=0.3",
    "sim-card": f"sim:smartssd?{REST}&lanes=4&chunk_bytes=2048&memory_bytes=1MiB&stall=0.2",
}
IN_DEPTH = {"golden-card", "sim-stalled", "sim-card"}
COUNTS = (1, 255, 256, 257, 1023, 1024, 1025, 5003)
SIGNED = {"m": True, "v": False, "v_max": False}


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    with nearstep.open(URLS[request.param]) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


def alloc(device: KernelDevice, count: int, *more: str) -> dict[str, Buffer]:
    return {
        name: device.alloc_blockwise(count) if name in SIGNED else device.alloc(count)
        for name in ("p", "g", "m", "v", *more)
    }


def written(device: KernelDevice, count: int, seed: int, *more: str) -> tuple[dict, dict]:
    """Arrays, and what was written to them: states as the golden model quantizes them."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    buffers, values = alloc(device, count, *more), {}
    for name, buffer in buffers.items():
        made = (rng.standard_normal(count) * 2.0 ** rng.integers(-20, 3, count)).astype("f4")
        if name in SIGNED:
            made = np.abs(made) if not SIGNED[name] else made
            coded = golden.quantize(made, signed=SIGNED[name])
            buffer.write(blockwise.pack(blockwise.Blockwise(*coded), device.block_layout))
            made = golden.dequantize(coded, signed=SIGNED[name])
        else:
            buffer.write(made)
        values[name] = made
    return buffers, values


HYPER = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.05}


def expected(device: KernelDevice, values: dict, **more: object) -> dict:
    """What a step of AdamW makes of them: results in binary32."""
    hyper = OPTIMIZERS["adamw"].defaults | HYPER | more
    form = OPTIMIZERS["adamw"].form(hyper).ordered(device.config.order)
    return evaluate(form.rule, values, form.registers(hyper, 3, False))


def compare(device: KernelDevice, buffers: dict, made: dict) -> int:
    """All bytes of the arrays: those of states are codes and scales, and zeros beside these."""
    compared = 0
    for name, values in made.items():
        found = buffers[name].read()
        if name in SIGNED:
            coded = blockwise.Blockwise(*golden.quantize(values, signed=SIGNED[name]))
            assert found.tobytes() == blockwise.pack(coded, device.block_layout).tobytes()
        else:
            assert found.tobytes() == values.tobytes()
        compared += values.size
    return compared


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_step_is_that_of_the_dequantized_arrays_quantized_once(device, amsgrad):
    compared = 0
    for count in COUNTS:
        more = ("v_max",) if amsgrad else ()
        buffers, values = written(device, count, count, *more)
        with accelerated(device):
            run = device.update("adamw", buffers, step=3, amsgrad=amsgrad, **HYPER).wait()
        compared += compare(device, buffers, expected(device, values, amsgrad=amsgrad))
        assert run.committed == count
        for buffer in buffers.values():
            buffer.free()
    assert compared == (4 if amsgrad else 3) * sum(COUNTS)


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_gradients_of_16_bits_and_a_copy_of_the_parameters(device, form):
    count = 5003
    buffers, values = written(device, count, 5)
    words = fp.narrow32(values["g"], BF16)
    g, values["g"] = device.alloc(count, np.uint16), fp.widen32(words, BF16)
    g.write(words)
    copy = device.alloc(count, np.uint16 if form == "bf16" else np.float16)
    options = {"gradient_format": "bf16", "copy_out": copy, "copy_out_format": form}
    with accelerated(device):
        device.update("adamw", buffers | {"g": g}, step=3, **options, **HYPER).wait()
    made = expected(device, values)
    assert compare(device, buffers, made) == 3 * count
    narrow = fp.narrow32(made["p"], BF16 if form == "bf16" else FP16)
    assert copy.read().tobytes() == narrow.tobytes()


def test_gradients_in_pairs(device):
    count = 5003
    buffers, values = written(device, count, 6)
    index = np.unique(np.random.default_rng(6).integers(0, count, 300)).astype(np.uint32)
    sent = values["g"][index]
    pairs = nearstep.Pairs(device.alloc(index.size, np.uint32), device.alloc(index.size))
    pairs.index.write(index)
    pairs.value.write(sent)
    values["g"] = np.zeros(count, np.float32)
    values["g"][index] = sent
    with accelerated(device):
        device.update("adamw", buffers | {"g": pairs}, step=3, **HYPER).wait()
    assert compare(device, buffers, expected(device, values)) == 3 * count


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1023, 1024, 1025, 5003])
def test_beats_of_a_run_are_those_of_codes_and_scales(device, count):
    """By which it is bounded: each array once in, and states once out."""
    config = device.config
    arrays = alloc(device, count)
    command = Command(operation=Operation.UPDATE, buffers=arrays, count=count, gradient="fp32")
    wide = -(-4 * count // config.beat_bytes)
    narrow = 0
    for start in range(0, count, config.block_elements):
        codes = min(config.block_elements, count - start)
        narrow += 1 + -(-codes // config.beat_bytes)
    assert command.beats(config) == 3 * wide + 4 * narrow
    assert narrow < wide / 2 or count < 2000


def test_arrays_of_another_size_or_dtype_are_refused_before_anything_is_touched(device):
    count = 1000
    arrays = alloc(device, count)
    for buffer in arrays.values():
        buffer.fill(0)
    size, block = device.block_layout.nbytes(count), device.config.block_elements
    for name in "mv":
        for dtype in (np.float32, np.float16, np.uint16, np.int8):
            wrong = arrays | {name: device.alloc(count, dtype)}
            form = "dynamic8" if name == "m" else "dynamic8u"
            expected = f"{name}: dtype must be uint8 that holds {form}, not {np.dtype(dtype)}"
            with pytest.raises(DtypeError, match=expected):
                device.update("adam", wrong, step=1)
        for other in (count, size - 1, size + 1, 0):
            wrong = arrays | {name: device.alloc(other, np.uint8)}
            expected = (
                f"{name}: shape must be of {size} bytes for {count} elements like p, in blocks of "
                f"{block} with their scales, not of {other}"
            )
            with pytest.raises(ShapeError, match=expected):
                device.update("adam", wrong, step=1)
    for name in "pg":
        wrong = arrays | {name: device.alloc(size, np.uint8)}
        with pytest.raises(DtypeError, match=f"{name}: dtype must be float32.*, not uint8"):
            device.update("adam", wrong, step=1)
    for buffer in arrays.values():
        assert not buffer.read().any()
    assert all(channel.run is None for channel in device.channels)
