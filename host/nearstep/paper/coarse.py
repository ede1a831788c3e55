"""The COARSE paper's figures and tables beside modelled ones.

*Modelled*: bytes over the links of the paper's machines, and FLOPs at the datasheets' peaks
(`nearstep.paper.coarse_case`). One constant is fitted, on section II (figure 2), in `Evaluation`.
`ASSUMPTIONS` apply where the text is silent, and `sensitivity` shows their effect on the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from nearstep.coarse.routing import FULL
from nearstep.paper.coarse_case import (
    GRADIENT_BYTES,
    Communication,
    Layout,
    Options,
    Work,
    platform,
)
from nearstep.paper.coarse_pcie import ROUND_TRIP_S, Pcie
from nearstep.paper.rows import Input, Row, Sensitivity, row, sensitive, spread
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Transfer

ASSUMPTIONS = (
    "Rates between two GPUs are figure 8's, those of a GPU's own link the 25 GB/s both ways of "
    "section III-E: all are PCIe 3.0 x16. The rate of each way is half of that both ways. Pairs "
    "of GPUs share only a GPU's link. Transfers take as long as the busiest link.",
    "Worker i and device i are at one switch (figure 4); a tensor is sent to the proxy with the "
    "highest rate. NVLink is off, as in the paper's profiler, for AllReduce, too.",
    "The devices are GPUs (IV-B), so pushes and pulls share links with rings, which T_train "
    "ignores. m is that of T_train (III-F); beside it are rows with the best m of these links.",
    "Synchronization begins after backward: with the overlap of T_train BERT would not block on "
    "the P100, and figure 17 has 72 % of AllReduce's blocked communication.",
    "Workers are half of a machine's GPUs; 3.3x and 4.3x, 11.3x and 13.3x are of two and four "
    "workers of the g4dn, 10.8x to 13.8x of one and two workers to a device.",
    "Forward and backward take the FLOPs of matrix products at a share of the peak that is the "
    "same on all GPUs (fitted), mixed precision where there are tensor cores (TensorFlow enables "
    "it on Volta and later), fp32 on the P100.",
    "BERT is BERT-large (about 300 million parameters) with 384 tokens; gradients are fp32. It has "
    "the 76 % of figure 2, with a batch of 2.",
    "DENSE: each worker pushes by stores, then pulls by loads, at a link's rate over 4 and over 17 "
    "(V-B); others do not slow it, as only the GPU's rate to the CPU was estimated (V-D).",
    "48.3 %, 42.7 % and 38.6 % are samples a second over AllReduce with a batch of 2; COARSE has 4 "
    "on one node (48.3 %, 38.6 %), and 2 on two. A node's network is Table I's.",
    "The KCU1500 has eight lanes in use; a packet has 128 bytes, which every part must take; the "
    "host's loads are of 64 bytes, one after the other; its stores are combined to 64 bytes "
    "(least) or of 8 (most).",
)
NOT_MODELLED = {
    "Figure 13: curves by access size, of 512 MB": "the text has no numbers of them; a load or a "
    "store has the same cost in an access of any size",
    "Figure 2: eight models, parts of the overhead": "models are not named, no number but 76 % is "
    "printed",
    "Figures 16 and 17: bars": "the text does not give them",
    "Coherence traffic (III-D), latency of CCI": "no number is printed; nearstep has no coherence",
    "Memory of GPUs, rate of links: an order of magnitude below the host's memory, and that of "
    "GPUs' memory (I)": "no machine is named",
    "Sync groups and devices of figure 11: 2 and 4": "an example; both are parameters",
    "TensorFlow plugin: 2 lines of a program change (IV-B)": "nearstep has none",
    "Prototype: two FPGAs, one cable, two switches, host of 32 GB (IV-C, V-A)": "described; no "
    "figure depends on them",
    "Versions: Python 3, CUDA 11.4, TensorFlow 2 (IV-B)": "no times of software",
    "Figure 15": "only relations, which figure 8's rates imply: `nearstep.coarse.routing` chooses "
    "the remote proxy for large tensors on the V100 and the local one elsewhere",
    "90 % of a serial bus (CCI), 34 % on a DGX-1, less than 10 % of in-network reduction": "of "
    "other papers",
    "Staging through the host on the g4dn, NCCL's and TensorFlow's own time": "no number is "
    "printed",
    "Memory that limits AllReduce to a batch of 2, COARSE to 4 (V-D)": "what COARSE takes off a "
    "GPU is not printed; both batches are inputs",
}
"""Printed figures without a row, and the reasons."""

FITTED_SHARE = 0.76
"""Share of communication in training time on four T4 (section II-B): up to 76 %."""

ENDS = ("least", "most")
BLOCKED = (
    *(f"T4, BERT: more blocked, {end}" for end in ENDS),
    "P100, BERT: less blocked",
    *(f"V100, BERT: less blocked, {end}" for end in ENDS),
    *(f"V100, one and two nodes: less blocked, {end}" for end in ENDS),
)
OVER_DENSE = (
    *(f"T4, {model} over DENSE, {end}" for model in ("ResNet50", "BERT") for end in ENDS),
    "P100, BERT over DENSE",
    *(f"V100, BERT over DENSE, {end}" for end in ENDS),
)
"""Rows that assumptions were chosen on: two readings of the text, and the closer one is taken."""

BERT, RESNET = "bert-large", "resnet50"
KNEE = 2 << 20
LANES_OF_PROTOTYPE = 8


@dataclass(frozen=True)
class Iteration:
    """Seconds of an iteration.

    Attributes
    ----------
    blocked : communication that training waits for.
    """

    compute: float
    blocked: float

    @property
    def total(self) -> float:
        return self.compute + self.blocked


class Evaluation:
    """The paper's evaluation under some assumptions.

    One constant is fitted, on section II: the share of its peak that a GPU reaches, so that
    communication is `FITTED_SHARE` of BERT's training on four T4.

    Parameters
    ----------
    options : `gpu` is fitted if it is None.
    payload : bytes in a packet of PCIe.

    Attributes
    ----------
    options : with the fitted constant.
    """

    def __init__(self, options: Options | None = None, payload: int = 128) -> None:
        self.options = options or Options()
        self.payload = payload
        if self.options.gpu is None:
            peak = Work(BERT, "g4dn", options=replace(self.options, gpu=1.0))
            blocked = Communication(T4[1], self.options).all_reduce_s(peak.nbytes)
            compute = blocked * (1 - FITTED_SHARE) / FITTED_SHARE
            self.options = replace(self.options, gpu=min(1.0, peak.seconds / compute))

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Inputs, with their labels."""
        return (
            Input(
                name="GPU, of its peak",
                value=f"{self.options.gpu:.1%}",
                label="fitted",
                source="once: communication is 76 % of BERT's training on four T4 (section II)",
                on=("Four T4: communication, most",),
            ),
            Input(
                name="batch of a GPU",
                value="ResNet50 64, BERT 2; of COARSE on one node 4",
                label="paper",
                source="V-D",
            ),
            Input(
                name="memory devices",
                value="half of a machine's GPUs; on the V100 one for two workers, too",
                label="paper",
                source="V-A",
            ),
            Input(
                name="host's loads and stores to the prototype",
                value="17 and 4 times slower than a link",
                label="paper",
                source="II-C, V-B; the most of figure 13",
            ),
            Input(
                name="synchronization and backward",
                value="one after the other",
                label="chosen",
                source="T_train overlaps them; then the P100 would not block at all, and the T4 "
                "less than with AllReduce",
                on=BLOCKED,
            ),
            Input(
                name="links that transfers share",
                value="a GPU's own, and that of a pair",
                label="chosen",
                source="if all that leaves a switch shared figure 8's rate, four V100 would block "
                "longer than with AllReduce",
                on=BLOCKED,
            ),
            Input(
                name="workers of DENSE",
                value="do not slow each other",
                label="chosen",
                source="only a GPU's rate to the CPU was estimated (V-D); one after the other they "
                "would take four times as long as in print",
                on=OVER_DENSE,
            ),
            Input(
                name="tokens of BERT",
                value=str(self.options.tokens),
                label="chosen",
                source="BERT's own fine-tuning on SQuAD; no length is printed",
            ),
        )

    def work(self, model: str, machine: str, batch: int | None = None) -> Work:
        return Work(model, machine, batch, self.options)

    def all_reduce(self, model: str, layout: Layout, batch: int | None = None) -> Iteration:
        """Iteration without memory devices."""
        work = self.work(model, layout.machine, batch)
        return Iteration(
            work.seconds, Communication(layout, self.options).all_reduce_s(work.nbytes)
        )

    def coarse(self, model: str, layout: Layout, batch: int | None = None) -> Iteration:
        """Iteration with dual synchronization."""
        work = self.work(model, layout.machine, batch)
        return Iteration(work.seconds, Communication(layout, self.options).coarse_s(work))

    def dense(self, model: str, layout: Layout, batch: int | None = None) -> Iteration:
        """Iteration with one memory device for all workers."""
        work = self.work(model, layout.machine, batch)
        return Iteration(work.seconds, Communication(layout, self.options).dense_s(work.nbytes))

    def speedup(self, model: str, layout: Layout) -> float:
        """Speedup of COARSE over DENSE."""
        return self.dense(model, layout).total / self.coarse(model, layout).total

    def less_blocked(self, layout: Layout) -> float:
        """Saving of COARSE in AllReduce's blocked communication for BERT, in percent."""
        ours, theirs = self.coarse(BERT, layout).blocked, self.all_reduce(BERT, layout).blocked
        return 100 * (1 - ours / theirs)

    def table_1(self) -> Iterator[Row]:
        printed = {"g4dn": (8, 384), "p3": (8, 768), "sdsc": (4, 128)}
        for name, (gpus, memory) in printed.items():
            machine = platform(name)
            found = sum(each.startswith("gpu") for each in machine.processors)
            size = float(machine.processors["cpu"].memory_bytes or 0) / 2**30
            rate = 8 * float(machine.links["ethernet"].bytes_per_s) / 1e9
            for title, unit, paper, here in (
                ("GPUs", "", gpus, found),
                ("memory", "GB", memory, size),
                ("network", "Gbit/s", 100, rate),
            ):
                yield row(f"{name}: {title}", "Table I", unit, paper, here, kind="input")

    def figure_2(self) -> Iterator[Row]:
        found = self.all_reduce(BERT, T4[1])
        share = 100 * found.blocked / found.total
        name = "Four T4: communication, most"
        yield row(name, "I, II-B, figure 2", "%", 76.0, share, kind="fitted")
        count = self.work(BERT, "g4dn").nbytes / GRADIENT_BYTES / 1e9
        yield row("BERT: parameters, about", "II-A", "B", 0.3, count, kind="counted")

    def figures_3_and_13(self) -> Iterator[Row]:
        link = Pcie(lanes=LANES_OF_PROTOTYPE, payload=self.payload)
        where = {"least": "V-B, figure 13", "most": "II-C, V-B, figures 3, 13"}
        reads = link.reads / link.loads
        for name, paper in (("least", 9.0), ("most", 17.0)):
            note = f"implies {reads / paper:.1f} loads in flight"
            title = f"Reads, GPU Direct over CCI, {name}"
            yield row(title, where[name], "x", paper, reads, note=note)
        for name, paper, size in (("least", 1.25, 64), ("most", 4.0, 8)):
            found = link.one_way / link.writes(size)
            title = f"Writes, GPU Direct over CCI, {name}"
            yield row(title, where[name], "x", paper, found, note=f"stores of {size} bytes")

    def figure_8(self) -> Iterator[Row]:
        printed = {"V100": ("p3", 9.0, 16.0), "P100": ("sdsc", 25.0, 18.0)}
        for title, (machine, *rates) in printed.items():
            for place, other, paper in zip(("local", "remote"), ("1", "2"), rates, strict=True):
                found = both_ways(machine, "gpu0", f"gpu{other}") / 1e9
                yield row(f"{title}, {place}", "figure 8", "GB/s", paper, found, kind="input")
        link = Pcie(lanes=16, payload=self.payload)
        where = "III-E"
        yield row("P100, local, one way", where, "GB/s", 13.0, link.one_way / 1e9)
        yield row("P100, local, both ways", where, "GB/s", 25.0, link.both_ways / 1e9)
        ratio = link.both_ways / link.one_way
        yield row("Both ways over one way, close to", where, "x", 2.0, ratio)

    def figure_14(self) -> Iterator[Row]:
        link = Pcie(lanes=LANES_OF_PROTOTYPE, payload=self.payload)
        found = link.knee(FULL, ROUND_TRIP_S) / 2**20
        times = [1e6 * link.latency_before(size, FULL) for size in (KNEE // 2, KNEE)]
        note = f"it takes {times[0]:.0f} to {times[1]:.0f} us before a transfer"
        yield row("DMA: full rate from", "III-E, V-B, figure 14", "MB", 2.0, found, note=note)

    def figure_16(self) -> Iterator[Row]:
        where = "V-D, figure 16"
        for title, model, low, high in (
            ("ResNet50", RESNET, 3.3, 4.3),
            ("BERT", BERT, 11.3, 13.3),
        ):
            found = [self.speedup(model, layout) for layout in T4]
            yield from spread(f"T4, {title} over DENSE", where, low, high, found)
        name = "P100, BERT over DENSE"
        yield row(name, where, "x", 3.4, self.speedup(BERT, P100), mean=True)
        found = [self.speedup(BERT, layout) for layout in (V100, V100_SHARED)]
        yield from spread("V100, BERT over DENSE", where, 10.8, 13.8, found)
        base = self.all_reduce(BERT, V100).total
        larger = self.coarse(BERT, V100, 4).total
        single = 2 * base / larger
        two = self.all_reduce(BERT, TWO_NODES).total
        name = "V100, batch 4 over AllReduce's 2: 48.3 %"
        yield row(name, f"abstract, {where}, VI", "x", 1.483, single, mean=True)
        for title, paper, here in (
            (
                "V100, two nodes over AllReduce: 42.7 %",
                1.427,
                two / self.coarse(BERT, TWO_NODES).total,
            ),
            ("V100, one node over two of AllReduce: 38.6 %", 1.386, two / larger),
        ):
            yield row(title, where, "x", paper, here, mean=True)
        for title, layouts, relation in (
            ("T4, BERT over AllReduce: slightly lower", T4, "<"),
            ("P100, BERT over AllReduce: beats it", (P100,), ">"),
            ("V100, BERT over AllReduce: beats it", (V100, V100_SHARED), ">"),
        ):
            ratios = [
                self.all_reduce(BERT, each).total / self.coarse(BERT, each).total
                for each in layouts
            ]
            worst = max(ratios) if relation == "<" else min(ratios)
            yield row(title, where, "x", 1.0, worst, relation=relation)

    def figure_17(self) -> Iterator[Row]:
        where = "V-E, figure 17"
        more = [-self.less_blocked(layout) for layout in T4]
        yield from spread("T4, BERT: more blocked", where, 18.0, 20.0, more, "%")
        yield row("P100, BERT: less blocked", where, "%", 28.0, self.less_blocked(P100))
        for title, low, high, layouts in (
            ("V100, BERT: less blocked", 20.0, 42.0, (V100, V100_SHARED)),
            ("V100, one and two nodes: less blocked", 23.0, 46.0, (V100, TWO_NODES)),
        ):
            found = [self.less_blocked(layout) for layout in layouts]
            yield from spread(title, where, low, high, found, "%")
        for title, case in (("AllReduce", self.all_reduce), ("COARSE", self.coarse)):
            worst = max(
                case(BERT, layout).blocked / self.dense(BERT, layout).blocked
                for layout in (*T4, P100, V100)
            )
            name = f"{title}: blocked, of DENSE's"
            yield row(name, where, "%", 10.0, 100 * worst, relation="<")

    def rows(self, parts: Iterable[str] | None = None) -> Iterator[Row]:
        """Model the rows of some of `PARTS`, with `Row.ours` by the best m; None: of all."""
        best = Evaluation(replace(self.options, split="best"), self.payload)
        for part in PARTS if parts is None else parts:
            for each, other in zip(PARTS[part](self), PARTS[part](best), strict=True):
                yield each if each.found == other.found else replace(each, ours=other.found)


T4 = tuple(Layout(machine="g4dn", workers=p, devices=p) for p in (2, 4))
P100 = Layout(machine="sdsc", workers=2, devices=2)
V100 = Layout(machine="p3", workers=4, devices=4)
V100_SHARED = Layout(machine="p3", workers=4, devices=2)
TWO_NODES = Layout(machine="p3", workers=8, devices=8, nodes=2)

PARTS: Mapping[str, Callable[[Evaluation], Iterator[Row]]] = {
    "table-1": Evaluation.table_1,
    "figure-2": Evaluation.figure_2,
    "figure-3": Evaluation.figures_3_and_13,
    "figure-8": Evaluation.figure_8,
    "figure-14": Evaluation.figure_14,
    "figure-16": Evaluation.figure_16,
    "figure-17": Evaluation.figure_17,
}
"""Parts of the paper; figure 13 is with figure 3."""


def both_ways(machine: str, one: str, other: str, nbytes: int = 1 << 30) -> float:
    """Return the modelled bytes a second of concurrent transfers both ways between two parts."""
    graph = Graph()
    for start, stop in ((one, other), (other, one)):
        graph.add(
            f"{start} to {stop}", transfer=Transfer.between(platform(machine), start, stop, nbytes)
        )
    return 2 * nbytes / float(execute(graph).seconds or 0)


VARIANTS: Mapping[str, tuple[Options, int]] = {
    "as assumed": (Options(), 128),
    "the best m": (Options(split="best"), 128),
    "GPU at its peak": (Options(gpu=1.0), 128),
    "fp32 on all GPUs, not fitted": (Options(dtype="fp32", gpu=1.0), 128),
    "fp32 on all GPUs, at 45 %": (Options(dtype="fp32", gpu=0.45), 128),
    "synchronization within backward (T_train)": (Options(overlap=True), 128),
    "pairs of GPUs alone bound": (Options(share="pairs"), 128),
    "all that leaves a switch shares figure 8's rate": (Options(share="uplinks"), 128),
    "DENSE: one worker after the other": (Options(dense_shared=True), 128),
    "DENSE: pushes beside pulls": (Options(dense_turns=False), 128),
    "DENSE: 9 and 1.25 times slower": (Options(read=9.0, write=1.25), 128),
    "BERT with 128 tokens": (Options(tokens=128), 128),
    "PCIe packets of 256 bytes": (Options(), 256),
}


@dataclass(frozen=True, kw_only=True)
class Variant(Sensitivity):
    """Rows under a changed assumption: `values` of `SENSITIVE`."""

    values: Mapping[str, float]


SENSITIVE = {
    "V100, BERT over DENSE, most": "V100 over DENSE",
    "V100, batch 4 over AllReduce's 2: 48.3 %": "batch 4 over 2",
    "P100, BERT: less blocked": "P100 less blocked",
    "V100, BERT: less blocked, most": "V100 less blocked",
    "P100, local, one way": "one way",
}
"""Rows in the table of sensitivity, and their titles there."""


def sensitivity(
    variants: Mapping[str, tuple[Options, int]] = VARIANTS,
) -> Iterator[Variant]:
    """Evaluate the paper under each assumption."""
    for variant, (options, payload) in variants.items():
        evaluation = Evaluation(options, payload)
        rows = [*evaluation.rows(["figure-8", "figure-16", "figure-17"])]
        found = {each.name: float(each.found or 0.0) for each in rows}
        values = {title: found[name] for name, title in SENSITIVE.items()}
        yield Variant(**sensitive(variant, evaluation.options.gpu, rows), values=values)
