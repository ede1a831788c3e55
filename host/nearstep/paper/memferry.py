"""Section V of the MemFerry paper: printed figures beside modelled ones.

*Modelled*: profiles by roofline (`nearstep.memferry.modelled`) on the machines of the platform
files, plans by the paper's greedy planner (`Row.ours` by the exact one), times of one iteration by
the cost model. One constant is fitted, on GPU utilisation, in `Evaluation`. `ASSUMPTIONS` apply
where paper and datasheets are silent, and `sensitivity` shows their effect on the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, starmap
from statistics import fmean
from typing import Any

from nearstep.errors import ArgumentError
from nearstep.memferry.work import GPU, Iterations, Shared, native, steady
from nearstep.paper.memferry_case import BUCKET_ELEMENTS, MemferryCase, Options, sized
from nearstep.paper.rows import Input, Row, labelled, row, spread
from nearstep.work.executor import execute
from nearstep_spec.platform.load import load
from nearstep_spec.platform.models import MODELS
from nearstep_spec.platform.transformer import Transformer

ASSUMPTIONS = (
    "Plans are those of the paper's planner: Algorithm 1 by its first reading, then DFGB; the "
    "exact planner's are beside them as nearstep's.",
    "Parameters and gradients are fp32, matrix products TF32 on the A100 and fp32 on the V100: the "
    "defaults of PyTorch 1.9; both at the same share of the datasheet's peak, memory at its rate.",
    "Native ZeRO-Offload sends gradients layer by layer, and updates when all have been received; "
    "nothing overlaps the next iteration.",
    "DeepSpeed has its defaults: gradients are collected in a bucket of 500,000,000, which is "
    "sent when full or after backward, while the GPU waits (overlap_comm is off).",
    "A tied matrix is loaded and held once: by the baselines for its embedding, by MemFerry for "
    "its product, as the embedding's rows are read in place.",
    "Direct host access: a matrix is read in forward once a wave of tiles; in backward the half "
    "for the gradient of the input reads it once, the other half not at all.",
    "GO-MemFerry's backward of a layer and its write to the host overlap on the A100 (V-B: they "
    "execute in parallel), and follow each other on the V100; the GPU counts as busy in both.",
    "Memory is parameters, gradients and activations (section II-B), DeepSpeed's gradients its "
    "bucket; activations as Korthikanti et al. count them. If native ZeRO-Offload does not fit the "
    "GPU's memory with all of them, all systems compute blocks again in backward (II-A), and those "
    "of V-D for all sizes, as 6.7 billion do not fit.",
    "A baseline without a name is DeepSpeed; bounds over baselines are over both.",
    "On eight GPUs each has an eighth of the batch; gradients are reduced to the first GPU while "
    "it sends others; the host updates as on one GPU.",
)
BUSY = (
    ("bert-base", "Bert-base: GPU busy, DeepSpeed"),
    ("gpt2-medium", "GPT-2: GPU busy, DeepSpeed"),
)
PRINTED_BUSY = 63.0, 63.1
"""Printed utilisation of the models of `BUSY`, in percent (sections I and III-A)."""

GIVEN = (
    Input(
        name="link of a GPU",
        value="12.5 GB/s (V100: 15.75)",
        label="paper",
        source="100 Gbit/s (III-B); of the V100 PCIe 3.0 (V-A), of 16 lanes",
        on=("A100: link",),
    ),
    Input(
        name="memory of a GPU, and GPUs",
        value="80 GB, eight (V100: 32 GB, one)",
        label="paper",
        source="section V-A; 80 and 32 GB in I, too",
        on=("A100: memory", "A100: GPUs", "V100: memory", "V100: GPUs"),
    ),
    Input(
        name="batch of figures 11, 13 and 14(b)",
        value="1, 8, and 128 on eight GPUs",
        label="paper",
        source="V-C, V-D",
    ),
    Input(
        name="batch x sequence of figures 9, 10 and 14(a)",
        value="8 x 512, GPT-2 8 x 1024",
        label="chosen",
        source="V-D trains with a batch of 8; the models' longest sequences",
    ),
    Input(
        name="batches of figure 12",
        value="1, 2, 4, 8, with the sequences of figure 9",
        label="chosen",
        source="from V-C's batch to V-D's. The print has an average of GPT-2 alone, and of "
        "Bert-base and Roberta, which one batch makes alike, -40.1 % in the mean and -61.7 %",
        on=("Memory: MemFerry, smaller models", "Memory: MemFerry, up to"),
    ),
    Input(
        name="activations of V-D's models",
        value="computed again in backward (II-A)",
        label="chosen",
        source="6.7 billion do not fit with all of them at the printed batch of 8; all sizes of "
        "the figures are trained in the same way",
        on=("GO-MemFerry, memory",),
    ),
    Input(
        name="shapes of TransformerXL",
        value="GPT blocks, hidden 2048 (4096 from 4 billion), vocabulary 32768 (130528), 8 x 512",
        label="chosen",
        source="in V-A's ranges; as many blocks as fit the size; V-C prints the V100's batch of 1",
    ),
    Input(
        name="host's optimizer",
        value="28 bytes a parameter at 8 channels of DDR4-3200 (V100: 2 of DDR4-2666)",
        label="chosen",
        source="the hosts' memory is not printed",
    ),
    Input(
        name="times that a parameter passes the link to a GPU, on 8 GPUs",
        value="2, by a copy or by direct host access",
        label="chosen",
        source="DataParallel sends parameters to the first GPU, and from it to the others in a "
        "ring (V-D: communication between GPUs is the bottleneck)",
        on=("4.3 billion, 8 GPUs", "8 GPUs: over DeepSpeed", "8 GPUs: over native"),
    ),
    Input(
        name="gradients that the V100 writes to the host",
        value="after backward of the layer",
        label="chosen",
        source="V-C: the lower PCIe bandwidth severely affects the writes",
        on=("V100: GO-MemFerry, speed",),
    ),
    Input(
        name="reads of a matrix in backward",
        value="1",
        label="chosen",
        source="III-B: backward is hardly slower by direct host access",
        on=("Backward by DHA, slower, least", "Backward by DHA, slower, most"),
    ),
)
MODELS_OF_FIGURE_9 = ("bert-base", "roberta-base", "bert-large", "gpt2-medium")
SMALL, LARGE = MODELS_OF_FIGURE_9[:2], MODELS_OF_FIGURE_9[2:]
FIT_STEPS, FIT_WITHIN = 100, 1e-5
NOT_MODELLED = {
    "GPU busy without offloading: 99 % (I), above 80 % (III-A)": "a model in GPU memory never "
    "waits here, so the model has 100 %; the paper counts multiprocessors",
    "DeepSpeed's latency to make and free its buffer, considerable (V-A)": "no number is "
    "printed, and PyTorch's allocator keeps what is freed",
    "Bars and curves of figures 3 and 9 to 14": "the text does not give them",
    "GPU idle for a third of the time (III-A)": "the rest of 63.1 %",
    "Sizes of TransformerXL: 0.7 to 6.7 billion (V-A)": "both ends, and sizes between, have rows",
    "Embeddings of 32768 to 130528, hidden sizes of 2048 to 4096, sequences of 378 to 4096 (V-A)": (
        "ranges; no model has its own"
    ),
    "Host memory: an order of magnitude above a GPU's (I)": "no size is printed",
    "CPU cores: 128 and 12 (V-A), 8 (III-B)": "the rate of the host's optimizer is that of its "
    "memory, which is not printed",
    "Adam's momentum and variance, each two times the model (II-A)": "in host memory; twice is of "
    "fp16 parameters, here each is as large as fp32 parameters",
    "Parameters of GPT-2: 15 billion; LLaMA: 70 billion; GPT-3: 175 billion (I)": "of other "
    "papers, not trained in this one; GPT-2 has 1.5 billion",
    "Versions of PyTorch (1.9.0), Python (3.6), CUDA (11.7) (V-A)": "no times of software",
    "Figure 10(b): time over the reserve factor is convex": "no number is printed; "
    "`.venv/bin/nearstep plan --reserve` shows the curve",
}
"""Printed figures without a row, and the reasons."""


class Evaluation:
    """Section V under some assumptions.

    One constant is fitted, on GPU utilisation: the share of its peak that the GPU reaches, so that
    DeepSpeed's mean over the two models of `BUSY` is the printed mean.

    Parameters
    ----------
    options : `gpu` is fitted if it is None.

    Attributes
    ----------
    options : with the fitted constant.

    Raises
    ------
    ArgumentError : the fit does not converge.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self._cases: dict[object, MemferryCase] = {}
        if self.options.gpu is None:
            self.options = replace(self.options, gpu=self._fit())

    def _fit(self) -> float:
        """Fit by the ratio of busy to idle, which the share changes in proportion, up to the
        peak."""
        wanted, share = fmean(PRINTED_BUSY) / 100, 1.0
        for _ in range(FIT_STEPS):
            trial = Evaluation(replace(self.options, gpu=share))
            timelines = [trial.named(name).deepspeed for name, _ in BUSY]
            busy = fmean(each.busy(GPU) / each.makespan for each in timelines)
            if abs(busy - wanted) < FIT_WITHIN or (share == 1 and busy > wanted):
                return share
            share = min(share * busy / (1 - busy) * (1 - wanted) / wanted, 1.0)
        raise ArgumentError(f"no share of the GPU's peak makes it busy for {wanted:.1%}")

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Inputs, with their labels."""
        fitted = Input(
            name="GPU, of its peak",
            value=f"{self.options.gpu:.1%}",
            label="fitted",
            source="once: DeepSpeed's mean utilisation over both models is 63.05 %",
            on=tuple(name for _, name in BUSY),
        )
        return fitted, *GIVEN

    @cached_property
    def ours(self) -> Evaluation:
        """This evaluation with nearstep's planner."""
        return Evaluation(replace(self.options, planner="best"))

    def case(self, model: Transformer, machine: str = "memferry-a100", **size: Any) -> MemferryCase:
        key = (model.name, machine, *size.items())
        if key not in self._cases:
            made = MemferryCase(model=model, machine=machine, options=self.options, **size)
            self._cases[key] = made
        return self._cases[key]

    def named(self, name: str, batch: int = 8) -> MemferryCase:
        """Case of a model of figure 9."""
        model = MODELS[name]
        assert isinstance(model, Transformer)
        return self.case(model, batch=batch, sequence=1024 if name == "gpt2-medium" else 512)

    def large(self, billions: float, **size: Any) -> MemferryCase:
        """Case of a model of section V-D."""
        return self.case(sized(billions), again=True, **size)

    def machines(self) -> Iterator[Row]:
        """Rows of the platform files, and parameters of a model."""
        for name, gpus, memory in (("A100", 8, 80), ("V100", 1, 32)):
            machine = load(f"memferry-{name.lower()}")
            found = [each for key, each in machine.processors.items() if key.startswith("gpu")]
            size = float(found[0].memory_bytes or 0) / 2**30
            yield row(f"{name}: GPUs", "V-A", "", gpus, len(found))
            yield row(f"{name}: memory", "I, V-A", "GB", memory, size)
        rate = 8 * float(load("memferry-a100").links["pcie0"].bytes_per_s) / 1e9
        yield row("A100: link", "III-B", "Gbit/s", 100.0, rate)
        layers = self.named("bert-base").model.layers(1, 1)
        count = sum(each.parameter_count for each in layers) / 1e9
        yield row("Bert-base: parameters", "I", "B", 0.11, count, kind="counted")

    def figure_9(self) -> Iterator[Row]:
        where = "V-B, figure 9"
        for title, models, low, high in (
            ("All models", MODELS_OF_FIGURE_9, 10.0, 40.0),
            ("Bert-base and Roberta", SMALL, 21.7, 68.7),
            ("Bert-large and GPT-2", LARGE, 7.1, 32.1),
        ):
            cases = [self.named(name) for name in models]
            values = [100 * (v - 1) for each in cases for v in (each.speedup, each.native_speedup)]
            note = RANGES if title == "All models" else ""
            yield from spread(f"{title}: speed", where, low, high, values, "+%", note=note)
        every = [self.named(name) for name in MODELS_OF_FIGURE_9]
        fastest = max(each.speedup for each in every)
        yield row("MemFerry, up to", "abstract, I", "x", 1.68, fastest)
        slower = [100 * _slower(each) for each in every]
        yield from spread("Backward by DHA, slower", "III-B", 5.0, 10.0, slower, "+%")

    def utilisation(self) -> Iterator[Row]:
        for (name, title), paper, where in zip(BUSY, PRINTED_BUSY, ("I", "III-A"), strict=True):
            yield row(title, where, "%", paper, 100 * self.named(name).busy.deepspeed, note=TWICE)
        busy, where = self.named("gpt2-medium").busy, "V-B, figure 10(a)"
        for name, paper, ours, base in (
            ("MemFerry over DeepSpeed", 18.5, busy.memferry, busy.deepspeed),
            ("MemFerry over native", 1.5, busy.memferry, busy.native),
            ("GO-MemFerry over DeepSpeed", 27.0, busy.go, busy.deepspeed),
        ):
            yield row(f"GPT-2, GPU busy: {name}", where, "+%", paper, 100 * (ours / base - 1))
        most = max(busy.memferry, busy.go) / busy.deepspeed
        yield row("GPT-2, GPU busy over DeepSpeed, up to", "I", "x", 1.27, most)

    def memory(self) -> Iterator[Row]:
        found = {
            name: [self.named(name, batch).memory for batch in self.options.batches]
            for name in MODELS_OF_FIGURE_9
        }
        ours = {name: [_saved(x.memferry, x.deepspeed) for x in found[name]] for name in found}
        small = fmean(x for name in SMALL for x in ours[name])
        every = [*chain(*ours.values())]
        every_go = [_saved(x.go, x.deepspeed) for x in chain(*found.values())]
        beside = [_saved(x.go, x.memferry) for name in SMALL for x in found[name]]
        where = "V-C, figure 12"
        for name, section, paper, here, note in (
            ("MemFerry, smaller models", where, -40.1, small, ""),
            ("GO-MemFerry beside MemFerry", where, -17.6, fmean(beside), ""),
            ("MemFerry, GPT-2", where, -1.4, fmean(ours["gpt2-medium"]), ""),
            ("MemFerry, mean", where, -25.4, fmean(every), ""),
            ("GO-MemFerry, mean", where, -41.6, fmean(every_go), MEANS),
            ("MemFerry, up to", "I", -61.7, min(every), ""),
            ("GO-MemFerry, mean", "I", -20.1, fmean(every_go), MEANS),
            ("GO-MemFerry, up to", "I", -74.4, min(every_go), ""),
        ):
            yield row(f"Memory: {name}", section, "+%", paper, here, note=note)

    def sizes(self) -> Iterator[Row]:
        cases = [self.large(each) for each in (0.7, 1.0, 2.4, 4.3, 6.7)]
        where = "V-D, figure 13"
        again = _refused(cases)
        mean = fmean(each.speedup for each in cases)
        yield row("mean of sizes", f"I, {where}", "x", 1.32, mean, note=again)
        yield row("1 billion", where, "x", 1.37, cases[1].speedup, note=again)
        yield row("6.7 billion", where, "x", 1.26, cases[-1].speedup, note=again)
        saved = [_saved(each.memory.go, each.memory.deepspeed) for each in cases]
        name = "GO-MemFerry, memory"
        yield row(name, where, "+%", -21.6, fmean(saved), note=again)
        yield row(f"{name}, least saved", where, "+%", -18.0, max(saved), note=again)
        yield row(f"{name}, most saved", where, "+%", -22.0, min(saved), note=again)

    def v100(self) -> Iterator[Row]:
        cases = [self.case(sized(each), "memferry-v100", batch=1) for each in (0.7, 1.0, 1.7, 2.4)]
        where = "V-C, figure 11"
        yield row("V100: MemFerry", where, "x", 1.12, fmean(each.speedup for each in cases))
        go = fmean(each.go_speedup - 1 for each in cases)
        yield row("V100: GO-MemFerry, speed", where, "+%", -3.4, 100 * go)

    def largest(self) -> Iterator[Row]:
        where = "V-C, figure 11"
        others = [self._largest(name) for name in ("deepspeed", "native", "memferry")]
        yield row("V100: largest without GO, billions", where, "B", 2.4, max(others) / 1e9)
        where, ratio = f"abstract, I, {where}", self._largest("go") / others[0]
        yield row("V100: GO's largest over DeepSpeed's", where, "x", 1.52, ratio)

    def _largest(self, system: str) -> float:
        """Parameters of the largest model whose peak fits into the V100, without recomputation."""
        kept = Evaluation(replace(self.options, recompute=False))
        low, high = 1, 400
        base = sized(1.0)
        while high - low > 1:
            blocks = (low + high) // 2
            model = replace(base, name=f"{blocks} blocks", blocks=blocks)
            case = kept.case(model, "memferry-v100", batch=1)
            fits = getattr(case.memory, system) <= case.capacity
            low, high = (blocks, high) if fits else (low, blocks)
        return low * 12 * base.hidden**2 + base.vocabulary * base.hidden

    def gpus(self) -> Iterator[Row]:
        one, eight = self.large(4.3), self.large(4.3, batch=1, gpus=8)
        where = "V-D, figure 14(a)"
        yield row("4.3 billion, 1 GPU", where, "s", 5.41, one.seconds.memferry)
        yield row("4.3 billion, 8 GPUs", where, "s", 4.12, eight.seconds.memferry)
        speed = 100 * (eight.speedup - 1)
        yield row("8 GPUs: over DeepSpeed", f"abstract, I, {where}", "+%", 28.1, speed)
        yield row("8 GPUs: over native", where, "+%", 19.1, 100 * (eight.native_speedup - 1))
        large = self.large(6.7, batch=16, gpus=8)
        where, again = "V-D, figure 14(b)", _refused([large])
        yield row("6.7 billion, batch 128, 8 GPUs", where, "x", 1.21, large.speedup, note=again)
        yield row("the same, GO-MemFerry", where, "x", 1.16, large.go_speedup, note=again)

    def rows(self) -> Iterator[Row]:
        """Model all rows by the paper's planner, with `Row.ours` by nearstep's."""
        parts = ("figure_9", "utilisation", "memory", "v100", "sizes", "gpus")
        for part in parts:
            both = zip(getattr(self, part)(), getattr(self.ours, part)(), strict=True)
            yield from labelled(starmap(_beside, both), self.inputs)
        yield from map(_counted, self.largest())
        yield from labelled(self.machines(), self.inputs)


RANGES = "the print contradicts itself: 10 to 40 % of all models, 7.1 to 68.7 % of their parts"
TWICE = "63 % is printed of Bert-base (I) and of GPT-2 (III-A)"
MEANS = "GO-MemFerry's mean is printed as -20.1 % (I) and as -41.6 % (V-C)"
"""Notes of rows where the print contradicts itself."""


def of_memory(each: Row) -> bool:
    """Whether a row is of the GPU's memory."""
    return "emory" in each.name or "largest" in each.name


def _counted(paper: Row) -> Row:
    return replace(paper, mean=True)


def _beside(paper: Row, ours: Row) -> Row:
    """A row with nearstep's figure, where it differs."""
    return _counted(replace(paper, ours=None if ours.found == paper.found else ours.found))


def _refused(cases: Sequence[MemferryCase]) -> str:
    """Note the cases whose activations do not fit in the GPU's memory."""
    names = [
        f"{each.model.name} at {each.batch} x {each.sequence} needs {each.kept_bytes / 1e9:.0f} GB "
        f"of {each.capacity / 1e9:.0f} with all activations kept"
        for each in cases
        if each.kept_bytes > each.capacity
    ]
    return (
        f"{', '.join(names)}; all models of the figure compute blocks again (II-A)" if names else ""
    )


def _saved(here: float, base: float) -> float:
    """Relative change in percent."""
    return 100 * (here / base - 1)


def _slower(case: MemferryCase) -> float:
    """Relative increase of backward with all parameters in host memory."""
    layers = case.profile.layers
    there = sum(each.backward_dha_s or each.backward_s for each in layers)
    return there / sum(each.backward_s for each in layers) - 1


VARIANTS: Mapping[str, Options] = {
    "as assumed": Options(),
    "fp16": Options(dtype="fp16"),
    "no TF32": Options(dtype="fp32"),
    "exact planner": Options(planner="best"),
    "GPU at its peak": Options(gpu=1.0),
    "GPU at half of its peak": Options(gpu=0.5),
    "GPU at an eighth of its peak": Options(gpu=0.125),
    "host updates at a quarter": Options(host=0.25),
    "matrices read once": Options(reads="once"),
    "matrices read by each tile": Options(reads="tile"),
    "gradients written after backward": Options(writes="after"),
    "four times the batch": Options(batch=4),
    "a quarter of the batch": Options(batch=0.25),
    "activations computed again": Options(recompute=True),
    "activations kept, if they fit the GPU": Options(alike=False),
    "figure 12: batch of 8": Options(batches=(8,)),
    "figure 12: batch of 2": Options(batches=(2,)),
    "figure 12: batches of 1 and 8": Options(batches=(1, 8)),
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


def sensitivity(models: Sequence[str], under: Mapping[str, Evaluation]) -> Iterator[Sensitivity]:
    """Evaluate models of figure 9 under some `evaluations`."""
    for variant, evaluation in under.items():
        for name in models:
            case = evaluation.named(name)
            values = {key: of(case) for key, (_, of) in SENSITIVE.items()}
            yield Sensitivity(variant, name, values, _overlapped(case), _shared(case))


def _overlapped(case: MemferryCase) -> float:
    """Return the speedup over native of the better of MemFerry's two orders of updates."""
    base = Iterations(case.base, native(case.base), updates="all-gradients")
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
    return case.seconds.native / (execute(iterations.graph).makespan / 1e12)
