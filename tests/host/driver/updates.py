"""Arrays of updates with everything that a kernel can have, and what they must become."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from nearstep import Pairs
from nearstep.axdimm.device import AxdimmDevice
from nearstep.buffer import Buffer
from nearstep.updater.device import KernelDevice
from nearstep.updater.run import UpdateRun
from nearstep_sim.golden import fp
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.fp import BF16, FP16, FP32
from nearstep_spec.rule.rule import Rule

FORMATS = {"fp32": (FP32, np.float32), "fp16": (FP16, np.float16), "bf16": (BF16, np.uint16)}
NARROW = ("fp16", "bf16")


def host_reaches(device: KernelDevice) -> bool:
    """Whether the host may use the memory while kernels run."""
    return not isinstance(device, AxdimmDevice) or device.dimm is None


@contextmanager
def accelerated(device: KernelDevice) -> Iterator[None]:
    """The kernels have the memory, where that takes a change of mode."""
    if host_reaches(device):
        yield
    else:
        with device.acceleration():
            yield


def gradients(rng: np.random.Generator, count: int, form: str) -> NDArray:
    """Patterns of a format: numbers of any size, every eighth of them special."""
    fmt, dtype = FORMATS[form]
    numbers = rng.standard_normal(count).astype(np.float32).view(np.uint32)
    bits, _ = fp.convert(numbers, FP32, fmt)
    infinity = fmt.infinity
    specials = np.array(
        [0, 1, 3, fmt.sign_bit | 2, infinity, fmt.sign_bit | infinity, infinity + 1,
         fmt.quiet_nan, fmt.sign_bit | fmt.quiet_nan | 5, infinity - 1, fmt.sign_bit, 0x101]
    )  # fmt: skip
    chosen = rng.random(count) < 0.125
    bits[chosen] = rng.choice(specials, np.count_nonzero(chosen))
    return bits.astype(np.uint32 if form == "fp32" else np.uint16).view(dtype)


def widened(values: NDArray, form: str) -> NDArray[np.float32]:
    """Patterns of a format as float32."""
    fmt, dtype = FORMATS[form]
    raw = values.view(np.uint32 if dtype == np.float32 else np.uint16)
    wide = raw if form == "fp32" else fp.convert(raw.astype(np.uint32), fmt, FP32)[0]
    return wide.astype(np.uint32).view(np.float32)


def rounded(p: NDArray[np.float32], form: str) -> bytes:
    """The bytes of a copy of p."""
    return fp.convert(p.view(np.uint32), FP32, FORMATS[form][0])[0].astype(np.uint16).tobytes()


def indices(rng: np.random.Generator, count: int, pairs: int, group: int) -> NDArray[np.uint32]:
    """Indices below ``count`` in the order of groups of elements, each group in any order."""
    chosen = rng.integers(0, count, pairs)
    return chosen[np.argsort(chosen // group, kind="stable")].astype(np.uint32)


class Arrays:
    """All arrays of a kernel, g in a format, and copies of what they hold."""

    def __init__(self, device: KernelDevice, count: int, seed: int, form: str = "fp32") -> None:
        print(f"seed {seed}")
        rng = np.random.default_rng(seed)
        self.device, self.form, self.count = device, form, count
        names = [*(name for name in device.config.arrays if name != "g"), "g"]
        self.before: dict[str, NDArray] = {
            name: rng.standard_normal(count).astype(np.float32) for name in names
        }
        self.before |= {n: np.square(self.before[n]) for n in ("v", "v_max") if n in names}
        if form != "fp32":
            self.before["g"] = gradients(rng, count, form)
        self.buffers = {name: device.alloc(count, self.before[name].dtype) for name in names}
        for name, buffer in self.buffers.items():
            buffer.write(self.before[name])

    def free(self) -> None:
        """Give the memory back."""
        for buffer in self.buffers.values():
            buffer.free()

    def run(self, name: str, arrays: Iterable[str], **hyper: object) -> UpdateRun:
        """A whole run of an optimizer on some of the arrays."""
        if self.form == "bf16":
            hyper.setdefault("gradient_format", "bf16")
        with accelerated(self.device):
            return self.device.update(
                name, {each: self.buffers[each] for each in arrays}, **hyper
            ).wait()

    def gradient(self, scale: float) -> NDArray[np.float32]:
        """The gradients as the rule sees them: converted, then scaled."""
        wide = widened(self.before["g"], self.form)
        return fp.mul32(wide, np.full(self.count, scale, np.float32))

    def check(self, rule: Rule, scalars: dict[str, float], scale: float = 1.0) -> int:
        """Arrays of the rule are as it says, the others as they were; the number compared."""
        given = {name: self.before[name] for name in rule.arrays_in} | {"g": self.gradient(scale)}
        expected = evaluate(rule, given, scalars)
        compared = 0
        for name, buffer in self.buffers.items():
            got, wanted = buffer.read(), expected.get(name, self.before[name])
            assert got.tobytes() == wanted.tobytes(), f"{rule.name} {name} of {self.count}"
            compared += wanted.size
        self.before |= expected
        return compared


class Update:
    """States on a device, gradients dense or in pairs, and copies of what they hold."""

    def __init__(self, device: KernelDevice, count: int, seed: int) -> None:
        print(f"seed {seed}")
        self.rng = np.random.default_rng(seed)
        self.device, self.count = device, count
        self.before = {n: self.rng.standard_normal(count).astype(np.float32) for n in "pmv"}
        self.before["v"] = np.square(self.before["v"])
        self.buffers = {name: self.upload(array) for name, array in self.before.items()}
        self.copies: dict[str, Buffer] = {}

    def upload(self, array: NDArray) -> Buffer:
        """A buffer like the array, with its contents."""
        buffer = self.device.alloc(array.shape, array.dtype)
        buffer.write(array)
        return buffer

    def copy_buffer(self, form: str) -> Buffer:
        """A buffer for a copy, into which nobody has written."""
        return self.device.alloc(self.count, FORMATS[form][1])

    def pairs(self, index: NDArray, values: NDArray, form: str) -> Pairs:
        """Pairs on the device; the host's copies stay in `index` and `values`."""
        self.index, self.values = index, values
        return Pairs(self.upload(index), self.upload(values), form)

    def dense(self, value_form: str) -> NDArray[np.float32]:
        """The gradients that the last pairs stand for, one pair after the other."""
        made = np.zeros(self.count, np.float32)
        wide = widened(self.values, value_form)
        for at, value in zip(self.index.tolist(), wide, strict=True):
            made[at] = value
        return made

    def run(self, name: str, g: Buffer | Pairs, **hyper: object) -> UpdateRun:
        """A whole run of a rule."""
        states = {"adam": "pmv", "sgd": "p", "sgd_momentum": "pm", "adagrad": "pv"}[name]
        arrays = {"g": g, **{n: self.buffers[n] for n in states}}
        with accelerated(self.device):
            return self.device.update(name.removesuffix("_momentum"), arrays, **hyper).wait()

    def check(
        self, rule: Rule, scalars: dict[str, float], g: NDArray[np.float32], scale: float = 1.0
    ) -> int:
        """Compare all states, bit for bit, with the rule's results; the number compared."""
        scaled = fp.mul32(g, np.full(self.count, scale, np.float32))
        given = {"g": scaled, **{n: self.before[n] for n in rule.arrays_in if n != "g"}}
        self.before |= evaluate(rule, given, scalars)
        return self.check_states()

    def check_states(self) -> int:
        """Compare all states with what is known of them; the number compared."""
        compared = 0
        for name, buffer in self.buffers.items():
            assert buffer.read().tobytes() == self.before[name].tobytes(), f"{name} of {self.count}"
            compared += buffer.size
        return compared

    def free(self, *others: Buffer) -> None:
        """Give the memory back."""
        for buffer in (*self.buffers.values(), *others):
            buffer.free()

    def free_pairs(self, g: Pairs) -> None:
        """Give the memory of pairs back."""
        g.index.free()
        g.value.free()
