"""Section V of the MemFerry paper: printed figures beside modelled ones.

*Modelled*: profiles by roofline (`nearstep.memferry.modelled`) on the machines of the platform
files, plans by `nearstep.memferry.planner`, times of one iteration by the cost model. No constant
is fitted. `ASSUMPTIONS` apply where paper and datasheets are silent, and `sensitivity` shows their
effect on the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from nearstep.memferry.work import Iterations, Shared, native, steady
from nearstep.paper.memferry_case import BUCKET_ELEMENTS, MemferryCase, Options, sized
from nearstep.paper.rows import Row, row, spread
from nearstep.work.executor import execute
from nearstep_spec.platform.load import load
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
    "Native ZeRO-Offload sends gradients layer by layer, and updates when all have been received; "
    "nothing overlaps the next iteration.",
    "DeepSpeed has its defaults: gradients are collected in a bucket of 500,000,000, which is "
    "sent when full or after backward, while the GPU waits (overlap_comm is off).",
    "Memory is parameters, gradients and activations (section II-B), DeepSpeed's gradients its "
    "bucket; activations are all kept, as Korthikanti et al. count them (III-B: they are retained; "
    "II-A counts the peak of computing them again, which is in the sensitivity table).",
    "A baseline without a name is DeepSpeed; bounds over baselines are over both.",
    "On eight GPUs each has an eighth of the batch; parameters and gradients are scattered and "
    "gathered, which takes each link as long as one copy; the host updates as on one GPU.",
)
MODELS_OF_FIGURE_9 = ("bert-base", "roberta-base", "bert-large", "gpt2-medium")
SMALL, LARGE = MODELS_OF_FIGURE_9[:2], MODELS_OF_FIGURE_9[2:]
NOT_MODELLED = {
    "GPU busy without offloading: 99 % (I), above 80 % (III-A)": "a model in GPU memory never "
    "waits here, so the model has 100 %; the paper counts multiprocessors",
    "DeepSpeed's latency to make and free its buffer, considerable (V-A)": "no number is "
    "printed, and PyTorch's allocator keeps what is freed",
    "Bars and curves of figures 3 and 9 to 14": "the text does not give them",
    "Figure 10(b): time over the reserve factor is convex": "no number is printed; "
    "`.venv/bin/nearstep plan --reserve` shows the curve",
}
"""Printed figures without a row, and the reasons."""


class Evaluation:
    """Section V under some assumptions."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self._cases: dict[object, MemferryCase] = {}

    def case(self, model: Transformer, machine: str = "memferry-a100", **size: Any) -> MemferryCase:
        key = (model.name, machine, *size.items())
        if key not in self._cases:
            made = MemferryCase(model=model, machine=machine, options=self.options, **size)
            self._cases[key] = made
        return self._cases[key]

    def named(self, name: str) -> MemferryCase:
        """Case of a model of figure 9."""
        model = MODELS[name]
        assert isinstance(model, Transformer)
        return self.case(model, sequence=1024 if name == "gpt2-medium" else 512)

    def figure_9(self) -> Iterator[Row]:
        where = "V-B, figure 9"
        for title, models, low, high in (
            ("All models", MODELS_OF_FIGURE_9, 10.0, 40.0),
            ("Bert-base and Roberta", SMALL, 21.7, 68.7),
            ("Bert-large and GPT-2", LARGE, 7.1, 32.1),
        ):
            cases = [self.named(name) for name in models]
            values = [100 * (v - 1) for each in cases for v in (each.speedup, each.native_speedup)]
            yield from spread(f"{title}: speed", where, low, high, values, "%")
        every = [self.named(name) for name in MODELS_OF_FIGURE_9]
        fastest = max(each.speedup for each in every)
        yield row("MemFerry, up to", "abstract", "x", 1.68, fastest)
        slower = [100 * _slower(each) for each in every]
        yield from spread("Backward by DHA, slower", "III-B", 5.0, 10.0, slower, "%")

    def utilisation(self) -> Iterator[Row]:
        busy = self.named("gpt2-medium").busy
        bert = self.named("bert-base").busy
        where = "V-B, figure 10(a)"
        yield row("Bert-base: GPU busy, DeepSpeed", "I", "%", 63.0, 100 * bert.deepspeed)
        yield row("GPT-2: GPU busy, DeepSpeed", "III-A", "%", 63.1, 100 * busy.deepspeed)
        for name, paper, ours, base in (
            ("MemFerry over DeepSpeed", 18.5, busy.memferry, busy.deepspeed),
            ("MemFerry over native", 1.5, busy.memferry, busy.native),
            ("GO-MemFerry over DeepSpeed", 27.0, busy.go, busy.deepspeed),
        ):
            yield row(f"GPT-2, GPU busy: {name}", where, "%", paper, 100 * (ours / base - 1))
        every = [self.named(name).busy for name in MODELS_OF_FIGURE_9]
        most = max(max(each.memferry, each.go) / each.deepspeed for each in every)
        yield row("GPU busy over DeepSpeed, up to", "I", "x", 1.27, most)

    def memory(self) -> Iterator[Row]:
        found = {name: self.named(name).memory for name in MODELS_OF_FIGURE_9}
        ours = {name: 100 * (each.memferry / each.deepspeed - 1) for name, each in found.items()}
        go = {name: 100 * (each.go / each.deepspeed - 1) for name, each in found.items()}
        beside = [100 * (found[name].go / found[name].memferry - 1) for name in SMALL]
        where = "V-C, figure 12"
        small = fmean(ours[name] for name in SMALL)
        yield row("Memory: MemFerry, smaller models", where, "%", -40.1, small)
        yield row("Memory: GO-MemFerry beside MemFerry", where, "%", -17.6, fmean(beside))
        yield row("Memory: MemFerry, GPT-2", where, "%", -1.4, ours["gpt2-medium"])
        yield row("Memory: MemFerry, mean", where, "%", -25.4, fmean(ours.values()))
        yield row("Memory: GO-MemFerry, mean", where, "%", -41.6, fmean(go.values()))
        yield row("Memory: MemFerry, up to", "I", "%", -61.7, min(ours.values()))
        yield row("Memory: GO-MemFerry, mean", "I", "%", -20.1, fmean(go.values()))
        yield row("Memory: GO-MemFerry, up to", "I", "%", -74.4, min(go.values()))

    def sizes(self) -> Iterator[Row]:
        cases = [self.case(sized(each)) for each in (0.7, 1.0, 2.4, 4.3, 6.7)]
        where = "V-D, figure 13"
        yield row("mean of sizes", where, "x", 1.32, fmean(each.speedup for each in cases))
        yield row("1 billion", where, "x", 1.37, cases[1].speedup)
        yield row("6.7 billion", where, "x", 1.26, cases[-1].speedup)
        saved = [100 * (each.memory.go / each.memory.deepspeed - 1) for each in cases]
        yield row("GO-MemFerry, memory", where, "%", -21.6, fmean(saved))
        yield row("GO-MemFerry, memory, least saved", where, "%", -18.0, max(saved))
        yield row("GO-MemFerry, memory, most saved", where, "%", -22.0, min(saved))

    def v100(self) -> Iterator[Row]:
        cases = [self.case(sized(each), "memferry-v100", batch=1) for each in (0.7, 1.0, 1.7, 2.4)]
        where = "V-C, figure 11"
        yield row("V100: MemFerry", where, "x", 1.12, fmean(each.speedup for each in cases))
        go = fmean(each.go_speedup - 1 for each in cases)
        yield row("V100: GO-MemFerry, speed", where, "%", -3.4, 100 * go)
        others = [self._largest(name) for name in ("deepspeed", "native", "memferry")]
        yield row("V100: largest without GO, billions", where, "B", 2.4, max(others) / 1e9)
        ratio = self._largest("go") / others[0]
        yield row("V100: GO's largest over DeepSpeed's", where, "x", 1.52, ratio)

    def _largest(self, system: str) -> float:
        """Parameters of the largest model whose peak fits into the V100, by greedy plans."""
        capacity = float(load("memferry-v100").processors["gpu"].memory_bytes or 0)
        low, high = 1, 400
        base = sized(1.0)
        while high - low > 1:
            blocks = (low + high) // 2
            model = replace(base, name=f"{blocks} blocks", blocks=blocks)
            peak = getattr(
                self.case(model, "memferry-v100", batch=1, planner="greedy").memory, system
            )
            low, high = (blocks, high) if peak <= capacity else (low, blocks)
        return low * 12 * base.hidden**2 + base.vocabulary * base.hidden

    def gpus(self) -> Iterator[Row]:
        one = self.case(sized(4.3))
        eight = self.case(sized(4.3), batch=1)
        where = "V-D, figure 14(a)"
        yield row("4.3 billion, 1 GPU", where, "s", 5.41, one.seconds.memferry)
        yield row("4.3 billion, 8 GPUs", where, "s", 4.12, eight.seconds.memferry)
        yield row("8 GPUs: over DeepSpeed", where, "%", 28.1, 100 * (eight.speedup - 1))
        yield row("8 GPUs: over native", where, "%", 19.1, 100 * (eight.native_speedup - 1))
        large = self.case(sized(6.7), batch=16)
        where = "V-D, figure 14(b)"
        yield row("6.7 billion, batch 128, 8 GPUs", where, "x", 1.21, large.speedup)
        yield row("the same, GO-MemFerry", where, "x", 1.16, large.go_speedup)

    def rows(self) -> Iterator[Row]:
        """Model all rows."""
        parts = (self.figure_9, self.utilisation, self.memory, self.v100, self.sizes, self.gpus)
        for part in parts:
            yield from part()


def _slower(case: MemferryCase) -> float:
    """Relative increase of backward with all parameters in host memory."""
    layers = case.profile.layers
    there = sum(each.backward_dha_s or each.backward_s for each in layers)
    return there / sum(each.backward_s for each in layers) - 1


VARIANTS: Mapping[str, Options] = {
    "as assumed": Options(),
    "fp16": Options(dtype="fp16"),
    "no TF32": Options(dtype="fp32"),
    "half of the GPU's FLOP/s": Options(flops=0.5),
    "host updates at a quarter": Options(host=0.25),
    "matrices read once": Options(reads="once"),
    "matrices read by each tile": Options(reads="tile"),
    "four times the batch": Options(batch=4),
    "a quarter of the batch": Options(batch=0.25),
    "activations computed again": Options(recompute=True),
    "DeepSpeed: bucket of 200 million": Options(bucket=2 * BUCKET_ELEMENTS // 5),
    "DeepSpeed: two buckets, overlap_comm": Options(beside=True),
    "DeepSpeed: no bucket, as native": Options(bucket=None),
}

SENSITIVE: Mapping[str, tuple[str, Callable[[MemferryCase], float]]] = {
    "over DeepSpeed": (":.2f}", lambda case: case.speedup),
    "over native": (":.2f}", lambda case: case.native_speedup),
    "GO over DeepSpeed": (":.2f}", lambda case: case.go_speedup),
    "busy, DeepSpeed": (":.1f} %", lambda case: 100 * case.busy.deepspeed),
    "memory, MemFerry": (
        ":.1f} %",
        lambda case: 100 * (case.memory.memferry / case.memory.deepspeed - 1),
    ),
    "memory, GO": (":.1f} %", lambda case: 100 * (case.memory.go / case.memory.deepspeed - 1)),
}


@dataclass(frozen=True)
class Sensitivity:
    """One model under one changed assumption.

    Attributes
    ----------
    values : by `SENSITIVE`.
    overlapped : speedup over native if updates overlap the next iteration's loads, in both systems.
    shared : speedup over native if direct host access and copies share the link.
    """

    variant: str
    model: str
    values: Mapping[str, float]
    overlapped: float
    shared: float


def evaluations() -> Mapping[str, Evaluation]:
    """Evaluations of section V under each of `VARIANTS`."""
    return {variant: Evaluation(options) for variant, options in VARIANTS.items()}


def sensitivity(
    models: tuple[str, ...] = MODELS_OF_FIGURE_9, under: Mapping[str, Evaluation] | None = None
) -> Iterator[Sensitivity]:
    """Evaluate models of figure 9 under each assumption; `under` are `evaluations` to reuse."""
    for variant, evaluation in (under or evaluations()).items():
        for name in models:
            case = evaluation.named(name)
            values = {key: of(case) for key, (_, of) in SENSITIVE.items()}
            yield Sensitivity(variant, name, values, _overlapped(case), _shared(case))


def _overlapped(case: MemferryCase) -> float:
    """Return the speedup over native of the better of MemFerry's two orders of updates."""
    base = Iterations(case.costs, native(case.costs), updates="all-gradients")
    ours = [
        steady(Iterations(case.costs, case.memferry.decisions, updates=each)).seconds
        for each in ("after-backward", "all-gradients")
    ]
    return steady(base).seconds / min(ours)


def _shared(case: MemferryCase) -> float:
    """Return the speedup of MemFerry's plan on a link shared by copies and the GPU's reads."""
    ends = "cpu", "gpu0" if case.machine == "memferry-a100" else "gpu"
    down, up = (
        min(hop.bytes_per_s for hop in case.platform.route(*way)) for way in (ends, ends[::-1])
    )
    link = Shared(down_bytes_per_s=down, up_bytes_per_s=up)
    iterations = Iterations(case.costs, case.memferry.decisions, shared=link)
    iterations.add()
    return case.native_s / (execute(iterations.graph).makespan / 1e12)
