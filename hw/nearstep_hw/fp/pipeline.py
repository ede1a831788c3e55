"""Feed-forward pipelines: each value has a stage, and delays are inserted at its uses."""

from collections.abc import Sequence
from dataclasses import dataclass

from amaranth.hdl import Cat, Const, Elaboratable, Module, Mux, Signal, Value, ValueLike
from amaranth.lib.memory import Memory

from nearstep_spec.errors import NearstepError

__all__ = ["Parts", "Pipeline", "PipelineError", "Staged", "Step", "spread"]

WORD_BITS = 64
"""A machine word of a simulator: wider signals cost much more."""

RING_WORDS = 3
"""A delay that would take this many words as a shift register is a ring buffer instead, which costs
the same for any length."""

LUT_RAM_WORDS, LUT_RAM_BITS = 16, 4
"""Entries and bits of a LUT RAM of the ECP5 (DPR16X4C)."""

COUNTED_STAGES = 5
"""Shortest delay of a counted ring; shorter ones are registers."""

DELAYS = ("ring", "shift", "counted")
"""Forms of delays, see `Pipeline`."""

DSP48E2 = (26, 17)
"""Bits of the unsigned factors of the DSP48E2 multiplier, which is 27 by 18 bits signed."""

MULT18X18D = (18, 18)
"""Bits of the unsigned factors of an ECP5 multiplier."""


class PipelineError(NearstepError, ValueError):
    """A value is used before its stage or in another pipeline, or an option is invalid."""


@dataclass(frozen=True, eq=False)
class Staged:
    """A value together with the pipeline stage at which it is present.

    Attributes
    ----------
    value : signal or constant, valid at `stage`.
    stage : int, or None for a constant (present at every stage).
    pipe : the value's pipeline.
    """

    value: Value
    stage: int | None
    pipe: "Pipeline"


@dataclass(frozen=True)
class Step:
    """One step of an operation, placed at a stage. `step(x)` is `x` delayed to this stage."""

    pipe: "Pipeline"
    stage: int

    def __call__(self, x: Staged) -> Value:
        return self.pipe.at(x, self.stage)

    def wrap(self, name: str, value: ValueLike) -> Staged:
        """Wrap a combinational result of this step in a signal called `name`."""
        return self.pipe.wrap(value, self.stage, name)

    def signal(self, name: str, value: ValueLike) -> Signal:
        """Return `value` as a signal called `name`, for use within this step.

        A signal can be sliced and used many times at no cost; slices of an expression repeat it.
        """
        signal = self.pipe.wrap(value, self.stage, name).value
        assert isinstance(signal, Signal)
        return signal


@dataclass(frozen=True)
class Parts:
    """Cost of a step that can be divided.

    Attributes
    ----------
    cost : cost of the whole step, in the unit of the other steps.
    parts : costs of its parts, in a unit common to all steps.
    """

    cost: float
    parts: tuple[float, ...]


class _Line:
    """All delayed copies (taps) of one value."""

    def __init__(self, value: Value, name: str) -> None:
        self.value = value
        self.name = name
        self.taps: dict[int, Signal] = {}


class Pipeline(Elaboratable):
    """Feed-forward pipeline inside the module `m`; one clock enable, no back-pressure.

    Arithmetic is written between `Staged` values. `at` delays a value to the stage
    where it is used; all users of a value share one chain of registers. The registers are made when
    `m` is elaborated (as its submodule), so that every use is known by then.

    *Timing*: a value delayed by n stages is what it was n enabled cycles before. Data registers
    have no reset; bits delayed by `valid` are reset to 0.

    Parameters
    ----------
    m : module that computes the steps. The delays become its submodule `name`.
    en : optional clock enable of every register of the pipeline.
    delay : `"ring"`: delays of many bits are small memories that share one pointer (fast to
        simulate, LUT-RAM in an FPGA). `"shift"`: registers only (SRL in an FPGA). `"counted"`:
        memories of up to 16 entries with a counter each, so that address wires are short.
    multiplier : bits of the unsigned factors of a multiplier of the FPGA.
    name : name of the submodule.

    Raises
    ------
    PipelineError : for an unknown `delay`, a value used before it exists, or a value of another
        pipeline.
    """

    def __init__(
        self,
        m: Module,
        *,
        en: ValueLike = 1,
        delay: str = "ring",
        multiplier: tuple[int, int] = DSP48E2,
        name: str = "delays",
    ) -> None:
        if delay not in DELAYS:
            raise PipelineError(f"Delay must be one of {', '.join(DELAYS)}, not {delay!r}")
        self.en = Value.cast(en)
        self.multiplier = multiplier
        self._m = m
        self._delay = delay
        self._lines: dict[int, tuple[Staged, _Line]] = {}
        self._valids: list[tuple[Value, list[Signal]]] = []
        m.submodules[name] = self

    def source(self, value: ValueLike, stage: int = 0, name: str = "") -> Staged:
        """Return a value that is present at `stage`."""
        return Staged(Value.cast(value), stage, self)

    def constant(self, value: ValueLike) -> Staged:
        """Return a value that is the same at every stage: a constant, or a register stable in
        use."""
        return Staged(Value.cast(value), None, self)

    def wrap(self, value: ValueLike, stage: int | None, name: str) -> Staged:
        """Wrap a combinational result of values at `stage` in a signal called `name`."""
        value = Value.cast(value)
        signal = Signal(value.shape(), name=name)
        self._m.d.comb += signal.eq(value)
        return Staged(signal, stage, self)

    def at(self, x: Staged, stage: int) -> Value:
        """Return `x` delayed to `stage`, which must not precede the stage of `x`."""
        if x.pipe is not self:
            raise PipelineError(f"{x.value!r} belongs to another pipeline")
        if x.stage is None or x.stage == stage:
            return x.value
        if stage < x.stage:
            raise PipelineError(f"{x.value!r} is present from stage {x.stage}, not at {stage}")
        if isinstance(x.value, Const):
            return x.value
        _, line = self._lines.setdefault(
            id(x), (x, _Line(x.value, getattr(x.value, "name", "value")))
        )
        if stage not in line.taps:
            line.taps[stage] = Signal(x.value.shape(), name=f"{line.name}_{stage}", reset_less=True)
        return line.taps[stage]

    def delayed(self, x: Staged, stage: int) -> Staged:
        """Delay `x` to `stage`; a constant becomes a value of that stage."""
        return Staged(self.at(x, stage), stage, self)

    def latest(self, *values: Staged) -> int:
        """Return the first stage at which all values are present; 0 if all are constants."""
        return max((x.stage for x in values if x.stage is not None), default=0)

    def valid(self, value: ValueLike, latency: int) -> Value:
        """Delay a bit by `latency` stages through registers that reset to 0."""
        if latency == 0:
            return Value.cast(value)
        words = [min(WORD_BITS, latency - k) for k in range(0, latency, WORD_BITS)]
        chain = [Signal(width, name=f"valid_{k}") for k, width in enumerate(words)]
        self._valids.append((Value.cast(value), chain))
        return chain[-1][-1]

    def steps(
        self, start: int, costs: Sequence[float | Parts], depth: int, *, whole: int | None = None
    ) -> list[Step | list[Step]]:
        """Place `len(costs)` successive steps into `depth` stages from `start` on.

        With fewer stages than steps, neighbours share a stage so that the greatest sum of `costs`
        (any unit) in a stage is least; with as many, each step has a stage to itself. With more
        stages than `whole`, steps with parts are divided, and the parts share stages as steps do.
        With stages to spare, registers are spread between the steps. The caller delays the result
        of the last step to `start + depth` with `delayed`, so that the result is registered.

        Parameters
        ----------
        depth : stages.
        whole : most stages with undivided steps; `len(costs)` by default.

        Returns
        -------
        list : a `Step` for each cost, or for `Parts` a list of them.
        """
        if not isinstance(depth, int) or depth < 1:
            raise PipelineError(f"Depth must be a positive integer, not {depth!r}")
        parts = [each.parts if isinstance(each, Parts) else (each,) for each in costs]
        if depth <= (len(costs) if whole is None else whole):
            sums = [each.cost if isinstance(each, Parts) else each for each in costs]
            stages = [k for k, each in zip(_spread(sums, depth), parts, strict=True) for _ in each]
        else:
            stages = _spread([cost for each in parts for cost in each], depth)
        steps = iter([Step(self, start + stage) for stage in stages])
        return [
            [next(steps) for _ in each.parts] if isinstance(each, Parts) else next(steps)
            for each in costs
        ]

    def elaborate(self, platform: object) -> Module:
        m = Module()
        pointer = Signal(16, name="pointer", reset_less=True)
        pointer_bits = 0
        for number, (x, line) in enumerate(self._lines.values()):
            stage, value = x.stage, line.value
            for tap in sorted(line.taps):
                target, gap = line.taps[tap], tap - stage
                name = f"{line.name}_{tap}_{number}"
                if self._delay == "counted" and _is_counted(len(value), gap):
                    self._counted(m, name, value, target, gap)
                elif self._delay != "ring" or _words(len(value), gap) < RING_WORDS:
                    self._shift(m, line.name, value, target, gap)
                else:
                    used = self._ring(m, name, value, target, gap, pointer)
                    pointer_bits = max(pointer_bits, used)
                stage, value = tap, target
        if pointer_bits:
            m.d.sync += pointer[:pointer_bits].eq(
                Mux(self.en, pointer[:pointer_bits] + 1, pointer[:pointer_bits])
            )
        for value, chain in self._valids:
            for word in chain:
                m.d.sync += word.eq(Mux(self.en, Cat(value, word)[: len(word)], word))
                value = word[-1]
        return m

    def _register(self, m: Module, target: Signal, value: Value) -> None:
        m.d.sync += target.eq(Mux(self.en, value, target))

    def _shift(self, m: Module, name: str, value: Value, target: Signal, gap: int) -> None:
        """Delay through `gap` registers, packed into as few words as hold whole copies."""
        width = len(target)
        inner = gap - 1
        while inner:
            count = max(1, min(inner, WORD_BITS // width))
            word = Signal(width * count, name=f"{name}_shift", reset_less=True)
            self._register(m, word, Cat(value, word)[: len(word)])
            value = word[-width:]
            inner -= count
        self._register(m, target, value)

    def _counted(self, m: Module, name: str, value: Value, target: Signal, gap: int) -> None:
        """Delay through memories, each read and then written at its counter."""
        parts = -(-gap // (LUT_RAM_WORDS + 1))
        for part in range(parts):
            stages = (gap + part) // parts
            entries = stages - 1
            count = Signal(range(entries), name=f"{name}_count_{part}", reset_less=True)
            through = target
            if part < parts - 1:
                through = Signal(len(target), name=f"{name}_{part}", reset_less=True)
            m.submodules[f"{name}_ring_{part}"] = memory = Memory(
                shape=len(target), depth=entries, init=[], attrs={"ram_style": "distributed"}
            )
            write = memory.write_port()
            read = memory.read_port(domain="sync")
            m.d.comb += [
                write.en.eq(self.en),
                write.addr.eq(count),
                write.data.eq(value),
                read.en.eq(self.en),
                read.addr.eq(count),
                through.eq(read.data),
            ]
            self._register(m, count, Mux(count == entries - 1, 0, count + 1))
            value = through

    def _ring(
        self, m: Module, name: str, value: Value, target: Signal, gap: int, pointer: Signal
    ) -> int:
        """Delay through a memory written at `pointer` and read `gap - 1` entries behind; return the
        bits of the pointer used.
        """
        behind = gap - 1
        bits = max(1, (behind - 1).bit_length())
        m.submodules[f"{name}_ring"] = memory = Memory(
            shape=len(target), depth=1 << bits, init=[], attrs={"ram_style": "distributed"}
        )
        write = memory.write_port()
        read = memory.read_port(domain="sync")
        m.d.comb += [
            write.en.eq(self.en),
            write.addr.eq(pointer),
            write.data.eq(value),
            read.en.eq(self.en),
            read.addr.eq(pointer - behind),
            target.eq(read.data),
        ]
        return bits


def _is_counted(width: int, stages: int) -> bool:
    """Return whether memories are smaller than registers: 6 LUTs a memory, some 4 its counter."""
    memories = -(-width // LUT_RAM_BITS)
    return stages >= COUNTED_STAGES and width * (stages - 1) > 6 * memories + 10


def _words(width: int, stages: int) -> int:
    """Return the words of a delay's shift register, each of as many whole copies as fit."""
    return -(-stages // max(1, WORD_BITS // width))


def spread(steps: Sequence[Step], costs: Sequence[float]) -> list[Step]:
    """Return the step of each item: successive items in successive steps, so that the greatest sum
    of `costs` in a stage is least.
    """
    stages = list(dict.fromkeys(steps))
    return [stages[k] for k in _partition(costs, min(len(stages), len(costs)))]


def _spread(costs: Sequence[float], depth: int) -> list[int]:
    """Return the stage of each item; items share a stage only if stages are too few."""
    count = len(costs)
    if depth >= count:
        return [k * depth // count for k in range(count)]
    return _partition(costs, depth)


def _partition(costs: Sequence[float], parts: int) -> list[int]:
    """Return the part of each item, for contiguous, non-empty parts whose greatest sum is least."""
    count = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [[float("inf")] * (parts + 1) for _ in range(count + 1)]
    cut = [[0] * (parts + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for end in range(1, count + 1):
        for part in range(1, min(parts, end) + 1):
            for begin in range(part - 1, end):
                worst = max(best[begin][part - 1], total[end] - total[begin])
                if worst < best[end][part]:
                    best[end][part], cut[end][part] = worst, begin
    stages = [0] * count
    end = count
    for part in range(parts, 0, -1):
        begin = cut[end][part]
        stages[begin:end] = [part - 1] * (end - begin)
        end = begin
    return stages
