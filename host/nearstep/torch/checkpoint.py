"""Generations on drives as checkpoints of `torch.distributed.checkpoint`."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from torch.nn import Module
from torch.optim import Optimizer

from nearstep import blockwise
from nearstep.blockwise import BlockLayout
from nearstep.storage.store import Store
from nearstep.torch.convert import DTYPES
from nearstep.torch.dtensor import local
from nearstep.torch.errors import StateError
from nearstep.torch.formats import TENSORS, regrouped
from nearstep.torch.homes.errors import RanksDifferError, ResumeError
from nearstep.torch.homes.generation import SavedArrays, options_of, plain_keys
from nearstep.torch.homes.opening import drives_of
from nearstep.torch.homes.resume import Made, newest, steps_of
from nearstep.torch.layout import scales_of
from nearstep.torch.optimizer import DeviceOptimizer
from nearstep.torch.state import MASTER
from nearstep_spec.blockwise import GROUP, SIGNED

WORDS: Mapping[torch.dtype, type] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
}
"""Formats of arrays on drives, as numpy has them."""

Offset = tuple[int, ...]


class _Chunk(NamedTuple):
    """Elements of an array that one rank has.

    Attributes
    ----------
    arrays : of the rank.
    key : of the parameter on its drives.
    size : shape.
    elements : of the parameter, that the rank has.
    """

    arrays: SavedArrays
    key: str
    size: Sequence[int]
    elements: int


class Array(NamedTuple):
    """An array of a parameter: its chunks by their offsets.

    Attributes
    ----------
    eight : of an array in 8 bits: its format, and how it lies on the drives.
    is_scales : these are its scales, not its codes.
    is_spread : these are the scales of its elements, one for each.
    """

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    chunks: Mapping[Offset, _Chunk]
    eight: tuple[str, BlockLayout] | None = None
    is_scales: bool = False
    is_spread: bool = False

    @property
    def wide(self) -> torch.dtype:
        """Dtype of the values."""
        return self.dtype if self.eight is None else torch.float32

    def metadata(self) -> TensorStorageMetadata:
        chunks = [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(chunk.size))
            for offset, chunk in self.chunks.items()
        ]
        properties = TensorProperties(dtype=self.dtype)
        return TensorStorageMetadata(properties, torch.Size(self.shape), chunks)

    def read(
        self,
        chunk: _Chunk,
        offsets: Sequence[int],
        lengths: Sequence[int],
        *,
        wide: bool = False,
    ) -> Tensor:
        """Read a part of a chunk: its rows, of which other dimensions are cut in memory.

        Parameters
        ----------
        wide : values in float32 instead of codes.
        """
        row = math.prod(chunk.size[1:])
        first, rows = (offsets[0], lengths[0]) if chunk.size else (0, 1)
        if self.eight is None:
            out: NDArray[Any] = np.empty(rows * row, WORDS[self.dtype])
            chunk.arrays.read(chunk.key, self.name, first * row, out)
            flat = torch.from_numpy(out).view(self.dtype)
        else:
            flat = self._read_eight(
                *self.eight, chunk, range(first * row, (first + rows) * row), wide
            )
        found = flat.view([rows, *chunk.size[1:]][: len(lengths)])
        for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
            found = found.narrow(dim, start, length) if dim else found
        return found

    def _read_eight(
        self, form: str, layout: BlockLayout, chunk: _Chunk, elements: range, wide: bool
    ) -> Tensor:
        """Read elements of an array in 8 bits: whole blocks of it."""
        part = range(chunk.elements) if self.is_scales else elements
        begin = part.start // layout.elements * layout.elements
        end = min(-(-part.stop // layout.elements) * layout.elements, chunk.elements)
        start = layout.offset(begin)
        data = np.empty(layout.nbytes(end) - start if part else 0, np.uint8)
        chunk.arrays.read(chunk.key, self.name, start, data)
        found = blockwise.unpack(data, layout)
        if self.is_scales:
            scales = torch.zeros(math.prod(chunk.size), device="cpu")
            scales[: found.scales.size] = torch.from_numpy(found.scales)
            return scales[elements.start : elements.stop]
        if self.is_spread:
            values: NDArray[Any] = np.repeat(found.scales, GROUP)
        else:
            values = blockwise.dequantize(found, signed=SIGNED[form]) if wide else found.codes
        return torch.from_numpy(values[part.start - begin : part.stop - begin])

    def rows(self, most: int) -> Iterator[Tensor]:
        """Yield the values in order, in pieces of at most `most` bytes, or of one row."""
        if not self.shape:
            yield from (self.read(chunk, (), (), wide=True) for chunk in self.chunks.values())
            return
        count, *others = self.shape
        step = max(1, most // max(1, self.wide.itemsize * math.prod(others)))
        for start in range(0, count, step):
            end = min(start + step, count)
            piece = torch.empty([end - start, *others], dtype=self.wide, device="cpu")
            for (first, *offset), chunk in self.chunks.items():
                low, high = max(start, first), min(end, first + chunk.size[0])
                if low < high:
                    lengths = [high - low, *chunk.size[1:]]
                    begins = [low - first, *(0 for _ in offset)]
                    place = piece[low - start : high - start]
                    for dim, at in enumerate(offset, 1):
                        place = place.narrow(dim, at, chunk.size[dim])
                    place.copy_(self.read(chunk, begins, lengths, wide=True))
            yield piece


class GenerationWriter(StorageWriter, AsyncStager):
    """Keeps a generation of the drives as a checkpoint: saving is a commit, without a copy.

    The state dict has the parameters of the optimizer's model, and its state, under the keys of
    `GenerationReader`, which reads the checkpoint by its name. Training goes on while it is kept.
    Drives do not have parameters that were never trained (`requires_grad=False`): save these apart.

    A generation is that of all ranks between two steps, and cannot change once it is kept. So
    `torch.distributed.checkpoint.async_save` commits it before it returns, as its staging, and
    copies nothing; errors are raised at once, on all ranks. What is left to its thread are torch's
    collectives, which should have a process group of their own, and run in a thread: an optimizer
    with drives cannot be sent to another process (UnsupportedOptionError).

    Parameters
    ----------
    optimizer : of `model.named_parameters()`, with drives.
    name : of the checkpoint: `optimizer.store.drop` frees its space.
    model, optim : keys of the state dict.

    Raises
    ------
    StateError : on saving: the drives do not have a value of the state dict.
    ArgumentError, StorageError : as of `nearstep.torch.optimizer.DeviceOptimizer.keep`.
    """

    def __init__(
        self, optimizer: DeviceOptimizer, name: str, *, model: str = "model", optim: str = "optim"
    ) -> None:
        self._optimizer, self._name = optimizer, name
        self._model, self._optim = model, optim
        self._is_staged = False

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a writer is made for an optimizer

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Commit a generation on all ranks, or on none; nothing is copied."""
        with self._optimizer.together():
            self._check(flatten_state_dict(state_dict)[0])
            self._optimizer.keep(self._name)
        self._is_staged = True
        return state_dict

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Nothing is held."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The name is the writer's."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All ranks do the same."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self._is_staged:
            self._check(each.index.fqn for each in plan.items)
        return plan

    def _check(self, keys: Iterable[str]) -> None:
        """Check that the drives have all values."""
        placed = self._optimizer.table.parameters
        known = {
            f"{self._model}.{name}"
            for group in self._optimizer.param_groups
            for name, p in zip(group.get("param_names", ()), group["params"], strict=False)
            if p.requires_grad or p in placed
        }
        for key in keys:
            if key not in known and not key.startswith(f"{self._optim}."):
                expected = "be a parameter of an optimizer of model.named_parameters(), trained"
                raise StateError(key, expected, "a value that drives do not have")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Commit a generation on all ranks, or on none, unless that is done."""
        if not self._is_staged:
            self._optimizer.keep(self._name)
        self._is_staged = False
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The drives have all of it."""


class GenerationReader(StorageReader):
    """Reads a generation that the drives of all ranks have, for any number of processes.

    A state dict has the model's parameters under `model`, and the optimizer's state, as
    `get_optimizer_state_dict` returns it, under `optim`. Parameters and state are read from the
    drives into the tensors of the state dict: DTensors of any mesh, or plain tensors. Parameters
    that were never trained are not listed, as drives do not have them.

    Parameters
    ----------
    drives : of each rank that made the generation, in any order: its drives, as its optimizer was
        given them, or their folder. All processes that load must be able to read them.
    name : of a generation that is kept; empty: the last one that all drives have.
    names : of the parameters, in the order of the optimizer; None: the optimizer was made of
        `model.named_parameters()`, and the drives have them.
    model, optim : keys of the state dict.

    Attributes
    ----------
    model, optim : as given.
    spreads : for `load_generation`, list the scale of each element, too.
    arrays, values : what `read_metadata` found, by key: arrays on drives, and all else.
    groups : options of each group, with the names of its parameters as `params`.

    Raises
    ------
    ResumeError : on reading: shards are missing, or are not of one optimizer and generation.
    StorageError
    """

    def __init__(
        self,
        drives: Sequence[Sequence[str | Path] | str | Path],
        *,
        name: str = "",
        names: Sequence[str] | None = None,
        model: str = "model",
        optim: str = "optim",
    ) -> None:
        self._places = [[each] if isinstance(each, str | Path) else each for each in drives]
        self._name = name
        self._names = names
        self.model, self.optim = model, optim
        self.spreads = False
        self._opened = ExitStack()
        self.arrays: dict[str, Array] = {}
        self._at: dict[str, tuple[int, int]] = {}  # group and place of parameters, by their keys
        self.values: dict[str, Any] = {}
        self.groups: list[dict[str, Any]] = []

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a reader is made with drives

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Drives are those that the reader was made with."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open all drives, and list what their last common generation has."""
        self.close()
        try:
            ranks = self._open()
            paths = self._list(ranks)
        except BaseException:
            self.close()
            raise
        listed: dict[str, Any] = {key: each.metadata() for key, each in self.arrays.items()}
        listed |= {
            key: TensorStorageMetadata(
                TensorProperties(), torch.Size(), [ChunkStorageMetadata(torch.Size(), torch.Size())]
            )
            if isinstance(value, Tensor)
            else BytesStorageMetadata()
            for key, value in self.values.items()
        }
        return Metadata(listed, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """All of it is known since `read_metadata`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan names, and close the drives."""
        try:
            for item in plan.items:
                index = item.storage_index
                value = self.values.get(index.fqn)
                if item.type == LoadItemType.BYTE_IO:
                    data = io.BytesIO()
                    torch.save(value, data)
                    data.seek(0)
                    planner.load_bytes(item, data)
                    continue
                if value is None:
                    array = self.arrays[index.fqn]
                    chunk = array.chunks[tuple(index.offset or ())]
                    wide = planner.resolve_tensor(item).is_floating_point()
                    value = array.read(chunk, item.storage_offsets, item.lengths, wide=wide)
                target = planner.resolve_tensor(item).detach()
                target.copy_(value)
                planner.commit_tensor(item, target)
        finally:
            self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Close the drives."""
        self._opened.close()
        self.arrays, self.values, self.groups = {}, {}, []

    def _open(self) -> list[tuple[Mapping[str, Any], SavedArrays]]:
        """Open the last generation that all have; return meta data and arrays by rank."""
        stores = []
        for places in self._places:
            opened = Store.open(drives_of(places), owner=None, read_only=True)
            stores.append(self._opened.enter_context(opened))
        held = [dict(self._held(store)) for store in stores]
        for places, each in zip(self._places, held, strict=True):
            if not each:
                named = f" named {self._name!r}" if self._name else ""
                raise ResumeError(f"a generation{named} with its shards", f"none on {places}")
        shared = newest(held)
        if shared is None:
            raise RanksDifferError(steps_of(dict(enumerate(held))), None)
        found = []
        for store, each in zip(stores, held, strict=True):
            view = store.at(next(n for n, made in each.items() if made == shared))
            found.append((view.meta, SavedArrays(view)))
        found.sort(key=lambda pair: pair[0]["shards"]["rank"])
        first = found[0][0]
        for name in ("owner", "rule", "formats"):
            if any(meta[name] != first[name] for meta, _ in found):
                said = "; ".join(sorted({str(meta[name]) for meta, _ in found}))
                raise ResumeError(f"one {name}", said)
        ranks = [meta["shards"]["rank"] for meta, _ in found]
        if ranks != list(range(first["shards"]["ranks"])):
            expected = f"the shards of {first['shards']['ranks']} ranks"
            raise ResumeError(expected, f"those of ranks {ranks}")
        return found

    def _held(self, store: Store) -> Iterator[tuple[int, Made]]:
        """Yield the generations that can be read."""
        kept = store.kept
        numbers = (
            store.generations if not self._name else [kept[n] for n in kept if n == self._name]
        )
        for number in numbers:
            meta = store.at(number).meta
            if "shards" in meta:
                yield number, Made.of(meta, number)

    def _list(
        self, ranks: Sequence[tuple[Mapping[str, Any], SavedArrays]]
    ) -> dict[str, Sequence[Any]]:
        """List arrays and other values by their keys; return the path of each key."""
        meta, paths = ranks[0][0], dict[str, Sequence[Any]]()

        def add(into: dict[str, Any], path: Sequence[Any], value: Any) -> None:
            key = ".".join(map(str, path))
            into[key], paths[key] = value, path

        named = dict(self._named(meta))
        for number, keys in enumerate(_keys(meta)):
            self._at.update((key, (number, at)) for at, key in enumerate(keys))
        for key, name in named.items():
            state = meta["states"].get(key)
            arrays: list[tuple[Sequence[Any], str]] = [((self.model, name), "p")]
            for moment in () if state is None else state["moments"]:
                arrays.append(((self.optim, "state", name, moment), meta["arrays"][moment]))
            if state is not None and state.get("master"):
                arrays.append(((self.optim, "state", name, MASTER), "p"))
            for path, array in arrays:
                found = self._array(ranks, key, name, array)
                owned = [chunk.arrays for chunk in found.chunks.values()]
                if owned and not any(each.has(key, array) for each in owned):
                    continue  # a frozen parameter that was never placed
                add(self.arrays, path, found)
                if found.eight is not None:
                    scales = self._array(ranks, key, name, array, is_scales=True)
                    add(self.arrays, [*path[:-1], scales_of(path[-1])], scales)
                    if self.spreads:
                        spread = found._replace(dtype=torch.float32, is_spread=True)
                        add(self.arrays, [*path[:-1], _spread(path[-1])], spread)
            if state is not None and state["step"] is not None:
                step = torch.tensor(float(state["step"]), device="cpu")
                add(self.values, (self.optim, "state", name, "step"), step)
        for number, options in enumerate(options_of(meta)):
            own = [named[key] for key in _keys(meta)[number]]
            self.groups.append({**options, "params": own})
            for option, value in {**self.groups[-1], "param_names": own}.items():
                add(self.values, (self.optim, "param_groups", number, option), value)
        return paths

    def _named(self, meta: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield key and name of each parameter."""
        parts, names = meta["shards"]["parts"], iter(self._names or ())
        count = sum(map(len, parts))
        if self._names is not None and len(self._names) != count:
            raise ResumeError(f"{len(self._names)} parameters, as names", str(count))
        for keys, own in zip(_keys(meta), meta["names"], strict=True):
            if own is None and self._names is None:
                expected = "names of parameters, or the reader be given names="
                raise ResumeError(expected, "an optimizer of model.parameters()")
            for position, key in enumerate(keys):
                yield key, next(names) if self._names else own[position]

    def _array(
        self,
        ranks: Sequence[tuple[Mapping[str, Any], SavedArrays]],
        key: str,
        name: str,
        array: str,
        *,
        is_scales: bool = False,
    ) -> Array:
        form, stored = ranks[0][0]["formats"].get(array, "fp32"), ranks[0][0].get("blockwise")
        eight = None
        if form not in DTYPES:
            if stored is None:
                raise ResumeError(f"where the scales of {array} of {name} are", form)
            eight = form, BlockLayout(*stored["block"])
        shape, chunks = [], dict[Offset, _Chunk]()
        for meta, arrays in ranks:
            number, position = self._at[key]
            part = meta["shards"]["parts"][number][position]
            shape, offset, size = part or ([0], [0], [0])
            count = math.prod(size)
            if is_scales:
                shape, offset, size = meta["blockwise"]["scales"][key]
            if count:
                chunks.setdefault(tuple(offset), _Chunk(arrays, key, size, count))
        found = sum(math.prod(each.size) for each in chunks.values())
        if found != math.prod(shape) and not is_scales:  # an empty shard has none
            raise ResumeError(f"{math.prod(shape)} elements of {name}", str(found))
        dtype = torch.float32 if is_scales else TENSORS[form]
        return Array(array, dtype, shape, chunks, eight, is_scales)


def _keys(meta: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """Names of the parameters of each group on the drives."""
    return meta.get("keys") or plain_keys(meta["shards"]["parts"])


def _spread(key: str) -> str:
    """Key of the scales of all elements of a moment in 8 bits, of the parameter's shape."""
    return f"{scales_of(key)}_of_each"


def load_generation(model: Module, optimizer: Optimizer, reader: GenerationReader) -> None:
    """Load a generation, by the shards of any ranks, into a model and its optimizer.

    Moments in 8 bits are read as codes and scales by an optimizer with the same shards. Others have
    other groups of 256 elements: those whose elements had one scale keep it and their codes; the
    values of others are quantized anew. So no value changes if no group is of two shards of either,
    as with rows of a multiple of 256 elements.

    Parameters
    ----------
    optimizer : of torch or nearstep, of all parameters of the model; its state is replaced.

    Raises
    ------
    ResumeError, StorageError : as of the reader.
    CheckpointException : of torch; the generation has no such parameter, or it has another shape.
    """
    found: tuple[Any, Any] = get_state_dict(model, optimizer)
    model_state, state = found
    with closing(reader):
        reader.read_metadata()
        arrays = dict(reader.arrays)
    others: list[tuple[dict[str, Any], str, str, Tensor]] = []
    for name, values in state["state"].items():
        for key in [each for each in values if scales_of(each) in values]:
            path = f"{reader.optim}.state.{name}"
            there = arrays.get(f"{path}.{scales_of(key)}")
            if there is not None and tuple(there.shape) == tuple(values[scales_of(key)].shape):
                continue
            scales = values.pop(scales_of(key))
            each = torch.empty_like(values[key], dtype=torch.float32)
            if there is None or there.eight is None:
                values[key] = each  # the optimizer quantizes it
            else:
                values[_spread(key)] = each
                others.append((values, key, there.eight[0], scales))
    reader.spreads = bool(others)
    try:
        with closing(reader):  # of a plan that fails no data are read
            load({reader.model: model_state, reader.optim: state}, storage_reader=reader)
    finally:
        reader.spreads = False
    for values, key, form, scales in others:
        codes, groups = regrouped(values[key], values.pop(_spread(key)), form)
        local(values[key]).copy_(codes)
        local(scales).zero_().view(-1)[: len(groups)] = groups
        values[scales_of(key)] = scales
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state)
