"""Profiles: bytes and times of each layer, the planner's input.

`nearstep.memferry.modelled.profile` makes a `Profile` of a machine and the shape of a model,
`from_json` of a file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args

from nearstep.memferry.errors import ProfileError
from nearstep.scalars import is_whole

VERSION = 1
Source = Literal["modelled", "measured", "file"]
MOST_SECONDS = 1e4
"""Largest time: the planner counts picoseconds in 64 bits."""

MOST_BYTES = 1 << 50


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Bytes and seconds of one layer.

    Attributes
    ----------
    parameter_bytes : of the layer in GPU memory.
    gradient_bytes : of its gradients; 0 without gradients, e.g. for a frozen layer.
    load_s : parameters from host to GPU (T_trans).
    send_s : gradients from GPU to host.
    forward_s, backward_s : with parameters and gradients in GPU memory (T_FP, T_BP).
    forward_dha_s, backward_dha_s : with parameters by direct host access (T_FP^H, T_BP^H); None if
        the layer does not support it.
    backward_write_s : with parameters in GPU memory, gradients written to the host (T_GBP); None if
        the layer does not support it, or has no gradients.
    backward_dha_write_s : with both in host memory; None likewise.
    between_forward_s, between_backward_s : computation between this layer and the next (A_{l,l+1}).
    update_s : of its parameters by the optimizer on the host.

    Raises
    ------
    ProfileError : a number is missing, negative, not finite or above `MOST_SECONDS` or
        `MOST_BYTES`; a layer without gradients has a time to send, write or update them.

    Ref: MemFerry paper, section IV-B.
    """

    name: str
    parameter_bytes: int
    gradient_bytes: int
    load_s: float
    send_s: float
    forward_s: float
    backward_s: float
    forward_dha_s: float | None
    backward_dha_s: float | None
    backward_write_s: float | None
    backward_dha_write_s: float | None
    between_forward_s: float = 0.0
    between_backward_s: float = 0.0
    update_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ProfileError(repr(self.name), "name", "a text", self.name)
        for each in fields(self)[1:]:
            _check_number(self.name, each.name, getattr(self, each.name))
        if (self.forward_dha_s is None) != (self.backward_dha_s is None):
            raise ProfileError(
                self.name, "backward_dha_s", "given as forward_dha_s is", self.backward_dha_s
            )
        if self.backward_dha_write_s is not None and self.backward_dha_s is None:
            raise ProfileError(
                self.name, "backward_dha_write_s", "null without DHA", self.backward_dha_write_s
            )
        if not self.gradient_bytes:
            for name in ("send_s", "update_s", "backward_write_s", "backward_dha_write_s"):
                if getattr(self, name):
                    raise ProfileError(
                        self.name, name, "0 or null without gradients", getattr(self, name)
                    )

    @property
    def trained(self) -> bool:
        """Whether the layer has gradients."""
        return self.gradient_bytes > 0


_NULLABLE = {"forward_dha_s", "backward_dha_s", "backward_write_s", "backward_dha_write_s"}
_BYTES = {"parameter_bytes", "gradient_bytes", "activation_bytes"}


def _check_number(layer: str, name: str, value: object) -> None:
    if value is None and name in _NULLABLE:
        return
    if name in _BYTES:
        good = is_whole(value) and 0 <= value <= MOST_BYTES
        expected = f"a whole number of bytes from 0 to {MOST_BYTES}"
    else:
        good = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and 0 <= value <= MOST_SECONDS
        )
        expected = f"seconds from 0 to {MOST_SECONDS:g}"
    if not good:
        raise ProfileError(layer, name, expected, value)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on a machine.

    Attributes
    ----------
    source : of the times.
    description : model, batch, machine.
    fingerprint : of the model's tensors, by `fingerprint`.
    layers : in the order of the forward pass, at least one; names are unique.
    activation_bytes : peak of activations on the GPU in an iteration.

    Raises
    ------
    ProfileError : a field is invalid.
    """

    source: Source
    description: str
    fingerprint: str
    layers: tuple[LayerProfile, ...]
    activation_bytes: int = 0

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise ProfileError("", "source", f"one of {', '.join(get_args(Source))}", self.source)
        for name in ("description", "fingerprint"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ProfileError("", name, "a text", value)
        _check_number("", "activation_bytes", self.activation_bytes)
        if not self.layers:
            raise ProfileError("", "layers", "at least one", [])
        seen: set[str] = set()
        for layer in self.layers:
            if layer.name in seen:
                raise ProfileError(layer.name, "name", "of one layer alone", layer.name)
            seen.add(layer.name)

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        return sum(layer.gradient_bytes for layer in self.layers)

    def to_json(self) -> str:
        """Write the profile as text, the same for equal profiles."""
        table = {"version": VERSION, **asdict(self)}
        return json.dumps(table, indent=1, sort_keys=True, allow_nan=False) + "\n"


def fingerprint(tensors: Iterable[tuple[str, Sequence[int], str]]) -> str:
    """Fingerprint of a model from name, shape and dtype of its tensors in order.

    Returns
    -------
    str : 16 hexadecimal digits of a SHA-256.
    """
    text = json.dumps([[name, list(shape), dtype] for name, shape, dtype in tensors])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def from_json(text: str) -> Profile:
    """Read a profile.

    Raises
    ------
    ProfileError : the first field that is missing, unknown or out of range is named with its layer.
    """
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError("", "profile", "JSON", str(error)) from None
    if not isinstance(table, dict):
        raise ProfileError("", "profile", "a table", table)
    if table.pop("version", None) != VERSION:
        raise ProfileError("", "version", str(VERSION), json.loads(text).get("version"))
    layers = table.get("layers")
    if not isinstance(layers, list):
        raise ProfileError("", "layers", "a list", layers)
    ProfileError.check_keys("", table, [each.name for each in fields(Profile)])
    read = tuple(_layer(place, each) for place, each in enumerate(layers))
    return Profile(**{**table, "layers": read})


def _layer(place: int, table: object) -> LayerProfile:
    if not isinstance(table, dict):
        raise ProfileError(str(place), "layer", "a table", table)
    name = table.get("name")
    known = [each.name for each in fields(LayerProfile)]
    ProfileError.check_keys(name if isinstance(name, str) else str(place), table, known)
    return LayerProfile(**table)
