"""Every optimizer on every device: what is asked of a step is what the rule gives in numpy, bit for
bit, for any number of elements, any format of states and gradients, any scale, pairs and copy.

Optimizers, their rules, states, formats and hyper-parameters come from their data, devices from a
table: one more of either is one more row.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import nearstep
from nearstep import Rounding
from nearstep.backends.emulated import Injection
from nearstep.updater.device import KernelDevice
from nearstep.updater.rounding import Numbering
from nearstep_sim.updater.golden_kernel import CONVERTED
from nearstep_spec.rounding import alignment
from nearstep_spec.rule.optimizer import Form, Optimizer
from nearstep_spec.rule.rules import OPTIMIZERS, optimizer_named
from nearstep_spec.updater.registers import CopyOutFormat, GradientFormat

from ..optimizers import FORMATS as EVERY_FORMAT
from ..optimizers import GROUPS, hyper_of
from .conftest import ADAM_ALONE, BUILDS, DIMMS, RANKS, SIM_CARD_SHAPE, URLS, WHOLE, chosen
from .job import Job, accelerated
from .patterns import FORMATS, NARROW, format_of, gradients, indices

SHAPE = "lanes=4&block_bytes=512&memory_bytes=1MiB"
DEVICES = {
    "golden-numpy": f"golden:axdimm?{SHAPE}&engine=numpy",
    "golden-cpp": f"golden:axdimm?{SHAPE}",
    "golden-dimm": "golden:axdimm?channels=2&block_bytes=512&memory_bytes=2MiB",
    "golden-card": f"golden:smartssd?{SHAPE.replace('block', 'chunk')}",
    "sim-ideal": f"sim:axdimm?{SHAPE}&fu=native",
    "sim-stalled": f"sim:axdimm?{SHAPE}&memory=halfduplex&stall=0.3&seed=7",
    "sim-dimm": "sim:axdimm?memory=ddr4-1600&block_bytes=512&functional_units=4&fu=native",
    "sim-card": f"sim:smartssd?{SHAPE.replace('block', 'chunk')}&fu=native&stall=0.2",
}
PAIRS = "compression=fused,scatter"
ROUNDED = "state_format=bf16&stochastic_rounding=yes&rules=adam"
IN_8_BITS = "state_format=dynamic8&rules=adam,adam_amsgrad,adadelta,sgd_momentum"
KINDS = {
    **{
        group: (
            f"{EVERY_FORMAT}&rules={rules}&{PAIRS if group == 'all' else ''}".rstrip("&"),
            names,
        )
        for group, (rules, names) in GROUPS.items()
    },
    "paper": (f"{EVERY_FORMAT}&order=paper&rules=adam,sgd,sgd_momentum,adagrad", [*OPTIMIZERS]),
    "rounded": (f"{EVERY_FORMAT}&{ROUNDED}", ["adam", "adamw"]),
    "rounded-parameters": (f"{EVERY_FORMAT}&{ROUNDED}&parameter_format=bf16", ["adam", "adamw"]),
    "eight": (f"{EVERY_FORMAT}&{IN_8_BITS}&compression=fused", list(OPTIMIZERS)),
}
"""Options of a device by the formats of its states, and the optimizers that are tried with them."""


def named(url: str, kind: str) -> tuple[str, list[str]]:
    options, names = KINDS[kind]
    # A block has 256 elements or more where each 256 have a scale.
    return (
        f"{url.replace('_bytes=512', '_bytes=2048') if kind == 'eight' else url}&{options}",
        names,
    )


ROWS = {f"{name}-{kind}": named(url, kind) for name, url in DEVICES.items() for kind in KINDS}
EIGHT = {
    f"eight-{shape}-{engine}": (f"golden:axdimm?{shape}&{IN_8_BITS}&engine={engine}", [*OPTIMIZERS])
    for shape in (
        *("lanes=1&block_bytes=1024", "lanes=8&block_bytes=2048", "lanes=8&block_bytes=8192"),
        *("lanes=16&block_bytes=4096", "lanes=16&block_bytes=16384"),
    )
    for engine in ("cpp", "numpy")
}
ALONE = {
    f"{name}-adam": (url, ["adam", "adamw"])
    for name, url in (URLS | DIMMS | WHOLE | RANKS).items()
    if name not in set(URLS) - set(ADAM_ALONE)
}
ROWS |= EIGHT | ALONE
ROWS["sim-card-as-it-is-shipped"] = (f"sim:smartssd?{SIM_CARD_SHAPE}", list(OPTIMIZERS))
ROWS["sim-card-of-an-ecp5"] = (f"sim:smartssd?{SIM_CARD_SHAPE}&technology=ecp5", list(OPTIMIZERS))
ROWS["sim-card-on-pcie"] = (f"sim:smartssd?{SIM_CARD_SHAPE}&bus=pcie&stall=0.2", list(OPTIMIZERS))
for lanes in (1, 2):
    few = f"sim:axdimm?lanes={lanes}&block_bytes=512&memory_bytes=1MiB&fu=native&{ROUNDED}"
    ROWS[f"sim-{lanes}-lanes-rounded"] = (few, ["adam"])
QUICK = {"sim-ideal-adam", "sim-dimm-adam", "sim-dimm-stalled-adam", "sim-card-as-it-is-shipped"}
QUICK_EIGHT = ("eight-lanes=1&", "eight-lanes=8&block_bytes=8192")
IN_DEPTH = [
    name
    for name in ROWS
    if (name.startswith(("sim", "pcie")) and name not in QUICK)
    or (name in EIGHT and not name.startswith(QUICK_EIGHT))
    or name.removesuffix("-adam") in {*BUILDS, *WHOLE, *RANKS}
]
SCALES = (1.0, 2.0**-7, -0.3, 0.0)
SEED = 70


@pytest.fixture(params=chosen(ROWS, IN_DEPTH))
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[KernelDevice, list[str]]]:
    url, names = ROWS[request.param]
    with nearstep.open(url) as device:
        assert isinstance(device, KernelDevice)
        yield device, names


def counts(device: KernelDevice) -> list[int]:
    """Numbers of elements that cut beats, groups and blocks."""
    block, lanes = device.config.block_elements, device.config.lanes
    some = [1, 2, 3, lanes - 1, lanes, lanes + 1, 2 * lanes + 1, 4 * lanes + 1, 255, 256, 257]
    some += [block - 1, block, block + 1, block + 4 * lanes + 1, 2 * block, 3 * block + 300]
    return sorted({each for each in some if each > 0})


class Drawn:
    """A step with options that are drawn at random among those that the kernel has."""

    def __init__(self, device: KernelDevice, rng: np.random.Generator, count: int) -> None:
        config = device.config
        self.device, self.rng, self.count = device, rng, count

        def one_of(values: tuple, *others: object) -> object:
            among = [*others, *values]
            return among[int(rng.integers(len(among)))]

        self.gradient = one_of(config.gradient_formats)
        self.copy = one_of(config.copy_out_formats, None)
        self.pairs = one_of(config.compression, None)
        self.scale = one_of(SCALES) if config.gradient_scale else 1.0
        self.rounding = None
        if config.stochastic_rounding:
            self.rounding = one_of((self.drawn_rounding(), self.drawn_rounding()), None)

    def drawn_rounding(self) -> Rounding:
        """Numbered from zero; from the middle of a block, of which others lie between; beside a
        carry."""
        block, begins = self.device.config.block_elements, alignment(self.device.config.lanes)
        numbering = (
            Numbering(),
            Numbering(index=7 * begins, within=block - begins, skip=3 * block),
            Numbering(index=(1 << 34) - 2 * block, within=0, skip=block),
        )[int(self.rng.integers(3))]
        states = (None, ("v",), ("m",))[int(self.rng.integers(3))]
        step = (None, int(self.rng.integers(1 << 32)))[int(self.rng.integers(2))]
        seed = int(self.rng.integers(1 << 32))
        return Rounding(seed=seed, step=step, states=states, numbering=numbering)

    def pairs_of(self, job: Job) -> object:
        """From none to more than there are elements; all of some are one element."""
        rng, count = self.rng, self.count
        number = int(rng.choice([0, 1, count // 100, count // 2, count, 2 * count + 3]))
        group = 1 if self.pairs == "fused" else self.device.config.block_elements
        index = indices(rng, count, number, group)
        if number and rng.random() < 0.2:
            index[:] = rng.integers(count)
        return job.pairs(index, gradients(rng, number, self.gradient), self.pairs)

    def step(self, optimizer: Optimizer, usual: Form, rule: str) -> int:
        """Make it, once or twice, and compare; the number of elements."""
        device, rng, form = self.device, self.rng, usual.ordered(self.device.config.order)
        print(vars(self))
        job = Job(
            device, self.count, int(rng.integers(1 << 30)), arrays=form.rule.arrays_in,
            channel=int(rng.integers(device.channel_count)), gradient=self.gradient,
            odd=bool(rng.integers(2)), guarded=True,
        )  # fmt: skip
        compared = 0
        for _ in range(1 + (rng.random() < 0.2)):
            given = {
                "step": int(rng.integers(1, 1000)),
                "first": bool(rng.integers(2)),
                "gradient_format": self.gradient,
                **hyper_of(optimizer, usual, rng),
            }
            if (
                "betas" in given and rng.random() < 0.2
            ):  # below one half: the other form of the mean
                given["betas"] = (0.3, 0.9)
            if self.pairs is not None:
                given["g"] = self.pairs_of(job)
            if self.copy is not None:
                given |= {"copy_out": job.copy(self.copy), "copy_out_format": self.copy}
            scale, rounding = self.scale, self.rounding
            run = job.run(optimizer, gradient_scale=scale, rounding=rounding, **given)
            assert (run.rule, run.what, run.done) == (
                rule,
                f"{rule} of {self.count} elements",
                True,
            )
            compared += job.check()
        job.free()
        return compared


def test_a_step_is_that_of_the_rule(opened: tuple[KernelDevice, list[str]]) -> None:
    device, names = opened
    print(f"seed {SEED}")
    rng, config = np.random.default_rng(SEED), device.config
    compared = least = 0
    seen: Counter[tuple[str, object]] = Counter()
    rules = [
        (optimizer, usual, rule)
        for optimizer in map(optimizer_named, names)
        for rule, usual in optimizer.by_rule.items()
        if rule in config.rule_set.names
    ]
    for optimizer, usual, rule in rules:
        for count in counts(device):
            drawn = Drawn(device, rng, count)
            if rng.random() < 0.1 and hasattr(device.backend, "inject"):
                # Hits nothing; emulations may then move one burst after the other.
                device.backend.inject(Injection(kind="never", write=False, base=1 << 40))
            compared += drawn.step(optimizer, usual, rule)
            least += count * len(usual.rule.states)
            seen.update(
                ("rule", rule) if name == "count" else (name, value)
                for name, value in vars(drawn).items()
                if isinstance(value, str | int)
            )
        if hasattr(device.backend, "heal"):
            device.backend.heal()
    for channel in device.channels:
        kernel = channel.kernel
        assert not any(kernel[f"window{i}_permissions"].bits for i in range(config.windows))
    print(f"{compared} elements compared: {seen}")
    offered = {
        "rule": config.rule_set.names, "gradient": config.gradient_formats,
        "copy": config.copy_out_formats, "pairs": config.compression,
    }  # fmt: skip
    for name, values in offered.items():
        assert {value for key, value in seen if key == name} == set(values)
    assert compared > least > len(rules) * sum(counts(device)) - 1


@pytest.mark.parametrize("engine", ["cpp", "numpy"])
def test_more_elements_than_are_converted_at_a_time(engine: str) -> None:
    url = f"golden:axdimm?state_format=dynamic8&memory_bytes=4MiB&engine={engine}"
    with nearstep.open(url) as device:
        for count in (CONVERTED, CONVERTED + 4096 + 257):
            job = Job(device, count, 13)
            job.run()
            assert job.check() == 3 * count
            job.free()


@pytest.mark.parametrize("kind", ["mixed", "narrow"])
def test_the_device_says_which_format_a_state_has(kind: str) -> None:
    url, _ = ROWS[f"golden-numpy-{kind}"]
    with nearstep.open(url) as device:
        formats = device.config.rule_set.whole.formats
        said = device.channels[0].kernel.state_formats
        for name in "pmv":
            expected = GradientFormat[formats.get(name, "fp32").upper()]
            assert getattr(said, name) == expected


@pytest.mark.parametrize("array", ["p", "m", "g"])
def test_one_wrong_bit_is_seen(array: str) -> None:
    with nearstep.open(f"{DEVICES['golden-numpy']}&{EVERY_FORMAT}") as device:
        job = Job(device, 129, SEED, gradient="bf16")
        before = job.before[array].copy()
        job.before[array].view(np.uint8)[-1] ^= 0x40
        job.run("adam", step=1)
        with pytest.raises(AssertionError, match=f"adam {array if array == 'g' else '.'} of 129"):
            job.check()
        job = Job(device, 129, SEED, gradient="bf16")
        assert job.before[array].tobytes() == before.tobytes()
        job.run("adam", step=1)
        assert job.check() == 3 * 129


def test_a_wrong_copy_counter_or_byte_beside_an_array_is_seen() -> None:
    with nearstep.open(f"{DEVICES['golden-numpy']}&{EVERY_FORMAT}") as device:
        job = Job(device, 129, SEED, guarded=True)
        copy = job.copy("fp16")
        job.run(copy_out=copy)
        copy[128:].fill(7)
        with pytest.raises(AssertionError, match=r"adam copy of 129 is wrong at \[128\]"):
            job.check()
        job.upload()
        run = job.run()
        run.counters["read_beats"] += 1
        with pytest.raises(AssertionError):
            job.check()
        job.upload()
        job.run()
        job._whole[0][256:].fill(7)
        with pytest.raises(AssertionError, match="beside an array"):
            job.check()


KIND = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("form", NARROW)
def test_every_rounding_of_a_copy_is_that_of_torch(full, form):
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


@pytest.mark.parametrize("value_form", NARROW)
def test_values_of_16_bits_are_widened_exactly(full, value_form):
    every = np.arange(1 << 16, dtype=np.uint16).view(FORMATS[value_form][1])
    work = Job(full, 1 << 14, 17)
    for first in range(0, every.size, work.count):
        part = every[first : first + work.count]
        pairs = work.pairs(np.arange(work.count, dtype=np.uint32), part, "fused")
        work.run("sgd", g=pairs, lr=1.0)
        assert format_of(part.dtype) == value_form
        assert work.check() == 3 * work.count


@pytest.mark.parametrize("what", ["nothing", "nothing but pairs"])
def test_no_elements_are_done_and_change_nothing(full, what):
    work = Job(full, 300, 9)
    copy = work.put(np.full(300, 7, np.float16))
    arrays = {name: buffer[0:0] for name, buffer in work.buffers.items()}
    if what == "nothing but pairs":
        arrays["g"] = work.pairs(np.array([5], np.uint32), np.ones(1, np.float32), "fused")
    work.run("adam", step=1, copy_out=work.copy("fp16"))
    assert work.check() == 1200
    with accelerated(full):
        run = full.update("adam", arrays, step=1, copy_out=copy[0:0]).wait()
    assert (run.done, run.committed) == (True, 0)
    assert [run.counters[each] for each in ("committed", "read_beats", "write_beats")] == [0, 0, 0]
    assert full.channels[0].kernel.status.done
    assert np.all(copy.read() == 7)
    assert work.check_untouched() == 900


def test_a_run_without_a_copy_writes_none(full):
    work = Job(full, 300, 6)
    copy = work.copy("fp16")
    work.run("adam", step=1, copy_out=copy)
    assert work.check() == 1200
    copy.fill(7)
    work.run("adam", step=1)
    assert work.check() == 900
    assert np.all(copy.read() == 7)
    assert full.channels[0].kernel.formats.copy_out == CopyOutFormat.NONE


def test_the_same_seed_and_step_give_the_same_bits_and_others_others():
    url, _ = ROWS["golden-cpp-rounded"]
    with nearstep.open(url) as device:
        work, found = Job(device, 1001, seed=6, optimizer="adamw"), []
        for seed, step in ((1, None), (1, None), (2, None), (1, 4)):
            work.upload()
            work.run(rounding=Rounding(seed=seed, step=step))
            found.append(np.concatenate([work.buffers[n].read() for n in "mv"]))
    assert (found[0] == found[1]).all()
    for other in found[2:]:
        assert 0.1 < np.mean(found[0] != other) < 0.6
    # Stochastic rounding is one of the two neighbours.
    assert (np.abs(found[0].astype(int) - found[2].astype(int)) <= 1).all()


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
