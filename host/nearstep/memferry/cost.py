"""The planner's cost model: the time of an iteration under a decision for each layer.

Times are whole picoseconds, as `nearstep.work.clock` counts them, so that sums are exact. Four
resources run one operation at a time: the GPU, the copies from the host, the copies to the host,
and the optimizer on the host. For a layer l (from 0 to L-1, in the order of the forward pass):

- *Loads*: `R_l = R_{l-1} + T_trans(l)` of a GFGB layer, else `R_l = R_{l-1}`; `R_{-1} = 0`.
- *Forward*: `F_l = max(F_{l-1} + A_{l-1,l}, R_l) + T_FP(l)` of a GFGB layer, else `F_l = F_{l-1} +
  A_{l-1,l} + T_FP^H(l)`.
- *Loads of DFGB layers* follow those of all GFGB layers, the last layer first, since its backward
  is the first, each after its own forward: `D_l = max(D of the one before, R_{L-1}, F_l) +
  T_trans(l)`.
- *Backward*, from L-1 to 0: `B_l = max(B_{l+1} + A_{l,l+1}, D_l) + T`, where `B_L = F_{L-1}`, `D_l`
  is of DFGB layers alone, and T is the time for the memory of parameters and gradients.
- *Gradients* that GPU memory keeps are sent: `S_l = max(S of the one before, B_l) + T_send(l)`.
- *Updates* begin after backward, in its order, each when the host has its gradients: `U_l = max(U
  of the one before, B_0, S_l) + T_update(l)`. An iteration ends with the last.

Assumptions where the paper is silent: direct host access and copies do not slow each other (section
III-B: the streams "are independent"), nor do copies to and from the host (PCIe is full duplex);
nothing is loaded before the iteration begins; a layer without parameters waits for no copy.

Memory of a decision: parameters of GFGB and DFGB layers, and gradients that are not written to the
host, each in a buffer of its own for the whole iteration (section V-A: "we do not destroy the
gradients on GPU after they have been used").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nearstep.errors import ArgumentError
from nearstep.memferry.profile import LayerProfile, Profile
from nearstep.work.clock import Clock

Ints = npt.NDArray[np.int64]


class Mode(IntEnum):
    """Mode of computation of a layer (section IV-B)."""

    GFGB = 0
    DHA = 1
    DFGB = 2


@dataclass(frozen=True, order=True)
class Decision:
    """A decision for one layer.

    Attributes
    ----------
    write : gradients are written to host memory by direct host access; else they are kept in GPU
        memory, and sent.
    """

    mode: Mode
    write: bool = False

    @property
    def index(self) -> int:
        """Index of its column in `Costs`."""
        return 2 * self.mode + self.write


DECISIONS = tuple(Decision(mode, write) for mode in Mode for write in (False, True))
"""All decisions, by `Decision.index`."""

GFGB, DHA, DFGB = (Decision(mode) for mode in Mode)

_MODES = np.array([each.mode for each in DECISIONS])
EARLY, LATE = _MODES == Mode.GFGB, _MODES == Mode.DFGB
"""Whether a decision loads the layer before its forward, and before its backward alone."""

KEEPS = np.array([not each.write for each in DECISIONS])
"""Whether a decision keeps gradients in GPU memory."""


@dataclass(frozen=True)
class Times:
    """Ends of operations in picoseconds, by layer; -1 where there is no such operation.

    Attributes
    ----------
    total : end of the iteration.
    """

    load: Sequence[int]
    forward: Sequence[int]
    backward: Sequence[int]
    send: Sequence[int]
    update: Sequence[int]
    total: int


class Costs:
    """Times and bytes of a profile, by layer and decision.

    Attributes
    ----------
    load, send, update : picoseconds of each layer; int64 of shape (L,).
    before_forward, before_backward : picoseconds between the layer before and this one; (L,), the
        first 0.
    forward, backward : picoseconds by layer and `Decision.index`; int64 of shape (L, 6).
    allowed : bool of shape (L, 6).
    parameter_bytes, gradient_bytes : GPU memory of a decision; int64 of shape (L, 6).

    Raises
    ------
    ArgumentError : times together are longer than 64 bits can compare.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        clock = Clock()
        layers = profile.layers

        def ticks(name: str) -> Ints:
            return np.array([clock.cycles(getattr(each, name)) for each in layers], np.int64)

        self.load, self.send, self.update = ticks("load_s"), ticks("send_s"), ticks("update_s")
        self.before_forward = np.concatenate([[0], ticks("between_forward_s")[:-1]])
        self.before_backward = np.concatenate([[0], ticks("between_backward_s")[:-1]])
        count = len(layers)
        self.forward, self.backward, self.parameter_bytes, self.gradient_bytes = (
            np.zeros((count, len(DECISIONS)), np.int64) for _ in range(4)
        )
        self.allowed = np.zeros((count, len(DECISIONS)), bool)
        for place, layer in enumerate(layers):
            for column, decision in enumerate(DECISIONS):
                times = _computation(layer, decision)
                if times is None:
                    continue
                self.allowed[place, column] = True
                self.forward[place, column] = clock.cycles(times[0])
                self.backward[place, column] = clock.cycles(times[1])
                if decision.mode is not Mode.DHA:
                    self.parameter_bytes[place, column] = layer.parameter_bytes
                if not decision.write:
                    self.gradient_bytes[place, column] = layer.gradient_bytes
        if self.horizon > _MOST:
            raise ArgumentError(
                f"an iteration must be at most {_MOST / 1e12:g} s, not {self.horizon / 1e12:g} s"
            )

    def __len__(self) -> int:
        return len(self.load)

    @cached_property
    def trained(self) -> npt.NDArray[np.bool_]:
        """Whether a layer has gradients; (L,)."""
        return np.array([layer.trained for layer in self.profile.layers])

    @cached_property
    def horizon(self) -> int:
        """Upper bound of an iteration, in picoseconds."""
        slowest = self.forward.max(1) + self.backward.max(1)
        rest = self.load + self.send + self.update + self.before_forward + self.before_backward
        return int((slowest + rest).sum(dtype=object))

    @cached_property
    def updated(self) -> Ints:
        """Picoseconds of the updates of all layers up to each; (L,)."""
        return np.cumsum(self.update)

    def taken(self, decisions: Sequence[Decision]) -> tuple[int, int]:
        """GPU memory of parameters, and of gradients."""
        at = range(len(decisions)), [each.index for each in decisions]
        return int(self.parameter_bytes[at].sum()), int(self.gradient_bytes[at].sum())

    def bytes_of(self, decisions: Sequence[Decision]) -> int:
        """GPU memory of parameters and gradients."""
        return sum(self.taken(decisions))

    def times(self, decisions: Sequence[Decision]) -> Times:
        """Compute the recurrence of the module for one decision for each layer."""
        count = len(self)
        load, forward, backward, send, update = ([-1] * count for _ in range(5))
        columns = [each.index for each in decisions]
        compute = self.forward[range(count), columns].tolist()
        compute_back = self.backward[range(count), columns].tolist()
        moved, sent, updated = self.load.tolist(), self.send.tolist(), self.update.tolist()
        loaded = now = 0
        for i, gap in enumerate(self.before_forward.tolist()):
            now += gap
            if decisions[i].mode is Mode.GFGB:
                loaded = load[i] = loaded + moved[i]
                now = max(now, loaded)
            now = forward[i] = now + compute[i]
        for i in reversed(range(count)):
            if decisions[i].mode is Mode.DFGB:
                loaded = load[i] = max(loaded, forward[i]) + moved[i]
        gaps, at = self.before_backward.tolist(), 0
        for i in reversed(range(count)):
            if decisions[i].mode is Mode.DFGB:
                now = max(now, load[i])
            now = backward[i] = now + compute_back[i]
            if self.trained[i] and not decisions[i].write:
                at = send[i] = max(at, now) + sent[i]
            now += gaps[i]
        total = now
        for i in reversed(range(count)):
            if self.trained[i]:
                total = update[i] = max(total, send[i]) + updated[i]
        return Times(load, forward, backward, send, update, total)

    def seconds(self, decisions: Sequence[Decision]) -> float:
        """Seconds of an iteration."""
        return self.times(decisions).total / 1e12


_MOST = 8 * 10**15
"""Picoseconds: the exact planner adds up to 544 of them, and compares that with 2^62."""


def _computation(layer: LayerProfile, decision: Decision) -> tuple[float, float] | None:
    """Seconds of forward and backward, or None of a decision that the layer does not allow."""
    if decision.write and not layer.trained:
        return None
    if not layer.parameter_bytes:  # nothing to load: computed in place
        if decision.mode is not Mode.DHA:
            return None
        backward = layer.backward_write_s if decision.write else layer.backward_s
        return None if backward is None else (layer.forward_s, backward)
    dha = decision.mode is Mode.DHA
    forward = layer.forward_s if decision.mode is Mode.GFGB else layer.forward_dha_s
    if decision.write:
        backward = layer.backward_dha_write_s if dha else layer.backward_write_s
    else:
        backward = layer.backward_dha_s if dha else layer.backward_s
    return None if forward is None or backward is None else (forward, backward)
