"""Figures of a training run: what was lost, moved and counted, each with its origin."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median

import torch
from optimizers import Choice
from run_report import Figure
from stdlib_text import Batches
from trainer import Trainer

import nearstep
from nearstep.paper.axdimm_kernel import AXDIMM
from nearstep.torch.offload import Engine
from nearstep.torch.offload import Report as OffloadReport
from nearstep.torch.optimizer import DeviceOptimizer
from nearstep.updater.device import KernelDevice
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.smartssd.config import SmartssdConfig

VALIDATION_BATCHES = 8
LAST_STEPS = 10

PAPER_CLOCK_HZ = 200_000_000
"""Clock of the paper's kernel. Ref: AXDIMM, section 3.1."""

PAPER_PARAMS_PER_S = AXDIMM.achieved
"""The paper's kernel on both of its DDR4 channels. Ref: AXDIMM, Table 5."""

PAPER_CARD_BYTES_PER_S = 7e9
"""Of the updater of a card, at least. Ref: Smart-Infinity, section VII-H and Fig. 14."""

ELEMENT_BYTES = 4
"""Of an fp32 number. A step on a CPU moves so many for each array that it reads or writes.

Ref: AXDIMM, section 6.2.
"""

NEARSTEP_BYTES = 8
"""Least memory traffic of the host for each parameter when the step is on a device.

Gradients are read to be sent, and parameters written when they arrive. As in
a step on a CPU, further passes of an implementation are not counted: nearstep's own checks
of whether the host changed a parameter are two more reads of it.
"""


def figures(
    choice: Choice,
    ours: Trainer,
    theirs: Trainer | None,
    validation: Batches,
    engine: Engine | None = None,
) -> list[Figure]:
    """All figures of a run that has ended; `theirs` is the baseline, if there was one, and `engine`
    that of an offloaded model."""
    optimizer = ours.optimizer
    if not isinstance(optimizer, DeviceOptimizer):
        raise TypeError(f"ours must step on a device, not with {type(optimizer).__name__}")
    traffic = dataclasses.replace(
        optimizer.traffic
    )  # as it is before anything is read for a figure
    offloaded = [] if engine is None else list(_offload(engine.report()))
    drives = [] if optimizer.store is None else list(_drives(optimizer, traffic))
    return [
        *_losses(ours, theirs, validation),
        *_differences(choice, ours, theirs),
        *_link(choice, traffic),
        *offloaded,
        *drives,
        *_memory_bus(choice, traffic),
        *_device(choice, traffic, optimizer.device),
        *seconds(traffic, ours, theirs),
    ]


def sha256(ours: Trainer) -> str:
    """Of the bits of all parameters, and of their state."""
    found = hashlib.sha256()
    for p in ours.model.parameters():
        state = ours.optimizer.state[p]
        for each in (p, *(state[key] for key in sorted(state))):
            found.update(each.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


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


def _differences(choice: Choice, ours: Trainer, theirs: Trainer | None) -> Iterator[Figure]:
    bits = partial(Figure, section="bits that differ from torch", unit="bits", origin="measured")
    if theirs is None:
        yield bits(name="all", value=None, note="no baseline run")
        return
    if choice.compression is not None:
        yield bits(name="all", value=None, note="whole gradients there")
        return
    for name, (differing, total) in _bits_that_differ(ours, theirs).items():
        yield bits(name=name, value=differing, note=f"of {total:,}")


def _bits_that_differ(ours: Trainer, theirs: Trainer) -> Mapping[str, tuple[int, int]]:
    """Differing and all bits, by kind of array, over all parameters of two trainers; of arrays that
    both have in one format."""
    counts: dict[str, list[int]] = {}
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        mine, other = ours.optimizer.state[a], theirs.optimizer.state[b]
        arrays = {"parameters": (a, b)} | {
            key: (mine[key], value) for key, value in other.items() if key != "step"
        }
        for key, (x, y) in arrays.items():
            if x.dtype != y.dtype:
                continue
            counts.setdefault(key, [0, 0])
            words = x.detach().view(torch.int32) ^ y.detach().view(torch.int32)
            counts[key][0] += sum(int(((words >> bit) & 1).sum()) for bit in range(32))
            counts[key][1] += 32 * words.numel()
    return {key: (differing, total) for key, (differing, total) in counts.items()}


def _link(choice: Choice, traffic: nearstep.optim.Traffic) -> Iterator[Figure]:
    elements = traffic.elements // traffic.steps
    link = partial(Figure, section="host link", unit="B/step")
    yield link(
        name="gradients down",
        value=traffic.gradients_down // traffic.steps,
        origin="measured",
        note=f"{traffic.gradients_down / traffic.elements:.3g} B/param",
    )
    if choice.compression is not None:
        yield link(
            name="without compression",
            value=ELEMENT_BYTES * elements,
            origin="modelled",
            note=f"{ELEMENT_BYTES} B/param",
        )
        yield Figure(
            section="host link",
            name="elements sent",
            value=100 * traffic.pairs / traffic.elements,
            unit="%",
            origin="measured",
            note=f"{traffic.gradients_down / traffic.pairs:g} B each",
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
        name="masters down, once" if choice.drives is None else "masters down",
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


def _offload(report: OffloadReport) -> Iterator[Figure]:
    """What was on the host at most, and how often parameters came."""
    here = partial(Figure, section="parameters and gradients here", unit="B", origin="measured")
    share = f"{100 * report.peak / report.parameters:.3g} % of all"
    yield here(name="at most", value=report.peak, note=share)
    yield here(name="budget", value=report.budget, note=f"of {report.parameters:,} B")
    fetches = report.fetches + report.prefetches
    note = f"{100 * report.prefetches / fetches:.3g} % early"
    yield here(name="parameters fetched", value=fetches, unit="", note=note)


def _drives(optimizer: DeviceOptimizer, traffic: nearstep.optim.Traffic) -> Iterator[Figure]:
    """What was in the memory of the device at most, and what went over the drives."""
    elements = traffic.elements // traffic.steps
    on = partial(Figure, section="device memory and drives", origin="measured")
    peak = optimizer.memory_peak
    yield on(name="memory, at most", value=peak, unit="B", note="parameters, gradients, state")
    ways = [("host to drives", traffic.to_drives), ("drives to host", traffic.from_drives)]
    if optimizer.device.drive_places:
        ways += [("drives to cards", traffic.drives_to_cards)]
        ways += [("cards to drives", traffic.cards_to_drives)]
    if traffic.residuals_to_drives:
        ways += [("held back, host to drives", traffic.residuals_to_drives)]
    for name, moved in ways:
        note = f"{moved / traffic.steps / elements:.3g} B/param"
        yield on(name=name, value=moved // traffic.steps, unit="B/step", note=note)


def _memory_bus(choice: Choice, traffic: nearstep.optim.Traffic) -> Iterator[Figure]:
    """What a step moves between the host and its own memory, at least."""
    elements = traffic.elements // traffic.steps
    bus = partial(Figure, section="traffic on host memory bus", unit="B/step", origin="modelled")
    ours, arrays = NEARSTEP_BYTES, "g, p"
    if choice.compression is not None and choice.error_feedback:
        ours, arrays = ours + 2 * ELEMENT_BYTES, "g, p, residual"
    yield bus(name=f"nearstep: {arrays}", value=ours * elements, note=f"{ours} B/param")
    theirs = choice.kind.bytes_moved()
    states = "".join(f", {name}" for name in choice.kind.rule.arrays_out if name != "p")
    yield bus(name=f"CPU offload: g, p{states}", value=theirs * elements, note=f"{theirs} B/param")


def _device(
    choice: Choice, traffic: nearstep.optim.Traffic, opened: KernelDevice
) -> Iterator[Figure]:
    dimm: DimmConfig | None = getattr(opened, "dimm", None)
    card: SmartssdConfig | None = getattr(opened, "card", None)
    cycles = traffic.cycles
    memory = "no DDR4 behind it" if dimm is None else f"DDR4-1600, {dimm.density}"
    if card is not None:
        memory = f"{opened.channel_count} x {card.kernel.beat_bytes} B a cycle"
    device = partial(Figure, section="device")
    no_clock = "no clock here"
    yield device(
        name="cycles",
        value=cycles,
        unit="cycles",
        origin="measured",
        note=f"kernels, {traffic.launches} runs" if cycles else no_clock,
    )
    yield device(
        name="cycles/16 parameters",
        value=16 * cycles / traffic.elements if cycles else None,
        unit="cycles",
        origin="measured",
        note="16 are one beat" if cycles else no_clock,
    )
    clock = f"{PAPER_CLOCK_HZ // 10**6} MHz"
    for name, count, note in (
        (f"kernels at {clock}", cycles, "the paper's clock"),
        (f"whole step at {clock}", traffic.step_cycles, "with transfers"),
    ):
        yield device(
            name=name,
            value=1e3 * count / traffic.steps / PAPER_CLOCK_HZ if count else None,
            unit="ms/step",
            origin="modelled",
            note=note if count else no_clock,
        )
    yield device(
        name=f"throughput at {clock}",
        value=traffic.elements / cycles * PAPER_CLOCK_HZ / 1e6 if cycles else None,
        unit="Mparams/s",
        origin="modelled",
        note=memory if cycles else no_clock,
    )
    plain = choice.compression is None and choice.max_grad_norm is None
    formats = opened.config.rule_set.whole.formats
    moved = choice.kind.bytes_moved(formats) * traffic.elements
    if dimm is not None and cycles and plain:
        yield device(
            name="of DRAM peak",
            value=100 * moved / (cycles * dimm.channels * dimm.kernel.beat_bytes),
            unit="%",
            origin="measured",
            note=f"bound {100 * dimm.refresh_bound:.2f} %",
        )
    if card is not None:
        yield from _card(moved if plain else None, cycles, card, opened.channel_count)
    elif choice.kind.rules == "adam":
        yield device(
            name="the paper's throughput",
            value=PAPER_PARAMS_PER_S / 1e6,
            unit="Mparams/s",
            origin="paper",
            note="DDR4-1600, 32Gb",
        )


def _card(
    moved: int | None, cycles: int | None, card: SmartssdConfig, cards: int
) -> Iterator[Figure]:
    """`moved` are the bytes of whole gradients and of states; of pairs they are not counted."""
    device = partial(Figure, section="device")
    if moved is not None and cycles:
        yield device(
            name="of DRAM peak",
            value=100 * moved / (cycles * cards * card.kernel.beat_bytes),
            unit="%",
            origin="measured",
            note="half duplex",
        )
        yield device(
            name=f"DRAM of a card at {PAPER_CLOCK_HZ // 10**6} MHz",
            value=moved / cards / cycles * PAPER_CLOCK_HZ / 1e9,
            unit="GB/s",
            origin="modelled",
            note="its SSD: about 3.2",
        )
    yield device(
        name="the paper's updater",
        value=PAPER_CARD_BYTES_PER_S / 1e9,
        unit="GB/s",
        origin="paper",
        note="more than this",
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
