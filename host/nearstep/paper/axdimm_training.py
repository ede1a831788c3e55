"""Table 6 of the AXDIMM paper: an iteration of five GPT models, with and without the DIMM.

*Modelled*: `nearstep.plan` plans the iteration, and the work graph times the plan on the paper's
machine. Inputs beyond the paper and datasheets:

- One constant is fitted, on one figure, the forward pass of the largest model on the baseline
  (`FITTED_ON`): the rate of both drives together, in both directions.
- The printed peak of the drives is an input: it gives the memory left for tensors
  (`AxdimmCase.memory_bytes`). The text does not explain the peak: parameters and state less 16 GB
  are 8 to 14 GB below it.
- `ASSUMPTIONS` where the text is silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from nearstep.paper.axdimm_kernel import Rate
from nearstep.paper.rows import Input, Row, row
from nearstep.plan.iteration import Iteration, Iterations, Limits, Roles
from nearstep.plan.pieces import ELEMENT_BYTES, Item, Layer, Piece, cut
from nearstep.plan.residency import Policy, belady, updated_first
from nearstep.plan.schedule import Schedule, uses
from nearstep.work.executor import execute
from nearstep.work.timeline import Timeline
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import Figure, Link, Platform
from nearstep_spec.platform.models import MODELS

ARRAYS = ("p", "m", "v")
POLICIES = ("updated_first", "belady")
CHANNELS = 2
ASSUMPTIONS = (
    "The GPU computes at its datasheet's fp32 rate, without recomputation in backward.",
    "A core copies between memory and GPU as fast as it updates: 140.32 MP/s of 28 bytes.",
    "One layer is prefetched, on one stream; backward of a layer waits until the gradients of the "
    "previous one are sent.",
    "The arrays of an update are gathered when the gradients of its layer are complete (section "
    "5.3).",
    "On the baseline one thread of the host updates and moves tensors to and from the drives, "
    "without overlap; on the AXDIMM channels update concurrently.",
    "A channel runs an update or a transfer, and one transfer to or from the DIMM is in flight "
    "(section 5.2).",
    "Parameters larger than half of a channel's room for gathering are cut.",
    "For an update parameters are copied from the GPU, which has just used them, not from the "
    "drives.",
    "The head's matrix, which is that of the embedding, is fetched once and kept on the GPU.",
)
NOT_MODELLED = {
    "GPT-3's 175 billion parameters in 700 GB, GPUs with less than 100 GB (1)": "not evaluated; "
    "700 GB are 4 bytes a parameter",
    "Tables 1 and 3 (32Gb, 2666 Mbps, 32 GB, 800 MT/s), drives of 2 TB (6.1), figure 5": "inputs, "
    "of `.venv/bin/nearstep platform show axdimm`; the text does not give the rates of figure 5",
    "10 chips (Table 1)": "8 of them are data; the others, of ECC, are not kept",
    "31 DSPs and 128 cycles of a unit (3.3)": "of the paper's units; `.venv/bin/nearstep area` has "
    "both beside nearstep's, which have other shapes",
    "4 bytes read as 64, two instructions of 32 bytes (4.1)": "CLFLUSH, non-temporal stores and "
    "pinned pages (4.3): no time is printed; copies have the rate of a core's update",
    "Table 4: layers, widths, heads, batches, contexts": "inputs: of the models",
    "16 GB for tensors, 8 GB a channel (6.3)": "contradict the printed peaks, which are the input",
    "ZeRO's 1.5 times as much communication (7.2)": "of another system",
    "PyTorch, hooks, kernel launches, the operating system": "no number is printed; their time is "
    "part of every printed second",
    "GPUDirect Storage, NVMe commands, files": "no number is printed; the drives have one rate",
    "Changes of a channel's mode, refreshes": "no number is printed; `sim:axdimm` has both",
    "Initialisation, the first iteration": "the table is of one iteration; here the second",
    "Activations on the drives or in memory": "the text offloads parameters and state only",
}
"""Printed figures without a row, parts of the time that are not modelled, and the reasons."""


@dataclass(frozen=True, kw_only=True)
class Printed:
    """A row of Table 6: seconds of forward, backward and the total, speedups of backward and of the
    total, and the peak of the drives in GB."""

    baseline: tuple[float, float, float]
    axdimm: tuple[float, float, float]
    speedups: tuple[float, float]
    peak_gb: float

    @property
    def speedup(self) -> float:
        """Ratio of the totals."""
        return self.baseline[2] / self.axdimm[2]


TABLE_6: Mapping[str, Printed] = {
    name: Printed(baseline=baseline, axdimm=axdimm, speedups=speedups, peak_gb=peak_gb)
    for name, baseline, axdimm, speedups, peak_gb in (
        ("gpt3-large", (0.78, 8.01, 8.79), (0.80, 4.60, 5.40), (1.74, 1.63), 0.9),
        ("gpt3-xl", (2.12, 19.31, 21.42), (2.14, 13.28, 15.43), (1.45, 1.39), 9.8),
        ("gpt3-2.7b", (4.78, 43.09, 47.87), (4.79, 30.45, 35.23), (1.42, 1.36), 26.1),
        ("gpt3-6.7b", (13.12, 115.17, 128.29), (13.55, 88.17, 101.72), (1.31, 1.26), 78.4),
        ("gpt3-13b", (25.24, 221.62, 246.86), (26.21, 166.25, 192.45), (1.33, 1.28), 153.1),
    )
}
FITTED_ON = "gpt3-13b"
DRIVES_BYTES_PER_S = 2.034e9
"""Rate of both drives, both ways: with it the forward pass of `FITTED_ON` on the baseline takes the
printed time."""

PRINTED_UPDATES = Input(
    name="updates of the DIMM",
    value="789.38 MP/s",
    label="paper",
    source="Table 5, both channels; --rtl-updates has the rate of the RTL",
)
CHOSEN_COPIES = Input(
    name="copies between memory and GPU",
    value="3.93 GB/s",
    label="chosen",
    source="140.32 MP/s x 28 bytes (Table 5): what a core moves in its update",
)
INPUTS = (
    Input(
        name="both drives together, both ways",
        value=f"{DRIVES_BYTES_PER_S / 1e9:.3f} GB/s",
        label="fitted",
        source="once: the forward pass of the largest model on the baseline",
        on=(f"{FITTED_ON}, baseline: forward",),
    ),
    Input(
        name="memory for tensors",
        value="parameters and state less the peak of the drives",
        label="paper",
        source="Table 6, peak; the text has 16 GB for it",
        on=tuple(f"{name}: peak NVMe usage" for name in TABLE_6),
    ),
    CHOSEN_COPIES,
    Input(
        name="GPU",
        value="14 TFLOP/s",
        label="chosen",
        source="datasheet of the V100, fp32, at its peak",
    ),
    Input(
        name="gradients that wait for the link",
        value="of one layer",
        label="chosen",
        source="with two the smallest model's total on the AXDIMM is 20 % below the printed one",
        on=("gpt3-large, axdimm: total", "gpt3-large: speedup, total"),
    ),
    PRINTED_UPDATES,
    Input(
        name="updates of a core",
        value="140.32 MP/s",
        label="paper",
        source="Table 5",
        on=("CPU, one core: achieved", "CPU, one core: efficiency"),
    ),
    Input(name="clock of the RTL", value="200 MHz", label="paper", source="section 3.1"),
)


@dataclass(frozen=True, kw_only=True)
class AxdimmCase:
    """A model on one of the two platforms.

    Attributes
    ----------
    model : of Table 4.
    platform : `baseline` or `axdimm`.
    policy : `updated_first`, as in section 5.3, or `belady`.
    updates_per_s : parameters that both channels of the DIMM update in a second; None: the paper's.
    copies_bytes_per_s : rate of copies between DIMM and GPU; None: that of a core.
    """

    model: str
    platform: str
    drives_bytes_per_s: float = DRIVES_BYTES_PER_S
    limits: Limits = field(default_factory=Limits)
    policy: str = "updated_first"
    updates_per_s: float | None = None
    copies_bytes_per_s: float | None = None

    @cached_property
    def machine(self) -> Platform:
        """The paper's machine, with the fitted rate of the drives, and the rate of copies."""
        machine = load("axdimm")
        copies = Figure(
            value=ELEMENT_BYTES * 7 * float(machine.processors["cpu"].adam_params_per_s or 0),
            origin="paper",
            source="AXDIMM paper, Table 5: 140.32 MP/s x 28 bytes",
        )
        drives = Figure(value=self.drives_bytes_per_s, origin="fitted", source=FITTED_ON)
        links = dict(machine.links)
        between = copies
        if self.platform == "axdimm" and self.copies_bytes_per_s is not None:
            between = Figure(value=self.copies_bytes_per_s, origin="measured", source="the RTL")
        links["ddr"] = replace(links["ddr"], bytes_per_s=between)
        links["storage"] = Link(ends=("cpu", "storage"), bytes_per_s=drives, duplex="half")
        cpu = replace(machine.processors["cpu"], memory_bytes_per_s=copies)
        return replace(
            machine,
            processors={**machine.processors, "cpu": cpu},
            switches=(*machine.switches, "storage"),
            links=links,
        )

    @cached_property
    def layers(self) -> list[Layer]:
        """Layers of the model, with the times of this machine's GPU."""
        model = MODELS[self.model]
        shapes = model.layers(model.batch, model.sequence, ELEMENT_BYTES)  # type: ignore[attr-defined]
        flops = float(self.machine.processors["gpu"].flops["fp32"])
        place = {
            f"{shape.name}.{name}": (index, position)
            for index, shape in enumerate(shapes)
            for position, name in enumerate(shape.parameters)
        }
        return [
            Layer(
                name=shape.name,
                parameters=tuple(shape.elements.values()),
                borrowed=tuple(place[name] for name in shape.tied),
                forward_s=shape.forward_flops / flops,
                backward_s=shape.backward_flops / flops,
            )
            for shape in shapes
        ]

    @property
    def memory_bytes(self) -> int:
        """Memory left for tensors: parameters and state less the printed peak of the drives."""
        elements = sum(layer.elements for layer in self.layers)
        peak = round(TABLE_6[self.model].peak_gb * 1e9)
        return len(ARRAYS) * ELEMENT_BYTES * elements - peak

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        gathered = (len(ARRAYS) + 1) * ELEMENT_BYTES
        most = self.memory_bytes // self._channels // gathered // 2
        return [list(each) for each in cut(self.layers, self._channels, most)]

    @property
    def _channels(self) -> int:
        return CHANNELS if self.platform == "axdimm" else 1

    @cached_property
    def roles(self) -> Roles:
        machine = self.machine
        if self.platform == "axdimm":
            printed = float(machine.dimms["axdimm"].adam_params_per_s)
            rate = (self.updates_per_s or printed) / CHANNELS
            memory = tuple(f"axdimm.{channel}" for channel in range(CHANNELS))
        else:
            rate = float(machine.processors["cpu"].adam_params_per_s or 0)
            memory = ("cpu",)
        return Roles(
            compute="gpu",
            memory=memory,
            drives="storage",
            updates="memory" if self.platform == "axdimm" else "processor",
            params_per_s=rate,
        )

    def plan(self) -> Iterations:
        """Make a graph without iterations."""
        pieces, layers = self.pieces, self.layers
        borrowed = {
            index: [
                piece
                for owner, parameter in layer.borrowed
                for piece in pieces[owner]
                if piece.parameter == parameter
            ]
            for index, layer in enumerate(layers)
        }
        policy: Policy[Item] = updated_first
        if self.policy == "belady":
            policy = belady(*uses(pieces, borrowed, ARRAYS))
        share = self.memory_bytes // self._channels
        schedule = Schedule(
            pieces,
            borrowed=borrowed,
            arrays=ARRAYS,
            capacity=[share] * self._channels,
            policy=policy,
        )
        schedule.place()
        return Iterations(layers, pieces, schedule, self.machine, self.roles, self.limits)

    def timeline(self) -> Timeline:
        """Timeline of the iteration of the table, the second."""
        plan, timeline = self.run()
        return plan.split(timeline)[-1]

    def run(self) -> tuple[Iterations, Timeline]:
        """Run two iterations: in the first, tensors are still placed by initialisation."""
        plan = self.plan()
        plan.add()
        plan.add()
        return plan, execute(plan.graph)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A modelled row of the table beside the printed one."""

    model: str
    printed: Printed
    baseline: Iteration
    axdimm: Iteration
    peak_on_drives: int

    @property
    def speedup(self) -> float:
        return self.baseline.total_s / self.axdimm.total_s

    def rows(self) -> Iterator[Row]:
        """Make a row of each printed figure."""
        for platform in ("baseline", "axdimm"):
            printed, found = getattr(self.printed, platform), getattr(self, platform)
            for name, paper, here in (
                ("forward", printed[0], found.forward_s),
                ("backward", printed[1], found.backward_s),
                ("total", printed[2], found.total_s),
            ):
                title, mean = f"{self.model}, {platform}: {name}", name == "total"
                yield row(title, "Table 6", "s", paper, here, mean=mean)
        backward = self.baseline.backward_s / self.axdimm.backward_s
        found_by_name = {"backward": backward, "total": self.speedup}
        for (name, here), paper in zip(found_by_name.items(), self.printed.speedups, strict=True):
            yield row(f"{self.model}: speedup, {name}", "Table 6", "x", paper, here, mean=True)
        peak = self.peak_on_drives / 1e9
        yield row(f"{self.model}: peak NVMe usage", "Table 6", "GB", self.printed.peak_gb, peak)


def inputs(rtl: Rate | None, transfers: Rate | None = None) -> Sequence[Input]:
    """Return the inputs, with the DIMM's updates, or its copies (`transfers`), at a rate measured
    on the RTL if there is one."""
    found = list(INPUTS)
    if rtl is not None:
        value, source = f"{rtl.achieved / 1e6:.2f} MP/s", f"measured: {rtl.source}"
        measured = replace(PRINTED_UPDATES, value=value, label="chosen", source=source)
        found[found.index(PRINTED_UPDATES)] = measured
    if transfers is not None:
        value = f"{(transfers.copied or 0) / 1e9:.2f} GB/s of the DIMM, 3.93 GB/s of the baseline"
        source = f"measured: {transfers.source}; {CHOSEN_COPIES.source}"
        found[found.index(CHOSEN_COPIES)] = replace(CHOSEN_COPIES, value=value, source=source)
    return found


def table_6(models: Mapping[str, Printed] = TABLE_6, **options: object) -> Iterator[Comparison]:
    """Model the rows one after the other; `options` are fields of `AxdimmCase`."""
    for model, printed in models.items():
        runs = {}
        for platform in ("baseline", "axdimm"):
            plan, timeline = AxdimmCase(model=model, platform=platform, **options).run()  # type: ignore[arg-type]
            runs[platform] = plan.times(timeline)[-1]
        peak = plan.schedule.peak_on_drives
        yield Comparison(model=model, printed=printed, peak_on_drives=peak, **runs)
