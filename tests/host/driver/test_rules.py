"""Every update rule of a kernel with several, through the driver, on every emulated device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.emulated import Injection
from nearstep.errors import ArgumentError, BusResponseError, DtypeError, OptionError, UrlError
from nearstep_spec.rule.rules import OPTIMIZERS
from nearstep_spec.updater.registers import ErrorCause, Stream

from .conftest import SIM_CARD_SHAPE, chosen
from .job import Job, accelerated

FOUR = "rules=adam,sgd,sgd_momentum,adagrad"
ALL = "rules=adam,adam_amsgrad,sgd,sgd_momentum,adagrad"
FIVE_ARRAYS = ("p", "g", "m", "v", "v_max")
URLS = {
    "golden-numpy": f"golden:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&engine=numpy&{ALL}",
    "golden-cpp": f"golden:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&{ALL}",
    "golden-dimm": f"golden:axdimm?channels=2&block_bytes=512&memory_bytes=2MiB&{ALL}",
    "sim-ideal": f"sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&{ALL}",
    "sim-halfduplex": (
        "sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&memory=halfduplex&fu=native"
        f"&stall=0.2&seed=3&{FOUR}"
    ),
    "sim-dimm": f"sim:axdimm?memory=ddr4-1600&block_bytes=1024&functional_units=4&{ALL}",
    "golden-card": f"golden:smartssd?lanes=4&chunk_bytes=512&memory_bytes=1MiB&{ALL}",
    "sim-card": f"sim:smartssd?{SIM_CARD_SHAPE}",
    "pcie-card": f"sim:smartssd?{SIM_CARD_SHAPE}&bus=pcie",
}
COUNTS = (1, 15, 16, 127, 128, 129, 1001, 4099)


@pytest.fixture(params=chosen(URLS, {"sim-ideal", "sim-halfduplex", "sim-dimm", "pcie-card"}))
def device(request: pytest.FixtureRequest) -> Iterator[AxdimmDevice]:
    with nearstep.open(URLS[request.param]) as opened:
        yield opened


def test_rules_in_turn_on_the_same_arrays(device):
    compared = 0
    amsgrad = "adam_amsgrad" in device.config.rules
    for count in COUNTS:
        work = Job(device, count, 40 + count, arrays=device.config.arrays)
        steps = [
            ("adam", {"step": 2, "lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
            ("sgd", {"lr": 0.3, "weight_decay": 0.01}),
            ("sgd_momentum", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "first": True}),
            ("sgd_momentum", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
            ("adagrad", {"step": 3, "lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.2}),
            ("adam_amsgrad", {"step": 4, "lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
        ]
        for rule, hyper in steps[: None if amsgrad else -1]:
            name = rule.partition("_")[0]
            run = work.run(name, **hyper)
            assert (run.rule, run.committed) == (rule, count)
            assert run.what == f"{rule} of {count} elements"
            compared += work.check()
        work.free()
    assert compared == (5 + amsgrad) * (len(device.config.arrays) - 1) * sum(COUNTS)


def test_only_arrays_of_the_rule_are_moved(device):
    work = Job(device, 4096, 5, arrays=device.config.arrays)
    beats = 4096 // device.config.lanes
    amsgrad = "adam_amsgrad" in device.config.rules
    for name, arrays, hyper in (
        *([("adam", FIVE_ARRAYS, {"step": 1, "amsgrad": True})] if amsgrad else []),
        ("sgd", "pg", {}),
        ("sgd", "pgm", {"momentum": 0.5}),
        ("adagrad", "pgv", {"step": 1}),
        ("adam", "pgmv", {"step": 1}),
    ):
        run = work.run(name, arrays=arrays, **hyper)
        assert run.counters["read_beats"] == len(arrays) * beats
        assert run.counters["write_beats"] == (len(arrays) - 1) * beats


def test_a_rule_that_the_kernel_does_not_have_is_refused_at_once():
    with nearstep.open("golden:axdimm?rules=sgd,adagrad&memory_bytes=1MiB&engine=numpy") as device:
        work = Job(device, 100, 1, arrays=device.config.arrays)
        work.buffers |= {name: device.alloc(100) for name in ("m", "v_max")}
        for name, arrays, hyper in (
            ("adam", "pgmv", {"step": 1}),
            ("adam", FIVE_ARRAYS, {"step": 1, "amsgrad": True}),
            ("sgd", "pgm", {"momentum": 0.9}),
        ):
            with pytest.raises(ArgumentError, match=r"has \(sgd, adagrad\).*rules=sgd,adagrad,"):
                work.run(name, arrays=arrays, **hyper)
        work.run("adagrad", step=1)


def test_a_register_that_names_no_rule_is_refused_by_the_kernel(device):
    work = Job(device, 300, 2, arrays=device.config.arrays)
    kernel = device.channels[0].kernel
    kernel.count.value = 300
    kernel.rule.value = len(device.config.rules)
    with accelerated(device):
        kernel.start.go = 1
        device.backend.wait([kernel.status.poll(busy=0)], 20_000)
        assert (kernel.status.done, kernel.status.error) == (0, 1)
        assert kernel.error.cause == ErrorCause.UNSUPPORTED
    work.run("sgd", lr=0.5)
    assert work.check() == 300 * (len(work.buffers) - 1)


def test_addresses_of_arrays_that_the_rule_does_not_have_do_not_matter(device):
    work = Job(device, 300, 2, arrays=device.config.arrays)
    work.run("adam", step=1)
    work.check()
    device.channels[0].kernel.m_address.value = 4  # neither aligned nor granted
    work.run("sgd", lr=0.5)
    assert work.check() == 300 * (len(work.buffers) - 1)


TORCH = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}


@pytest.mark.parametrize("name", TORCH)
def test_hyper_parameters_that_are_not_given_are_those_of_torch(name):
    """Jobs take them from the optimizer, as the driver does: they are compared here."""
    theirs = inspect.signature(getattr(torch.optim, TORCH[name])).parameters
    ours = OPTIMIZERS[name].defaults
    shared = {key for key in ours if key in theirs}
    assert {key: ours[key] for key in shared} == {key: theirs[key].default for key in shared}
    assert set(ours) - shared <= {"decoupled_weight_decay"}
    assert ours.get("decoupled_weight_decay", False) == (name == "adamw")


WRONG = {
    "momentum without a buffer": ("sgd", "pg", {"momentum": 0.9}, ArgumentError),
    "a buffer without momentum": ("sgd", "pgm", {}, ArgumentError),
    "nesterov without momentum": ("sgd", "pg", {"nesterov": True}, ArgumentError),
    "nesterov with dampening": (
        "sgd",
        "pgm",
        {"momentum": 0.9, "nesterov": True, "dampening": 0.1},
        ArgumentError,
    ),
    "negative rate": ("sgd", "pg", {"lr": -1.0}, ArgumentError),
    "negative momentum": ("sgd", "pgm", {"momentum": -0.9}, ArgumentError),
    "amsgrad without maxima": ("adam", "pgmv", {"step": 1, "amsgrad": True}, ArgumentError),
    "an unknown hyper-parameter": ("adam", "pgmv", {"step": 1, "decoupled": True}, ArgumentError),
    "step zero": ("adagrad", "pgv", {"step": 0}, ArgumentError),
    "rate of text": ("adagrad", "pgv", {"step": 1, "lr": "a"}, ArgumentError),
    "NaN decay of the rate": (
        "adagrad",
        "pgv",
        {"step": 1, "lr_decay": float("nan")},
        ArgumentError,
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_fail_before_the_device_is_touched(case, monkeypatch):
    name, arrays, hyper, error = WRONG[case]
    with nearstep.open(URLS["golden-numpy"]) as device:
        work = Job(device, 16, 3, arrays=device.config.arrays)
        touched = []
        monkeypatch.setattr(device.backend, "write_register", lambda *args: touched.append(args))
        with pytest.raises(error) as caught:
            work.run(name, arrays=arrays, **hyper)
        print(caught.value)
        assert touched == []


def test_a_step_must_be_given_where_the_rule_depends_on_it():
    with nearstep.open(f"golden:axdimm?engine=numpy&memory_bytes=64KiB&{ALL}") as device:
        p, g, m, v = (device.alloc(16) for _ in range(4))
        for buffer in (p, g, m, v):
            buffer.fill(1.0)
        for name, arrays in (
            ("adam", {"p": p, "g": g, "m": m, "v": v}),
            ("adamw", {"p": p, "g": g, "m": m, "v": v}),
            ("adagrad", {"p": p, "g": g, "v": v}),
        ):
            with pytest.raises(ArgumentError, match=r"step must be given: ada\w+ depends on it"):
                device.update(name, arrays)
            assert p.read().tolist() == [1.0] * 16
        device.update("sgd", {"p": p, "g": g}, lr=0.5).wait()
        assert p.read().tolist() == [0.5] * 16


def test_an_array_that_is_no_buffer_is_named():
    with nearstep.open(URLS["golden-numpy"]) as device:
        work = Job(device, 16, 3, arrays=device.config.arrays)
        with pytest.raises(DtypeError, match="p: dtype must be Buffer"):
            device.update("sgd", {"p": work.before["p"], "g": work.buffers["g"]})


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    "device", chosen(["golden-cpp", "sim-ideal"], {"sim-ideal"}), indirect=True
)
def test_a_failure_of_the_fifth_array_is_named(device, write):
    work = Job(device, 1000, 6, arrays=device.config.arrays)
    hit = work.buffers["v_max"].address + 4 * 999
    device.backend.inject(Injection(kind="slverr", write=write, base=hit, limit=hit + 4))
    with pytest.raises(BusResponseError) as caught:
        work.run("adam", amsgrad=True, step=1)
    assert caught.value.stream == (Stream.V_MAX_WRITE if write else Stream.V_MAX_READ).name
    assert caught.value.committed < 1000


@pytest.mark.parametrize(
    "rules", ["", "adam,adam", "lion", "sgd,", "adam,adam_amsgrad&order=paper"]
)
def test_rules_that_cannot_be(rules):
    with pytest.raises((OptionError, UrlError)):
        nearstep.open(f"golden:axdimm?rules={rules}")


@pytest.mark.parametrize("value", ["no", "", 0, 1, None, 0.0])
def test_a_switch_is_a_truth_value(value):
    """`bool("no")` is True."""
    with nearstep.open(URLS["golden-numpy"]) as device:
        p, g, m, v = (device.alloc(16) for _ in range(4))
        for buffer in (p, g, m, v):
            buffer.fill(1.0)
        for start in (
            lambda: device.update(
                "adam", {"p": p, "g": g, "m": m, "v": v}, step=1, decoupled_weight_decay=value
            ),
            lambda: device.update("sgd", {"p": p, "g": g, "m": m}, momentum=0.9, nesterov=value),
            lambda: device.update("sgd", {"p": p, "g": g, "m": m}, momentum=0.9, first=value),
            lambda: device.arguments(
                "adam",
                step=1,
                lr=0.1,
                betas=(0.9, 0.9),
                eps=0.1,
                weight_decay=0,
                decoupled_weight_decay=value,
            ),
        ):
            with pytest.raises(ArgumentError, match="must be True or False, not"):
                start()
        device.update(
            "adam", {"p": p, "g": g, "m": m, "v": v}, step=1, decoupled_weight_decay=np.True_
        ).wait()
        assert p.read().tolist() != [1.0] * 16
