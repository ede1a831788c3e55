"""Command of the functional kernel at START, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nearstep_sim.golden.rounding import Draw
from nearstep_sim.updater.golden_port import Fault
from nearstep_spec.blockwise import SIGNED
from nearstep_spec.csr.model import NamedValue
from nearstep_spec.rounding import INDEX_BITS, alignment
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.config import COPY_OUT, INDEX, UpdateKernelConfig
from nearstep_spec.updater.operands import array_bytes, element_bytes, operands
from nearstep_spec.updater.pair_registers import form_value
from nearstep_spec.updater.registers import (
    Compression,
    CopyOutFormat,
    ErrorCause,
    GradientFormat,
    RunKind,
    Stream,
)

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
        """Return whether the window grants reading, or writing, all of [address, limit)."""
        inside = self.base <= address and limit <= self.limit
        return inside and (self.write if write else self.read)


@dataclass(frozen=True)
class Area:
    """An array of a run; a stream is NONE if it is not read, or not written."""

    name: str
    base: int
    nbytes: int
    read: NamedValue
    write: NamedValue

    @property
    def stream(self) -> NamedValue:
        """Stream in an error of the array's address."""
        return self.read or self.write


@dataclass(frozen=True, kw_only=True)
class Command:
    """The configuration registers at START; registers that a kernel lacks are 0.

    Parameters
    ----------
    rule : number of the rule.
    operation, gradient, copy_out, form : values of `operation.kind`, `formats` and
        `compression.form`.
    scale : pattern of `gradient_scale`.
    base : addresses of all arrays, by name.
    windows : valid windows.
    streams : of random bits, by state that can be rounded stochastically.
    seed, step, index, within, skip : of these bits.
    """

    config: UpdateKernelConfig
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
    streams: Mapping[str, int]
    seed: int
    step: int
    index: int
    within: int
    skip: int
    _formats: dict[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def read(cls, config: UpdateKernelConfig, value: Callable[[str], int]) -> Command:
        """Read the registers; `value` returns a field by `register.field`."""
        names = [f"window{i}" for i in range(config.window_count)]
        base = {name: value(f"{name}_address.value") for name in config.arrays}
        if config.compression:
            base[INDEX] = value("index_address.value")
        base[COPY_OUT] = value("copy_out_address.value")
        rounds = config.stochastic_rounding
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
            streams={n: value(f"rounding.{n}") for n in config.stochastic} if rounds else {},
            seed=value("rounding_seed.value") if rounds else 0,
            step=value("rounding_step.value") if rounds else 0,
            index=value("element_index.value") if rounds else 0,
            within=value("element_within.value") if rounds else 0,
            skip=value("element_skip.value") if rounds else 0,
        )

    @property
    def scans(self) -> bool:
        """Whether the gradients are read alone."""
        return self.operation == RunKind.SCAN

    @property
    def chosen(self) -> Rule:
        """The rule of an update."""
        return self.config.rule_set.rules[self.rule]

    def format_of(self, array: str) -> str:
        """Format of the elements of an array; of gradients as pairs, of their values."""
        if array not in self._formats:
            self._formats[array] = self._format_of(array)
        return self._formats[array]

    def _format_of(self, array: str) -> str:
        if array == GRADIENT:
            return GradientFormat(self.gradient).name.lower()
        if array == COPY_OUT:
            return CopyOutFormat(self.copy_out).name.lower()
        return operands(self.config)[array].format

    def bytes_of(self, array: str) -> int:
        """Bytes of an element of an array that is not in 8 bits."""
        return element_bytes(self.format_of(array))

    def extent(self, array: str, first: int, count: int) -> tuple[int, int]:
        """Return begin and end of elements [first, first + count), in bytes from the array's base;
        in 8 bits `first` must begin a block."""
        form = self.format_of(array)
        nbytes = array_bytes(self.config, form, count)
        if form in SIGNED:
            begin = self.config.block_layout.offset(first)
        else:
            begin = first * element_bytes(form)
        return begin, begin + nbytes

    def draw_of(self, array: str, first: int) -> Draw | None:
        """Return the random bits that round elements from `first` on; None for nearest even."""
        stream = self.streams.get(array, 0)
        if not stream:
            return None
        draw = Draw(
            seed=self.seed,
            step=self.step,
            stream=stream,
            index=self.index,
            within=self.within,
            block=self.config.block_elements,
            skip=self.skip,
        )
        return draw.after(first)

    def areas(self) -> dict[str, Area]:
        """Arrays that the run uses, by name, in the order in which they are checked."""
        compressed = self.form != Compression.NONE
        used = {GRADIENT} if self.scans else {*self.chosen.arrays_in, *self.chosen.arrays_out}
        written: set[str] = set() if self.scans else {*self.chosen.arrays_out, COPY_OUT}
        if compressed and self.pairs:
            used.add(INDEX)
        elif compressed:
            used.discard(GRADIENT)
        if self.copy_out != CopyOutFormat.NONE:
            used.add(COPY_OUT)
        return {
            each.name: Area(
                each.name,
                self.base[each.name],
                array_bytes(
                    self.config,
                    self.format_of(each.name),
                    self.pairs if compressed and each.paired else self.count,
                ),
                each.read,
                each.write if each.name in written else Stream.NONE,
            )
            for each in operands(self.config).values()
            if each.name in used
        }

    def first_fault(self, end: int) -> Fault | None:
        """Return the first reason, in the order of the hardware, why the command cannot run.

        Parameters
        ----------
        end : largest end address of arrays.
        """
        if self._unsupported():
            return Fault(ErrorCause.UNSUPPORTED)
        if self.base[COPY_OUT] and not self.config.copy_out_formats:
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
        """Whether the kernel lacks a feature of the command; the copy's address is not checked."""
        config = self.config
        formats = {GradientFormat[name.upper()] for name in config.gradient_formats}
        copies = {CopyOutFormat[name.upper()] for name in ("none", *config.copy_out_formats)}
        forms = set(map(form_value, ("none", *config.compression)))
        compressed = self.form != Compression.NONE
        return bool(
            self.operation not in set(RunKind)
            or (not self.scans and self.rule >= len(config.programs))
            or self.gradient not in formats
            or self.copy_out not in copies
            or self.form not in forms
            or (self.scale and not config.gradient_scale)
            or self.index % alignment(config.lanes)
            or self.within % alignment(config.lanes)
            or self.index >> INDEX_BITS
            or (self.scans and (compressed or self.copy_out != CopyOutFormat.NONE))
            or ((self.scans or compressed) and self.count >= COUNT_LIMIT)
            or (compressed and self.pairs >= COUNT_LIMIT)
        )

    def _granted(self, area: Area, write: bool) -> bool:
        beat = self.config.beat_bytes
        limit = -(-(area.base + area.nbytes) // beat) * beat
        return any(window.grants(area.base, limit, write) for window in self.windows)
