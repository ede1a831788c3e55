"""What the functional kernel is told at START, and whether it can do that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nearstep_sim.updater.golden_port import Fault
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.config import ELEMENT_BYTES, HALF_BYTES, AdamKernelConfig
from nearstep_spec.updater.registers import (
    Compression,
    CopyOutFormat,
    ErrorCause,
    GradientFormat,
    Operation,
    Stream,
)

INDEX, COPY = "index", "copy"
"""Arrays beside those of the rules."""

COUNT_LIMIT = 1 << 32
"""Scans, and runs with pairs, have fewer elements and pairs than this."""


@dataclass(frozen=True)
class Window:
    """A range that the host granted."""

    base: int
    limit: int
    read: bool
    write: bool

    def grants(self, address: int, limit: int, write: bool) -> bool:
        """Whether it grants reading, or writing, all of [address, limit)."""
        inside = self.base <= address and limit <= self.limit
        return inside and (self.write if write else self.read)


@dataclass(frozen=True)
class Area:
    """An array of a run; a stream is NONE if it is not read, or not written."""

    name: str
    base: int
    nbytes: int
    read: Stream
    write: Stream

    @property
    def stream(self) -> Stream:
        """The one that faults are told of."""
        return self.read or self.write


@dataclass(frozen=True, kw_only=True)
class Command:
    """The configuration registers at START; what a kernel does not have is 0.

    Parameters
    ----------
    config: AdamKernelConfig
    rule: int
        Number of the rule.
    operation, gradient, copy_out, form: int
        Values of ``operation.kind``, ``formats`` and ``compression.form``.
    count, pairs: int
    scale: int
        Pattern of ``gradient_scale``.
    base: Mapping[str, int]
        Addresses of all arrays, by name.
    windows: Sequence[Window]
        Those in force.
    """

    config: AdamKernelConfig
    rule: int
    operation: int
    gradient: int
    copy_out: int
    form: int
    count: int
    pairs: int
    scale: int
    base: Mapping[str, int]
    windows: Sequence[Window]

    @classmethod
    def read(cls, config: AdamKernelConfig, value: Callable[[str], int]) -> Command:
        """Take the registers; ``value`` gives a field by ``register.field``."""
        names = [f"window{i}" for i in range(config.window_count)]
        base = {name: value(f"{name}_address.value") for name in config.arrays}
        if config.compression:
            base[INDEX] = value("index_address.value")
        base[COPY] = value("copy_out_address.value")
        return cls(
            config=config,
            rule=value("rule.value") if len(config.programs) > 1 else 0,
            operation=value("operation.kind") if config.scan else 0,
            gradient=value("formats.gradient"),
            copy_out=value("formats.copy_out"),
            form=value("compression.form") if config.compression else 0,
            count=value("count.value"),
            pairs=value("pairs.value") if config.compression else 0,
            scale=value("gradient_scale.value"),
            base=base,
            windows=[
                Window(
                    value(f"{name}_base.value"),
                    value(f"{name}_limit.value"),
                    bool(value(f"{name}_permissions.read")),
                    bool(value(f"{name}_permissions.write")),
                )
                for name in names
                if value(f"{name}_permissions.valid")
            ],
        )

    @property
    def scans(self) -> bool:
        """Whether the gradients are read alone."""
        return self.operation == Operation.SCAN

    @property
    def chosen(self) -> Rule:
        """The rule of an update."""
        return self.config.rule_set.rules[self.rule]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient, or of the value of a pair."""
        return ELEMENT_BYTES if self.gradient == GradientFormat.FP32 else HALF_BYTES

    def areas(self) -> dict[str, Area]:
        """Arrays that the run uses, by name, in the order in which they are checked."""
        compressed = self.form != Compression.NONE
        if self.scans:
            names, written = [GRADIENT], ()
        else:
            empty = compressed and not self.pairs
            names = [n for n in self.chosen.arrays_in if not (empty and n == GRADIENT)]
            written = self.chosen.arrays_out
        sizes = dict.fromkeys(names, self.count * ELEMENT_BYTES)
        if GRADIENT in sizes:
            sizes[GRADIENT] = (self.pairs if compressed else self.count) * self.gradient_bytes
        found = {
            name: Area(
                name,
                self.base[name],
                nbytes,
                Stream[f"{name.upper()}_READ"],
                Stream[f"{name.upper()}_WRITE"] if name in written else Stream.NONE,
            )
            for name, nbytes in sizes.items()
        }
        if compressed and self.pairs:
            nbytes = self.pairs * ELEMENT_BYTES
            found[INDEX] = Area(INDEX, self.base[INDEX], nbytes, Stream.INDEX_READ, Stream.NONE)
        if self.copy_out != CopyOutFormat.NONE:
            nbytes = self.count * HALF_BYTES
            found[COPY] = Area(COPY, self.base[COPY], nbytes, Stream.NONE, Stream.COPY_OUT)
        return found

    def first_fault(self, end: int) -> Fault | None:
        """The first reason, in the order of the hardware, why this cannot run.

        Parameters
        ----------
        end: int
            Where arrays must end at the latest.
        """
        if self._unsupported():
            return Fault(ErrorCause.UNSUPPORTED)
        if self.base[COPY] and not self.config.copy_out_formats:
            return Fault(ErrorCause.UNSUPPORTED, Stream.COPY_OUT)
        if not self.count:
            return None
        areas = list(self.areas().values())
        for area in areas:
            if area.base % self.config.beat_bytes:
                return Fault(ErrorCause.ALIGNMENT, area.stream, area.base)
        for area in areas:
            if area.base + area.nbytes > end:
                return Fault(ErrorCause.ADDRESS_RANGE, area.stream, area.base)
        for i, one in enumerate(areas):
            for other in areas[i + 1 :]:
                low, high = sorted((one, other), key=lambda area: area.base)
                if low.base + low.nbytes > high.base:
                    return Fault(ErrorCause.OVERLAP, other.stream, other.base)
        for write in (False, True):
            for area in areas:
                stream = area.write if write else area.read
                if stream != Stream.NONE and not self._granted(area, write):
                    return Fault(ErrorCause.WINDOW, stream, area.base)
        return None

    def _unsupported(self) -> bool:
        """Whether the kernel lacks something, streams aside."""
        config = self.config
        formats = {GradientFormat[name.upper()] for name in config.gradient_formats}
        copies = {CopyOutFormat[name.upper()] for name in ("none", *config.copy_out_formats)}
        forms = {Compression[name.upper()] for name in ("none", *config.compression)}
        compressed = self.form != Compression.NONE
        return bool(
            self.operation not in set(Operation)
            or (not self.scans and self.rule >= len(config.programs))
            or self.gradient not in formats
            or self.copy_out not in copies
            or self.form not in forms
            or (self.scale and not config.gradient_scale)
            or (self.scans and (compressed or self.copy_out != CopyOutFormat.NONE))
            or ((self.scans or compressed) and self.count >= COUNT_LIMIT)
            or (compressed and self.pairs >= COUNT_LIMIT)
        )

    def _granted(self, area: Area, write: bool) -> bool:
        beat = self.config.beat_bytes
        limit = -(-(area.base + area.nbytes) // beat) * beat
        return any(window.grants(area.base, limit, write) for window in self.windows)
