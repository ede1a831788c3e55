"""Random steps and scans of a device, and what they must leave, in plain numpy.

Of the device only its driver is used. What a step must give comes from `formulas` with
hyper-parameters as a user has them; formats, pairs and scans are written here.

Ref: Smart-Infinity, sections IV-C (pairs) and V-A (updater); AXDIMM, section 3.3.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep import Pairs
from nearstep.buffer import Buffer
from nearstep.updater.device import KernelDevice
from nearstep.updater.run import KernelRun, ScanRun

from .arithmetic import Plain
from .draws import hyper, patterns
from .formulas import FORMULAS

DTYPES: dict[str, type[np.generic]] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
NAN16 = {"fp16": 0x7E00, "bf16": 0x7FC0}
PARTIAL_SUMS = 8
GUARD_BYTES = 64
LENGTHS = (1, 2, 3, 15, 16, 17, 127, 128, 129, 1000)


def widened(values: NDArray[Any], form: str) -> NDArray[np.float32]:
    """Elements of memory as float32."""
    if form == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def narrowed(values: NDArray[np.float32], form: str) -> NDArray[np.uint16]:
    """float32 as patterns of 16 bits, rounded to nearest even; every NaN is the default one."""
    if form == "fp16":
        with np.errstate(all="ignore"):
            bits = values.astype(np.float16).view(np.uint16).copy()
    else:
        words = values.view(np.uint32).astype(np.uint64)
        bits = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    bits[np.isnan(values)] = NAN16[form]
    return bits


def scanned(values: NDArray[np.float32], lanes: int) -> tuple[bool, float]:
    """Whether one is infinite or NaN, and the sum of squares: binary32 within a beat, neighbours
    first; beat n goes to sum n mod 8, in binary64; these are added in their order."""
    beats = -(-values.size // lanes)
    padded = np.zeros(beats * lanes, np.float32)
    padded[: values.size] = values
    rows = Plain(padded.reshape(beats, lanes))
    rows = rows * rows
    while rows.values.shape[1] > 1:
        rows = Plain(rows.values[:, 0::2]) + Plain(rows.values[:, 1::2])
    sums = [0.0] * PARTIAL_SUMS
    for number, beat in enumerate(rows.values[:, 0].tolist()):
        sums[number % PARTIAL_SUMS] += beat
    total = sums[0]
    for each in sums[1:]:
        total += each
    return not np.isfinite(values).all(), total


@dataclass
class Task:
    """A step or a scan, drawn at random, on one channel.

    Parameters
    ----------
    device
    rng, numbers : of choices, of elements.
    rules : that it may be of.
    channel
    longest : elements, at most.
    """

    device: KernelDevice
    rng: random.Random
    numbers: np.random.Generator
    rules: list[str]
    channel: int
    longest: int
    _guards: list[tuple[Buffer, NDArray[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng, config = self.rng, self.device.config
        self.rule = rng.choice([*self.rules, "scan"] if config.scan else self.rules)
        self.count = rng.choice([rng.randint(1, self.longest), rng.choice(LENGTHS)])
        self.form = rng.choice(config.gradient_formats)
        forms = ("none", *config.compression) if self.rule != "scan" else ("none",)
        self.pairs = rng.choice(forms)
        copies = ("none", *config.copy_out_formats) if self.rule != "scan" else ("none",)
        self.copy = rng.choice(copies)
        self.h = {} if self.rule == "scan" else hyper(self.rule, rng)
        if self.h and config.gradient_scale:
            self.h["gradient_scale"] = rng.choice([1.0, 1.0, -1.0, rng.uniform(-4, 4)])
        self._draw()

    def _draw(self) -> None:
        names = ("g",) if self.rule == "scan" else FORMULAS[self.rule][2]
        size = self.count
        self.before: dict[str, NDArray[Any]] = {
            name: patterns(self.numbers, size).view(np.float32) for name in names if name != "g"
        }
        if self.pairs != "none":
            size = self.rng.choice([1, self.rng.randint(1, 2 * self.count)])
            self.before["index"] = self._indices(size)
        values = patterns(self.numbers, size).view(np.float32)
        if self.rule == "scan" and self.rng.random() < 0.7:
            values = self.numbers.standard_normal(size).astype(np.float32)
        if self.form != "fp32":
            bits = narrowed(values, self.form)
            values = bits.view(DTYPES[self.form])
        self.before["g"] = values
        self.buffers = {name: self._put(array) for name, array in self.before.items()}
        self.out = None
        if self.copy != "none":
            self.out = self.device.alloc(self.count, DTYPES[self.copy], channel=self.channel)
            self._guard()

    def _indices(self, size: int) -> NDArray[np.uint32]:
        drawn = self.numbers.integers(0, self.count, size)
        block = 1 if self.pairs == "fused" else self.device.config.block_elements
        return drawn[np.argsort(drawn // block, kind="stable")].astype(np.uint32)

    def _put(self, array: NDArray[Any]) -> Buffer:
        buffer = self.device.alloc(array.shape, array.dtype, channel=self.channel)
        buffer.write(array)
        self._guard()
        return buffer

    def _guard(self) -> None:
        content = self.numbers.integers(0, 256, GUARD_BYTES, dtype=np.uint8)
        buffer = self.device.alloc(GUARD_BYTES, np.uint8, channel=self.channel)
        buffer.write(content)
        self._guards.append((buffer, content))

    @property
    def text(self) -> str:
        """What it is, for messages."""
        return (
            f"{self.rule} of {self.count} on channel {self.channel}, {self.form}, "
            f"pairs {self.pairs}, copy {self.copy}, {self.h}"
        )

    def start(self) -> KernelRun:
        """Start it on the device."""
        form = {"gradient_format": "bf16"} if self.form == "bf16" else {}
        if self.rule == "scan":
            self.run: KernelRun = self.device.scan(self.buffers["g"], **form)
            return self.run
        names = [name for name in FORMULAS[self.rule][2] if name != "g"]
        g: Any = self.buffers["g"]
        if self.pairs != "none":
            g = Pairs(self.buffers["index"], g, self.pairs)
        options: dict[str, Any] = {**self.h, **form}
        if self.out is not None:
            options |= {"copy_out": self.out, "copy_out_format": self.copy}
        arrays = {**{name: self.buffers[name] for name in names}, "g": g}
        self.run = self.device.update(FORMULAS[self.rule][0], arrays, **options)
        return self.run

    def check(self) -> int:
        """Compare all memory of the task with what it must hold; the number of elements."""
        compared = 0
        expected = {name: array.view(np.uint8) for name, array in self.before.items()}
        if self.rule == "scan":
            assert isinstance(self.run, ScanRun)
            found, total = scanned(widened(self.before["g"], self.form), self.device.config.lanes)
            same = repr(self.run.sum_of_squares) == repr(total)
            assert (self.run.found_inf, same) == (found, True), (self.text, total)
            compared += 2
        else:
            expected |= {name: array.view(np.uint8) for name, array in self._after().items()}
        buffers = dict(self.buffers) | ({} if self.out is None else {"copy": self.out})
        for name, buffer in buffers.items():
            held = buffer.read().view(np.uint8)
            wrong = np.flatnonzero(held != expected[name])
            assert wrong.size == 0, f"{self.text}: {name} is wrong at byte {wrong[:4]}"
            compared += buffer.size
        for buffer, content in self._guards:
            assert (buffer.read() == content).all(), f"{self.text}: wrote beside its arrays"
        return compared

    def _after(self) -> dict[str, NDArray[Any]]:
        values = widened(self.before["g"], self.form)
        if self.pairs != "none":
            whole = np.zeros(self.count, np.float32)
            for index, value in zip(self.before["index"].tolist(), values, strict=True):
                whole[index] = value
            values = whole
        x = {name: Plain(self.before[name]) for name in FORMULAS[self.rule][2] if name != "g"}
        x["g"] = Plain(values)
        if self.device.config.gradient_scale:
            x["g"] = x["g"] * Plain.number(self.h["gradient_scale"])
        formula = "adam_paper" if self._in_the_papers_order else self.rule
        made = FORMULAS[formula][1](Plain, x, self.h)
        after: dict[str, NDArray[Any]] = {name: value.values for name, value in made.items()}
        if self.copy != "none":
            after["copy"] = narrowed(after["p"], self.copy)
        return after

    @property
    def _in_the_papers_order(self) -> bool:
        return self.rule == "adam" and self.device.config.order == "paper"

    def free(self) -> None:
        """Give the memory back."""
        for buffer in (*self.buffers.values(), *(buffer for buffer, _ in self._guards)):
            buffer.free()
        if self.out is not None:
            self.out.free()
