"""Options and faults of a link, as plain data and as structures of `link.hpp`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from nearstep.scalars import is_whole
from nearstep_sim.verilate.abi import structure
from nearstep_spec.errors import NearstepError

HEADER = Path(__file__).with_name("link.hpp")

Kind = Literal["drop", "duplicate", "reorder", "corrupt", "dead", "stall"]
Frame = Literal["any", "control", "entry", "abort"]
KINDS: tuple[str, ...] = get_args(Kind)
FRAMES: tuple[str, ...] = get_args(Frame)
ONE = 1 << 16
"""Scale of chances in C++."""


class LinkOptionError(NearstepError, ValueError):
    """An invalid option or fault of a link: its name and value, and what is allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name = name
        self.value = value
        super().__init__(f"{name} must be {allowed}, not {value!r}")


class COptions(structure("models/link/link.hpp", "Options")):
    """`Options` of link.hpp."""


class CFault(structure("models/link/link.hpp", "FrameFault")):
    """`FrameFault` of link.hpp."""


class CStatistics(
    structure(
        "models/link/link.hpp",
        "Statistics",
        sizes={"kFaultKinds": len(KINDS), "kFrameKinds": len(FRAMES)},
    )
):
    """`Statistics` of link.hpp."""

    def frame_faults_made(self) -> Iterator[tuple[str, str]]:
        """Return the faults that happened, each with the kind of frame that it hit."""
        for kind, row in zip(KINDS, self.frame_faults, strict=True):
            yield from ((kind, frame) for frame, n in zip(FRAMES, row, strict=True) if n)


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """Options of every direction of every link.

    Parameters
    ----------
    latency : cycles from sender to receiver, at least 1.
    interval : cycles for each phit; 1 is full rate.
    seed : of the faults; each direction has a separate random sequence.
    drop, duplicate, reorder, corrupt : chance of each fault for a frame, from 0 to 1. A reordered
        frame is delivered after the next one or two; a corrupt one has 1 to 3 bits inverted in one
        of its phits.

    Raises
    ------
    LinkOptionError
    """

    latency: int = 32
    interval: int = 1
    seed: int = 1
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (("latency", 1 << 20), ("interval", 1 << 10)):
            _whole(name, getattr(self, name), 1, most)
        _whole("seed", self.seed, 0, (1 << 64) - 1)
        for name in KINDS[:4]:
            if not 0 <= getattr(self, name) <= 1:
                raise LinkOptionError(name, getattr(self, name), "a chance from 0 to 1")

    @property
    def faulty(self) -> bool:
        """Whether a fault can happen to frames."""
        return any(getattr(self, name) for name in KINDS[:4])

    def mirror(self, direction: int = 0) -> COptions:
        """Return the structure for C++; `direction` numbers the directions of all links."""
        rates = {name: round(getattr(self, name) * ONE) for name in KINDS[:4]}
        seed = (self.seed * 0x9E3779B97F4A7C15 + direction) % (1 << 64)
        return COptions(latency=self.latency, interval=self.interval, seed=seed, **rates)


@dataclass(frozen=True, kw_only=True)
class LinkFault:
    """A fault of certain frames in one direction of a link.

    Parameters
    ----------
    kind : `drop`, `duplicate`, `reorder`, `corrupt`; `dead`: nothing passes from then on; `stall`:
        nothing passes for `cycles`, then all is delivered.
    link, direction : which link, and 0 from the device of the lower number, or 1 to it.
    frame : the kind of frame that counts: `any`, `control`, `entry`, `abort`.
    nth : number of the first such frame that is hit; 0 is the next. A `dead` or `stall` of `any`
        frame with 0 begins at once.
    times : number of such frames in a row that are hit.
    cycles : of a stall.

    Raises
    ------
    LinkOptionError
    """

    kind: Kind
    link: int = 0
    direction: int = 0
    frame: Frame = "any"
    nth: int = 0
    times: int = 1
    cycles: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("kind", KINDS), ("frame", FRAMES)):
            if getattr(self, name) not in allowed:
                raise LinkOptionError(name, getattr(self, name), f"one of {', '.join(allowed)}")
        _whole("link", self.link, 0, 255)
        _whole("direction", self.direction, 0, 1)
        _whole("nth", self.nth, 0, (1 << 63) - 1)
        _whole("times", self.times, 1, (1 << 63) - 1)
        _whole("cycles", self.cycles, int(self.kind == "stall"), (1 << 63) - 1)

    def mirror(self) -> CFault:
        """Return the structure for C++."""
        return CFault(
            kind=KINDS.index(self.kind),
            frame=FRAMES.index(self.frame),
            nth=self.nth,
            times=self.times,
            cycles=self.cycles,
        )


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not is_whole(value) or not low <= value <= high:
        raise LinkOptionError(name, value, f"a whole number from {low} to {high}")
