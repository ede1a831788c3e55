"""Contents of a generation on drives: a step, arrays, and the residuals of error feedback."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy

from nearstep.backends.base import Completion
from nearstep.placement import Extent
from nearstep.storage.aligned import AlignedPool
from nearstep.storage.generation import GenerationView
from nearstep.stripes import Stripes
from nearstep.torch import convert
from nearstep.torch.dtensor import chunk
from nearstep.torch.errors import StateError
from nearstep.torch.formats import scales_shape
from nearstep.torch.homes.errors import ResumeError
from nearstep.torch.homes.opening import describe, shards
from nearstep.torch.homes.segments import HELD_BACK, DriveSegment, StoredArray
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.state import ParameterState, count
from nearstep.torch.table import Owner
from nearstep_spec.blockwise import SIGNED, BlockLayout
from nearstep_spec.rule.optimizer import Optimizer

VERSION = 1


class StepState(NamedTuple):
    """State of one parameter.

    Attributes
    ----------
    step : None if the rule keeps no count.
    moments : keys of the moments that the drives have.
    residual : whether the drives have the residual; None: the parameter had one that was not saved.
    master : the parameter on the drives is the fp32 master of one of 16 bits.
    """

    step: int | None
    moments: Sequence[str]
    residual: bool | None = False
    master: bool = False


def pack(
    owner: Owner,
    names: Mapping[Tensor, str],
    layout: Mapping[str, Any] | None,
    parts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the meta data of a generation.

    Parameters
    ----------
    names : of the parameters on the drives.
    layout : of the arrays; see `nearstep.torch.homes.durable.DurableHome.layout`.
    parts : as of `parts_of`.
    """
    groups = owner.param_groups
    saves = owner.table.settings.save_residual
    return {
        **parts,
        "version": VERSION,
        "owner": _name(owner),
        "rule": owner.computes,
        "layout": layout,
        "names": [group.get("param_names") for group in groups],
        "arrays": dict(owner.table.layout.moments),
        "formats": dict(owner.table.formats.state),
        "groups": [_options(group, index) for index, group in enumerate(groups)],
        "states": {
            names[p]: _state(names[p], state, save_residual=saves)
            for p, state in owner.state.items()
            if p in owner.table.parameters and isinstance(state, ParameterState)
        },
    }


def unpack(
    meta: Mapping[str, Any], owner: Owner, names: Mapping[Tensor, str]
) -> tuple[Sequence[dict[str, Any]], Mapping[Tensor, StepState]]:
    """Return the options of each group and the states of a generation.

    Raises
    ------
    ResumeError : the generation is of no optimizer, of another, or of another arithmetic.
    """
    groups, named = owner.param_groups, _name(owner)
    if meta.get("owner") != named:
        raise ResumeError(f"a step of {named}", str(meta.get("owner")))
    if meta.get("version") != VERSION:
        raise ResumeError(f"a step in version {VERSION}", f"version {meta.get('version')}")
    found = meta.get("rule")
    if found != owner.computes:
        expected = f"a step of {owner.title} that computes {owner.computes}"
        raise ResumeError(expected, f"{found}: it was changed")
    if len(meta["groups"]) != len(groups):
        raise ResumeError(f"{len(groups)} groups", str(len(meta["groups"])))
    states = {
        p: StepState(**meta["states"][name]) for p, name in names.items() if name in meta["states"]
    }
    return options_of(meta), states


def options_of(meta: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the options of each group; JSON has no tuples."""
    return [
        {k: tuple(v) if isinstance(v, list) else v for k, v in each.items()}
        for each in meta["groups"]
    ]


def digest(rule: Optimizer, source: str) -> str:
    """Hash the arithmetic of all forms of an optimizer, and its state.

    Parameters
    ----------
    source : as of `nearstep_spec.rule.file.load_with_digest`; empty for a rule of nearstep.
    """
    forms = [each.digest for each in rule.all_forms]
    text = json.dumps([forms, sorted(rule.state.items()), rule.counts, *filter(None, [source])])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parts_of(owner: Owner, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Return the meta data that changes with the parameters alone: what this process has of each,
    their names unless these are group and place, and with state in 8 bits how that lies on the
    drives, and `chunk` of the scales."""
    groups, blocks = [each["params"] for each in owner.param_groups], owner.table.formats.blocks
    parts: dict[str, Any] = {"shards": shards(owner.param_groups)}
    keys = [[names[p] for p in group] for group in groups]
    if keys != plain_keys(groups):
        parts["keys"] = keys
    if blocks is not None:
        own = {names[p]: p for p in chain(*groups) if not is_lazy(p)}
        scales = {name: chunk(p, scales_shape(p)) for name, p in own.items()}
        parts["blockwise"] = {"block": [blocks.elements, blocks.scale_bytes], "scales": scales}
    return parts


def plain_keys(groups: Iterable[Sequence[Any]]) -> list[list[str]]:
    """Names of parameters: group and place in it."""
    return [[f"{n}.{k}" for k in range(len(group))] for n, group in enumerate(groups)]


def _name(owner: Owner) -> str:
    return describe(owner.title, [group["params"] for group in owner.param_groups])


def _state(name: str, state: ParameterState, *, save_residual: bool) -> dict[str, Any]:
    counts = state.store is not None and state.store.layout.counts
    layout = () if state.store is None else state.store.layout.moments
    return {
        "step": count(name, state.step) if counts else None,
        "moments": [key for key in layout if state.has_moment(key)],
        "residual": False if state.residual is None else (save_residual or None),
        "master": state.store is not None and state.store.keeps_master,
    }


def _options(group: Mapping[str, Any], index: int) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: _plain(value, f"group {index}", key) for key, value in options.items()}


def _plain(value: Any, where: str, key: str) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    if isinstance(value, tuple | list):
        return [_plain(each, where, key) for each in value]
    is_text = value is None or isinstance(value, int | str)
    if is_text or (isinstance(value, float) and math.isfinite(value)):  # JSON has no infinity
        return value
    raise StateError(where, f"have an option {key!r} that drives can keep", value)


CARRIED_ELEMENTS = 1 << 20
"""Elements in each copy."""


class SavedArrays:
    """Arrays of one generation: for each parameter a tensor, striped over the host's drives; or,
    on cards, for each segment a tensor on each drive."""

    def __init__(self, view: GenerationView) -> None:
        self._view, layout = view, view.meta.get("layout")
        self._stripes = None if layout is None else Stripes(layout["block"], layout["cards"])
        blocks = view.meta.get("blockwise")
        self._blocks = None if blocks is None else BlockLayout(*blocks["block"])
        self._places: Mapping[str, tuple[int, int]] = {
            key: (number, start)
            for number, segment in enumerate(() if layout is None else layout["segments"])
            for key, (start, _) in segment.items()
        }

    def has(self, key: str, array: str) -> bool:
        """Return whether this array of the parameter named `key` exists."""
        name = f"{key}.{array}"
        if self._stripes is not None:
            name = f"{self._places[key][0]}.{array}@0" if key in self._places else ""
        return name in self._view.tensors

    def read(self, key: str, array: str, start: int, out: NDArray[Any]) -> None:
        """Copy elements of a parameter's array, from `start` on, to `out`, of shape (n,); of one in
        8 bits, bytes."""
        if self._stripes is None:
            self._view.read(f"{key}.{array}", out, start * out.itemsize)
            return
        number, at = self._places[key]
        stripes = self._stripes
        if self._blocks is not None and self._view.meta["formats"].get(array) in SIGNED:
            stripes, at = stripes.in_bytes(self._blocks), self._blocks.offset(at)
        low = at + start
        for channel in range(stripes.channels):
            first, last = stripes.span(low, low + out.size, channel)
            if first < last:
                part = np.empty(last - first, out.dtype)
                self._view.read(f"{number}.{array}@{channel}", part, first * out.itemsize)
                stripes.scatter(part, out, low, channel)


def reshard(saved: SavedArrays, key: str, resident: DeviceParameter, arrays: Iterable[str]) -> None:
    """Copy arrays of one parameter to its present drives, where they are reserved.

    Raises
    ------
    ResumeError : the generation does not have an array.
    StorageError
    """
    extent = resident.extent
    for array in arrays:
        if not saved.has(key, array):
            raise ResumeError(f"{array} of {resident.label}", "none")
        target = extent.segment.elsewhere(array)
        assert target is not None, "nothing is in memory before the first step"
        _, first, last = extent.segment.span(array, extent.start, extent.start + extent.count)
        for start in range(first, last, CARRIED_ELEMENTS):
            part = np.empty(min(CARRIED_ELEMENTS, last - start), extent.segment.dtype_of(array))
            saved.read(key, array, start - first, part)
            target.write(start, part)


WRITTEN_ELEMENTS = 1 << 18
"""Elements in each write to a drive."""

WRITES = 2
"""Writes in flight while the next one is prepared."""


def write_residuals(
    segments: Iterable[DriveSegment], states: Mapping[Tensor, Any], *, save: bool
) -> list[ParameterState]:
    """Write the residuals that changed since they were saved, for the next generation.

    Parameters
    ----------
    save : False removes all residuals from the drives.

    Returns
    -------
    list[ParameterState] : states whose residual was written.
    """
    written = []
    for segment in segments:
        is_held = False
        unsaved: list[tuple[Extent, Tensor]] = []
        for resident in segment.parameters:
            state = states.get(resident.parameter)
            if not save or not isinstance(state, ParameterState) or state.residual is None:
                continue
            is_held = True
            if (residual := state.unsaved_residual) is not None:
                unsaved.append((resident.extent, residual))
                written.append(state)
        if is_held:
            segment.reserve({HELD_BACK: 0.0})
            if unsaved:
                _write(segment, unsaved)
        elif HELD_BACK in segment.on_drives:
            segment.remove(HELD_BACK)
    return written


def read_residual(resident: DeviceParameter, state: ParameterState) -> None:
    """Load the residual of a parameter from the drives."""
    array = resident.extent.read(HELD_BACK)
    state.keep_residual(convert.to_tensor(array, resident.parameter))
    state.residual_saved()


class _Writer:
    """Writes an array in runs of at most `most` elements that end at multiples of `most`: drives
    read a block that is written in part first."""

    def __init__(self, place: StoredArray, most: int) -> None:
        self._place = place
        self._most = most
        self._pool = AlignedPool()
        self._room = self._pool.empty(most, np.float32)
        self._writes: list[tuple[list[Completion], object]] = []
        self._start = self._stop = 0  # elements in the room

    def add(self, start: int, data: NDArray[np.float32]) -> None:
        """Write `data` to elements from `start` on, after all earlier data."""
        if start != self._stop:
            self.flush()
            self._start = self._stop = start
        for part in np.split(data, range(-start % self._most, data.size, self._most)):
            self._room[self._stop - self._start :][: part.size] = part
            self._stop += part.size
            if self._stop % self._most == 0:
                self.flush()

    def flush(self) -> None:
        """Begin to write the elements in the room."""
        if self._stop > self._start:
            data = self._room[: self._stop - self._start]
            self._writes.append((self._place.begin_write(self._start, data), data))
            self.wait(WRITES)
            self._room = self._pool.empty(self._most, np.float32)
        self._start = self._stop

    def wait(self, most: int) -> None:
        """Wait until at most `most` writes are in flight."""
        while len(self._writes) > most:
            completions, _ = self._writes.pop(0)
            for each in completions:
                each.wait()


def _write(segment: DriveSegment, residuals: Iterable[tuple[Extent, Tensor]]) -> None:
    """Write residuals in the order of their extents, with zeros between neighbours."""
    place = segment.elsewhere(HELD_BACK)
    assert place is not None, "it is on the drives alone"
    writer = _Writer(place, WRITTEN_ELEMENTS * segment.stripes.channels)
    stop = end = -1
    for extent, residual in residuals:
        if extent.start == end:
            writer.add(stop, np.zeros(end - stop, np.float32))
        writer.add(extent.start, convert.to_float32(residual))
        stop, end = extent.start + extent.count, extent.end
    writer.flush()
    writer.wait(0)
