"""States in bfloat16 that are rounded stochastically, through the driver, on every emulated
device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import nearstep
from nearstep import Rounding
from nearstep.backends.emulated import Injection
from nearstep.errors import (
    AbortedError,
    ArgumentError,
    BusResponseError,
    ConfigurationError,
    DtypeError,
    OptionError,
)
from nearstep.updater.device import KernelDevice
from nearstep.updater.rounding import Numbering
from nearstep_spec.rounding import alignment

from .conftest import chosen
from .job import Job, accelerated

REST = "gradient_formats=fp32,bf16&copy_out_formats=bf16&stochastic_rounding=yes&state_format=bf16"
SHAPE = "lanes=4&block_bytes=512&memory_bytes=1MiB"
DEVICES = {
    "golden-numpy": f"golden:axdimm?{SHAPE}&engine=numpy",
    "golden-cpp": f"golden:axdimm?{SHAPE}",
    "golden-dimm": "golden:axdimm?channels=2&block_bytes=512&memory_bytes=2MiB",
    "golden-card": "golden:smartssd?lanes=4&chunk_bytes=512&memory_bytes=1MiB",
    "sim-one-lane": "sim:axdimm?lanes=1&block_bytes=512&memory_bytes=1MiB&fu=native",
    "sim-two-lanes": "sim:axdimm?lanes=2&block_bytes=512&memory_bytes=1MiB&fu=native",
    "sim-stalled": f"sim:axdimm?{SHAPE}&memory=halfduplex&stall=0.3&seed=7",
    "sim-dimm": "sim:axdimm?memory=ddr4-1600&block_bytes=512&fu=native",
    "sim-dimm-few-units": (
        "sim:axdimm?memory=ddr4-1600&block_bytes=512&functional_units=4&fu=native"
    ),
    "sim-card": "sim:smartssd?lanes=4&chunk_bytes=512&memory_bytes=1MiB&fu=native&stall=0.2",
    "sim-ecp5": (
        f"sim:axdimm?{SHAPE}&memory=halfduplex&stall=0.3&seed=7&technology=ecp5&fu=native"
    ),
}
PARAMETERS = {"mv": "", "pmv": "&parameter_format=bf16"}
URLS = {
    f"{name}-{states}": f"{device}&{REST}{more}"
    for name, device in DEVICES.items()
    for states, more in PARAMETERS.items()
}
FAST = {"golden-numpy-mv", "golden-cpp-pmv", "golden-dimm-mv"}
IN_DEPTH = set(URLS) - FAST
COUNTS = (1, 3, 8, 127, 128, 129, 257, 1001, 5003)


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    with nearstep.open(URLS[request.param]) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


def numberings(device: KernelDevice) -> list[Numbering]:
    """From zero; in the middle of a block, of which others lie between; beside a carry."""
    block, begins = device.config.block_elements, alignment(device.config.lanes)
    return [
        Numbering(),
        Numbering(index=7 * begins, within=block - begins, skip=3 * block),
        Numbering(index=(1 << 34) - 2 * block, within=0, skip=block),
    ]


@pytest.mark.parametrize("gradient", ["fp32", "bf16"])
def test_states_are_rounded_with_the_bits_of_their_elements(device, gradient):
    checked = 0
    for count in COUNTS:
        for number, numbering in enumerate(numberings(device)):
            if number and count not in (257, 5003):
                continue
            work = Job(device, count, seed=count, gradient=gradient, optimizer="adamw")
            rounding = Rounding(seed=0xABCD_EF01 + number, numbering=numbering)
            work.run(gradient_format=gradient, rounding=rounding)
            checked += work.check()
            work.free()
    assert checked == 3 * (sum(COUNTS) + 2 * (257 + 5003))


def test_special_values_are_rounded_as_golden_has_it(device):
    """Infinities, NaN, zeros, subnormal numbers, and results that overflow when rounded."""
    patterns = np.array(
        [0x0000, 0x8000, 0x0001, 0x807F, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x0080], np.uint16
    )
    work = Job(device, patterns.size**2, seed=1, gradient="bf16", optimizer="adamw")
    for name, values in (("m", np.repeat(patterns, patterns.size)),
                         ("v", np.tile(patterns & 0x7FFF, patterns.size))):  # fmt: skip
        work.before[name] = values
        work.buffers[name].write(values)
    work.run(rounding=Rounding(seed=3))
    assert work.check() == 3 * patterns.size**2


def test_some_states_alone_or_none_and_a_copy_of_the_parameters(device):
    """What is not named is rounded to nearest even, also by a run after one that named it."""
    checked = 0
    for states in (("v",), ("m",), None):
        work = Job(device, 1001, seed=5, optimizer="adamw")
        rounding = None if states is None else Rounding(seed=1, states=states)
        work.run(rounding=rounding, copy_out=work.copy("bf16"), copy_out_format="bf16")
        checked += work.check()
        work.free()
    assert checked == 3 * 4 * 1001


def test_the_same_seed_and_step_give_the_same_bits_and_others_others(device):
    work = Job(device, 1001, seed=6, optimizer="adamw")
    found = []
    for seed, step in ((1, None), (1, None), (2, None), (1, 4)):
        work.upload()
        work.run(rounding=Rounding(seed=seed, step=step))
        found.append(np.concatenate([work.buffers[n].read() for n in "mv"]))
    assert (found[0] == found[1]).all()
    for other in found[2:]:
        assert 0.1 < np.mean(found[0] != other) < 0.6
    # Stochastic rounding is one of the two neighbours.
    assert (np.abs(found[0].astype(int) - found[2].astype(int)) <= 1).all()


def test_what_cannot_be_is_refused_before_anything_is_touched(device):
    work = Job(device, 100, seed=7, optimizer="adamw")
    begins = alignment(device.config.lanes)
    refused = [
        (Rounding(seed=-1), r"rounding.seed must be an integer in \[0, 2\*\*32\), not -1"),
        (Rounding(seed=1 << 32), "rounding.seed must be an integer"),
        (Rounding(seed=1.0), "rounding.seed must be an integer"),
        (Rounding(seed=True), "rounding.seed must be an integer"),
        (Rounding(step=1 << 32), "rounding.step must be an integer"),
        (Rounding(step="1"), "rounding.step must be an integer"),
        (Rounding(states=("g",)), "rounding.states must be states of adam in bf16"),
        (Rounding(states=("v_max",)), "rounding.states must be states of adam in bf16"),
        (Rounding(states=()), "rounding needs a state in bf16"),
        (Rounding(numbering=Numbering(1)), f"index must be a multiple of {begins}, not 1"),
        (Rounding(numbering=Numbering(within=2)), f"within must be a multiple of {begins}, not 2"),
        (Rounding(numbering=Numbering(1 << 48)), r"index must be an integer in \[0, 2\*\*48\)"),
        (Rounding(numbering=Numbering(skip=-1)), "skip must be an integer"),
        (Rounding(numbering=Numbering(skip=1 << 32)), "skip must be an integer"),
        ("stochastic", "rounding must be a Rounding or None, not 'stochastic'"),
    ]
    for rounding, message in refused:
        with pytest.raises(ArgumentError, match=message):
            work.run(rounding=rounding)
    assert work.check_untouched() == 300
    work.run(rounding=Rounding())
    assert work.check() == 300
    assert len(refused) == 15


def test_start_refuses_an_index_that_begins_no_beat(device):
    """As a host that checks nothing would set it."""
    work = Job(device, 100, seed=8, optimizer="adamw")
    kernel = device.channels[0].kernel
    refused = 0
    for name, value in (("element_index", 2), ("element_within", 1), ("element_index", 1 << 48)):
        with accelerated(device):
            work.run(rounding=None)  # which leaves these registers alone
            kernel[name].value = value
            with pytest.raises(ConfigurationError) as caught:
                work.run(rounding=None)
            kernel[name].value = 0
        assert caught.value.cause == "UNSUPPORTED"
        refused += 1
        work.upload()
    work.run(rounding=Rounding(seed=2))
    assert work.check() == 300
    assert refused == 3


@pytest.mark.parametrize("name", chosen(URLS, IN_DEPTH))
def test_after_a_fault_or_an_abort_what_is_committed_is_whole(name):
    with nearstep.open(URLS[name]) as device:
        silent = name.startswith("sim-dimm")  # a DDR4 channel answers no write
        for fault in ("abort",) if silent else ("error", "abort"):
            work = Job(device, 5003, seed=4, optimizer="adamw")
            begin = work.buffers["v"].address
            if fault == "error":
                device.backend.inject(
                    Injection(kind="slverr", write=True, base=begin + 4000, limit=begin + 4002)
                )
            with accelerated(device):
                run = work.start(rounding=Rounding(seed=9))
                if fault == "abort":
                    run.abort()
                    with pytest.raises(AbortedError) as caught:
                        run.wait()
                else:
                    with pytest.raises(BusResponseError) as caught:
                        run.wait()
            whole = caught.value.committed
            assert whole < 5003
            assert work.check(0, whole) == 3 * whole
            work.free()
            again = Job(device, 1001, seed=5, optimizer="adamw")
            again.run(rounding=Rounding(seed=9))
            assert again.check() == 3003
            again.free()


def test_a_kernel_that_was_built_without_it_says_what_to_open():
    for options in ("", "&state_format=bf16"):
        with nearstep.open(f"golden:axdimm?{SHAPE}{options}") as device:
            work = Job(device, 100, seed=1)
            with pytest.raises(ArgumentError, match="open the device with stochastic_rounding=yes"):
                work.run(rounding=Rounding())
            work.run()
            assert work.check() == 300


def test_formats_that_a_kernel_was_built_without_are_refused():
    """In buffers, in the device's name, and for a rule that has formats of its own."""
    with nearstep.open(f"golden:axdimm?{SHAPE}&state_format=bf16") as device:
        work = Job(device, 100, seed=2)
        work.buffers["m"] = device.alloc(100, np.float32)
        with pytest.raises(DtypeError, match="m: dtype must be uint16 that holds bfloat16"):
            work.run()
    with nearstep.open(f"golden:axdimm?{SHAPE}&state_format=fp16") as device:
        work = Job(device, 100, seed=2)
        work.run()
        assert work.check() == 300
    for options, message in (
        ("stochastic_rounding=yes", "stochastic_rounding needs a state in bf16"),
        ("stochastic_rounding=yes&state_format=fp16", "stochastic_rounding needs a state in bf16"),
        ("state_format=int8", "state_format"),
        ("parameter_format=fp8", "parameter_format"),
        ("rules=sgd&state_format=bf16&stochastic_rounding=yes", "needs a state in bf16"),
    ):
        with pytest.raises(OptionError, match=message):
            nearstep.open(f"golden:axdimm?{SHAPE}&{options}")
