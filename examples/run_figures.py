"""Figures of a training run: what was lost, moved and counted, each with its origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median

import torch
from run_report import Figure
from stdlib_text import Batches
from trainer import Trainer

import nearstep
from nearstep_hw.axdimm.dimm import DimmConfig

VALIDATION_BATCHES = 8
LAST_STEPS = 10

PAPER_CLOCK_HZ = 200_000_000
"""Clock of the paper's kernel. Ref: AXDIMM, section 3.1."""

PAPER_PARAMS_PER_S = 789.38e6
"""The paper's kernel on both of its DDR4 channels. Ref: AXDIMM, Table 5."""

BEATS = 7
"""Beats that a kernel moves for each beat of parameters: 4 read, 3 written."""

CPU_ADAM_BYTES = 28
"""Least memory traffic of Adam on a CPU for each parameter, of fp32 arrays.

Parameters, gradients and both moments are read, parameters and moments written.
Ref: AXDIMM, section 6.2.
"""

NEARSTEP_BYTES = 8
"""Least memory traffic of the host for each parameter when the step is on a device.

Gradients are read to be sent, and parameters written when they arrive. As in
:data:`CPU_ADAM_BYTES`, further passes of an implementation are not counted: nearstep's own checks
of whether the host changed a parameter are two more reads of it.
"""


def figures(ours: Trainer, theirs: Trainer | None, validation: Batches) -> list[Figure]:
    """All figures of a run that has ended; ``theirs`` is the baseline, if there was one."""
    optimizer = ours.optimizer
    if not isinstance(optimizer, nearstep.optim.Adam):
        raise TypeError(f"ours must step on a device, not with {type(optimizer).__name__}")
    traffic = dataclasses.replace(
        optimizer.traffic
    )  # as it is before anything is read for a figure
    return [
        *_losses(ours, theirs, validation),
        *_differences(ours, theirs),
        *_link(traffic),
        *_memory_bus(traffic),
        *_device(traffic, optimizer.device.dimm),
        *seconds(traffic, ours, theirs),
    ]


def _losses(ours: Trainer, theirs: Trainer | None, validation: Batches) -> Iterator[Figure]:
    tokens = [validation.draw() for _ in range(VALIDATION_BATCHES)]
    trainers = {"nearstep": ours} | ({"torch": theirs} if theirs else {})
    loss = partial(Figure, section="loss", unit="nats/B", origin="measured")
    for name, trainer in trainers.items():
        last = trainer.losses[-LAST_STEPS:]
        yield loss(
            name=f"training, {name}",
            value=sum(last) / len(last),
            note=f"mean of last {len(last)}",
        )
    for name, trainer in trainers.items():
        yield loss(
            name=f"validation, {name}",
            value=trainer.validate(tokens),
            note="unseen text",
        )


def _differences(ours: Trainer, theirs: Trainer | None) -> Iterator[Figure]:
    bits = partial(Figure, section="bits that differ from torch", unit="bits", origin="measured")
    if theirs is None:
        yield bits(name="all", value=None, note="no baseline run")
        return
    for name, (differing, total) in _bits_that_differ(ours, theirs).items():
        yield bits(name=name, value=differing, note=f"of {total:,}")


def _bits_that_differ(ours: Trainer, theirs: Trainer) -> Mapping[str, tuple[int, int]]:
    """Differing and all bits, by kind of array, over all parameters of two trainers."""
    counts = {"parameters": [0, 0], "exp_avg": [0, 0], "exp_avg_sq": [0, 0]}
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        mine, other = ours.optimizer.state[a], theirs.optimizer.state[b]
        arrays = {"parameters": (a, b)} | {
            key: (mine[key], other[key]) for key in ("exp_avg", "exp_avg_sq")
        }
        for key, (x, y) in arrays.items():
            words = x.detach().view(torch.int32) ^ y.detach().view(torch.int32)
            counts[key][0] += sum(int(((words >> bit) & 1).sum()) for bit in range(32))
            counts[key][1] += 32 * words.numel()
    return {key: (differing, total) for key, (differing, total) in counts.items()}


def _link(traffic: nearstep.optim.Traffic) -> Iterator[Figure]:
    elements = traffic.elements // traffic.steps
    link = partial(Figure, section="host link", unit="B/step")
    yield link(
        name="gradients down",
        value=traffic.gradients_down // traffic.steps,
        origin="measured",
        note=f"{traffic.gradients_down / traffic.elements:g} B/param",
    )
    yield link(
        name="parameters up",
        value=traffic.parameters_up // traffic.steps,
        origin="measured",
        note=f"{traffic.parameters_up / traffic.elements:g} B/param",
    )
    yield link(
        name="moments down and up",
        value=(traffic.moments_down + traffic.moments_up) // traffic.steps,
        origin="measured",
        note="stay on device",
    )
    yield Figure(
        section="host link",
        name="masters down, once",
        value=traffic.masters_down,
        unit="B",
        origin="measured",
        note=f"{traffic.masters_down / elements:g} B/param",
    )
    for bits in (32, 16):
        yield link(
            name=f"CPU offload in fp{bits}",
            value=2 * elements * bits // 8,
            origin="modelled",
            note=f"{bits // 8} B/param a way",
        )


def _memory_bus(traffic: nearstep.optim.Traffic) -> Iterator[Figure]:
    """What a step moves between the host and its own memory, at least."""
    elements = traffic.elements // traffic.steps
    bus = partial(Figure, section="traffic on host memory bus", unit="B/step", origin="modelled")
    yield bus(
        name="nearstep: g, p",
        value=NEARSTEP_BYTES * elements,
        note=f"{NEARSTEP_BYTES} B/param",
    )
    yield bus(
        name="CPU offload: g, p, m, v",
        value=CPU_ADAM_BYTES * elements,
        note=f"{CPU_ADAM_BYTES} B/param",
    )


def _device(traffic: nearstep.optim.Traffic, dimm: DimmConfig | None) -> Iterator[Figure]:
    cycles = traffic.cycles
    memory = "no DDR4 behind it" if dimm is None else f"{dimm.channels} x DDR4-1600"
    device = partial(Figure, section="device")
    no_clock = "no clock here"
    yield device(
        name="cycles",
        value=cycles,
        unit="cycles",
        origin="measured",
        note=f"RTL, {traffic.launches} runs" if cycles else no_clock,
    )
    yield device(
        name="cycles/16 parameters",
        value=16 * cycles / traffic.elements if cycles else None,
        unit="cycles",
        origin="measured",
        note="16 are one beat" if cycles else no_clock,
    )
    clock = f"{PAPER_CLOCK_HZ // 10**6} MHz"
    yield device(
        name=f"step at {clock}",
        value=1e3 * cycles / traffic.steps / PAPER_CLOCK_HZ if cycles else None,
        unit="ms/step",
        origin="modelled",
        note="the paper's clock" if cycles else no_clock,
    )
    yield device(
        name=f"throughput at {clock}",
        value=traffic.elements / cycles * PAPER_CLOCK_HZ / 1e6 if cycles else None,
        unit="Mparams/s",
        origin="modelled",
        note=memory if cycles else no_clock,
    )
    if dimm is not None and cycles:
        yield device(
            name="of DRAM peak",
            value=100 * BEATS * traffic.elements / dimm.kernel.lanes / (cycles * dimm.channels),
            unit="%",
            origin="measured",
            note=f"bound {100 * dimm.timing.refresh_bound:.2f} %",
        )
    yield device(
        name="the paper's throughput",
        value=PAPER_PARAMS_PER_S / 1e6,
        unit="Mparams/s",
        origin="paper",
        note="two DDR4 channels",
    )


def seconds(
    traffic: nearstep.optim.Traffic, ours: Trainer, theirs: Trainer | None
) -> Iterator[Figure]:
    """What passed on the wall clock; of steps the median, because the first one warms up."""
    here = partial(Figure, section="this machine", origin="measured")
    yield here(
        name="parameters simulated",
        value=traffic.elements / traffic.run_seconds,
        unit="params/s",
        note="in kernel runs",
    )
    yield here(
        name="step, nearstep",
        value=1e3 * median(ours.step_seconds),
        unit="ms/step",
        note="median, emulated",
    )
    if theirs:
        yield here(
            name="step, torch",
            value=1e3 * median(theirs.step_seconds),
            unit="ms/step",
            note=f"median, {torch.get_num_threads()} threads",
        )
    yield here(
        name="forward and backward",
        value=1e3 * median(ours.model_seconds),
        unit="ms/step",
        note="median",
    )
