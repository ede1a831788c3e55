"""What a kernel is told before START."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nearstep.buffer import Buffer
from nearstep.registers import BlockRegisters
from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.config import AdamKernelConfig
from nearstep_spec.updater.registers import Compression, CopyOutFormat, GradientFormat, Operation

INDEX, COPY_OUT = "index", "copy_out"
"""Arrays of a run beside those of its rule."""

READ_ONLY = frozenset({GRADIENT, INDEX})
"""Arrays that the kernel does not write."""

WRITE_ONLY = frozenset({COPY_OUT})
"""Arrays that it does not read."""

READS: Mapping[str, int] = {COPY_OUT: 0, INDEX: 2}
"""How often an array is read, if not once."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One run, as the configuration registers say it.

    Parameters
    ----------
    operation: Operation
    buffers: Mapping[str, Buffer]
        By array, those that the run uses.
    count: int
        Elements.
    gradient, copy_out: str
        Formats.
    form: str
        Of pairs; ``none`` without.
    pairs: int
    rule: str
        Of an update.
    scalars: Mapping[str, float | int]
        Of its rule, switches included.
    """

    operation: Operation
    buffers: Mapping[str, Buffer]
    count: int
    gradient: str
    copy_out: str = "none"
    form: str = "none"
    pairs: int = 0
    rule: str = ""
    scalars: Mapping[str, float | int] = field(default_factory=dict)

    def beats(self, config: AdamKernelConfig) -> int:
        """Beats that it moves."""
        return sum(
            -(-buffer.nbytes // config.beat_bytes) * (READS.get(name, 1) + (name not in READ_ONLY))
            for name, buffer in self.buffers.items()
        )

    def configure(self, kernel: BlockRegisters, config: AdamKernelConfig, base: int) -> None:
        """Write the registers of a kernel whose memory begins at ``base``, windows aside."""
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
            kernel.compression.form = Compression[self.form.upper()]
            kernel.pairs.value = self.pairs
        if self.operation is Operation.UPDATE:
            self._configure_rule(kernel, config)

    def grant(self, kernel: BlockRegisters, config: AdamKernelConfig, base: int) -> None:
        """Open a window of the kernel for the whole beats of each buffer."""
        for index, (name, buffer) in enumerate(self.buffers.items()):
            first = buffer.address - base
            whole = -(-(first + buffer.nbytes) // config.beat_bytes) * config.beat_bytes
            kernel[f"window{index}_base"].value = first
            kernel[f"window{index}_limit"].value = whole
            kernel[f"window{index}_permissions"].set(
                read=int(name not in WRITE_ONLY), write=int(name not in READ_ONLY), valid=1
            )

    def _configure_rule(self, kernel: BlockRegisters, config: AdamKernelConfig) -> None:
        rules = config.rule_set
        if len(rules.names) > 1:
            kernel.rule.value = rules.names.index(self.rule)
        for name in rules.rules[rules.names.index(self.rule)].scalars:
            kernel[name].value = float(self.scalars[name])
        if rules.switches:
            kernel.mode.set(**{name: int(self.scalars.get(name, 0)) for name in rules.switches})
