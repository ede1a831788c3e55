"""One iteration of storage-offloaded training on the machine of the Smart-Infinity paper.

A graph of work (`nearstep.work`) of forward, backward with transfers of gradients to the drives,
and the update, by any of the paper's methods, on the same machine, drives and links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import Any, Literal

from nearstep.errors import ArgumentError
from nearstep.paper.smart_infinity_machine import PARAMETER_BYTES, STATES, Machine, Options
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Range
from nearstep.work.timeline import Timeline
from nearstep_spec.platform.layer import Layer, Model

Method = Literal["base", "su", "su+o", "su+o+c"]
METHODS: tuple[Method, ...] = ("base", "su", "su+o", "su+o+c")
"""ZeRO-Infinity on RAID0; SmartUpdate; with the transfer handler; with compressed gradients."""

HALF_BYTES = 2
PAIR_BYTES = 8
"""An index and a value of a gradient (section VII-A)."""

MOST_BLOCKS = 24
"""Most blocks of layers, which are transferred and computed as a whole."""

SUMS = 2
"""Sums of the activations of a layer on several GPUs: one of attention and one of the perceptron.
"""

DRIVES = 10


@dataclass(frozen=True)
class Phases:
    """Seconds of the three parts of figures 9 and 11(b).

    Attributes
    ----------
    backward : with transfers of gradients to the drives.
    update : with transfers of the optimizer's states.
    """

    forward: float
    backward: float
    update: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


@dataclass(frozen=True, kw_only=True)
class Block:
    """Layers that are transferred and computed together.

    Attributes
    ----------
    elements : parameters.
    forward_flops, backward_flops : the latter with the second forward.
    output_bytes : activations that are kept.
    """

    elements: int
    forward_flops: int
    backward_flops: int
    output_bytes: int


def blocks(layers: Sequence[Layer], most: int = MOST_BLOCKS) -> list[Block]:
    """Join layers to at most so many blocks of about as many layers each."""
    count = min(most, len(layers))
    bounds = [len(layers) * i // count for i in range(count + 1)]
    found = []
    for first, last in pairwise(bounds):
        group = layers[first:last]
        forward = sum(layer.forward_flops for layer in group)
        found.append(
            Block(
                elements=sum(layer.parameter_count for layer in group),
                forward_flops=forward,
                backward_flops=forward + sum(layer.backward_flops for layer in group),
                output_bytes=sum(layer.output_bytes for layer in group),
            )
        )
    return found


def shares(total: int, parts: int) -> list[int]:
    """Divide an integer into nearly equal integers."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


@dataclass(frozen=True, kw_only=True)
class CsdCase:
    """A model, trained by a method.

    Parameters
    ----------
    method : of `METHODS`.
    drives : 1 to 10.
    gpus : of the machine, by name; several share each layer (tensor parallelism, section VIII-A).
    optimizer : of `STATES`.
    percent : of SmartComp: bytes of pairs beside those of whole gradients (section VII-A).
    batch : sequences.
    sequence : tokens. None: those of the options.

    Raises
    ------
    ArgumentError : a number is out of range, or a name unknown.
    """

    model: Model
    method: Method = "base"
    drives: int = DRIVES
    gpus: tuple[str, ...] = ("a5000",)
    optimizer: str = "adam"
    percent: float = 2.0
    batch: int = 4
    sequence: int | None = None
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ArgumentError(f"method must be of {', '.join(METHODS)}, not {self.method!r}")
        if self.drives not in range(1, DRIVES + 1):
            raise ArgumentError(f"drives must be 1 to {DRIVES}, not {self.drives!r}")
        if self.optimizer not in STATES:
            raise ArgumentError(f"optimizer must be of {', '.join(STATES)}, not {self.optimizer!r}")
        if not 0 < self.percent <= 100:
            raise ArgumentError(f"percent must be above 0, to 100, not {self.percent!r}")
        if not self.gpus:
            raise ArgumentError("gpus must name one")

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.options)

    @cached_property
    def blocks(self) -> list[Block]:
        sequence = self.options.sequence if self.sequence is None else self.sequence
        return blocks(self.model.layers(self.batch, sequence, HALF_BYTES))

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(block.elements for block in self.blocks)

    @property
    def states(self) -> tuple[str, ...]:
        return STATES[self.optimizer]

    def gradient_bytes(self, elements: int) -> int:
        """Bytes of gradients sent to the drives for so many parameters: all, or pairs of the
        largest."""
        if self.method != "su+o+c":
            return PARAMETER_BYTES * elements
        return PAIR_BYTES * ceil(elements * self.percent * PARAMETER_BYTES / PAIR_BYTES / 100)

    @cached_property
    def graph(self) -> Graph:
        return _Work(self).graph

    @cached_property
    def timeline(self) -> Timeline:
        return execute(self.graph)

    @cached_property
    def phases(self) -> Phases:
        ends = {entry.operation.name: entry.end for entry in self.timeline.entries}
        hertz = self.timeline.hertz or 1.0
        forward, backward = ends["forward ends"] / hertz, ends["backward ends"] / hertz
        return Phases(forward, backward - forward, self.timeline.makespan / hertz - backward)

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return self.phases.total


class _Work:
    """The graph of a case."""

    def __init__(self, case: CsdCase) -> None:
        self.graph = Graph()
        self._case = case
        self._machine = case.machine
        self._blocks = case.blocks
        forward = self._forward()
        end = self.graph.add("forward ends", "host", after=forward, seconds=0.0)
        backward = self._backward(end)
        self._gate = self.graph.add("backward ends", "host", after=backward, seconds=0.0)
        if case.method == "base":
            self._update_on_host()
        else:
            for drive, each in enumerate(shares(case.elements, case.drives)):
                self._update_on_card(drive, each)

    def _move(
        self,
        name: str,
        ends: tuple[str, str],
        nbytes: int,
        hold: str,
        after: Sequence[Operation],
        **others: Any,
    ) -> Operation:
        """Add a transfer between two parts, which holds a stream; `others` are of `Graph.add`."""
        holds = (hold,) if hold else ()
        transfer = self._machine.transfer(*ends, nbytes)
        return self.graph.add(name, *holds, after=after, transfer=transfer, **others)

    def _compute(
        self, name: str, flops: int, sums: int, after: Sequence[Operation]
    ) -> list[Operation]:
        """Compute a block on all GPUs, each with its share, and sum so many bytes in a ring."""
        gpus = self._case.gpus
        options = self._case.options
        share = 1.0 if options.gpu is None else options.gpu
        done = []
        for gpu in gpus:
            seconds = flops / len(gpus) / (share * self._machine.flops(gpu))
            done.append(self.graph.add(f"{name} on {gpu}", gpu, after=after, seconds=seconds))
        if len(gpus) == 1:
            return done
        nbytes = 2 * (len(gpus) - 1) * sums // len(gpus)
        ring = zip(gpus, (*gpus[1:], gpus[0]), strict=True)
        return [self._move(f"{name} sums", ends, nbytes, "", done) for ends in ring]

    def _loads(
        self, name: str, block: Block, extra: int, after: Sequence[Operation]
    ) -> list[Operation]:
        """Load parameters in half precision, and extra bytes of a block, to each GPU."""
        gpus = self._case.gpus
        nbytes = (HALF_BYTES * block.elements + extra) // len(gpus)
        return [self._move(name, ("cpu", gpu), nbytes, f"{gpu} loads", after) for gpu in gpus]

    def _sends(self, name: str, nbytes: int, after: Sequence[Operation]) -> Iterator[Operation]:
        gpus = self._case.gpus
        for gpu in gpus:
            yield self._move(name, (gpu, "cpu"), nbytes // len(gpus), f"{gpu} sends", after)

    def _forward(self) -> list[Operation]:
        """Figure 1(a): one block is loaded ahead; its activations are sent to the host."""
        done: list[list[Operation]] = [[], []]
        kept: list[Operation] = []
        for number, block in enumerate(self._blocks):
            loads = self._loads(f"load {number}", block, 0, done[-2])
            name = f"forward {number}"
            sums = SUMS * block.output_bytes
            done.append(self._compute(name, block.forward_flops, sums, [*loads, *done[-1]]))
            kept += self._sends(f"keep {number}", block.output_bytes, done[-1])
        return [*done[-1], *kept]

    def _backward(self, begin: Operation) -> list[Operation]:
        """Figure 1(b): gradients of a block are sent to the host, and from there to the drives."""
        case = self._case
        done: list[list[Operation]] = [[begin], [begin]]
        gone: list[list[Operation]] = [[begin]]
        for number, block in reversed([*enumerate(self._blocks)]):
            loads = self._loads(f"load again {number}", block, block.output_bytes, done[-2])
            after = [*loads, *done[-1], *([] if case.options.overlap else gone[-1])]
            name = f"backward {number}"
            sums = 2 * SUMS * block.output_bytes  # backward, and recomputed forward
            done.append(self._compute(name, block.backward_flops, sums, after))
            nbytes = HALF_BYTES * block.elements
            if case.method == "su+o+c":
                nbytes = case.gradient_bytes(block.elements)
            sent = [*self._sends(f"gradient {number}", nbytes, done[-1])]
            gone.append([])
            for drive, each in enumerate(shares(block.elements, case.drives)):
                if each:
                    nbytes = case.gradient_bytes(each)
                    gone[-1].append(self._offload(f"gradient {number}", drive, nbytes, sent))
        return [*done[-1], *(each for group in gone for each in group)]

    def _offload(self, what: str, drive: int, nbytes: int, after: Sequence[Operation]) -> Operation:
        ends, hold = ("cpu", f"ssd{drive}"), f"ssd{drive} offloads"
        return self._move(f"offload {what}", ends, nbytes, hold, after)

    def _update_on_host(self) -> None:
        """Figures 1(c), 4(a): while a block is updated the next one is read and the last one
        written."""
        case = self._case
        states = PARAMETER_BYTES * len(case.states)
        written: list[list[Operation]] = [[self._gate]] * 3
        for number, block in enumerate(self._blocks):
            dealt = [*enumerate(shares(block.elements, case.drives))]
            here = []
            for drive, each in dealt:
                for what, width in (("states", states), ("gradient", PARAMETER_BYTES)):
                    after = [self._gate, *written[-3]]
                    here.append(
                        self._upload(f"{what} {number}", f"ssd{drive}", each * width, after)
                    )
            moved = (2 * len(case.states) + 1) * PARAMETER_BYTES
            seconds = block.elements * moved / (28 * self._machine.host_params_per_s)
            update = self.graph.add(f"update {number}", "cpu", after=here, seconds=seconds)
            written.append(
                [
                    self._offload(f"states {number}", drive, each * states, [update])
                    for drive, each in dealt
                ]
            )

    def _update_on_card(self, drive: int, elements: int) -> None:
        """Figures 4(b), 5 and 6(b): subgroups as large as fit the card's DRAM.

        With the handler, a variable of the next subgroup is read when its buffer has been written
        back; without it, when all buffers have.
        """
        case = self._case
        ssd, fpga = f"ssd{drive}", f"fpga{drive}"
        room = self._machine.card_bytes // (PARAMETER_BYTES * (len(case.states) + 1))
        written: Sequence[Operation] = [self._gate]
        waiting: list[tuple[str, int, Operation]] = []  # uploads, until the next subgroup is read
        for number, each in enumerate(shares(elements, max(1, ceil(elements / room)))):
            tag, nbytes = f"{drive}.{number}", PARAMETER_BYTES * each
            after: Sequence[Operation] = [self._gate]
            if case.method == "su":
                title, seconds = f"allocate {tag}", case.options.allocation_s
                after = [self.graph.add(title, fpga, after=written, seconds=seconds)]
            *reads, update = self._read_and_update(drive, tag, each, after)
            self._upload_all(ssd, waiting, reads)
            written = []
            for name in case.states:
                kept: Any = {"reads": [Range((fpga, name), 0, 1)], "priority": -1}
                title = f"write {name} {tag}"
                hold = f"{ssd} writes"
                written.append(self._move(title, (fpga, ssd), nbytes, hold, [update], **kept))
            waiting.append((f"p {tag}", nbytes, written[0]))
            if case.options.upload == "written":
                self._upload_all(ssd, waiting, [])
        self._upload_all(ssd, waiting, [])

    def _upload_all(
        self, ssd: str, waiting: list[tuple[str, int, Operation]], after: Sequence[Operation]
    ) -> None:
        """Send updated parameters to the host after they are written and the next ones have been
        read.
        """
        while waiting:
            what, nbytes, written = waiting.pop()
            self._upload(what, ssd, nbytes, [written, *after])

    def _upload(self, what: str, ssd: str, nbytes: int, after: Sequence[Operation]) -> Operation:
        return self._move(f"upload {what}", (ssd, "cpu"), nbytes, f"{ssd} uploads", after)

    def _read_and_update(
        self, drive: int, tag: str, elements: int, after: Sequence[Operation]
    ) -> list[Operation]:
        """Read and update a subgroup, and return these operations."""
        case, machine = self._case, self._machine
        ssd, fpga = f"ssd{drive}", f"fpga{drive}"
        buffers = {name: Range((fpga, name), 0, 1) for name in (*case.states, "g", "pairs")}
        gradient = "pairs" if case.method == "su+o+c" else "g"
        there = []
        for name in (*case.states, gradient):
            nbytes = PARAMETER_BYTES * elements
            if name == gradient:
                nbytes = case.gradient_bytes(elements)
            title, writes = f"read {name} {tag}", [buffers[name]]
            read = self._move(title, (ssd, fpga), nbytes, f"{ssd} reads", after, writes=writes)
            there.append(read)
        if gradient == "pairs":
            seconds = machine.decompress_s(elements)
            reads, writes = [buffers["pairs"]], [buffers["g"]]
            self.graph.add(f"decompress {tag}", fpga, reads=reads, writes=writes, seconds=seconds)
        update = self.graph.add(
            f"update {tag}",
            fpga,
            reads=[buffers["g"]],
            writes=[buffers[name] for name in case.states],
            seconds=case.options.tasklet_s + machine.update_s(elements, len(case.states) + 1),
        )
        return [*there, update]
