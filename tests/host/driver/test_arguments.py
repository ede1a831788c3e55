"""Wrong arguments of updates and scans, and wrong options in the name of a device: each row is
refused with an error that says what is allowed, before a register is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nearstep
from nearstep import Pairs, Rounding
from nearstep.errors import (
    AlignmentError,
    ArgumentError,
    ConfigurationError,
    DtypeError,
    ForeignBufferError,
    FreedBufferError,
    OptionError,
    OverlapError,
    ShapeError,
    UrlError,
)
from nearstep.updater import pairs
from nearstep.updater.arguments import rule_arguments
from nearstep.updater.rounding import Numbering
from nearstep_spec.rule.rules import optimizer_named

from .conftest import DIMMS, FULL, URLS
from .job import HYPER, Job, accelerated

Case = tuple[Callable[[Job], dict[str, Any]] | dict[str, Any], type[Exception], str]
NAN, INF = float("nan"), float("inf")
PGMV = ("p", "g", "m", "v")
BF16 = Path(__file__).resolve().parents[3] / "examples" / "adam_bf16.py"


def arrays(*names: str, **changes: Callable[[Job], Any]) -> Callable[[Job], dict[str, Any]]:
    """The arrays of a job, some of them others."""

    def change(job: Job) -> dict[str, Any]:
        kept = {name: job.buffers[name] for name in names or PGMV}
        return {"arrays": kept | {name: make(job) for name, make in changes.items()}}

    return change


def both(first: Callable[[Job], dict[str, Any]], **options: Any) -> Callable[[Job], dict[str, Any]]:
    return lambda job: first(job) | options


def empty(dtype: object, more: int = 0, start: int = 0) -> Callable[[Job], Any]:
    """A buffer of a dtype, with so many more elements, without the first."""
    return lambda job: job.device.alloc(job.count + more, dtype)[start:]


def copied(make: Callable[[Job], Any], **options: Any) -> Callable[[Job], dict[str, Any]]:
    return lambda job: {"copy_out": make(job), **options}


def of_adam(job: Job) -> dict[str, Any]:
    return {name: job.buffers[name] for name in PGMV}


def paired(**changes: Any) -> Callable[[Job], dict[str, Any]]:
    """Four pairs, of which something is another."""

    def change(job: Job) -> dict[str, Any]:
        given = {"index": np.zeros(4, np.uint32), "value": np.zeros(4, np.float32), **changes}
        form = given.pop("form", "fused")
        made = {n: e(job) if callable(e) else job.put(e) for n, e in given.items()}
        return {"arrays": of_adam(job) | {"g": Pairs(**made, form=form)}}

    return change


def freed(job: Job) -> Any:
    job.buffers["g"].free()
    return job.buffers["g"]


def overlapping(job: Job) -> dict[str, Any]:
    shared, count = job.device.alloc(2 * job.count), job.count
    return {"arrays": of_adam(job) | {"p": shared[:count], "m": shared[count - 4 : 2 * count - 4]}}


def scanned(make: Callable[[Job], Any], **options: Any) -> Callable[[Job], dict[str, Any]]:
    return lambda job: {"scan": make(job), **options}


def rule(name: str, *names: str, **options: Any) -> Callable[[Job], dict[str, Any]]:
    return both(arrays(*names), optimizer=name, **options)


FULL_CASES: dict[str, Case] = {
    # arrays
    "float64": (arrays(g=empty(np.float64)), DtypeError, "g: dtype"),
    "another size": (arrays(m=empty(np.float32, 1)), ShapeError, "m"),
    "an array of the host": (arrays(p=lambda job: job.before["p"]), DtypeError, "p: dtype must"),
    "misaligned": (arrays(v=empty(np.float32, 1, 1)), AlignmentError, "v"),
    "overlapping": (overlapping, OverlapError, ""),
    "the same twice": (arrays(v=lambda job: job.buffers["m"]), OverlapError, ""),
    "freed": (arrays(g=freed), FreedBufferError, ""),
    # hyper-parameters of Adam
    "step zero": ({"step": 0}, ArgumentError, "step"),
    "fractional step": ({"step": 1.5}, ArgumentError, ""),
    "step of a truth value": ({"step": True}, ArgumentError, ""),
    "step of text": ({"step": "1"}, ArgumentError, ""),
    "no step": ({"step": None}, ArgumentError, ""),
    "step beyond all powers": ({"step": 10**400}, ArgumentError, ""),
    "infinite rate": ({"lr": INF}, ArgumentError, ""),
    "rate beyond binary32": ({"lr": 1e300}, ArgumentError, ""),
    "rate beyond binary64": ({"lr": 10**400}, ArgumentError, ""),
    "decay beyond binary32": ({"weight_decay": 1e45}, ArgumentError, ""),
    "rate of text": ({"lr": "a"}, ArgumentError, ""),
    "no rate": ({"lr": None}, ArgumentError, ""),
    "NaN rate": ({"lr": NAN}, ArgumentError, ""),
    "eps of a truth value": ({"eps": True}, ArgumentError, ""),
    "eps beyond binary32": ({"eps": 1e39}, ArgumentError, ""),
    "beta of one": ({"betas": (0.9, 1.0)}, ArgumentError, ""),
    "one beta": ({"betas": 0.9}, ArgumentError, ""),
    "three betas": ({"betas": (0.9, 0.9, 0.9)}, ArgumentError, ""),
    "betas of text": ({"betas": ("a", "b")}, ArgumentError, ""),
    "betas in text": ({"betas": "ab"}, ArgumentError, ""),
    "NaN beta": ({"betas": (NAN, 0.9)}, ArgumentError, ""),
    "an unknown hyper-parameter": ({"decoupled": True}, ArgumentError, ""),
    # other rules
    "momentum without a buffer": (rule("sgd", "p", "g", momentum=0.9), ArgumentError, ""),
    "a buffer without momentum": (rule("sgd", "p", "g", "m"), ArgumentError, ""),
    "nesterov without momentum": (rule("sgd", "p", "g", nesterov=True), ArgumentError, ""),
    "nesterov with dampening": (
        rule("sgd", "p", "g", "m", momentum=0.9, nesterov=True, dampening=0.1), ArgumentError, ""
    ),
    "negative rate": (rule("sgd", "p", "g", lr=-1.0), ArgumentError, ""),
    "negative momentum": (rule("sgd", "p", "g", "m", momentum=-0.9), ArgumentError, ""),
    "amsgrad without maxima": ({"amsgrad": True}, ArgumentError, ""),
    "adagrad's step zero": (rule("adagrad", "p", "g", "v", step=0), ArgumentError, ""),
    "adagrad's rate of text": (rule("adagrad", "p", "g", "v", lr="a"), ArgumentError, ""),
    "adagrad's NaN decay": (rule("adagrad", "p", "g", "v", lr_decay=NAN), ArgumentError, ""),
    "no step of adam": ({"step": ...}, ArgumentError, r"step must be given: adam depends on it"),
    "no step of adamw": (
        {"optimizer": "adamw", "step": ...}, ArgumentError, r"step must be given: ada\w+ depends"
    ),
    "no step of adagrad": (
        rule("adagrad", "p", "g", "v", step=...), ArgumentError, "step must be given: adagrad dep"
    ),
    **{
        f"a switch that is {value!r}": (options | {name: value}, ArgumentError, "True or False")
        for value in ("no", "", 0, 1, None, 0.0)
        for options, name in (
            ({}, "decoupled_weight_decay"),
            ({"optimizer": "sgd", "momentum": 0.9, "step": ...}, "nesterov"),
            ({"optimizer": "sgd", "momentum": 0.9, "step": ...}, "first"),
        )
    },
    # gradients
    "no such format": ({"gradient_format": "fp8"}, ArgumentError, "a format of the kernel"),
    "bfloat16 in float16": (
        both(arrays(g=empty(np.float16)), gradient_format="bf16"), DtypeError, "must be uint16"
    ),
    "half in float32": ({"gradient_format": "fp16"}, DtypeError, "must be float16"),
    "text for a scale": ({"gradient_scale": "1"}, ArgumentError, "must be a number"),
    "infinite scale": ({"gradient_scale": INF}, ArgumentError, "finite"),
    "NaN for a scale": ({"gradient_scale": NAN}, ArgumentError, "finite"),
    "scale beyond binary32": ({"gradient_scale": 1e39}, ArgumentError, "overflow binary32"),
    # a copy
    "a format without a copy": ({"copy_out_format": "fp16"}, ArgumentError, "needs a copy"),
    "no buffer of a copy": (
        copied(lambda job: np.zeros(job.count, np.float16)), DtypeError, "copy_out: dtype must be B"
    ),
    "float32 copy": (copied(empty(np.float32)), DtypeError, "float16 or uint16 with copy_o"),
    "bf16 copy unnamed": (copied(empty(np.uint16)), DtypeError, "copy_out_format='bf"),
    "bf16 copy in float16": (
        copied(empty(np.float16), copy_out_format="bf16"), DtypeError, "uint16"
    ),
    "no such format of a copy": (
        copied(empty(np.float16), copy_out_format="fp32"), ArgumentError, "a format of the kernel"
    ),
    "another size of a copy": (copied(empty(np.float16, 1)), ShapeError, "like p"),
    "misaligned copy": (copied(empty(np.float16, 1, 1)), AlignmentError, "copy"),
    "a copy over gradients": (
        lambda job: {
            "arrays": of_adam(job) | {"g": (g := job.put(np.zeros(job.count, np.float16)))},
            "copy_out": g,
        },
        OverlapError, "",
    ),
    # pairs
    "no such form": (paired(form="sorted"), ArgumentError, r"\(fused, scatter\), not 'sorted'"),
    "index of int32": (paired(index=np.zeros(4, np.int32)), DtypeError, "must be uint32"),
    "fewer values": (paired(value=np.zeros(3, np.float32)), ShapeError, "of 4 elements"),
    "values of int32": (paired(value=np.zeros(4, np.int32)), DtypeError, "g: dtype must be"),
    "bf16 values unnamed": (
        paired(value=np.zeros(4, np.uint16)), DtypeError, "gradient_format='bf16'"
    ),
    "half of single values": (both(paired(), gradient_format="fp16"), DtypeError, "be float16"),
    "an index of the host": (paired(index=lambda job: np.zeros(4, np.uint32)), DtypeError, ""),
    "values of the host": (paired(value=lambda job: np.zeros(4, np.float32)), DtypeError, ""),
    "misaligned pairs": (
        paired(index=lambda job: job.device.alloc(5, np.uint32)[1:]), AlignmentError, ""
    ),
    "values over parameters": (paired(value=lambda job: job.buffers["p"][:4]), OverlapError, ""),
    # scans
    "scan of the host": (scanned(lambda job: np.ones(4, np.float32)), DtypeError, ""),
    "scan of float64": (scanned(empty(np.float64)), DtypeError, ""),
    "scan of bf16 unnamed": (scanned(empty(np.uint16)), DtypeError, ""),
    "scan of no such format": (
        scanned(empty(np.float32), gradient_format="fp8"), ArgumentError, ""
    ),
    "scan of half in float32": (
        scanned(empty(np.float32), gradient_format="fp16"), DtypeError, ""
    ),
    "misaligned scan": (scanned(empty(np.float32, 1, 1)), AlignmentError, ""),
    "scan of freed gradients": (scanned(freed), FreedBufferError, ""),
    "scan of pairs": (
        lambda job: {"scan": paired()(job)["arrays"]["g"]}, DtypeError, "Pairs"
    ),
}  # fmt: skip
FIVE = (*PGMV, "v_max")
ROUNDED = "state_format=bf16&stochastic_rounding=yes"
IN_8_BITS = "lanes=4&block_bytes=1024&state_format=dynamic8"
OF_FILE = f"rules={BF16}:ADAM_ALL_BF16"
IN_FILE = {"optimizer": "adam_all_bf16"}


def bytes_(count: int) -> Callable[[Job], Any]:
    return lambda job: job.device.alloc(count, np.uint8)


def other_program(job: Job) -> dict[str, Any]:
    """A rule of the same name, in which a state has another format."""
    other = Path(job.folder) / "adam_bf16.py"  # type: ignore[attr-defined]
    other.write_text(BF16.read_text().replace('"v": "bf16"', '"v": "fp16"'))
    return {"optimizer": optimizer_named(f"{other}:ADAM_ALL_BF16")}


HALF = both(arrays(g=empty(np.float16)), gradient_format="fp16")
BRAIN = both(arrays(g=empty(np.uint16)), gradient_format="bf16")
SOME = r"kernel \(sgd, adagrad\).*rules=sgd,adagrad,"
LACKING: list[tuple[str, *Case]] = [  # type: ignore[valid-type]
    ("", arrays(g=empty(np.float16)), DtypeError, "must be float32, not float16"),
    ("", HALF, ArgumentError, r"kernel \(fp32\), not 'fp16'"),
    ("", BRAIN, ArgumentError, r"kernel \(fp32\), not 'bf16'"),
    ("", {"gradient_scale": 2.0}, ArgumentError, "gradient_scale=yes"),
    ("gradient_formats=fp32,fp16", BRAIN, ArgumentError, "gradient_formats="),
    ("gradient_formats=fp32,bf16", arrays(g=empty(np.float16)), DtypeError, "uint16 with gra"),
    ("", copied(empty(np.float16)), ArgumentError, "copy_out must be None"),
    ("copy_out_formats=bf16", copied(empty(np.float16)), ArgumentError, "uint16 with"),
    ("", paired(form="scatter"), ArgumentError, r"kernel \(none\), not 'scatter'"),
    ("compression=fused", paired(form="scatter"), ArgumentError, r"nel \(fused\), not 'scatter'"),
    ("", scanned(empty(np.float32)), ArgumentError, "scan=yes"),
    ("rules=sgd,adagrad", rule("adam", *PGMV), ArgumentError, SOME),
    ("rules=sgd,adagrad", rule("adam", *FIVE, amsgrad=True), ArgumentError, SOME),
    ("rules=sgd,adagrad", rule("sgd", *"pgm", momentum=0.9, step=...), ArgumentError, SOME),
    ("", {"rounding": Rounding()}, ArgumentError, "open the device with stochastic_rounding=yes"),
    ("state_format=bf16", {"rounding": Rounding()}, ArgumentError, "with stochastic_rounding=yes"),
    ("state_format=bf16", arrays(m=empty(np.float32)), DtypeError, "must be uint16 that holds bf"),
    *[
        (OF_FILE, both(arrays(**{name: empty(dtype)}), **IN_FILE), DtypeError,
         f"{name}: dtype must be uint16 that holds bfloat16, not {np.dtype(dtype)}")
        for name in "pmv"
        for dtype in (np.float32, np.float16)
    ],
    (OF_FILE, other_program, ArgumentError, "has another arithmetic in the kernel"),
    *[
        (ROUNDED, {"rounding": rounding}, ArgumentError, text)
        for rounding, text in (
            (Rounding(seed=-1), r"rounding.seed must be an integer in \[0, 2\*\*32\), not -1"),
            (Rounding(seed=1 << 32), "rounding.seed must be an integer"),
            (Rounding(seed=1.0), "rounding.seed must be an integer"),
            (Rounding(seed=True), "rounding.seed must be an integer"),
            (Rounding(step=1 << 32), "rounding.step must be an integer"),
            (Rounding(step="1"), "rounding.step must be an integer"),
            (Rounding(states=("g",)), "rounding.states must be states of adam in bf16"),
            (Rounding(states=("v_max",)), "rounding.states must be states of adam in bf16"),
            (Rounding(states=()), "rounding needs a state in bf16"),
            (Rounding(numbering=Numbering(1)), "index must be a multiple of 16, not 1"),
            (Rounding(numbering=Numbering(within=2)), "within must be a multiple of 16, not 2"),
            (Rounding(numbering=Numbering(1 << 48)), r"index must be an integer in \[0, 2\*\*48\)"),
            (Rounding(numbering=Numbering(skip=3)), "skip must be a multiple of 16, not 3"),
            (Rounding(numbering=Numbering(skip=-1)), "skip must be an integer"),
            (Rounding(numbering=Numbering(skip=1 << 32)), "skip must be an integer"),
            ("stochastic", "rounding must be a Rounding or None, not 'stochastic'"),
        )
    ],
    *[
        (IN_8_BITS, arrays(**{name: empty(dtype)}), DtypeError,
         f"{name}: dtype must be uint8 that holds {form}, not {np.dtype(dtype)}")
        for name, form in (("m", "dynamic8"), ("v", "dynamic8u"))
        for dtype in (np.float32, np.float16, np.uint16, np.int8)
    ],
    *[
        (IN_8_BITS, arrays(**{name: bytes_(other)}), ShapeError,
         f"{name}: shape must be of 116 bytes for 100 elements like p, in blocks of 256 with "
         f"their scales, not of {other}")
        for name in "mv"
        for other in (100, 115, 117, 0)
    ],
    *[
        (IN_8_BITS, arrays(**{name: bytes_(116)}), DtypeError,
         f"{name}: dtype must be float32.*, not uint8")
        for name in "pg"
    ],
]  # fmt: skip
"""Options of a device that lacks what is asked of it."""

GOLDEN = ("golden-numpy", "golden-cpp", "golden-dimm", "golden-card")


def check_refused(device: Any, case: Case, folder: Path) -> None:
    """The update, or the scan, is refused, and no register has been written."""
    change, error, text = case
    job = Job(device, 100)
    job.folder = folder  # type: ignore[attr-defined]
    job.buffers |= {name: device.alloc(100) for name in FIVE if name not in job.buffers}
    given = {"optimizer": "adam", "step": 1} | (change(job) if callable(change) else change)
    given.setdefault("arrays", of_adam(job))
    given = {name: value for name, value in given.items() if value is not ...}
    touched: list[object] = []
    real, device.backend.write_register = device.backend.write_register, touched.append
    method, positional = device.update, [given.pop("optimizer"), given.pop("arrays")]
    if "scan" in given:
        method, positional = device.scan, [given.pop("scan")]
        del given["step"]
    with pytest.raises(error, match=text or None) as caught:
        method(*positional, **given)
    device.backend.write_register = real
    print(caught.value)
    assert not isinstance(caught.value, ConfigurationError)
    assert touched == []
    assert all(channel.run is None for channel in device.channels)


@pytest.mark.parametrize("case", FULL_CASES)
def test_wrong_arguments_fail_before_the_device_is_touched(case, tmp_path):
    change, error, text = FULL_CASES[case]
    decoupled = [True, False] if isinstance(change, dict) and change.keys() < set(HYPER) else [True]
    for name in GOLDEN:
        for each in decoupled:
            given = change
            if isinstance(change, dict) and "optimizer" not in change:
                given = {"decoupled_weight_decay": each, **change}
            with nearstep.open(FULL[name]) as device:
                check_refused(device, (given, error, text), tmp_path)


@pytest.mark.parametrize(("options", "change", "error", "text"), LACKING)
def test_what_the_kernel_does_not_have_is_refused_at_once(options, change, error, text, tmp_path):
    for name in (
        f"golden:axdimm?engine=numpy&memory_bytes=1MiB&{options}",
        f"golden:axdimm?{options}",
    ):
        with nearstep.open(name.rstrip("&?")) as device:
            check_refused(device, (change, error, text), tmp_path)


def test_a_buffer_of_another_device_is_refused():
    with nearstep.open(URLS["golden-numpy"]) as other, nearstep.open(FULL["golden-cpp"]) as device:
        work = Job(device, 100)
        work.buffers["g"] = other.alloc(100)
        index = other.alloc(40, np.uint32)
        work.buffers["pairs"] = Pairs(index, device.alloc(40))
        for use in (
            work.start,
            lambda: work.start(g=work.buffers["pairs"]),
            lambda: device.scan(work.buffers["g"]),
        ):
            with pytest.raises(ForeignBufferError):
                use()


def test_more_elements_than_indices_can_name_are_refused(monkeypatch):
    assert pairs.COUNT_LIMIT == 1 << 32
    monkeypatch.setattr(pairs, "COUNT_LIMIT", 100)
    with nearstep.open(FULL["golden-cpp"]) as device:
        for count, given in ((99, 99), (100, 99), (99, 100)):
            work = Job(device, count)
            index = np.sort(np.arange(given) % count).astype(np.uint32)
            g = work.pairs(index, np.zeros(given, "f"), "fused")
            if count == given:
                work.run("adam", g=g, step=1)
                device.scan(work.put(np.zeros(99, "f")))
                continue
            with pytest.raises(ArgumentError, match=r"fewer than 2\*\*32"):
                work.run("adam", g=g, step=1)
        with pytest.raises(ArgumentError, match=r"fewer than 2\*\*32"):
            device.scan(work.put(np.zeros(100, "f")))


def test_numbers_of_numpy_are_hyper_parameters_and_switches():
    with nearstep.open(FULL["golden-cpp"]) as device:
        work = Job(device, 100)
        hyper = {"step": np.int64(2), "lr": np.float32(0.25), "betas": [np.float64(0.5), 0]}
        work.run("adam", **hyper, weight_decay=0, decoupled_weight_decay=np.True_)
        assert work.check() == 300
        with pytest.raises(ArgumentError, match="must be True or False, not"):
            device.arguments("adam", step=1, decoupled_weight_decay="no")


@pytest.mark.parametrize("bound", [1e9, -5, "x", True, 1 << 64])
def test_a_bound_of_a_wait_is_a_number_of_cycles(bound):
    for url in (URLS["golden-cpp"], DIMMS["golden-dimm"]):
        with nearstep.open(url) as device:
            work = Job(device, 300)
            with accelerated(device):
                run = work.start()
                for use in (run.wait, run.abort):
                    with pytest.raises(ArgumentError, match="max_cycles must be an integer"):
                        use(max_cycles=bound)
                run.wait()
                with pytest.raises(ArgumentError):
                    run.wait(max_cycles=bound)
            assert work.check() == 900


CHIP = "memory=ddr4-1600"
OPTIONS = [
    *[(f"golden:axdimm?copy_out_formats={each}", "") for each in ("fp32", "fp16,fp16", "fp16,")],
    *[(f"golden:axdimm?gradient_formats={each}", "")
      for each in ("", "fp16", "fp32,fp32", "fp32,fp8", "fp32,")],
    *[(f"golden:axdimm?compression={each}", "") for each in ("dense", "fused,fused", "fused,")],
    *[(f"golden:axdimm?rules={each}", "")
      for each in ("", "adam,adam", "lion", "sgd,", "adam,adam_amsgrad&order=paper")],
    ("golden:axdimm?stochastic_rounding=yes", "stochastic_rounding needs a state in bf16"),
    ("golden:axdimm?stochastic_rounding=yes&state_format=fp16", "needs a state in bf16"),
    ("golden:axdimm?state_format=int8", "state_format"),
    ("golden:axdimm?parameter_format=fp8", "parameter_format"),
    ("golden:axdimm?rules=sgd&state_format=bf16&stochastic_rounding=yes", "needs a state in bf16"),
    (f"golden:axdimm?rules=adam,{BF16}:ADAM_BF16",
     "State 'm' is bf16 here, and fp32 in another rule"),
    (f"sim:axdimm?{CHIP}&channels=3", "channels must be one of"),
    (f"sim:axdimm?{CHIP}&lanes=4", "lanes must be 16"),
    (f"sim:axdimm?{CHIP}&mapping=row", "mapping"),
    (f"sim:axdimm?{CHIP}&postpone=9", "postpone must lie"),
    (f"sim:axdimm?{CHIP}&latency=3", "cannot be used with memory=ddr4-1600"),
    ("sim:axdimm?memory=ddr5", "no such choice"),
    ("sim:axdimm?channels=2", "needs memory=ddr4-1600"),
    ("golden:axdimm?channels=2&memory_bytes=192", "memory_bytes must be"),
    ("golden:axdimm?channels=2&lanes=8", "lanes must be 16"),
    (f"sim:axdimm?{CHIP}&ranks=3", r"ranks must be one of \(1, 2\), not 3"),
    (f"sim:axdimm?{CHIP}&ranks=2&channels=4", "the chip selects of a host, not 4 times 2"),
    (f"sim:axdimm?{CHIP}&ranks=2&density=16Gb", "at least 35 bits for a channel, not 34"),
    (f"sim:axdimm?{CHIP}&ranks=2&density=32Gb&width=x16", "must be at least 35 bits"),
    (f"sim:axdimm?{CHIP}&ranks=2&interleave=2048", "a power of two from 4096 to 8589934592"),
    (f"sim:axdimm?{CHIP}&ranks=2&interleave=5000", "interleave must be a power of two"),
    (f"sim:axdimm?{CHIP}&ranks=2&interleave=16GiB", "the bytes of a rank, not 17179869184"),
    ("sim:axdimm?ranks=2&memory=ideal", "ranks"),
    *[(f"{DIMMS['sim-dimm']}&{option}={path}", "")
      for option in ("trace", "commands") for path in ("", "/proc/none/x", "/dev/null/x")],
    *[(f"sim:axdimm?{more}&fu=native", "fu must be rtl with top=whole")
      for more in (f"{CHIP}&channels=2&top=whole", "top=whole")],
    (f"sim:axdimm?{CHIP}&channels=2&top=channel", "channels must be 1 with top=channel, not 2"),
    ("sim:smartssd?top=whole&fu=native", "fu must be rtl with top=whole"),
    ("golden:smartssd?cards=0", "cards"),
    ("sim:smartssd?cards=65", "cards"),
    ("golden:smartssd?channels=2", "no such option; valid: lanes"),
    ("golden:smartssd?memory_bytes=3MiB", "power of two"),
    ("golden:smartssd?memory_bytes=128GiB", "power of two"),
    ("golden:smartssd?subgroup_elements=1", "multiple of a chunk"),
    ("golden:smartssd?subgroup_elements=1Gi", "whole number"),
    ("golden:smartssd?compression=sorted", "compression must be some of"),
    ("golden:smartssd?scan=maybe", "must be a boolean"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "said"), OPTIONS)
def test_options_that_cannot_be_are_refused_when_a_device_is_opened(url, said):
    with pytest.raises((OptionError, UrlError), match=said or None) as caught:
        nearstep.open(url)
    print(caught.value)


@pytest.mark.parametrize("url", [
    "sim:axdimm?memory=ddr4-1600&channels=2&top=whole", "sim:axdimm?top=whole",
    "sim:smartssd?lanes=4&chunk_bytes=512&cards=2",
])  # fmt: skip
def test_a_trace_that_cannot_be_is_refused_and_no_file_made(url, tmp_path):
    said = "it is of one card" if "cards" in url else "top must be parts with trace="
    with pytest.raises(OptionError, match=said):
        nearstep.open(f"{url}&trace={tmp_path / 'waves.vcd'}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_numbers_of_numpy_are_computed_with_in_binary64(kind) -> None:
    """Scalars of rules are rounded once, whatever the hyper-parameters are numbers of."""
    given = {"lr": kind(3e-4), "betas": (kind(0.9), kind(0.999)), "weight_decay": kind(0.1)}
    plain = {k: tuple(map(float, v)) if k == "betas" else float(v) for k, v in given.items()}
    for step in range(1, 200):
        ours, theirs = (
            rule_arguments(optimizer_named("adamw"), "default", step=step, **each).scalars
            for each in (given, plain)
        )
        assert ours == theirs
        assert all(type(value) is type(theirs[name]) for name, value in ours.items())
