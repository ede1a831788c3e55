"""A pool of memory devices that sum tensors near memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.counters import PoolCounters, read_counters
from nearstep.coarse.device import CoarseDevice
from nearstep.coarse.errors import (
    ExactSumError,
    QueueFullError,
    RingError,
    TensorMismatchError,
)
from nearstep.coarse.frozen import Frozen
from nearstep.coarse.rings import Addends, Pending, RingJob, Rings
from nearstep.coarse.split import Part, split
from nearstep.coarse.tensor import PoolTensor, as_array, is_shape
from nearstep.device import open_device
from nearstep.errors import ArgumentError, DtypeError
from nearstep.run import check_bound
from nearstep.scalars import is_whole
from nearstep.storage.errors import SnapshotError
from nearstep.storage.snapshot_file import as_path, load, open_file, save
from nearstep_spec.coarse.config import MAX_ADDENDS
from nearstep_spec.coarse.registers import ReduceOp, Wire

OPERATIONS = {each.name.lower(): each for each in ReduceOp}
WIRES = {each.name.lower(): each for each in Wire}
EXACT = ("sum", "average")
"""Operations that can be exact."""

SILENCE_CYCLES = 1 << 16

Reduced = TypeVar("Reduced", PoolTensor, Sequence[PoolTensor])


class Event(Pending):
    """A reduction begun by `CoarsePool.submit`."""

    def __init__(self, rings: Rings, tensor: PoolTensor, jobs: Sequence[RingJob]) -> None:
        super().__init__(rings, jobs)
        self.tensor = tensor

    def result(self, max_cycles: int | None = None) -> PoolTensor:
        """Wait as `wait` does, and return the reduced tensor."""
        return self.wait(max_cycles).tensor

    def begin(self) -> None:
        self.tensor.begin(self)

    def end(self, error: RingError | None) -> None:
        super().end(error)
        self.tensor.end(succeeded=error is None)

    def __repr__(self) -> str:
        state = "ended" if self.found_ended else "in work"
        return f"<reduction of {self.tensor!r}, {state}>"


class CoarsePool:
    """Memory devices in rings: tensors on each device, summed over all devices.

    Close the pool, or use it as a context manager. Several threads may call its methods.

    Parameters
    ----------
    device : an open device, such as `nearstep.open("golden:coarse", CoarseDevice)`. `close` of the
        pool closes it; an error of the constructor leaves it open.
    silence_cycles : device cycles without a valid frame after which a peer counts as dead; 0:
        never.

    Attributes
    ----------
    groups : number of rings that work at the same time, one for each sync core of a device.

    Raises
    ------
    ArgumentError : `device` is no CoarseDevice, or is a single device without an update kernel and
        exact sums, or `silence_cycles` is not from 0 to 2**32 - 1.

    Ref: COARSE paper, sections III and IV.
    """

    def __init__(self, device: CoarseDevice, *, silence_cycles: int = SILENCE_CYCLES) -> None:
        if not isinstance(device, CoarseDevice):
            raise ArgumentError(f"device must be a CoarseDevice, not {type(device).__name__}")
        if not is_whole(silence_cycles) or not 0 <= silence_cycles < 1 << 32:
            raise ArgumentError(
                f"silence_cycles must be a whole number from 0 to 2**32 - 1, not {silence_cycles!r}"
            )
        alone = device.config.updater is None and not device.config.exact
        if len(device.nodes) < 2 and alone:
            raise ArgumentError(
                f"device must be a pool of 2 devices at least, or have an update kernel (rules=), "
                f"not 1 on {device.url}; serial: opens other boards of a ring as peers="
            )
        device.check_open("make a pool")
        self.device = device
        self.devices = len(device.nodes)
        self.groups = device.config.groups
        self.rings = Rings(device, silence_cycles)

    @classmethod
    def open(cls, url: str, *, silence_cycles: int = SILENCE_CYCLES) -> Self:
        """Return `CoarsePool(nearstep.open(url, CoarseDevice))`; an error closes the device.

        Parameters
        ----------
        url : such as `golden:coarse?devices=4&groups=2`.
        """
        device = open_device(url, CoarseDevice)
        try:
            return cls(device, silence_cycles=silence_cycles)
        except BaseException:
            device.close()
            raise

    def close(self) -> None:
        """Close the devices; all tensors become unusable. A second call does nothing."""
        self.device.close()

    def tensor(self, arrays: int | Sequence[Any], *, reduced: bool = True) -> PoolTensor:
        """Allocate a tensor on all devices and write its values.

        Parameters
        ----------
        arrays : a shape, for zeros; or one float32 array for each device, all of one shape, each of
            numpy or readable by numpy without a copy.
        reduced : whether the tensor can be reduced; otherwise it takes half the memory.

        Raises
        ------
        ArgumentError : a negative shape, not one array for each device, or not float32
            (DtypeError).
        """
        self.device.check_open("make a tensor")
        if is_shape(arrays):
            shape = (arrays,) if isinstance(arrays, int | np.integer) else tuple(arrays)
            shape = tuple(map(int, shape))
            if any(dim < 0 for dim in shape):
                raise ArgumentError(f"shape must not be negative, not {shape}")
            values = None
        else:
            values = self._checked(arrays)
            shape = tuple(int(dim) for dim in values[0].shape)
        tensor = PoolTensor(self.rings, shape, reduced=reduced)
        try:  # an allocation on the devices that fails needs no array on the host
            for device, each in enumerate(values or [np.zeros(shape, np.float32)] * self.devices):
                tensor.write(device, each)
        except BaseException:
            if not self.device.closed:
                tensor.free()
            raise
        return tensor

    def tensors(
        self, arrays: Iterable[int | Sequence[Any]], *, reduced: bool = True
    ) -> tuple[PoolTensor, ...]:
        """Allocate tensors as `tensor` does; after an error, none of them."""
        made: list[PoolTensor] = []
        try:
            for each in arrays:
                made.append(self.tensor(each, reduced=reduced))
        except BaseException:
            if not self.device.closed:
                for tensor in made:
                    tensor.free()
            raise
        return tuple(made)

    def split(
        self, elements: int, wire: str = "fp32", group: int | None = None
    ) -> tuple[Part, ...]:
        """Return the parts of a tensor that is reduced alone, one for each ring.

        All rings get a share, in whole entries; with `group`, that ring gets all elements. The
        parts determine the order of additions: an element's sum starts at the device whose position
        in the ring equals the index of the element's entry in its chunk, and continues around the
        ring.

        Raises
        ------
        ArgumentError : no such wire format or group, or `elements` is negative or not whole.
        """
        if not is_whole(elements) or elements < 0:
            raise ArgumentError(f"elements must be a whole number, at least 0, not {elements!r}")
        self.check_wire(wire)
        if group is not None:
            if not is_whole(group) or not 0 <= group < self.groups:
                raise ArgumentError(f"group must be from 0 to {self.groups - 1}, not {group!r}")
        groups = range(self.groups) if group is None else (group,)
        return split(self.device.config, elements, wire, groups)

    def submit(
        self,
        tensor: PoolTensor,
        op: str = "sum",
        wire: str = "fp32",
        *,
        group: int | None = None,
        exact: bool = False,
    ) -> Event:
        """Queue the reduction of a tensor over all devices, and return at once.

        Parameters
        ----------
        op : `sum`; `average`, the sum times float32(1 / devices); `max`, NaN if an input is NaN.
        wire : format on the links, `fp32`, `fp16` or `bf16`: partial results are rounded to it at
            every hop; all devices get the same bits.
        group : the ring to use. None: all rings, a part each (`split`).
        exact : round once, to `wire`: the exact sum of the values, rounded to `wire` before, or the
            quotient of that sum and the number of devices; neither depends on an order, nor on the
            numbers of devices and rings. Devices are built for it: `exact=bf16` in their name.

        Raises
        ------
        ArgumentError : no such operation, format or group; the tensor belongs to another pool, was
            freed (FreedBufferError) or made without `reduced`; or the pool has a single device.
        ExactSumError : the devices do not have this exact sum.
        """
        with self.rings.lock:
            event = self._event(tensor, op, wire, group, exact)
            self.rings.check_space([part.group for part in event.parts])
            self.rings.submit(event)
        return event

    def _event(
        self, tensor: PoolTensor, op: str, wire: str, group: int | None, exact: bool = False
    ) -> Event:
        self.check_operation(op)
        self.check_wire(wire)
        self.check_tensor(tensor)
        if exact:
            self.check_exact(op, wire, self.devices)
        else:
            self.check_ring("reduce")
        if not tensor.reduced:
            raise ArgumentError(f"{tensor!r} must be made with reduced=True to be reduced")
        parts = self.split(tensor.size, wire, group)
        tensor.check_idle("reduce")
        self.rings.check_ready()
        devices = range(self.devices)
        sources = [tensor.front(device).address for device in devices]
        destinations = [tensor.back(device).address for device in devices]
        how = OPERATIONS["sum" if exact else op], WIRES[wire], sources, destinations
        addends = Addends(divisor=self.devices if op == "average" else 1) if exact else None
        jobs = [self.rings.make_job(part, *how, addends=addends) for part in parts]
        return Event(self.rings, tensor, jobs)

    def all_reduce(
        self,
        tensors: Reduced,
        op: str = "sum",
        wire: str = "fp32",
        *,
        group: int | None = None,
        exact: bool = False,
        max_cycles: int | None = None,
    ) -> Reduced:
        """Reduce tensors over all devices, wait, and return them.

        A single tensor is split over all rings; of a sequence, each tensor uses one ring in turn,
        and as many are in flight as the queues hold. All are checked before the first is submitted.

        Parameters
        ----------
        op, wire, group, exact : as in `submit`.
        max_cycles : bound of the wait for each tensor, as in `Event.wait`.
        """
        check_bound(max_cycles)
        if isinstance(tensors, PoolTensor):
            self.submit(tensors, op, wire, group=group, exact=exact).wait(max_cycles)
            return tensors
        each_once = self.check_tensors(tensors)
        for tensor in each_once:
            tensor.check_idle("reduce")
        if len(set(map(id, each_once))) != len(each_once):
            raise ArgumentError("tensors must be given once each")
        events: list[Event] = []
        for number, tensor in enumerate(each_once):
            ring = number % self.groups if group is None else group
            while True:
                try:
                    events.append(self.submit(tensor, op, wire, group=ring, exact=exact))
                    break
                except QueueFullError:
                    waiting = [event for event in events if not event.ended]
                    if not waiting:
                        raise
                    waiting[0].wait(max_cycles)
        return tuple(event.result(max_cycles) for event in events)

    def counters(self) -> PoolCounters:
        """Read the counters of all devices; the difference of two readings covers the time
        between."""
        self.device.check_open("read counters")
        with self.rings.lock:  # a counter is captured and then read
            return PoolCounters(
                cycles=self.device.cycles,
                devices=tuple(read_counters(node, self.groups) for node in self.device.nodes),
            )

    def reset(self) -> None:
        """Abort all jobs on all devices; the pool is usable afterwards.

        Tensors keep their values from before the aborted jobs; events that had not ended fail with
        `PoolAbortedError`. Jobs queued directly through registers are dropped.
        """
        self.device.check_open("reset")
        self.rings.reset()

    @contextlib.contextmanager
    def freeze(self, tensors: Sequence[PoolTensor]) -> Iterator[Frozen]:
        """Freeze the current values of tensors for a `with` statement; reductions continue
        meanwhile.

        Raises
        ------
        ArgumentError : `tensors` is empty, or a tensor belongs to another pool or was freed.
        """
        tensors = self.check_tensors(tensors)
        if not tensors:
            raise ArgumentError("a snapshot must be of at least one tensor")
        frozen = Frozen(self.rings, tensors)
        try:
            yield frozen
        finally:
            frozen.close()

    def snapshot(
        self,
        path: str | Path,
        tensors: Sequence[PoolTensor] | Mapping[str, PoolTensor],
        *,
        opener: Callable[[Path], BinaryIO] = open_file,
    ) -> Path:
        """Save the current values of tensors while reductions continue.

        Parameters
        ----------
        path : the file has this name, a dot, and the number of its generation: one above the
            highest in the folder.
        tensors : by name; the names of a sequence are the numbers from 0.
        opener : opens the temporary file for writing.

        Returns
        -------
        Path : of the complete file, whose data has been flushed.
        """
        place, named = as_path(path), self._named(tensors)
        with self.freeze([*named.values()]) as frozen:
            shapes = {name: each.shape for name, each in named.items()}
            return save(place, shapes, self.devices, frozen.read, opener=opener)

    def restore(
        self,
        path: str | Path,
        tensors: Sequence[PoolTensor] | Mapping[str, PoolTensor] | None = None,
    ) -> tuple[PoolTensor, ...]:
        """Load tensors from a file of `snapshot`.

        Parameters
        ----------
        path : a file, or the argument of `snapshot`: then the newest generation.
        tensors : the tensors to write, of the saved names and shapes. None: new tensors are made.

        Raises
        ------
        SnapshotError : the file has other names, shapes, dtypes or another number of devices.
            Nothing was changed.
        """
        self.device.check_open("restore")
        named = None if tensors is None else self._named(tensors)
        for tensor in (named or {}).values():
            tensor.check_idle("restore")
        arrays = load(as_path(path))
        devices = len(next(iter(arrays.values())))
        if devices != self.devices:
            raise SnapshotError(f"{path} must be of {self.devices} devices, not {devices}")
        saved = {name: (str(each.dtype), each.shape[1:]) for name, each in arrays.items()}
        expected = {name: ("float32", saved[name][1]) for name in saved}
        if named is not None:
            expected = {name: ("float32", each.shape) for name, each in named.items()}
        if saved != expected:
            raise SnapshotError(f"{path} must have tensors of shapes {expected}, not {saved}")
        if named is None:
            return self.tensors([*arrays[n]] for n in sorted(arrays, key=lambda n: (len(n), n)))
        with self.rings.lock:  # so that no job starts in between
            for tensor in named.values():
                tensor.check_idle("restore")
            for name, tensor in named.items():
                for device, values in enumerate(arrays[name]):
                    tensor.write(device, values)
        return tuple(named.values())

    def _named(
        self, tensors: Sequence[PoolTensor] | Mapping[str, PoolTensor]
    ) -> dict[str, PoolTensor]:
        """Return usable tensors of this pool by name."""
        if not isinstance(tensors, Mapping):
            return {str(i): each for i, each in enumerate(self.check_tensors(tensors))}
        self.check_tensors([*tensors.values()])
        return dict(tensors)

    def check_ring(self, action: str) -> None:
        """Raise `ArgumentError`, which names `action`, if the pool has a single device."""
        if self.devices < 2:
            raise ArgumentError(f"cannot {action} on {self!r}: one device has no ring")

    def check_tensor(self, tensor: PoolTensor) -> None:
        """Raise unless `tensor` is a usable tensor of this pool."""
        if not isinstance(tensor, PoolTensor):
            raise ArgumentError(f"tensor must be a PoolTensor, not {type(tensor).__name__}")
        if tensor.rings is not self.rings:
            raise ArgumentError(
                f"tensor must be of {self!r}, not of another on {tensor.rings.device.url}"
            )
        tensor.check_usable("use")

    def check_tensors(self, tensors: Sequence[PoolTensor]) -> tuple[PoolTensor, ...]:
        """Check each tensor as `check_tensor` does, and return them as a tuple."""
        if not isinstance(tensors, Sequence):
            raise ArgumentError(
                f"tensors must be a sequence of PoolTensor, not {type(tensors).__name__}"
            )
        for tensor in tensors:
            self.check_tensor(tensor)
        return tuple(tensors)

    def _checked(self, arrays: Any) -> list[NDArray[np.float32]]:
        """Return one float32 array for each device, all of one shape."""
        if not hasattr(arrays, "__len__") or getattr(arrays, "ndim", 1) == 0:
            raise ArgumentError(
                f"arrays must be a shape, or an array for each device, not {arrays!r}"
            )
        if len(arrays) != self.devices:
            raise ArgumentError(f"there must be {self.devices} arrays, not {len(arrays)}")
        values = [as_array(each) for each in arrays]
        found = {device: f"{each.dtype} of {each.shape}" for device, each in enumerate(values)}
        if len(set(found.values())) > 1:
            raise TensorMismatchError(found)
        if values[0].dtype != np.float32:
            raise DtypeError("arrays of a tensor", "float32", values[0].dtype)
        return values

    def check_operation(self, op: str) -> None:
        """Raise `ArgumentError` unless the operation exists."""
        if not isinstance(op, str) or op not in OPERATIONS:
            raise ArgumentError(f"op must be one of {', '.join(OPERATIONS)}, not {op!r}")

    def check_wire(self, wire: str) -> None:
        """Raise `ArgumentError` unless the devices' links support this format."""
        formats = self.device.config.wire_formats
        if not isinstance(wire, str) or wire not in formats:
            raise ArgumentError(f"wire must be one of {', '.join(formats)}, not {wire!r}")

    def check_exact(self, op: str, wire: str, addends: int) -> None:
        """Raise `ExactSumError` unless the devices have this exact sum.

        Parameters
        ----------
        addends : arrays of all devices.
        """
        built = self.device.config.exact
        if op not in EXACT:
            raise ExactSumError("op", " or ".join(EXACT), repr(op))
        if wire not in built:
            formats = ", ".join(built) or "none, as the devices were opened without exact="
            raise ExactSumError("wire", formats, repr(wire))
        if addends > MAX_ADDENDS:
            raise ExactSumError("addends", f"at most {MAX_ADDENDS}", addends)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CoarsePool {self.device.url} of {self.devices} devices, {self.groups} groups>"
