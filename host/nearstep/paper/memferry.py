"""Section V of the MemFerry paper: what is printed, beside what is modelled.

*Modelled*: profiles by roofline (`nearstep.memferry.modelled`) on the machines of the platform
files, plans by `nearstep.memferry.planner`, times of one iteration by the cost model. No constant
is fitted. What neither the paper nor a datasheet says is in `ASSUMPTIONS`, and what that does to
the rows in `sensitivity`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from nearstep.memferry.cost import Costs
from nearstep.memferry.modelled import Setup, profile
from nearstep.memferry.planner import Planned, make
from nearstep.memferry.profile import Profile
from nearstep.memferry.work import GPU, Iterations, Shared, native, once, steady
from nearstep.work.executor import execute
from nearstep.work.timeline import Timeline
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import Figure, Platform
from nearstep_spec.platform.models import MODELS
from nearstep_spec.platform.transformer import Transformer

ASSUMPTIONS = (
    "Parameters and gradients are fp32, matrix products TF32 on the A100 and fp32 on the V100: the "
    "defaults of PyTorch 1.9; all at the datasheet's peak.",
    "Batches and sequences of figures 9, 10 and 12 are not printed: 8 x 512, GPT-2 8 x 1024.",
    "Shapes of TransformerXL are not printed but for ranges: GPT blocks of hidden 2048 (4096 from "
    "4 billion parameters), a vocabulary of 32768 (130528), sequence 512; as many as fit the size.",
    "The host's memory is not printed: the optimizer moves 28 bytes a parameter at eight channels "
    "of DDR4-3200 on the larger machine, and at two of DDR4-2666 on the smaller one.",
    "DeepSpeed is modelled as native ZeRO-Offload: what its gradient buffers cost is not printed. "
    "Native updates when all gradients have come; nothing overlaps the next iteration.",
    "Activations are all kept, as Korthikanti et al. count them; nothing is computed again.",
    "On eight GPUs each has an eighth of the batch; parameters and gradients are scattered and "
    "gathered, which takes each link as long as one copy; the host updates as on one GPU.",
)
HOST_PARAMS_PER_S = {"memferry-a100": 8 * 25.6e9 / 28, "memferry-v100": 2 * 21.328e9 / 28}
MODELS_OF_FIGURE_9 = ("bert-base", "roberta-base", "bert-large", "gpt2-medium")
SMALL, LARGE = MODELS_OF_FIGURE_9[:2], MODELS_OF_FIGURE_9[2:]
MOST_STATES = 400


@dataclass(frozen=True, kw_only=True)
class Options:
    """Assumptions that can be changed.

    Attributes
    ----------
    dtype : None: as `ASSUMPTIONS` has it for the machine.
    reads : of matrices by direct host access.
    host : factor on the rate of the optimizer on the host.
    flops : factor on that of the GPU.
    batch : factor on the batch.
    recompute : activations are computed again in backward: outputs of layers are kept, and all of
        one layer. Times stay.
    """

    dtype: str | None = None
    reads: str = "wave"
    host: float = 1.0
    flops: float = 1.0
    batch: int = 1
    recompute: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine.

    Attributes
    ----------
    model
    machine : name.
    batch, sequence
    options
    """

    model: Transformer
    machine: str = "memferry-a100"
    batch: int = 8
    sequence: int = 512
    options: Options = Options()

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.profile)

    @cached_property
    def platform(self) -> Platform:
        machine = load(self.machine)
        gpus = {
            name: replace(
                part,
                flops={
                    dtype: Figure(
                        value=float(each) * self.options.flops,
                        origin=each.origin,
                        source=each.source,
                    )
                    for dtype, each in part.flops.items()
                },
            )
            for name, part in machine.processors.items()
        }
        return replace(machine, processors=gpus)

    @cached_property
    def profile(self) -> Profile:
        larger = self.machine == "memferry-a100"
        setup = Setup(
            batch=self.batch * self.options.batch,
            sequence=self.sequence,
            dtype=self.options.dtype or ("tf32" if larger else "fp32"),  # type: ignore[arg-type]
            gpu="gpu0" if larger else "gpu",
            reads=self.options.reads,  # type: ignore[arg-type]
            host_params_per_s=HOST_PARAMS_PER_S[self.machine] * self.options.host,
        )
        return profile(self.platform, self.model, setup)

    @cached_property
    def memferry(self) -> Planned:
        return make(self.profile, decisions="keep", most_states=MOST_STATES)

    @cached_property
    def go(self) -> Planned:
        """GO-MemFerry as in section V-A: all gradients are written to the host."""
        return make(self.profile, reserve=0.0, most_states=MOST_STATES)

    @cached_property
    def native_s(self) -> float:
        """Of an iteration of ZeRO-Offload."""
        return self._native.makespan / 1e12

    @cached_property
    def _native(self) -> Timeline:
        return once(self.costs, native(self.costs), updates="all-gradients")

    @property
    def speedup(self) -> float:
        """Of MemFerry over native ZeRO-Offload."""
        return self.native_s * 1e12 / self.memferry.total

    @property
    def go_speedup(self) -> float:
        return self.native_s * 1e12 / self.go.total

    @property
    def busy(self) -> tuple[float, float, float]:
        """Share of an iteration in which the GPU computes: native, MemFerry, GO-MemFerry."""
        ours = [once(self.costs, each.decisions) for each in (self.memferry, self.go)]
        one, two, three = (each.busy(GPU) / each.makespan for each in (self._native, *ours))
        return one, two, three

    @property
    def activation_bytes(self) -> int:
        if not self.options.recompute:
            return self.profile.activation_bytes
        layers = self.model.layers(self.batch * self.options.batch, self.sequence, 4)
        kept = sum(layer.output_bytes for layer in layers)
        return kept + max(layer.activation_bytes for layer in layers)

    @property
    def memory(self) -> tuple[int, int, int]:
        """Peak of the GPU's memory in bytes: native, MemFerry, GO-MemFerry."""
        plans = (native(self.costs), self.memferry.decisions, self.go.decisions)
        one, two, three = (self.costs.bytes_of(each) + self.activation_bytes for each in plans)
        return one, two, three


def sized(billions: float) -> Transformer:
    """A model of about so many billion parameters, as `ASSUMPTIONS` has them."""
    large = billions >= 4
    hidden, vocabulary = (4096, 130528) if large else (2048, 32768)
    blocks = max(round((billions * 1e9 - vocabulary * hidden) / (12 * hidden**2)), 1)
    return Transformer(
        name=f"gpt-{billions:g}b",
        source="MemFerry paper, section V-A: ranges of TransformerXL",
        stated=billions * 1e9,
        blocks=blocks,
        hidden=hidden,
        heads=hidden // 64,
        vocabulary=vocabulary,
        positions=4096,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A printed figure.

    Attributes
    ----------
    name, section
    unit : `x` of a ratio, `%`, or `s`.
    paper, modelled
    """

    name: str
    section: str
    unit: str
    paper: float
    modelled: float

    @property
    def error(self) -> float:
        """Of percentages their difference in points, of others a fraction of what is printed."""
        if self.unit == "%":
            return self.modelled - self.paper
        return self.modelled / self.paper - 1


class Evaluation:
    """Section V under some assumptions.

    Parameters
    ----------
    options
    """

    def __init__(self, options: Options = Options()) -> None:
        self.options = options
        self._cases: dict[object, Case] = {}

    def case(self, model: Transformer, machine: str = "memferry-a100", **size: int) -> Case:
        key = (model.name, machine, *size.items())
        if key not in self._cases:
            made = Case(model=model, machine=machine, options=self.options, **size)
            self._cases[key] = made
        return self._cases[key]

    def named(self, name: str) -> Case:
        """A model of figure 9."""
        model = MODELS[name]
        assert isinstance(model, Transformer)
        return self.case(model, sequence=1024 if name == "gpt2-medium" else 512)

    def figure_9(self) -> Iterator[Row]:
        small = [100 * (self.named(name).speedup - 1) for name in SMALL]
        large = [100 * (self.named(name).speedup - 1) for name in LARGE]
        for name, values, low, high in (
            ("Bert-base and Roberta", small, 21.7, 68.7),
            ("Bert-large and GPT-2", large, 7.1, 32.1),
        ):
            where = "V-B, figure 9"
            yield _row(f"{name}: speed, least", where, "%", low, min(values))
            yield _row(f"{name}: speed, most", where, "%", high, max(values))
        yield _row("MemFerry, up to", "abstract", "x", 1.68, 1 + max(small + large) / 100)
        slower = [each for name in SMALL for each in _slower(self.named(name))]
        yield _row("Backward by DHA, slower, most", "III-B", "%", 10.0, 100 * fmean(slower))

    def utilisation(self) -> Iterator[Row]:
        one, two, three = self.named("gpt2-medium").busy
        where = "V-B, figure 10(a)"
        yield _row("GPT-2: GPU busy, ZeRO-Offload", "III-A", "%", 63.1, 100 * one)
        yield _row("MemFerry over DeepSpeed", where, "%", 18.5, 100 * (two / one - 1))
        yield _row("MemFerry over native", where, "%", 1.5, 100 * (two / one - 1))
        yield _row("GO-MemFerry over DeepSpeed", where, "%", 27.0, 100 * (three / one - 1))

    def memory(self) -> Iterator[Row]:
        found = {name: self.named(name).memory for name in MODELS_OF_FIGURE_9}

        def less(name: str, here: int, there: int = 0) -> float:
            return 100 * (found[name][here] / found[name][there] - 1)

        where = "V-C, figure 12"
        small = fmean(less(name, 1) for name in SMALL)
        yield _row("MemFerry, smaller models", where, "%", -40.1, small)
        go = fmean(less(name, 2, 1) for name in SMALL)
        yield _row("GO-MemFerry beside MemFerry", where, "%", -17.6, go)
        yield _row("MemFerry, GPT-2", where, "%", -1.4, less("gpt2-medium", 1))
        for here, name, paper in ((1, "MemFerry, mean", -25.4), (2, "GO-MemFerry, mean", -41.6)):
            yield _row(name, where, "%", paper, fmean(less(each, here) for each in found))

    def sizes(self) -> Iterator[Row]:
        cases = [self.case(sized(each)) for each in (0.7, 1.0, 2.4, 4.3, 6.7)]
        where = "V-D, figure 13"
        yield _row("mean of sizes", where, "x", 1.32, fmean(each.speedup for each in cases))
        yield _row("1 billion", where, "x", 1.37, cases[1].speedup)
        yield _row("6.7 billion", where, "x", 1.26, cases[-1].speedup)
        go = fmean(each.memory[2] / each.memory[0] - 1 for each in cases)
        yield _row("GO-MemFerry, memory", where, "%", -21.6, 100 * go)
        saved = [100 * (each.memory[2] / each.memory[0] - 1) for each in cases]
        yield _row("GO-MemFerry, memory, least saved", where, "%", -18.0, max(saved))
        yield _row("GO-MemFerry, memory, most saved", where, "%", -22.0, min(saved))

    def v100(self) -> Iterator[Row]:
        cases = [self.case(sized(each), "memferry-v100", batch=1) for each in (0.7, 1.0, 1.7, 2.4)]
        where = "V-C, figure 11"
        yield _row("V100: MemFerry", where, "x", 1.12, fmean(each.speedup for each in cases))
        go = fmean(each.go_speedup - 1 for each in cases)
        yield _row("V100: GO-MemFerry, speed", where, "%", -3.4, 100 * go)
        ratio = self._largest(2) / self._largest(0)
        yield _row("V100: largest model", where, "x", 1.52, ratio)

    def _largest(self, which: int) -> float:
        """Parameters of the largest model whose peak fits into the V100."""
        capacity = float(load("memferry-v100").processors["gpu"].memory_bytes or 0)
        low, high = 1, 400
        base = sized(1.0)
        while high - low > 1:
            blocks = (low + high) // 2
            model = replace(base, name=f"{blocks} blocks", blocks=blocks)
            case = Case(model=model, machine="memferry-v100", batch=1, options=self.options)
            costs = case.costs
            if which == 0:
                decisions = native(costs)
            else:
                planned = make(case.profile, reserve=0.0, planner="greedy")
                decisions = tuple(planned.decisions)
            peak = costs.bytes_of(decisions) + case.activation_bytes
            low, high = (blocks, high) if peak <= capacity else (low, blocks)
        return low * 12 * base.hidden**2 + base.vocabulary * base.hidden

    def gpus(self) -> Iterator[Row]:
        one = self.case(sized(4.3))
        eight = self.case(sized(4.3), batch=1)
        where = "V-D, figure 14(a)"
        yield _row("4.3 billion, 1 GPU", where, "s", 5.41, one.memferry.total / 1e12)
        yield _row("4.3 billion, 8 GPUs", where, "s", 4.12, eight.memferry.total / 1e12)
        gain = 100 * (eight.speedup - 1)
        yield _row("8 GPUs: over DeepSpeed", where, "%", 28.1, gain)
        yield _row("8 GPUs: over native", where, "%", 19.1, gain)
        large = self.case(sized(6.7), batch=16)
        where = "V-D, figure 14(b)"
        yield _row("6.7 billion, batch 128, 8 GPUs", where, "x", 1.21, large.speedup)
        yield _row("the same, GO-MemFerry", where, "x", 1.16, large.go_speedup)

    def rows(self) -> Iterator[Row]:
        """All, as each is modelled."""
        for each in (
            self.figure_9,
            self.utilisation,
            self.memory,
            self.v100,
            self.sizes,
            self.gpus,
        ):
            yield from each()


def _slower(case: Case) -> Iterator[float]:
    """By how much backward of a model is longer with all parameters in host memory."""
    layers = case.profile.layers
    there = sum(each.backward_dha_s or each.backward_s for each in layers)
    yield there / sum(each.backward_s for each in layers) - 1


def _row(name: str, section: str, unit: str, paper: float, modelled: float) -> Row:
    return Row(name=name, section=section, unit=unit, paper=paper, modelled=modelled)


VARIANTS: Mapping[str, Options] = {
    "as assumed": Options(),
    "fp16": Options(dtype="fp16"),
    "no TF32": Options(dtype="fp32"),
    "half of the GPU's FLOP/s": Options(flops=0.5),
    "host updates at a quarter": Options(host=0.25),
    "matrices read once": Options(reads="once"),
    "matrices read by each tile": Options(reads="tile"),
    "four times the batch": Options(batch=4),
    "activations computed again": Options(recompute=True),
}

SENSITIVE: Mapping[str, tuple[str, Callable[[Case], float]]] = {
    "speedup": ("x", lambda case: case.speedup),
    "GO speedup": ("x", lambda case: case.go_speedup),
    "busy, native": ("%", lambda case: 100 * case.busy[0]),
    "memory, MemFerry": ("%", lambda case: 100 * (case.memory[1] / case.memory[0] - 1)),
    "memory, GO": ("%", lambda case: 100 * (case.memory[2] / case.memory[0] - 1)),
}


@dataclass(frozen=True)
class Sensitivity:
    """One model under one changed assumption.

    Attributes
    ----------
    variant, model
    values : by `SENSITIVE`.
    overlapped : speedup if updates overlap the next iteration's loads, in both systems.
    shared : speedup if direct host access and copies share the link.
    """

    variant: str
    model: str
    values: Mapping[str, float]
    overlapped: float
    shared: float


def sensitivity(models: tuple[str, ...] = MODELS_OF_FIGURE_9) -> Iterator[Sensitivity]:
    """What each assumption decides.

    Parameters
    ----------
    models : of figure 9.
    """
    for variant, options in VARIANTS.items():
        evaluation = Evaluation(options)
        for name in models:
            case = evaluation.named(name)
            values = {key: of(case) for key, (_, of) in SENSITIVE.items()}
            yield Sensitivity(variant, name, values, _overlapped(case), _shared(case))


def _overlapped(case: Case) -> float:
    """The better one of MemFerry's two orders of updates, beside native's."""
    base = Iterations(case.costs, native(case.costs), updates="all-gradients")
    ours = [
        steady(Iterations(case.costs, case.memferry.decisions, updates=each)).seconds
        for each in ("after-backward", "all-gradients")
    ]
    return steady(base).seconds / min(ours)


def _shared(case: Case) -> float:
    """MemFerry's plan on a link that reads of the GPU take from the copies."""
    ends = "cpu", "gpu0" if case.machine == "memferry-a100" else "gpu"
    down, up = (
        min(hop.bytes_per_s for hop in case.platform.route(*way)) for way in (ends, ends[::-1])
    )
    link = Shared(down_bytes_per_s=down, up_bytes_per_s=up)
    iterations = Iterations(case.costs, case.memferry.decisions, shared=link)
    iterations.add()
    return case.native_s / (execute(iterations.graph).makespan / 1e12)
