"""Device cycles of `optimizer.step()` on a DIMM: one thing after the other, and as a graph."""

import statistics
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import torch
from harness import Results, option, report, script, track

import nearstep
from nearstep.axdimm.device import AxdimmDevice

DEVICE = "sim:axdimm?memory=ddr4-1600&fu=native"
SIZES = (1 << 16, 1 << 20, 1 << 22)
CHANNELS = (1, 2)
VECTOR = 512  # elements of a small parameter beside each of the large ones
LR = 1e-3


class Sequence:
    """Steps of AdamW on buffers of the device, the tensors of a channel one behind the other."""

    def __init__(self, parameters: list[torch.Tensor], *, lr: float, device: AxdimmDevice) -> None:
        self.parameters, self.lr, self.device, self.steps = parameters, lr, device, 0
        channels = len(device.channels)
        each = sum(p.numel() for p in parameters) // channels
        self.channels = [
            {n: device.alloc(each, channel=c, align=device.stripe_align) for n in "pgmv"}
            for c in range(channels)
        ]
        for buffers in self.channels:
            buffers["m"].fill(0)
            buffers["v"].fill(0)
        self._write("p", parameters)

    def _parts(self, name: str, tensors: list[torch.Tensor]) -> Iterator[tuple[Any, np.ndarray]]:
        share = len(tensors) // len(self.channels)
        for index, tensor in enumerate(tensors):
            if index % share == 0:
                at = 0
            buffer = self.channels[index // share][name][at : at + tensor.numel()]
            at += tensor.numel()
            yield buffer, tensor.detach().numpy()

    def _write(self, name: str, tensors: list[torch.Tensor]) -> None:
        for buffer, values in self._parts(name, tensors):
            buffer.write(values)

    def step(self) -> None:
        self.steps += 1
        self._write("g", [p.grad for p in self.parameters if p.grad is not None])
        with self.device.acceleration():
            hyper = {"step": self.steps, "lr": self.lr, "weight_decay": 0.01}
            for run in [self.device.update("adamw", b, **hyper) for b in self.channels]:
                run.wait()
        for buffer, values in self._parts("p", self.parameters):
            buffer.read(out=values)


def measure(channels: int, parameters: int, steps: int) -> Results:
    # A small model: eight matrices, each with a vector.
    sizes = [parameters // 8 - VECTOR, VECTOR] * 8
    url = f"{DEVICE}&channels={channels}"
    cycles: dict[str, float] = {}
    ends = []
    for kind in ("sequence", "graph"):
        generator = torch.Generator().manual_seed(1)
        own = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
        with nearstep.open(url) as device:
            assert isinstance(device, AxdimmDevice)
            make = Sequence if kind == "sequence" else nearstep.optim.AdamW
            optimizer: Any = make(own, lr=LR, device=device)
            took = []
            for _ in range(1 + steps):
                for p in own:
                    p.grad = torch.randn(p.shape, generator=generator)
                begun = device.cycles or 0
                optimizer.step()
                took.append((device.cycles or 0) - begun)
            cycles[kind] = statistics.median(took[1:])
            ends.append(own)
    if not all(map(torch.equal, *ends)):
        raise AssertionError(f"{url}: not the same bits")
    timeline = optimizer.timeline
    busy = {lane: timeline.busy(lane) for lane in sorted(timeline.lanes)}
    return {"device": url, "channels": channels, "parameters": parameters, "tensors": len(sizes),
        "steps": steps, **{f"{kind}_cycles": each for kind, each in cycles.items()},
        **{f"{kind}_over_limit": each / max(busy.values()) for kind, each in cycles.items()},
        "graph_over_sequence": cycles["graph"] / cycles["sequence"], "busy_cycles": busy,
        "slower": max(each for lane, each in busy.items() if lane != "bus"),
        "last_over_limit": timeline.makespan / timeline.limit}  # fmt: skip


@script
def main(
    steps: Annotated[int, option("Of each kind, after the first.")] = 3,
    largest: Annotated[int, option("Leave out larger steps.")] = SIZES[-1],
) -> None:
    """Measure, print, and write build/bench/step.json."""
    shapes = [(c, n) for c in CHANNELS for n in SIZES if n <= largest]
    report("step", rows=[measure(*shape, steps) for shape in track(shapes, "steps")])
