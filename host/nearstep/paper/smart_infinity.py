"""The Smart-Infinity paper's figures and tables beside nearstep's.

*Counted*: bytes of the operations of an iteration. *Modelled*: the time of the same operations on
the paper's machine, with links and drives shared (`nearstep.paper.smart_infinity_case`). Two
constants are fitted, both on section III (figure 3), in `Evaluation`. `ASSUMPTIONS` apply where the
text is silent, and `sensitivity` shows their effect on the rows. Measured rows are of
`nearstep.paper.smart_infinity_measured`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nearstep.paper.rows import Input, Row, Sensitivity, row, sensitive, spread
from nearstep.paper.smart_infinity_case import (
    HALF_BYTES,
    METHODS,
    PAIR_BYTES,
    CsdCase,
    Method,
    Phases,
)
from nearstep.paper.smart_infinity_machine import (
    PARAMETER_BYTES,
    SATURATED_BY,
    Machine,
    Options,
)
from nearstep.paper.smart_infinity_traffic import traffic
from nearstep_spec.platform.layer import Model
from nearstep_spec.platform.models import MODELS, PADDED_VOCABULARY
from nearstep_spec.platform.transformer import Transformer

ASSUMPTIONS = (
    "Rates of the SSD are not printed: those of Samsung's PM983 of the same size and link, 3.2 "
    "GB/s of reads and 2.0 GB/s of writes.",
    "Drives are half-duplex. With full duplex an update on one drive would take at most 75 % of "
    "an iteration, and figure 3 has over 80 %.",
    "The uplink's rate is of both ways together, and that of four drives in an update (fitted).",
    "The GPU reaches a share of its fp16 peak, the same on each GPU (fitted); forward is "
    "recomputed in backward.",
    "The sequence is not printed: 1024 tokens of GPT-2 and BLOOM, 512 of BERT, 128 of the GLUE "
    "tasks of Table IV; the batch is 4.",
    "Shapes are not printed: Megatron's widths for GPT-2, its BERT of 3.9 billion, BLOOM of 7.1 "
    "billion, ViT-L/16.",
    "Each block's parameters are distributed equally over all cards.",
    "Backward of a block waits until the gradients of the previous one are on the drives (figure "
    "1(b), steps 1 to 4); parameters are prefetched by one block. The update begins when all "
    "gradients are on the drives (IV-C).",
    "The baseline's update overlaps reads, the CPU and writes; the CPU moves 28 bytes a parameter "
    "at its memory's rate.",
    "An updater reads 7 GB/s (VII-H: above), the decompressor fills gradients as fast as the SSD "
    "reads (VII-H: slightly above); neither overlaps the transfers of its card's one set of "
    "buffers (IV-B).",
    "Updated parameters are uploaded while the next subgroup is updated (IV-A), in SU, too; "
    "allocation of buffers and the start of a tasklet take no time. So SU+O gains over SU only by "
    "overlapping reads and writes of a drive: nothing.",
    "Speedups that are printed as ranges are the least and the most of the models of their figure; "
    "those of figures 10, 11, 13 and 17 are of SU+O+C.",
)
NOT_MODELLED = {
    "Memories of 80 GB, 2 TB and 100 TB, SSDs of a few GB/s (I), models of 345M to 530B (II-A)": (
        "of other systems"
    ),
    "Table II; 10 SmartSSDs of 4 TB, DRAM of 4 GB, PCIe 3.0 x4, GPUs of 24, 40 and 16 GB (VII-A)": (
        "inputs, of `.venv/bin/nearstep platform show smart-infinity`, but for versions of software"
    ),
    "KU15P: 522K LUTs, 984 BRAMs, 128 URAMs, 1968 DSPs (VII-A, Table III)": "input of the shares "
    "of Table III; a quarter for Adam (VII-B) is about their mean",
    "Models of 0.34B, 0.77B, 1.6B, 1.16B, 4.0B, 8.4B and 33.0B, batch of 4": "inputs; no result "
    "is printed of 16.6B (VII-D)",
    "Epochs: 10, 12 and 3 (VII-J)": "of the fine-tuning",
    "Table IV, accuracy of fine-tuning": "out of reach: no pre-trained weights or GLUE here; "
    "`.venv/bin/python bench/bench_compression.py` has a small task's loss with and without Top-K",
    "Figure 16": "no number is printed; Table IV's speedups at 1 to 10 % are rows",
    "Bars and curves of figures 3, 9 to 13, 15 and 17": "the text does not give them; "
    "`--picture` draws figures 9 and 11 as modelled",
    "Figure 14: rates of the SSD": "no number is printed; the platform file has a datasheet's",
    "$45,000, $2,000, $7,000, $2,400 and $400 (VII-I)": "inputs of figure 15",
    "Top-K on the GPU, allocation of buffers, file system and software": "no number is printed",
}
"""Printed figures without a row, and the reasons."""

FITTED_SHARE = 0.80
"""Share of the update in an iteration with one SSD: over 80 % (section III)."""

FIT_STEPS = 16
WIDTHS = {1.16: 1536, 4.0: 2304, 8.4: 3072, 16.6: 4096, 33.0: 6144}
"""Widths of GPT-2, by billions of parameters: Megatron's up to 8.4 (Shoeybi et al., Table 1)."""

FINE_TUNING = {
    "bert-large": ("BERT-0.34B", 1.10, {10: 1.23, 5: 1.34, 2: 1.38, 1: 1.40}),
    "gpt2-large": ("GPT2-0.77B", 1.11, {10: 1.23, 5: 1.29, 2: 1.35, 1: 1.44}),
    "gpt2-xl": ("GPT2-1.6B", 1.29, {10: 1.45, 5: 1.54, 2: 1.54, 1: 1.53}),
}
"""Table IV: speedups of SU+O, and of SU+O+C by percent."""

GLUE_TOKENS = 128
DOLLARS = {"server": 45_000, "a5000": 2_000, "a100": 7_000, "ssd": 400, "card": 2_400}
"""Prices of section VII-I."""


def gpt2(billions: float) -> Transformer:
    """GPT-2 of about so many billion parameters, of `WIDTHS`."""
    hidden = WIDTHS[billions]
    rows = PADDED_VOCABULARY + 1024
    return Transformer(
        name=f"gpt2-{billions:g}b",
        source="Smart-Infinity paper, section VII, without the shape",
        stated=billions * 1e9,
        blocks=round((billions * 1e9 - rows * hidden) / (12 * hidden**2)),
        hidden=hidden,
        heads=hidden // 64,
        vocabulary=PADDED_VOCABULARY,
        positions=1024,
    )


BERT = Transformer(
    name="bert-3.9b",
    source="Shoeybi et al., Megatron-LM, Table 4",
    stated=3.9e9,
    blocks=48,
    hidden=2560,
    heads=40,
    vocabulary=30592,
    positions=512,
    types=2,
    head="pooler",
)
BERT_TOKENS = 512


class Evaluation:
    """The paper's evaluation under some assumptions.

    Two constants are fitted, on section III: the uplink's rate, so that `SATURATED_BY` drives fill
    it (`Machine`), and the share of its peak that the GPU reaches, so that an update of GPT-2 4.0B
    on one SSD takes `FITTED_SHARE` of an iteration: all larger models have more.

    Parameters
    ----------
    options : `gpu` is fitted if it is None.

    Attributes
    ----------
    options : with the fitted constant.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self._phases: dict[object, Phases] = {}
        if self.options.gpu is None:
            self.options = replace(self.options, gpu=self._fit())

    def _fit(self) -> float:
        """Fit by bisection, up to the peak."""
        low, high = 0.0, 1.0
        for _ in range(FIT_STEPS):
            middle = (low + high) / 2
            options = replace(self.options, gpu=middle)
            found = CsdCase(model=gpt2(4.0), drives=1, options=options).phases
            if found.update < FITTED_SHARE * found.total:
                low = middle
            else:
                high = middle
        return high

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Inputs that the paper does not print."""
        return (
            Input(
                name="uplink, both ways together",
                value=f"{self.machine.uplink_bytes_per_s / 1e9:.2f} GB/s",
                label="fitted",
                source="once: the baseline gains nothing beyond four SSDs (section III)",
                on=("Update on ten SSDs over four",),
            ),
            Input(
                name="uplink, its directions",
                value="share the rate",
                label="chosen",
                source="each at the rate of four SSDs, the update would gain 13 % beyond four",
                on=("Update on ten SSDs over four",),
            ),
            Input(
                name="drives, reads and writes",
                value="share a drive's time",
                label="chosen",
                source="at once, an update on one SSD would take at most 75 % of an iteration",
                on=("One SSD: update",),
            ),
            Input(
                name="drives, reads and writes a second",
                value="3.2 and 2.0 GB/s",
                label="chosen",
                source="datasheet of Samsung's PM983, of the same size and link (figure 14 has no "
                "numbers)",
            ),
            Input(
                name="tokens",
                value=f"{self.options.sequence}; BERT {BERT_TOKENS}, Table IV {GLUE_TOKENS}",
                label="chosen",
                source="the models' own; no length is printed",
            ),
            Input(
                name="GPU, of its peak",
                value=f"{self.options.gpu:.1%}",
                label="fitted",
                source="once: an update of GPT-2 4.0B on one SSD takes 80 % of an iteration",
                on=("One SSD: update",),
            ),
        )

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.options)

    def phases(self, model: Model, method: Method, drives: int, **others: Any) -> Phases:
        """Phases of an iteration; `others` are fields of `CsdCase`."""
        key = (model.name, method, drives, *sorted(others.items()))
        if key not in self._phases:
            case = CsdCase(
                model=model, method=method, drives=drives, options=self.options, **others
            )
            self._phases[key] = case.phases
        return self._phases[key]

    def speedup(self, model: Model, method: Method, drives: int, **others: Any) -> float:
        """Speedup over the baseline with as many drives."""
        base = {key: value for key, value in others.items() if key != "percent"}
        ours = self.phases(model, method, drives, **others)
        return self.phases(model, "base", drives, **base).total / ours.total

    def tables(self) -> Iterator[Row]:
        """Table I, and figures of the text counted from it."""
        printed = {
            "base": ("ZeRO-Inf", (6.0, 6.0, 2.0, 2.0)),
            "su": ("SmartUpdate", (2.0, 0.0, 0.0, 2.0)),
            "su+o+c": ("SmartComp, 2 %", (2.0, 0.0, 0.0, 0.04)),
        }
        ways = ("states read", "states written", "gradients read", "gradients written")
        totals = {}
        for method, (name, values) in printed.items():
            case = CsdCase(model=gpt2(4.0), method=method, options=self.options)  # type: ignore[arg-type]
            found = traffic(case)
            totals[method] = found
            note = f"padding to 4 KiB: {float(found.padding):.6f} M"
            for way, paper, each in zip(ways, values, found, strict=False):
                yield row(
                    f"{name}: {way}", "Table I", "M", paper, float(each), kind="counted", note=note
                )
        base, ours = totals["base"], totals["su"]
        where = "II-A, IV-A"
        size = CsdCase(model=gpt2(4.0), method="su+o+c", options=self.options)
        capacity = len(size.states) * PARAMETER_BYTES / HALF_BYTES
        yield row("Optimizer states, capacity", where, "M", 6.0, capacity, kind="counted")
        for name, found, paper in (("ZeRO-Inf", base, 8.0), ("SmartUpdate", ours, 2.0)):
            for way, each in (("read", found[0] + found[2]), ("written", found[1] + found[3])):
                title = f"{name}: all {way}"
                yield row(title, where, "M", paper, float(each), kind="counted")
        pairs = 100 * size.gradient_bytes(size.elements) / PAIR_BYTES / size.elements
        where, title = "IV-C, VII-A, VII-K", "SmartComp, 2 %: gradients selected"
        yield row(title, where, "%", 1.0, pairs, kind="counted")
        title, ratio = "SmartComp, 2 %: bytes of pairs", PAIR_BYTES / PARAMETER_BYTES
        yield row(title, where, "%", 2.0, pairs * ratio, kind="counted")
        where = "I, IV-A"
        states = float((base[0] + base[1]) / sum(base[:4]))
        yield row("Optimizer states, of all bytes", where, "%", 75.0, 100 * states, kind="counted")
        less = 1 - float(sum(ours[:4]) / sum(base[:4]))
        yield row("SmartUpdate: less traffic", where, "%", 75.0, 100 * less, kind="counted")
        for name in ("sgd_momentum", "adagrad"):
            case = CsdCase(model=gpt2(4.0), optimizer=name, options=self.options)
            found = traffic(case)
            volume = float((found[0] + found[2]) / (base[0] + base[2]))
            title = f"{name}: bytes read, of Adam's"
            yield row(title, "VII-F", "x", 0.75, volume, kind="counted")

    def figure_3(self) -> Iterator[Row]:
        where = "III, figure 3"
        one = [self.phases(model, "base", 1) for model in (gpt2(4.0), gpt2(8.4), gpt2(33.0))]
        update = min(each.update / each.total for each in one)
        yield row("One SSD: update", where, "%", 80.0, 100 * update, relation=">", kind="fitted")
        moving = min(self._moving(model, 1) for model in (gpt2(4.0), gpt2(8.4), gpt2(33.0)))
        yield row("One SSD: data to and from storage", "I", "%", 88.0, 100 * moving, relation=">")
        model = gpt2(4.0)
        four, ten = (self.phases(model, "base", n).update for n in (SATURATED_BY, 10))
        name = "Update on ten SSDs over four"
        yield row(name, where, "x", 1.0, four / ten, kind="fitted")

    def _moving(self, model: Model, drives: int) -> float:
        """Return the share of an iteration due to drives: all but forward and backward with almost
        no gradients to offload.
        """
        free = CsdCase(
            model=model, method="su+o+c", drives=10, percent=0.001, options=self.options
        ).phases
        whole = self.phases(model, "base", drives)
        return 1 - (free.forward + free.backward) / whole.total

    def figure_9(self) -> Iterator[Row]:
        where = "VII-C, figure 9"
        models = {gpt2(4.0): {}, gpt2(8.4): {}, BERT: {"sequence": BERT_TOKENS}}
        large = self.phases(gpt2(8.4), "base", 6)
        share = 100 * large.update / large.total
        yield row("GPT-2 8.4B, 6 SSDs: update", where, "%", 75.57, share)
        ratio = large.total / self.phases(gpt2(8.4), "base", 10).total
        yield row("Baseline, 10 SSDs over 6", where, "x", 1.0, ratio)
        found: dict[tuple[Method, int], list[float]] = {
            (method, drives): [
                self.speedup(model, method, drives, **others) for model, others in models.items()
            ]
            for method in METHODS[1:]
            for drives in (6, 10)
        }
        printed: Mapping[tuple[Method, int], tuple[float, float]] = {
            ("su", 6): (1.18, 1.24),
            ("su", 10): (1.54, 1.60),
            ("su+o", 10): (1.60, 1.66),
            ("su+o+c", 10): (1.85, 1.98),
        }
        for each, (low, high) in printed.items():
            yield from spread(f"{each[0].upper()}, {each[1]} SSDs", where, low, high, found[each])
        gain = min(
            other / ours for ours, other in zip(found["su", 10], found["su+o", 10], strict=True)
        )
        note = "reads and writes share a drive's time, so the handler's overlap gains nothing"
        name = "SU+O over SU, 10 SSDs"
        yield row(name, where, "x", 1.66 / 1.60, gain, note=note)
        more = [
            ours / other
            for drives in (6, 10)
            for ours, other in zip(found["su+o+c", drives], found["su", drives], strict=True)
        ]
        yield from spread("SmartComp over SmartUpdate", where, 1.22, 1.31, more)

    def figures_10_to_13(self) -> Iterator[Row]:
        for drives, paper in ((6, 1.37), (10, 1.88)):
            speedup = self.speedup(gpt2(33.0), "su+o+c", drives)
            name = f"GPT-2 33.0B, {drives} SSDs"
            yield row(name, "VII-D, figure 10", "x", paper, speedup, mean=True)
        model, where = gpt2(4.0), "VII-E, figure 11"
        best = max(self.speedup(model, "su+o+c", n, gpus=("a100",)) for n in (6, 10))
        yield row("A100, up to", f"I, {where}", "x", 2.11, best, mean=True)
        ratio = best / self.speedup(model, "su+o+c", 10)
        yield row("A100: speedup over the A5000's, higher", where, "x", 1.0, ratio, relation=">")
        for method in METHODS[2:]:
            one = self.speedup(model, method, 1)
            name = f"One CSD, {method.upper()}: a slight slowdown"
            yield row(name, where, "x", 1.0, one, relation="<")
        for gpu in ("a5000", "a100"):
            four, ten = (self.phases(model, "base", n, gpus=(gpu,)).total for n in (4, 10))
            name = f"{gpu.upper()}: baseline, 10 SSDs over 4"
            yield row(name, where, "x", 1.0, four / ten)
        adam = self.speedup(model, "su+o+c", 10)
        for name in ("sgd_momentum", "adagrad"):
            other = self.speedup(model, "su+o+c", 10, optimizer=name)
            title = f"{name}: speedup over Adam's, slightly lower"
            yield row(title, "VII-F, figure 12", "x", 1.0, other / adam, relation="<")
        found = [
            self.speedup(each, "su+o+c", drives, sequence=tokens)
            for each, tokens in ((MODELS["bloom-7b1"], None), (MODELS["vit-large-16"], 0))
            for drives in (6, 10)
        ]
        yield from spread("BLOOM and ViT, 6 and 10 SSDs", "VII-G, figure 13", 1.32, 1.85, found)

    def costs(self) -> Iterator[Row]:
        """Figure 15: speed for a dollar, beside the baseline with as many SSDs."""
        where = "VII-I, figure 15"
        ratio = DOLLARS["card"] / DOLLARS["ssd"]
        yield row("Price of a SmartSSD over an SSD's", where, "x", 6.0, ratio, kind="counted")
        for drives, relation in ((1, "<"), (2, "<"), (3, "<"), (5, ">"), (10, ">")):
            prices = [
                DOLLARS["server"] + DOLLARS["a5000"] + drives * DOLLARS[each]
                for each in ("ssd", "card")
            ]
            worth = self.speedup(gpt2(4.0), "su+o+c", drives) * prices[0] / prices[1]
            name = f"{drives} CSD{'s' * (drives > 1)}: GFLOPS/$ over the baseline's"
            yield row(name, where, "x", 1.0, worth, relation=relation)

    def fine_tuning(self) -> Iterator[Row]:
        where = "Table IV"
        for key, (title, dense, pairs) in FINE_TUNING.items():
            model, others = MODELS[key], {"sequence": GLUE_TOKENS}
            found = self.speedup(model, "su+o", 6, **others)
            yield row(f"{title}, 6 SSDs: SU+O", where, "x", dense, found, mean=True)
            for percent, paper in pairs.items():
                found = self.speedup(model, "su+o+c", 6, percent=float(percent), **others)
                name = f"{title}, 6 SSDs: SU+O+C ({percent} %)"
                yield row(name, where, "x", paper, found, mean=True)

    def congested(self) -> Iterator[Row]:
        found = [self.speedup(gpt2(1.16), "su+o+c", 10, gpus=_a4000(count)) for count in (1, 2, 3)]
        yield from spread("1 to 3 A4000 in the expansion", "VIII-A, figure 17", 1.66, 1.86, found)

    def rows(self, parts: Iterable[str] | None = None) -> Iterator[Row]:
        """Count and model the rows of some of `PARTS`; None: of all."""
        for part in PARTS if parts is None else parts:
            yield from PARTS[part](self)


PARTS: Mapping[str, Callable[[Evaluation], Iterator[Row]]] = {
    "table-1": Evaluation.tables,
    "figure-3": Evaluation.figure_3,
    "figure-9": Evaluation.figure_9,
    "figures-10-13": Evaluation.figures_10_to_13,
    "figure-15": Evaluation.costs,
    "table-4": Evaluation.fine_tuning,
    "figure-17": Evaluation.congested,
}
"""Parts of the paper with rows that are counted or modelled."""


def _a4000(count: int) -> tuple[str, ...]:
    return tuple(f"a4000-{i}" for i in range(count))


VARIANTS: Mapping[str, Options] = {
    "as assumed": Options(),
    "GPU at its peak": Options(gpu=1.0),
    "GPU at a quarter": Options(gpu=0.25),
    "uplink: PCIe 3.0 x16, not fitted": Options(uplink="full", uplink_bytes_per_s=15_753_846_154),
    "uplink: each way for itself": Options(uplink="full"),
    "drives: reads beside writes": Options(drive="full"),
    "drives: writes as fast as reads": Options(write_bytes_per_s=3.2e9),
    "backward overlaps gradients": Options(overlap=True),
    "uploads as soon as written": Options(upload="written"),
    "updater twice as fast": Options(updater_bytes_per_s=14e9),
    "decompressor twice as fast": Options(decompressor=2.0),
    "0.2 s to allocate a subgroup's buffers, in SU": Options(allocation_s=0.2),
    "0.1 s to start a tasklet": Options(tasklet_s=0.1),
    "half of the sequence": Options(sequence=512),
}


@dataclass(frozen=True, kw_only=True)
class Variant(Sensitivity):
    """The printed speedups under a changed assumption.

    Attributes
    ----------
    handler : SU+O over SU with ten cards, GPT-2 4.0B; 1.04 in print.
    """

    handler: float


def sensitivity(variants: Mapping[str, Options] = VARIANTS) -> Iterator[Variant]:
    """Evaluate the paper under each assumption."""
    for variant, options in variants.items():
        evaluation = Evaluation(options)
        found = sensitive(variant, evaluation.options.gpu, evaluation.rows())
        su, handler = (evaluation.phases(gpt2(4.0), each, 10).total for each in METHODS[1:3])
        yield Variant(**found, handler=su / handler)
