"""State of one parameter, as torch knows it: on the device until it is read, or saved."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from nearstep import blockwise
from nearstep.torch import convert, options
from nearstep.torch.convert import fingerprint
from nearstep.torch.dtensor import spread_alike, spreading
from nearstep.torch.eager import eager
from nearstep.torch.errors import HyperparameterError, StateError
from nearstep.torch.formats import Coded, encoded
from nearstep.torch.layout import Layout, scales_of
from nearstep.torch.parameter import DeviceParameter
from nearstep.updater.checks import STEPS

RESIDUAL = "residual"
"""Key of what compression has not sent so far. torch has no such key and ignores it."""


class _OnDevice:
    def __repr__(self) -> str:
        return "<on device>"


_ON_DEVICE = _OnDevice()


class ParameterState(dict[str, Any]):
    """`optimizer.state[p]` with the keys that torch has there, of Adam `step`, `exp_avg` and
    `exp_avg_sq`.

    `step` is an fp32 scalar tensor on the host. A moment is fetched when it is read, as a
    tensor of the parameter's shape, of fp32 whatever the parameter's format unless the rule names
    another one, and is good until the next step. One that was changed in place, or assigned, goes
    down with that step.

    A moment that the device keeps in 8 bits is a tensor of uint8, its codes, and under a key of its
    own, `exp_avg_scale` beside `exp_avg`, one of fp32 with a scale for each 256 elements. A
    floating-point tensor that is assigned to it becomes both.

    With error feedback `residual` is there after a step, an fp32 tensor of the parameter's shape
    where the gradient was: what has not been sent, with -0 where nothing is left. A step makes a
    new one.

    It is a dict, because torch and its users test for one; every way to read a value (`dict(s)`,
    `items()`, `|`, `copy()`, pickle, deepcopy, pytrees) fetches it. One that is made as a
    dict is, by `type(s)({...})` or of a pytree, is on no device until a step takes it over.
    """

    def __init__(self, *values: Any, **more: Any) -> None:
        super().__init__(*values, **more)
        self._store: DeviceParameter | None = None
        self._fetched: dict[str, int] = {}
        self._residual_is_saved = False
        self._residual_is_shown = True

    @classmethod
    def of(cls, store: DeviceParameter, step: Tensor | None, held: Iterable[str]) -> Self:
        """State of a parameter whose moments are on a device.

        Parameters
        ----------
        step : None if torch keeps no such count.
        held : keys of the moments that the device has.
        """
        state = cls({} if step is None else {"step": step})
        dict.update(state, dict.fromkeys(store.layout.with_scales(held), _ON_DEVICE))
        state._store = store
        return state

    @property
    def store(self) -> DeviceParameter | None:
        """Where the moments are kept; None of a state that is on no device."""
        return self._store

    @property
    def step(self) -> Any:
        """What is under the key `step`."""
        return super().__getitem__("step")

    @property
    def residual(self) -> Tensor | None:
        """What is under the key `residual`."""
        return super().get(RESIDUAL)

    def keep_residual(self, residual: Tensor) -> None:
        """Put a new tensor there that is like a moment of the parameter."""
        super().__setitem__(RESIDUAL, residual)
        self._residual_is_saved = self._residual_is_shown = False

    @property
    def unsaved_residual(self) -> Tensor | None:
        """What is under the key `residual`, unless drives have it as it is.

        What the user has seen may be changed at any time.
        """
        known = self._residual_is_saved and not self._residual_is_shown
        return None if known else self.residual

    def residual_saved(self) -> None:
        """Drives have the residual."""
        self._residual_is_saved = True

    @property
    def held(self) -> frozenset[str]:
        """Keys of the moments that are on the device, and have not been fetched or assigned."""
        return frozenset(key for key, raw in super().items() if raw is _ON_DEVICE)

    @property
    def is_on_device(self) -> bool:
        """Whether no moment is anywhere else."""
        layout = self._placed.layout
        moments = map(super().get, layout.with_scales(layout.moments))
        return all(raw is None or raw is _ON_DEVICE for raw in moments)

    def has_moment(self, key: str) -> bool:
        """Whether there is a moment `key`, on the device or to be sent there."""
        return super().get(key) is not None

    def written(self, keys: Iterable[str]) -> list[Tensor]:
        """Steps wrote these moments.

        Returns
        -------
        list[Tensor] : the count of steps, which is to be advanced, if there is one.
        """
        for key in self._placed.layout.with_scales(keys):
            super().__setitem__(key, _ON_DEVICE)
        if not self._placed.layout.counts:
            return []
        step = super().__getitem__("step")
        if not isinstance(step, Tensor):
            step = self["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        return [step]

    def flush(self) -> None:
        """Send what was changed on the host, and let go of what was fetched.

        The keys have been checked (`check_keys`).
        """
        store = self._placed
        for key in store.layout.moments:
            keys = store.layout.with_scales([key])
            parts: dict[str, Any] = {each: dict.get(self, each) for each in keys}
            if parts[key] is None or all(raw is _ON_DEVICE for raw in parts.values()):
                continue
            if any(self._is_changed(*each) for each in parts.items()):
                if any(value is _ON_DEVICE for value in parts.values()):
                    kept = store.fetch(key)
                    parts = {k: kept[k] if v is _ON_DEVICE else v for k, v in parts.items()}
                first, *scales = parts.values()
                store.send(key, Coded(first, *scales) if scales else first)
            dict.update(self, dict.fromkeys(parts, _ON_DEVICE))
        self._fetched.clear()

    def _is_changed(self, key: str, value: Any) -> bool:
        """Whether what is under the key of a moment, or its scales, is not what the device has."""
        return value is not _ON_DEVICE and self._fetched.get(key) != fingerprint(value)

    def check_keys(self) -> None:
        """Raise `StateError` if a key was deleted that state always has."""
        keys = self._placed.layout.keys
        if not self.keys() >= keys:
            missing = next(key for key in keys if key not in self.keys())
            raise StateError(self._placed.label, f"have {missing!r}", sorted(self.keys()))
        for key, scales in self._placed.layout.scales.items():
            if super().get(key) is not None and super().get(scales) is None:
                expected = f"have {scales!r} with {key!r}"
                raise StateError(self._placed.label, expected, sorted(self.keys()))

    def snapshot(self) -> dict[str, Any]:
        """A plain dict with values of its own: a copy of `step`, moments fetched afresh."""
        return {
            key: raw.detach().clone() if isinstance(raw, Tensor) and not is_new else raw
            for key, raw, is_new in self._contents()
        }

    def _contents(self) -> Iterator[tuple[str, Any, bool]]:
        """Key and value of all, and whether the value was fetched for this."""
        fetched: dict[str, Tensor] = {}
        for key, raw in super().items():
            if raw is _ON_DEVICE:
                if key not in fetched:
                    fetched.update(self._placed.fetch(self._moment(key)))
                yield key, fetched[key], True
            else:
                yield key, raw, False

    def savepoint(self) -> Callable[[], None]:
        """What makes the state what it is now, without copies of moments: what was not on the
        device is sent with the next step."""
        values = dict(zip(dict.__iter__(self), dict.values(self), strict=True))
        step = values.get("step")
        count = step.clone() if isinstance(step, Tensor) else None

        def restore() -> None:
            dict.clear(self)
            dict.update(self, values)
            self._fetched.clear()
            self._residual_is_shown = True
            if count is not None:
                values["step"].copy_(count)

        return restore

    def _moment(self, key: str) -> str:
        """Key of the moment that is under this one, or whose scales are."""
        return self._placed.layout.moment_of.get(key, key)

    @property
    def _placed(self) -> DeviceParameter:
        assert self._store is not None, "what is on a device was made by of()"
        return self._store

    @eager
    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if value is _ON_DEVICE:
            for each, found in self._placed.fetch(self._moment(key)).items():
                if super().get(each) is _ON_DEVICE:
                    self._fetched[each] = fingerprint(found)
                    super().__setitem__(each, found)
            value = super().__getitem__(key)
        elif key == RESIDUAL:
            self._residual_is_shown = True
        return value

    @eager
    def __setitem__(self, key: str, value: Any) -> None:
        store = self._store
        if store is not None:
            layout = store.layout
            scales = layout.scales.get(key)
            if value is None and key in layout.optional:
                if scales is not None:
                    super().pop(scales, None)
            elif scales is not None:
                value = self._codes_of(store, key, value)
            elif key in layout.moments:
                value = check_moment(store.label, store.parameter, key, value)
                self._fetched.pop(key, None)
            elif key in layout.moment_of:
                value = check_scales(store.label, store.parameter, key, value)
                self._fetched.pop(key, None)
            elif key == RESIDUAL:
                value = check_moment(store.label, store.parameter, key, value, torch.float32)
        if key == RESIDUAL:
            self._residual_is_shown = True
        super().__setitem__(key, value)

    def _codes_of(self, store: DeviceParameter, key: str, value: object) -> Tensor:
        """`value` as codes of a moment in 8 bits; if it is of floating point, its scales are
        there then."""
        layout, parameter = store.layout, store.parameter
        self._fetched.pop(key, None)
        if isinstance(value, Tensor) and value.is_floating_point():
            wide = check_moment(store.label, parameter, key, value)
            value, scales = encoded(wide, layout.coded[key])
            self._fetched.pop(layout.scales[key], None)
            super().__setitem__(layout.scales[key], scales)
        return check_moment(store.label, parameter, key, value, torch.uint8)

    def __iter__(self) -> Iterator[str]:
        # Defined so that dict(state) and {**state} go through __getitem__.
        return super().__iter__()

    get = MutableMapping.get  # type: ignore[assignment]
    update = MutableMapping.update

    def items(self) -> Any:
        return self.copy().items()

    def values(self) -> Any:
        return self.copy().values()

    def copy(self) -> dict[str, Any]:
        return {key: self[key] for key in self}

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        if not self:
            return super().popitem()  # raises
        key = next(reversed(self))
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Self:  # type: ignore[override]
        self.update(other)
        return self

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    def __ne__(self, other: object) -> bool:
        return self.copy() != other

    __hash__ = None

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {
            key: raw if is_new else copy.deepcopy(raw, memo)
            for key, raw, is_new in self._contents()
        }

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (tuple(self.snapshot().items()),)


def _flatten(state: ParameterState) -> tuple[list[Any], list[str]]:
    return list(state.values()), list(state)


def _flatten_with_keys(state: ParameterState) -> tuple[list[tuple[Any, Any]], list[str]]:
    return [(pytree.MappingKey(key), value) for key, value in state.items()], list(state)


def _unflatten(values: Iterable[Any], keys: list[str]) -> ParameterState:
    return ParameterState(zip(keys, values, strict=True))


pytree.register_pytree_node(  # a subclass of dict is a leaf without
    ParameterState,
    _flatten,
    _unflatten,
    serialized_type_name=f"{ParameterState.__module__}.{ParameterState.__qualname__}",
    flatten_with_keys_fn=_flatten_with_keys,
)


def check_moment(
    label: str,
    parameter: Tensor,
    key: str,
    value: object,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """`value` as a moment of a parameter, detached and on the host; a residual where it is.

    Parameters
    ----------
    dtype : None: any of floating point.
    shape : None: as the parameter has it, spread over processes as it is.

    Raises
    ------
    StateError
    """
    floats = dtype is None or dtype.is_floating_point
    kind = ("floating-point tensor" if floats else "tensor") + (f" of {dtype}" if dtype else "")
    if not isinstance(value, Tensor):
        raise StateError(label, f"have a {kind} as {key!r}", type(value).__name__)
    if value.dtype != dtype if dtype is not None else not value.is_floating_point():
        raise StateError(label, f"have a {kind} as {key!r}", value.dtype)
    if value.layout is not torch.strided or value.device.type == "meta":
        raise StateError(label, f"have a dense tensor with data as {key!r}", value.layout)
    if tuple(value.shape) != tuple(parameter.shape if shape is None else shape):
        expected = f"have {key!r} of shape {tuple(parameter.shape if shape is None else shape)}"
        raise StateError(label, expected, tuple(value.shape))
    if shape is None and not spread_alike(value, parameter):
        raise StateError(label, f"have {key!r} {spreading(parameter)}", spreading(value))
    found = value.detach()
    return found if key == RESIDUAL or found.device.type == "cpu" else found.cpu()


def check_scales(label: str, parameter: Tensor, key: str, value: object) -> Tensor:
    """`value` as scales of a parameter's moment in 8 bits: float32, one for each 256 elements."""
    shape = (blockwise.groups(convert.size(parameter)),)
    return check_moment(label, parameter, key, value, torch.float32, shape)


MASTER = "master_param"
"""Key of the fp32 master of a 16-bit parameter. torch has no such key and ignores it."""


EXACT_STEPS = 1 << 24
"""Whole numbers below it are fp32 values."""


@dataclass(frozen=True)
class Verbatim:
    """A value that `Optimizer.load_state_dict` is to pass on as it is, not cast to 16 bits."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """State of one parameter that is not on a device.

    Attributes
    ----------
    step : fp32 scalar; None if the layout has none.
    moments : by key; of the parameter's shape, or in 8 bits.
    master : fp32 master of a 16-bit parameter.
    others : values under keys that are not torch's.
    """

    step: Tensor | None
    moments: Mapping[str, Tensor | Coded]
    master: Tensor | None
    others: Mapping[str, Any]

    @classmethod
    def of(cls, layout: Layout, label: str, parameter: Tensor, saved: Mapping[str, Any]) -> Self:
        """Check `saved`, the state of `parameter` as torch's optimizer or `export` has it.

        Raises
        ------
        StateError
        """
        if is_lazy(parameter):
            raise StateError(label, "wait until the parameter has a shape", sorted(saved))
        values = {k: v.value if isinstance(v, Verbatim) else v for k, v in saved.items()}
        missing = [key for key in layout.keys if key not in values]
        if missing:
            raise StateError(label, f"have {missing}", sorted(values))
        step = None
        if layout.counts:
            whole = count(label, values.pop("step"))
            step = torch.tensor(float(whole), dtype=torch.float32, device="cpu")
        for key in layout.optional:
            if values.get(key) is None:
                values.pop(key, None)
                values.pop(scales_of(key), None)
        moments = {
            key: _moment(label, parameter, key, values) for key in layout.moments if key in values
        }
        master = values.pop(MASTER, None)
        if master is not None:
            master = check_moment(label, parameter, MASTER, master)
        if RESIDUAL in values:
            found = check_moment(label, parameter, RESIDUAL, values[RESIDUAL], torch.float32)
            values[RESIDUAL] = found.clone()
        return cls(step=step, moments=moments, master=master, others=values)


def _moment(label: str, parameter: Tensor, key: str, values: dict[str, Any]) -> Tensor | Coded:
    """Take a moment from saved values: a tensor, or codes and scales.

    Raises
    ------
    StateError
    """
    value, scales = values.pop(key), scales_of(key)
    if scales not in values:
        if isinstance(value, Tensor) and value.dtype == torch.uint8:
            found = sorted({key, *values})
            raise StateError(label, f"have {scales!r} with {key!r} of torch.uint8", found)
        return check_moment(label, parameter, key, value)
    codes = check_moment(label, parameter, key, value, torch.uint8)
    return Coded(codes, check_scales(label, parameter, scales, values.pop(scales)))


def count(label: str, step: object) -> int:
    """The value of `step`, a number or a tensor of one element, as an int.

    Raises
    ------
    StateError : it is not a whole number of at least 0, or a run could not have the next one.
    """
    try:
        value = options.scalar("step", step)
    except HyperparameterError:
        value = math.nan
    if 0 <= value < EXACT_STEPS and value == int(value):
        return int(value)
    with np.errstate(over="ignore"):
        kept = float(np.float32(value))
    if not 0 <= kept < STEPS or value != int(value):
        raise StateError(label, "have a whole number below 2**63 as 'step'", step)
    return int(value)


def export(state: ParameterState) -> dict[str, Any]:
    """A plain dict with what torch's optimizer has, and the master of a 16-bit parameter."""
    resident = state.store
    values = state.snapshot()
    if resident is not None and resident.keeps_master:
        values[MASTER] = resident.fetch_master()
    return values
