"""State of one parameter under torch's keys; fetched from the device when read or saved."""

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

from nearstep.torch import options
from nearstep.torch.convert import fingerprint
from nearstep.torch.dtensor import same_placements, sharding
from nearstep.torch.eager import eager
from nearstep.torch.errors import HyperparameterError, StateError
from nearstep.torch.formats import Quantized, quantize, scales_shape
from nearstep.torch.layout import Layout, scales_of
from nearstep.torch.parameter import DeviceParameter
from nearstep.updater.checks import STEPS

RESIDUAL = "residual"
"""Key of the part of the gradients not sent so far. torch has no such key and ignores it."""


class _OnDevice:
    def __repr__(self) -> str:
        return "<on device>"


_ON_DEVICE = _OnDevice()


class ParameterState(dict[str, Any]):
    """`optimizer.state[p]` with torch's keys: for Adam `step`, `exp_avg` and `exp_avg_sq`.

    `step` is an fp32 scalar tensor on the host. A moment is fetched when it is read, as a tensor of
    the parameter's shape, of fp32 whatever the parameter's format unless the rule names another
    dtype, and is valid until the next step. A moment that was assigned, or changed in place, is
    sent with that step.

    An 8-bit moment is a uint8 tensor of codes; its scales are an fp32 tensor, one for each 256
    elements, under a key of their own (`exp_avg_scale` beside `exp_avg`). A floating-point tensor
    assigned to the moment is quantized to both.

    With error feedback a step adds `residual`, a new fp32 tensor of the parameter's shape on the
    gradient's device: the part of the gradients that was not sent, -0 where nothing is left.

    The class is a dict, because torch and its users test for one; every way to read a value
    (`dict(s)`, `items()`, `|`, `copy()`, pickle, deepcopy, pytrees) fetches it. A state built like
    a dict (`type(s)({...})`, or from a pytree) is on no device until a step adopts it.
    """

    def __init__(self, *values: Any, **more: Any) -> None:
        super().__init__(*values, **more)
        self._store: DeviceParameter | None = None
        self._fetched: dict[str, int] = {}
        self._residual_is_saved = False
        self._residual_is_shown = True

    @classmethod
    def of(cls, store: DeviceParameter, step: Tensor | None, held: Iterable[str]) -> Self:
        """Return the state of a parameter whose moments are on a device.

        Parameters
        ----------
        step : None if torch keeps no count for this rule.
        held : keys of the moments that the device has.
        """
        state = cls({} if step is None else {"step": step})
        dict.update(state, dict.fromkeys(store.layout.with_scales(held), _ON_DEVICE))
        state._store = store
        return state

    @property
    def store(self) -> DeviceParameter | None:
        """The parameter on the device that has the moments; None if the state is on no device."""
        return self._store

    @property
    def step(self) -> Any:
        """Value under the key `step`."""
        return super().__getitem__("step")

    @property
    def residual(self) -> Tensor | None:
        """Value under the key `residual`, or None."""
        return super().get(RESIDUAL)

    def keep_residual(self, residual: Tensor) -> None:
        """Set `residual` to a new tensor of the moments' shape."""
        super().__setitem__(RESIDUAL, residual)
        self._residual_is_saved = self._residual_is_shown = False

    @property
    def unsaved_residual(self) -> Tensor | None:
        """Value under the key `residual`; None if the drives have the same value.

        A residual that the user has read counts as unsaved, since the user may change it.
        """
        known = self._residual_is_saved and not self._residual_is_shown
        return None if known else self.residual

    def residual_saved(self) -> None:
        """Record that the drives have the residual."""
        self._residual_is_saved = True

    @property
    def held(self) -> frozenset[str]:
        """Keys of the moments on the device that have been neither fetched nor assigned."""
        return frozenset(key for key, raw in super().items() if raw is _ON_DEVICE)

    @property
    def is_on_device(self) -> bool:
        """Whether no moment has been fetched or assigned since the last step."""
        layout = self._placed.layout
        moments = map(super().get, layout.with_scales(layout.moments))
        return all(raw is None or raw is _ON_DEVICE for raw in moments)

    def has_moment(self, key: str) -> bool:
        """Return whether there is a moment `key`, on the device or still to be sent."""
        return super().get(key) is not None

    def written(self, keys: Iterable[str]) -> list[Tensor]:
        """Record that a step wrote these moments.

        Returns
        -------
        list[Tensor] : the step count, for the caller to increment; empty if there is none.
        """
        for key in self._placed.layout.with_scales(keys):
            super().__setitem__(key, _ON_DEVICE)
        if not self._placed.layout.counts:
            return []
        step = super().__getitem__("step")
        if not isinstance(step, Tensor) or step.is_inference():
            step = self["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        return [step]

    def flush(self) -> None:
        """Send moments that were changed on the host, and drop all fetched copies.

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
                store.send(key, Quantized(first, *scales) if scales else first)
            dict.update(self, dict.fromkeys(parts, _ON_DEVICE))
        self._fetched.clear()

    def _is_changed(self, key: str, value: Any) -> bool:
        """Return whether a moment or its scales differ from what was fetched."""
        return value is not _ON_DEVICE and self._fetched.get(key) != fingerprint(value)

    def check_keys(self) -> None:
        """Raise `StateError` if a required key was deleted."""
        keys = self._placed.layout.keys
        if not self.keys() >= keys:
            missing = next(key for key in keys if key not in self.keys())
            raise StateError(self._placed.label, f"have {missing!r}", sorted(self.keys()))
        for key, scales in self._placed.layout.scales.items():
            if super().get(key) is not None and super().get(scales) is None:
                expected = f"have {scales!r} with {key!r}"
                raise StateError(self._placed.label, expected, sorted(self.keys()))

    def snapshot(self) -> dict[str, Any]:
        """Return a plain dict of own values: a copy of `step`, moments fetched anew."""
        return {
            key: raw.detach().clone() if isinstance(raw, Tensor) and not is_new else raw
            for key, raw, is_new in self._contents()
        }

    def _contents(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield key, value, and whether the value was fetched for this call."""
        fetched: dict[str, Tensor] = {}
        for key, raw in super().items():
            if raw is _ON_DEVICE:
                if key not in fetched:
                    fetched.update(self._placed.fetch(self._moment(key)))
                yield key, fetched[key], True
            else:
                yield key, raw, False

    def savepoint(self) -> Callable[[], None]:
        """Return a function that restores the present state without copies of moments: the next
        step sends the moments that were not on the device."""
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
        """Return the key of the moment that `key` names, or whose scales it names."""
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
        """Return `value` as codes of an 8-bit moment; quantize a floating-point tensor and set its
        scales."""
        layout, parameter = store.layout, store.parameter
        self._fetched.pop(key, None)
        if isinstance(value, Tensor) and value.is_floating_point():
            wide = check_moment(store.label, parameter, key, value)
            value, scales = quantize(wide, layout.quantized[key])
            self._fetched.pop(layout.scales[key], None)
            super().__setitem__(layout.scales[key], scales)
        return check_moment(store.label, parameter, key, value, torch.uint8)

    def __iter__(self) -> Iterator[str]:
        # Defined so that dict(state) and {**state} call __getitem__.
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


pytree.register_pytree_node(  # otherwise a subclass of dict is a leaf
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
    """Return `value` as a moment of a parameter, detached, on the host; a residual not moved.

    Parameters
    ----------
    dtype : None: any floating-point dtype.
    shape : None: the parameter's, sharded over processes alike.

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
    if value.layout is not torch.strided or value.is_nested or value.device.type == "meta":
        actual = "nested" if value.is_nested else value.layout
        raise StateError(label, f"have a dense tensor with data as {key!r}", actual)
    if tuple(value.shape) != tuple(parameter.shape if shape is None else shape):
        expected = f"have {key!r} of shape {tuple(parameter.shape if shape is None else shape)}"
        raise StateError(label, expected, tuple(value.shape))
    if not same_placements(value, parameter):
        raise StateError(label, f"have {key!r} {sharding(parameter)}", sharding(value))
    found = value.detach()
    return found if key == RESIDUAL or found.device.type == "cpu" else found.cpu()


def check_scales(label: str, parameter: Tensor, key: str, value: object) -> Tensor:
    """Check scales of a parameter's 8-bit moment: float32, one for each 256 elements."""
    return check_moment(label, parameter, key, value, torch.float32, scales_shape(parameter))


MASTER = "master_param"
"""Key of the fp32 master of a 16-bit parameter. torch has no such key and ignores it."""


EXACT_STEPS = 1 << 24
"""fp32 represents every whole number below this bound."""


@dataclass(frozen=True)
class Verbatim:
    """A value that `Optimizer.load_state_dict` must not cast to 16 bits."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """State of one parameter that is not on a device.

    Attributes
    ----------
    step : fp32 scalar; None if the layout has none.
    moments : by key; of the parameter's shape, or in 8 bits.
    master : fp32 master of a 16-bit parameter; None if none was saved.
    others : values under other keys.
    """

    step: Tensor | None
    moments: Mapping[str, Tensor | Quantized]
    master: Tensor | None
    others: Mapping[str, Any]

    @classmethod
    def of(cls, layout: Layout, label: str, parameter: Tensor, saved: Mapping[str, Any]) -> Self:
        """Check `saved`, a state of `parameter` from torch's optimizer or from `export`."""
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


def _moment(label: str, parameter: Tensor, key: str, values: dict[str, Any]) -> Tensor | Quantized:
    """Remove a moment from `values` and return it: a tensor, or codes and scales.

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
    return Quantized(codes, check_scales(label, parameter, scales, values.pop(scales)))


def count(label: str, step: object) -> int:
    """Return `step`, a number or a tensor of one element, as an int.

    Raises
    ------
    StateError : `step` is not a whole number of at least 0, or is too large for a run.
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
    """Return a plain dict with torch's keys, and the master of a 16-bit parameter."""
    resident = state.store
    values = state.snapshot()
    if resident is not None and resident.keeps_master:
        values[MASTER] = resident.fetch_master()
    return values
