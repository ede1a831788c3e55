"""This machine's processor as a device: update rules on arrays in memory of this process."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Poll
from nearstep.buffer import Buffer
from nearstep.errors import ArgumentError
from nearstep.storage.aligned import ALIGNMENT, aligned_bytes
from nearstep.updater.arguments import RuleArguments
from nearstep.updater.direct import DirectDevice, EndedRun
from nearstep.updater.formats import CopyOut, Gradient
from nearstep.updater.pairs import Pairs
from nearstep.updater.processor import Processor
from nearstep.updater.rounding import Drawn
from nearstep_spec.blockwise import SIGNED
from nearstep_spec.rule.columns import Columns
from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.config import UpdateKernelConfig

Bytes = NDArray[np.uint8]

ADDRESS_BITS = 62
"""Addresses name arrays and take no memory."""


class _Area:
    """Memory of one array: pages of its own from the first use on, and arrays that are lent."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.own: Bytes | None = None
        self.lent: dict[int, Bytes] = {}


class HostMemory(Backend):
    """Memory of this process, without registers and without a clock.

    Parameters
    ----------
    config : rules and formats of the processor.
    """

    family = "host"
    capacity_bytes = 1 << ADDRESS_BITS
    is_host_memory = True
    config: UpdateKernelConfig

    def __init__(self, config: UpdateKernelConfig) -> None:
        self.config = config
        self._areas: dict[int, _Area] = {}
        self._starts: list[int] = []

    @property
    def cycles(self) -> None:
        return None

    def claim(self, address: int, nbytes: int) -> None:
        self._areas[address] = _Area(address, nbytes)
        insort(self._starts, address)

    def protect(self, address: int, nbytes: int) -> None:
        if self._areas.pop(address, None) is not None:
            self._starts.remove(address)

    def host_view(self, address: int, nbytes: int) -> Bytes:
        if not nbytes:
            return aligned_bytes(0)  # no area has that address, or another array's
        area = self._area(address)
        for start, data in area.lent.items():
            if start <= address and address + nbytes <= start + data.size:
                return data[address - start :][:nbytes]
        if area.own is None:
            area.own = aligned_bytes(area.nbytes)
        return area.own[address - area.start :][:nbytes]

    def replace_memory(self, address: int, data: Bytes) -> bool:
        if not data.size:
            return True
        area = self._area(address)
        assert (area.start, area.nbytes) == (address, data.size), "memory of a whole array"
        area.own = data
        return True

    def borders(self, address: int, nbytes: int) -> Iterator[int]:
        """Yield the addresses within a range at which other memory begins."""
        for start, data in self._area(address).lent.items():
            yield from (at for at in (start, start + data.size) if 0 < at - address < nbytes)

    def read_memory(self, address: int, out: Bytes) -> None:
        for first, last in self._pieces(address, out.size):
            out[first:last] = self.host_view(address + first, last - first)

    def write_memory(self, address: int, data: Bytes) -> None:
        for first, last in self._pieces(address, data.size):
            self.host_view(address + first, last - first)[:] = data[first:last]

    def _pieces(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range that are in memory of one piece, as offsets."""
        borders = {at - address for at in self.borders(address, nbytes)}
        return pairwise(sorted({0, nbytes, *borders}))

    def lend_memory(self, address: int, data: Bytes, *, writes: bool) -> bool:
        self._area(address).lent[address] = data
        return True

    def end_loan(self, address: int) -> None:
        self._area(address).lent.pop(address, None)

    def read_register(self, address: int) -> NoReturn:
        raise ArgumentError("the processor has no registers")

    def write_register(self, address: int, value: int) -> NoReturn:
        raise ArgumentError("the processor has no registers")

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        """Return: a run has ended when the call that starts it returns."""

    def reset(self) -> None:
        """Return: no run is in progress."""

    def close(self) -> None:
        self._areas.clear()
        self._starts.clear()

    def _area(self, address: int) -> _Area:
        return self._areas[self._starts[bisect_right(self._starts, address) - 1]]


class ProcessorDevice(DirectDevice):
    """A device of one channel whose kernel is this machine's processor.

    A run calls the compiled rule on the memory of its buffers and returns at its end. It rounds
    the last elements of a run as torch rounds those of a tensor (`Form.remainder`), so that a run
    ends with each tensor that has padding behind it.

    Parameters
    ----------
    config : rules, and formats of the arrays.
    """

    backend: HostMemory
    ends_runs = True

    def __init__(self, processor: Processor, url: str, config: UpdateKernelConfig) -> None:
        super().__init__(HostMemory(config), url, config)
        self._processor = processor

    @property
    def stripe_align(self) -> int:
        return ALIGNMENT

    def _update(  # type: ignore[override]  # other runs read registers
        self,
        arguments: RuleArguments,
        states: Mapping[str, Buffer],
        g: Buffer | Pairs,
        gradient: Gradient,
        copy_out: CopyOut,
        drawn: Drawn | None,
    ) -> EndedRun:
        rule, config = arguments.form.rule, self.config
        buffers = self._check_update(arguments, states, g, gradient, copy_out)
        if isinstance(g, Pairs):
            raise ArgumentError("gradients must be whole for the processor, not pairs")
        formats = {**config.rule_set.whole.formats, GRADIENT: gradient.format_of(g, config)}
        columns = Columns.of(rule, formats, stochastic=drawn is not None)
        index, seed = (0, 0) if drawn is None else (drawn.numbering.index, drawn.seed)
        names, factor, divided = rule.arrays_in, gradient.scale, None
        # torch divides by a scale that is no power of two, and rounds otherwise than a product
        if factor and abs(math.frexp(factor)[0]) != 0.5:
            divided = self._floats(buffers[GRADIENT], columns.format_of(GRADIENT))
            divided /= np.float32(abs(1.0 / factor))
            columns, factor = columns.widened(GRADIENT), math.copysign(1.0, factor)
        rows = self._rows([buffers[name] for name in names], names, columns, index)
        if divided is not None:
            at = 2 + columns.parts(names).index((GRADIENT, False))
            first = rows[:, 1] - np.uint64(index)
            rows[:, at] = first * 4 + np.uint64(divided.ctypes.data)
        self._processor.blocks(arguments, columns, rows, gradient_scale=factor, seed=seed)()
        return EndedRun(buffers["p"].size)

    def _floats(self, buffer: Buffer, form: str) -> NDArray[np.float32]:
        """Return a copy of gradients in binary32."""
        words = buffer.read()
        if form == "bf16":
            return (words.astype(np.uint32) << 16).view(np.float32)
        return words.astype(np.float32)

    def _rows(
        self, buffers: Sequence[Buffer], names: Sequence[str], columns: Columns, index: int
    ) -> NDArray[np.uint64]:
        """Return the blocks of a run, as of `Processor.blocks`: of an array in 8 bits each block
        has its scales before it; other arrays are in memory that is lent, or their own."""
        memory, layout = self.backend, self.config.block_layout
        forms = {name: columns.format_of(name) for name in names}
        count = buffers[names.index("p")].size
        step = layout.elements if SIGNED.keys() & set(forms.values()) else max(count, 1)
        edges = {0, count}
        for name, buffer in zip(names, buffers, strict=True):
            if forms[name] not in SIGNED:
                borders = memory.borders(buffer.address, buffer.nbytes)
                edges.update((at - buffer.address) // buffer.dtype.itemsize for at in borders)
        found = [np.empty((0, 2 + len(columns.parts(names))), np.uint64)]
        for start, stop in pairwise(sorted(edges)):
            at = np.arange(0, stop - start, step).astype(np.uint64)
            rows = [np.minimum(at + step, stop - start) - at, index + start + at]
            for name, buffer in zip(names, buffers, strict=True):
                if forms[name] in SIGNED:
                    first, nbytes = layout.offset(start), layout.nbytes(stop - start)
                    offsets = at // step * layout.nbytes(step)
                else:
                    width = buffer.dtype.itemsize
                    first, nbytes, offsets = start * width, (stop - start) * width, at * width
                begins = offsets + memory.host_view(buffer.address + first, nbytes).ctypes.data
                if forms[name] in SIGNED:
                    rows.append(begins + layout.scale_bytes)
                rows.append(begins)
            found.append(np.stack(rows, 1))
        return np.concatenate(found)
