"""Device cycles of `optimizer.step()` on a DIMM: one thing after the other, and as a graph.

Both on the same device, in turn, transfers included, with steps that have the same bits. The limit
is the resource that is held longest in the graph's own timeline: the host's bus, or a channel,
which is held by its kernel and by the transfers from and to it.
"""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import report
import torch
import typer
from rich.console import Console
from rich.table import Table

import nearstep
from nearstep.torch.homes.home import DeviceHome
from nearstep_sim.axdimm.dimm import DimmBackend

DEVICE = "sim:axdimm?memory=ddr4-1600&fu=native"
SIZES = (1 << 16, 1 << 20, 1 << 22)
CHANNELS = (1, 2)
VECTOR = 512  # elements of a small parameter beside each of the large ones

console = Console()


def sizes_of(parameters: int) -> list[int]:
    """Elements of the tensors of a small model: eight matrices, each with a vector."""
    matrix = parameters // 8 - VECTOR
    return [matrix, VECTOR] * 8


def optimizer_of(parameters: list[torch.Tensor], device: nearstep.Device, kind: str) -> Any:
    optimizer = nearstep.optim.AdamW(parameters, lr=1e-3, device=device)
    if kind == "sequence":
        optimizer.table.executor.home = DeviceHome(optimizer.device, overlaps=False)
    return optimizer


def measure(channels: int, parameters: int, steps: int) -> dict[str, Any]:
    """Cycles of both, the median of some steps after the first."""
    generator = torch.Generator().manual_seed(1)
    first = [torch.randn(size, generator=generator) for size in sizes_of(parameters)]
    url = f"{DEVICE}&channels={channels}"
    kinds = ("sequence", "graph")
    cycles: dict[str, list[int]] = {kind: [] for kind in kinds}
    with nearstep.open(url) as device:
        assert isinstance(device.backend, DimmBackend)
        ours = {kind: [p.clone().requires_grad_() for p in first] for kind in kinds}
        optimizers = {kind: optimizer_of(ours[kind], device, kind) for kind in kinds}
        for _ in range(1 + steps):
            gradients = [torch.randn(p.shape, generator=generator) for p in first]
            for kind in kinds:
                for p, gradient in zip(ours[kind], gradients, strict=True):
                    p.grad = gradient
                begun = device.backend.cycles
                optimizers[kind].step()
                cycles[kind].append(device.backend.cycles - begun)
        if not all(map(torch.equal, *ours.values())):
            raise AssertionError(f"{url}: not the same bits")
        timeline = optimizers["graph"].timeline
        busy = {lane: timeline.busy(lane) for lane in sorted(timeline.lanes)}
        makespan, limit = timeline.makespan, timeline.limit
    found = {kind: statistics.median(each[1:]) for kind, each in cycles.items()}
    return {
        "label": "measured (RTL cycles)",
        "device": url,
        "channels": channels,
        "parameters": parameters,
        "tensors": len(first),
        "steps": steps,
        **{f"{kind}_cycles": each for kind, each in found.items()},
        "sequence_over_graph": found["sequence"] / found["graph"],
        "busy_cycles": busy,
        "last_over_limit": makespan / limit,
    }


def main(
    steps: Annotated[int, typer.Option(help="Of each kind, after the first.")] = 3,
    largest: Annotated[int, typer.Option(help="Leave out larger steps.")] = SIZES[-1],
) -> None:
    """Measure, print, and write build/bench/step.json."""
    rows = [measure(c, n, steps) for c in CHANNELS for n in SIZES if n <= largest]
    path = report.write("step", {"rows": rows})
    table = Table(
        "channels", "parameters", "in sequence", "as a graph", "ratio", "bus", "channels' busiest",
        "over the limit", title=f"cycles of a step of AdamW, {DEVICE}; {path}",
    )  # fmt: skip
    for row in rows:
        busy = row["busy_cycles"]
        table.add_row(
            str(row["channels"]),
            f"{row['parameters']:,}",
            f"{row['sequence_cycles']:,}",
            f"{row['graph_cycles']:,}",
            f"{row['sequence_over_graph']:.3f}",
            f"{busy['bus']:,}",
            f"{max(v for lane, v in busy.items() if lane != 'bus'):,}",
            f"{row['last_over_limit']:.3f}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
