"""The harness of the driver's tests: arrays on a device, updates of them, and what these must give.

The optimizer's form, the registers of a step and the results in numpy come from the optimizer's
data and the golden model; nothing that a kernel wrote is taken for right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from nearstep import Pairs, Rounding
from nearstep.axdimm.device import AxdimmDevice
from nearstep.buffer import Buffer
from nearstep.updater.device import KernelDevice
from nearstep.updater.run import UpdateRun
from nearstep_sim.golden import blockwise, fp
from nearstep_sim.golden.rounding import Draw, round_stochastically
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.blockwise import SIGNED
from nearstep_spec.rule.optimizer import Form, Optimizer
from nearstep_spec.rule.rules import OPTIMIZERS
from nearstep_spec.updater.operands import array_bytes, element_bytes
from nearstep_spec.updater.registers import ARRAYS

from .patterns import FORMATS, SPECIALS, format_of, gradients, narrowed, widened

HYPER = {
    "lr": 3e-3,
    "betas": (0.9, 0.99),
    "eps": 1e-7,
    "weight_decay": 0.05,
    "decoupled_weight_decay": True,
    "step": 3,
}
"""Of a job's step of Adam: none is a default."""

BESIDE = 64
"""Elements on either side of a guarded array."""


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


@dataclass(frozen=True)
class Asked:
    """What a run was asked for: a form and its registers, with pairs or without, the scale of the
    gradients, a copy in a format, and how states are rounded in which step."""

    form: Form
    registers: Mapping[str, float]
    pairs: bool
    scale: float
    copy: Buffer | None
    copy_format: str
    rounding: Rounding | None
    step: int


class Job:
    """Arrays of one size on a device, what they must hold, and updates of them.

    On a DIMM the channel is in acceleration mode from `start` until arrays are looked at.

    Parameters
    ----------
    gradient : format of g, whose elements then are of any kind; None is numbers in float32.
    optimizer : of the job's own step.
    odd : some elements of the states, and scales of those in 8 bits, are special.
    guarded : arrays and copies lie inside of larger ones, of which the rest must not change.
    **hyper : hyper-parameters of it, where they are not those of `HYPER`.
    """

    def __init__(
        self,
        device: KernelDevice,
        count: int = 1001,
        seed: int = 1,
        *,
        channel: int = 0,
        gradient: str | None = None,
        arrays: Iterable[str] = ARRAYS,
        optimizer: str | Optimizer = "adam",
        odd: bool = False,
        guarded: bool = False,
        **hyper: object,
    ) -> None:
        print(f"seed {seed}")
        self.rng = np.random.default_rng(seed)
        self.device, self.count, self.channel, self.gradient = device, count, channel, gradient
        self.optimizer, self.hyper = optimizer, {**HYPER, **hyper}
        self.odd, self.beside = odd, BESIDE if guarded else 0
        stored = device.config.rule_set.whole.formats
        # g last: read as a longer format it reaches into no other array
        self.formats = {name: stored.get(name, "fp32") for name in arrays if name != "g"}
        self.formats["g"] = gradient or "fp32"
        self.asked: Asked | None = None
        self.last: UpdateRun | None = None
        self._mode = ExitStack()
        self._kept: list[tuple[Buffer, NDArray]] = []
        self._whole: list[Buffer] = []
        self._guarded: list[tuple[Buffer, NDArray]] = []
        self.before = self.numbers()
        self.buffers = {name: self._alloc(array) for name, array in self.before.items()}
        self.upload()

    def _alloc(self, like: NDArray) -> Buffer:
        """A buffer, within a larger one if it is guarded."""
        size = like.size + 2 * self.beside
        whole = self.device.alloc(size, like.dtype, channel=self.channel)
        self._whole.append(whole)
        if not self.beside:
            return whole
        whole.write(np.arange(size).astype(np.uint8).astype(like.dtype))
        self._guarded.append((whole, whole.read()))
        return whole[self.beside : self.beside + like.size]

    def numbers(self) -> dict[str, NDArray]:
        """New contents of all arrays, of many sizes."""
        made = {}
        for name, form in self.formats.items():
            if name == "g" and self.gradient is not None:
                made[name] = gradients(self.rng, self.count, form)
            else:
                values = self.rng.standard_normal(self.count)
                values *= 2.0 ** self.rng.integers(-20, 3, self.count)
                values = np.abs(values) if name in ("v", "v_max") else values
                values = values.astype(np.float32)
                if self.odd:
                    some = self.rng.random(self.count) < 0.01
                    values.view(np.uint32)[some] = self.rng.choice(SPECIALS, some.sum())
                    values = np.abs(values) if name in ("v", "v_max") else values
                made[name] = self._stored(values, form)
                if self.odd and form in SIGNED:
                    self._spoil(made[name])
        return made

    def _spoil(self, packed: NDArray[np.uint8]) -> None:
        """Give some groups another scale, and noise to scales of no element."""
        layout = self.device.block_layout
        for first in range(0, packed.size, layout.scale_bytes + layout.elements):
            head, codes = np.split(packed[first:][: layout.scale_bytes + layout.elements],
                                   [layout.scale_bytes])  # fmt: skip
            scales = -(-codes.size // 256)
            head[4 * scales :] = self.rng.integers(0, 256, head.size - 4 * scales)
            some = self.rng.random(scales) < 0.2
            head[: 4 * scales].view("u4")[some] = self.rng.choice(SPECIALS, some.sum())

    def _taken(self, packed: NDArray[np.uint8]) -> blockwise.Blockwise:
        return blockwise.unpack(packed, **asdict(self.device.block_layout))

    def _stored(self, values: NDArray[np.float32], form: str) -> NDArray:
        """float32 as an array of memory has them in a format."""
        if form in SIGNED:
            made = blockwise.quantize(values, signed=SIGNED[form])
            return blockwise.pack(made, **asdict(self.device.block_layout))
        return narrowed(values, form)

    def _loaded(self, array: NDArray, form: str) -> NDArray[np.float32]:
        """What an array of memory means."""
        if form in SIGNED:
            return blockwise.dequantize(self._taken(array), signed=SIGNED[form])
        return widened(array, form)

    def upload(self) -> None:
        """Write what the arrays held before the last run."""
        self.take_back()
        for name, array in self.before.items():
            self.buffers[name].write(array)
        self.asked = None

    def take_back(self) -> None:
        """The channel is the host's again."""
        self._mode.close()

    def free(self, *others: Buffer) -> None:
        """Give the memory back, that of pairs, copies and others, too."""
        for buffer in (*self._whole, *others):
            if not buffer.freed:
                buffer.free()
        for each in (self._whole, self._kept, self._guarded):
            each.clear()

    def put(self, array: NDArray) -> Buffer:
        """Another buffer, like the array and with its contents."""
        buffer = self.device.alloc(array.shape, array.dtype, channel=self.channel)
        self._whole.append(buffer)
        buffer.write(array)
        return buffer

    def copy(self, form: str) -> Buffer:
        """A buffer for a copy of p, into which nobody has written."""
        return self._alloc(np.empty(self.count, FORMATS[form][1]))

    def pairs(self, index: NDArray, values: NDArray, form: str) -> Pairs:
        """Pairs on the device, which no run changes; the host's copies stay in `index` and
        `values`."""
        self.index, self.values = index, values
        put = [self.put(each) for each in (index, values)]
        self._kept = list(zip(put, (index, values), strict=True))
        return Pairs(*put, form)

    def dense(self) -> NDArray[np.float32]:
        """The gradients that the last pairs stand for, one pair after the other."""
        made = np.zeros(self.before["p"].size, np.float32)
        wide = widened(self.values, format_of(self.values.dtype))
        for at, value in zip(self.index.tolist(), wide, strict=True):
            made[at] = value
        return made

    def start(
        self,
        optimizer: str | Optimizer | None = None,
        *,
        arrays: Iterable[str] | None = None,
        g: Buffer | Pairs | None = None,
        copy_out: Buffer | None = None,
        **options: object,
    ) -> UpdateRun:
        """Start a step of an optimizer with these options and hyper-parameters, or the job's own.

        The arrays are those of the rule unless they are named. Gradients are those of the job, or
        the pairs that were made last. bfloat16 is named to the device where it is there.
        """
        if optimizer is None:
            optimizer, options = self.optimizer, {**self.hyper, **options}
        known = self._known(optimizer)
        names = self._form(known, options).rule.arrays_in if arrays is None else arrays
        given: dict[str, object] = {name: self.buffers[name] for name in names}
        if g is not None:
            given["g"] = g
        source = getattr(given["g"], "value", given["g"])
        for option, buffer in (("gradient_format", source), ("copy_out_format", copy_out)):
            if getattr(buffer, "dtype", None) == np.uint16:
                options.setdefault(option, "bf16")
        if not (host_reaches(self.device) or self.device.channels[self.channel].accelerated):
            self._mode.enter_context(self.device.acceleration(self.channel))
        run = self.device.update(optimizer, given, copy_out=copy_out, **options)
        self.expect(optimizer, pairs=isinstance(g, Pairs), copy_out=copy_out, **options)
        self.last = run
        return run

    def run(self, optimizer: str | Optimizer | None = None, **options: object) -> UpdateRun:
        """A whole run, as of `start`, after which the channel is the host's."""
        with self._mode:
            return self.start(optimizer, **options).wait()

    def expect(
        self,
        optimizer: str | Optimizer,
        *,
        pairs: bool = False,
        copy_out: Buffer | None = None,
        copy_out_format: str | None = None,
        gradient_format: str | None = None,
        gradient_scale: float = 1.0,
        rounding: Rounding | None = None,
        step: int = 1,
        first: bool = False,
        **hyper: object,
    ) -> None:
        """Whoever starts it, this is the run whose results the arrays must hold."""
        known = self._known(optimizer)
        form = self._form(known, hyper)
        registers = form.registers(known.defaults | hyper, step, first)
        stored = "" if copy_out is None else copy_out_format or format_of(copy_out.dtype)
        self.asked = Asked(form, registers, pairs, gradient_scale, copy_out, stored, rounding, step)
        self.last = None

    def expected(self) -> dict[str, NDArray]:
        """What the arrays, and the copy, must hold after the last run."""
        asked = self.asked
        if asked is None:
            return dict(self.before)
        names = asked.form.rule.arrays_in
        given = {n: self._loaded(self.before[n], self.formats[n]) for n in names if n != "g"}
        g = self.dense() if asked.pairs else widened(self.before["g"], self.formats["g"])
        given["g"] = fp.mul32(g, np.full(g.size, asked.scale, np.float32))
        made = evaluate(asked.form.rule, given, asked.registers)
        after = self.before | {n: self._rounded(n, a, asked) for n, a in made.items()}
        if asked.copy is not None:
            after["copy"] = narrowed(made["p"], asked.copy_format)
        return after

    def _rounded(self, name: str, values: NDArray[np.float32], asked: Asked) -> NDArray:
        """A result as memory has it."""
        rounding = asked.rounding
        wanted = rounding is not None and self.formats[name] == "bf16"
        if not wanted or name not in (rounding.states or asked.form.rule.states):
            return self._stored(values, self.formats[name])
        draw = Draw(
            seed=rounding.seed,
            step=asked.step if rounding.step is None else rounding.step,
            stream=1 + asked.form.rule.arrays_out.index(name),
            block=self.device.config.block_elements,
            **asdict(rounding.numbering),
        )
        return round_stochastically(values, draw)

    def check(self, first: int = 0, stop: int | None = None) -> int:
        """Compare elements [first, stop) of the states, and the copy if there is one, with the
        results of the last run, bit for bit; and g, which stays as it was.

        Gives the number compared without g. If all are, the kernel must have read and written
        every array of the run once, and the results are what the next run begins with.
        """
        expected = self.expected()
        compared = self._compare(expected, first, stop)
        if (first, stop) == (0, None):
            if self.asked is not None and self.last is not None:
                self._check_counters(self.asked, self.last)
            self.before, self.asked = {name: expected[name] for name in self.before}, None
        return compared

    def check_untouched(self, first: int = 0) -> int:
        """Compare elements from `first`, and g, with what they were; the number without g."""
        return self._compare(self.before, first, None)

    def _beats(self, elements: int, form: str) -> int:
        """Beats of an array: in 8 bits, of the codes, and one of scales for each block."""
        config = self.device.config
        scales = -(-elements // config.block_elements) if form in SIGNED else 0
        return scales + -(-elements * element_bytes(form) // config.beat_bytes)

    def _check_counters(self, asked: Asked, run: UpdateRun) -> None:
        """The kernel read and wrote each array of the rule once, and no more."""
        count = self.before["p"].size
        written = [(count, self.formats[name]) for name in asked.form.rule.states]
        read = [*written, (count, self.formats["g"])]
        if asked.pairs:  # indices are checked before they are used
            number = self.values.size
            read[-1:] = [*[(number, "fp32")] * 2, (number, format_of(self.values.dtype))]
            assert run.duplicates == number - np.unique(self.index).size
        written += [(count, asked.copy_format)] if asked.copy is not None else []
        assert run.committed == count
        found = [run.counters["read_beats"], run.counters["write_beats"]]
        assert found == [sum(self._beats(*array) for array in each) for each in (read, written)]

    def _place(self, name: str, element: int | None, form: str) -> int | None:
        """The byte of an array at which an element begins, in 8 bits one that begins a block."""
        config = self.device.config
        if element is None or form not in SIGNED:
            return None if element is None else element * element_bytes(form)
        return array_bytes(config, form, element // config.block_elements * config.block_elements)

    def _compare(self, expected: Mapping[str, NDArray], first: int, stop: int | None) -> int:
        self.take_back()
        buffers, formats = dict(self.buffers), dict(self.formats)
        if "copy" in expected:
            buffers["copy"], formats["copy"] = self.asked.copy, self.asked.copy_format
        rule = "" if self.asked is None else f"{self.asked.form.rule.name} "
        compared = 0
        for name, buffer in sorted(buffers.items(), key=lambda each: each[0] != "g"):
            form = formats[name]
            part = slice(*(self._place(name, e, form) for e in (first, stop)))
            part = slice(None) if name == "g" else part
            found, wanted = (a.view(np.uint8)[part] for a in (buffer.read(), expected[name]))
            if found.tobytes() != wanted.tobytes():
                wrong = np.unique(np.flatnonzero(found != wanted) // element_bytes(form))
                raise AssertionError(
                    f"{rule}{name} of {self.count} is wrong at {first + wrong[:8]}"
                )
            elements = self.count if form in SIGNED else expected[name].size
            compared += len(range(elements)[first:stop]) if name != "g" else 0
        for buffer, array in self._kept:
            assert buffer.read().tobytes() == array.tobytes(), "pairs have changed"
        for whole, array in self._guarded:
            found = whole.read()
            for part in (slice(self.beside), slice(-self.beside, None)):
                assert found[part].tobytes() == array[part].tobytes(), "beside an array"
        return compared

    def _known(self, optimizer: str | Optimizer) -> Optimizer:
        if isinstance(optimizer, Optimizer):
            return optimizer
        ours = {each.name: each for each in self.device.config.rule_set.optimizers}
        return {**OPTIMIZERS, **ours}[optimizer]

    def _form(self, optimizer: Optimizer, hyper: Mapping[str, object]) -> Form:
        return optimizer.form(optimizer.defaults | hyper).ordered(self.device.config.order)
