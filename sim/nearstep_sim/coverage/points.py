"""Functional coverage: closed sets of events of the RTL, and those that tests have seen.

`hit` does nothing unless `$NEARSTEP_POINTS` or `$NEARSTEP_COVERAGE` names a folder. Each process
then writes its hits to a file of that folder when it ends; a bin counts once for each process. With
the first variable models are those of any other test; with the second they count coverage, too.
"""

import atexit
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from nearstep_hw import COVERAGE, POINTS
from nearstep_sim.models.link.faults import FRAMES, KINDS
from nearstep_spec.axdimm.registers import arbiter_map
from nearstep_spec.coarse import registers as coarse
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.command import Command
from nearstep_spec.errors import NearstepError
from nearstep_spec.rule.rules import BY_RULE, RuleSet
from nearstep_spec.updater.config import PARAMETER_FORMATS
from nearstep_spec.updater.registers import ErrorCause, StateFormat

__all__ = [
    "ImpossibleHitError",
    "Point",
    "UnknownBinError",
    "folder_of_points",
    "hit",
    "merged_hits",
    "points",
    "saw_faults",
]

PATTERN = "points-*.yml"
MODES = (
    *("NORMAL", "TAKE", "CLOSED", "KERNEL", "LEAVE"),
    *("CUT", "CLOSE", "RESTORE", "YIELD"),
)
"""States of `nearstep_hw.axdimm.arbiter.ModeArbiter`, which a test compares."""
OF_BANK = tuple(Command)[Command.ACT : Command.PREA]
BANKS = ("closed", "open in the host's row", "open in another row")
RANKS = ("closed", "open")
OWNERS = ("acceleration", "normal")
"""Bits of the arbiter's status that are no flags."""
DAMAGES = tuple(kind for kind in KINDS if kind not in ("dead", "stall"))
SEEN = ("bad_frames", "gaps", "duplicates")
NO_RESPONSES = "a DDR4 channel has no error responses"


class UnknownBinError(NearstepError, ValueError):
    """The RTL showed what the cover point does not list."""

    def __init__(self, point: str, name: str) -> None:
        self.point = point
        self.name = name
        super().__init__(f"cover point {point} has no bin {name!r}")


class ImpossibleHitError(NearstepError, ValueError):
    """Bins were hit that have a reason why they cannot be; has them as point and bin."""

    def __init__(self, found: Sequence[tuple[str, str]]) -> None:
        self.found = list(found)
        said = "; ".join(f"{point}: {name}" for point, name in found)
        super().__init__(f"bins with a reason why they cannot be hit were hit: {said}")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A cover point.

    Attributes
    ----------
    what : where and when the RTL is sampled.
    bins : all, in order.
    impossible : bins that cannot be hit, each with the reason.
    """

    what: str
    bins: Sequence[str]
    impossible: Mapping[str, str] = field(default_factory=dict)


@cache
def points() -> Mapping[str, Point]:
    """All cover points by name."""
    commands = list(Command)[Command.ACT :]
    causes = [each.name for each in ErrorCause]
    jobs = [each.name for each in coarse.ErrorCause]
    status = arbiter_map(AddressMapping(), read_latency=0, write_latency=0)["status"]
    return {
        "axdimm.command_mode": Point(
            what="host command that reaches the arbiter of its rank, by the arbiter's state",
            bins=[f"{command.name} in {mode}" for command in commands for mode in MODES],
        ),
        "axdimm.command_bank": Point(
            what="host command in KERNEL or LEAVE, when the controller owns the channel, by the "
            "state of the bank that it names, or of all banks",
            bins=[
                f"{command.name}, {bank}"
                for command in commands
                for bank in (BANKS if command in OF_BANK else RANKS)
            ],
        ),
        "axdimm.arbiter": Point(
            what="flag of the arbiter's status register, as the host reads it",
            bins=[each.name for each in status.fields if each.name not in OWNERS],
        ),
        "axdimm.kernel": Point(what="error.cause of a kernel with an AXI memory", bins=causes),
        "axdimm.module": Point(
            what="error.cause of a kernel of a module with DDR4",
            bins=causes,
            impossible={name: NO_RESPONSES for name in causes if name.endswith("_RESPONSE")},
        ),
        "smartssd.kernel": Point(what="error.cause of the kernel of a card", bins=causes),
        "coarse.sync": Point(what="error.cause of a sync core", bins=jobs),
        "coarse.pool": Point(what="error.cause of the shared block of a device", bins=jobs),
        "coarse.kernel": Point(
            what="error.cause of the kernel of a memory device",
            bins=causes,
            impossible=dict.fromkeys(
                ("PAIR_RANGE", "PAIR_ORDER"), "a kernel of a memory device takes no pairs"
            ),
        ),
        "rules.format": _formats(),
        "coarse.fault_frame": Point(
            what="fault of a link, by the kind of frame that the link damaged",
            bins=[f"{kind} of {frame}" for kind in KINDS for frame in FRAMES],
            impossible={
                f"{kind} of any": "this fault is of a frame, whose kind is known"
                for kind in DAMAGES
            },
        ),
        "coarse.receiver": Point(
            what="counter of a receiver that moved on links with one kind of fault, by the fault",
            bins=[f"{kind}: {seen}" for kind in DAMAGES for seen in SEEN],
            impossible={
                "duplicate: gaps": "no entry is missing",
                **dict.fromkeys(
                    ("drop: duplicates", "corrupt: duplicates"),
                    "an entry is sent again only if its transmission is known to be lost",
                ),
                **{
                    f"{kind}: bad_frames": "a frame arrives whole, or not at all"
                    for kind in DAMAGES
                    if kind != "corrupt"
                },
            },
        ),
    }


def _formats() -> Point:
    bins, impossible = [], {}
    for rule in BY_RULE:
        signed = RuleSet((rule,), "default", state_format="dynamic8").rules[0]
        for state in signed.states:
            for form in StateFormat:
                name = f"{state} of {rule} in {form.name}"
                bins.append(name)
                wide = form.name.lower() in PARAMETER_FORMATS
                if not wide and state == "p":
                    impossible[name] = "parameters have no format of 8 bits"
                elif not wide and signed.formats[state] != form.name.lower():
                    negative = form is StateFormat.DYNAMIC8U
                    impossible[name] = f"the state is {'signed' if negative else 'never negative'}"
    return Point(
        what="state of a rule in memory, by its format, when a kernel with its functional units in "
        "RTL shows that it has updated elements and is done",
        bins=bins,
        impossible=impossible,
    )


def folder_of_points() -> str:
    """Return the folder for hits; empty: nothing is counted."""
    return os.environ.get(POINTS) or os.environ.get(COVERAGE) or ""


_seen: set[tuple[str, str]] = set()


def hit(point: str, name: str) -> None:
    """Count a bin.

    Raises
    ------
    UnknownBinError
    """
    folder = folder_of_points()
    if not folder or (point, name) in _seen:
        return
    if name not in points()[point].bins:
        raise UnknownBinError(point, name)
    _samplers(folder)[point](name)
    _seen.add((point, name))


def saw_faults(made: Iterable[tuple[str, str]]) -> None:
    """Count faults that links made, each with the kind of the frame."""
    for kind, frame in made:
        hit("coarse.fault_frame", f"{kind} of {frame}")


@cache
def _samplers(folder: str) -> Mapping[str, Callable[[str], None]]:
    """A function for each cover point; what they count is written when the process ends."""
    from cocotb_coverage.coverage import CoverPoint, coverage_db

    def sampler(name: str, point: Point) -> Callable[[str], None]:
        @CoverPoint(name, xf=lambda value: value, bins=list(point.bins))
        def sample(value: str) -> None:
            """Called for its decorator."""

        return sample

    def write() -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = PATTERN.replace("*", f"{os.getpid()}-{time.monotonic_ns()}")
        coverage_db.export_to_yaml(str(Path(folder) / name))

    made = {name: sampler(name, point) for name, point in points().items()}
    atexit.register(write)
    return made


def merged_hits(folder: Path) -> Mapping[str, Mapping[str, int]]:
    """Hits of each bin of each point, in all processes; empty if no process had one.

    Raises
    ------
    UnknownBinError : a file is of other cover points.
    ImpossibleHitError
    """
    import yaml
    from cocotb_coverage.coverage import merge_coverage

    files = sorted(map(str, folder.glob(PATTERN)))
    if not files:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "merged.yml"
        try:
            merge_coverage(lambda _: None, str(whole), *files)
        except KeyError as error:
            raise UnknownBinError(f"of a file in {folder}", str(error.args[0])) from None
        found = yaml.safe_load(whole.read_text(encoding="utf-8"))
    hits = {name: each["bins:_hits"] for name, each in found.items() if "bins:_hits" in each}
    for name in {*hits, *points()}:
        known, counted = points().get(name), hits.get(name, {})
        for other in {*counted}.symmetric_difference(known.bins if known else ()):
            raise UnknownBinError(name, other)
    wrong = [
        (name, each)
        for name, point in points().items()
        for each in point.impossible
        if hits[name][each]
    ]
    if wrong:
        raise ImpossibleHitError(wrong)
    return {name: {each: hits[name][each] for each in points()[name].bins} for name in points()}
