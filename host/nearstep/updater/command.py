"""Commands of a kernel: its registers before START."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from nearstep.buffer import Buffer
from nearstep.registers import BlockRegisters
from nearstep.updater.rounding import Drawn
from nearstep_spec.updater.config import INDEX, UpdateKernelConfig
from nearstep_spec.updater.operands import operands
from nearstep_spec.updater.pair_registers import form_value
from nearstep_spec.updater.registers import (
    CopyOutFormat,
    GradientFormat,
    RunKind,
    Stream,
)

READS: Mapping[str, int] = {INDEX: 2}
"""Number of reads of an array, if not one: indices are read before the run begins, too."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The configuration registers of one run.

    Parameters
    ----------
    buffers : by array, those that the run uses.
    count : elements.
    gradient, copy_out : formats.
    form : of pairs; `none` without.
    rule : of an update.
    scalars : of its rule, switches included.
    drawn : registers of stochastic rounding; None to nearest even.
    """

    operation: RunKind
    buffers: Mapping[str, Buffer]
    count: int
    gradient: str
    copy_out: str = "none"
    form: str = "none"
    pairs: int = 0
    rule: str = ""
    scalars: Mapping[str, float | int] = field(default_factory=dict)
    drawn: Drawn | None = None

    def beats(self, config: UpdateKernelConfig) -> int:
        """Beats that the run transfers."""
        table, total = operands(config), 0
        for name, buffer in self.buffers.items():
            reads = READS.get(name, 1) if table[name].read else 0
            passes = reads + (table[name].write != Stream.NONE)
            total += passes * -(-buffer.nbytes // config.beat_bytes)
        return total

    def configure(self, kernel: BlockRegisters, config: UpdateKernelConfig, base: int) -> None:
        """Write the registers of a kernel whose memory begins at `base`, windows aside."""
        for name, buffer in self.buffers.items():
            kernel[f"{name}_address"].value = buffer.address - base
        kernel.count.value = self.count
        if config.scan:
            kernel.operation.kind = self.operation
        if config.mixed or config.copy_out_formats:
            kernel.formats.set(
                gradient=GradientFormat[self.gradient.upper()],
                copy_out=CopyOutFormat[self.copy_out.upper()],
            )
        if config.compression:
            kernel.compression.form = form_value(self.form)
            kernel.pairs.value = self.pairs
        if self.operation is RunKind.UPDATE:
            self._configure_rule(kernel, config)
            if config.stochastic_rounding:
                self._configure_rounding(kernel, config)

    def grant(self, kernel: BlockRegisters, config: UpdateKernelConfig, base: int) -> None:
        """Open a window of the kernel for the whole beats of each buffer."""
        table = operands(config)
        for index, (name, buffer) in enumerate(self.buffers.items()):
            first = buffer.address - base
            whole = -(-(first + buffer.nbytes) // config.beat_bytes) * config.beat_bytes
            kernel[f"window{index}_base"].value = first
            kernel[f"window{index}_limit"].value = whole
            kernel[f"window{index}_permissions"].set(
                read=int(table[name].read != Stream.NONE),
                write=int(table[name].write != Stream.NONE),
                valid=1,
            )

    def _configure_rounding(self, kernel: BlockRegisters, config: UpdateKernelConfig) -> None:
        streams = {} if self.drawn is None else self.drawn.streams
        kernel.rounding.set(**{name: streams.get(name, 0) for name in config.stochastic})
        if self.drawn is not None:
            kernel.rounding_seed.value = self.drawn.seed
            kernel.rounding_step.value = self.drawn.step
            for name, value in asdict(self.drawn.numbering).items():
                kernel[f"element_{name}"].value = int(value)

    def _configure_rule(self, kernel: BlockRegisters, config: UpdateKernelConfig) -> None:
        rules = config.rule_set
        if len(rules.names) > 1:
            kernel.rule.value = rules.names.index(self.rule)
        for name in rules.rules[rules.names.index(self.rule)].scalars:
            kernel[name].value = float(self.scalars[name])
        if rules.switches:
            kernel.mode.set(**{name: int(self.scalars.get(name, 0)) for name in rules.switches})
