"""Covered and all points of a design, block by block; holes with their places in the sources."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from nearstep_sim.coverage.design import Module, modules_of
from nearstep_sim.coverage.records import Point
from nearstep_sim.verilate.build import marked
from nearstep_spec.errors import NearstepError

__all__ = [
    "KINDS",
    "REASONS",
    "Block",
    "Count",
    "Design",
    "Exclusion",
    "Hole",
    "StaleReasonError",
    "design_of",
    "designs_of",
]

KINDS = ("line", "branch", "toggle", "state", "transition")
REASONS = Path(__file__).with_name("reasons.toml")
"""Points that no test can reach, with the reason."""

INITIAL = "an initial value, which is always given"
CONSTANT = "a constant bit"
SECOND_NAME = "a second name of a bit that is counted"
UNNAMED = "a result of an operator, without a name in the sources"
TOO_WIDE = "a memory, or a signal of more than 256 bits"
EMPTY = "an arm without a statement, there for the order of the others"
OF_A_LINE = re.compile(r"^  (?:reg|initial) ")
BIT = re.compile(r"(.+?)(?:\[(\d+)\])?:([01]->[01])")


@dataclass
class Count:
    """Points that were covered, and all of them."""

    covered: int = 0
    total: int = 0

    def add(self, covered: bool) -> None:
        self.covered += covered
        self.total += 1

    def __add__(self, other: "Count") -> "Count":
        return Count(self.covered + other.covered, self.total + other.total)

    def __str__(self) -> str:
        share = f" ({100 * self.covered / self.total:.1f} %)" if self.total else ""
        return f"{self.covered}/{self.total}{share}" if self.total else "none"


@dataclass(frozen=True)
class Hole:
    """A point that was not covered.

    Attributes
    ----------
    kind : of `KINDS`.
    module : as in `Point`.
    place : file and line in the Python sources; of a toggle where its signal is made.
    what : condition, state, or signal with its missing edges.
    """

    kind: str
    module: str
    place: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A reason for which points are not counted.

    Attributes
    ----------
    tops : shipped tops, each of which has such a hole.
    kinds : of `KINDS`.
    block, what : regular expressions for `place` and `what` of a hole, whole. A toggle is one edge:
        `full: [3]0->1`.
    reason
    """

    tops: Sequence[str]
    kinds: Sequence[str]
    block: str
    what: str
    reason: str

    def fits(self, hole: Hole) -> bool:
        return (
            hole.kind in self.kinds
            and re.fullmatch(self.block, hole.place) is not None
            and re.fullmatch(self.what, hole.what) is not None
        )


class StaleReasonError(NearstepError, ValueError):
    """Reasons fit no hole of a top that was counted."""

    def __init__(self, stale: Sequence[tuple[str, Exclusion]]) -> None:
        self.stale = list(stale)
        said = "; ".join(f"{top}: {each.block} {each.what}" for top, each in stale)
        super().__init__(f"every reason must fit a hole that is left, and these fit none: {said}")


def exclusions(path: Path = REASONS) -> list[Exclusion]:
    """Exclusions of a file.

    Raises
    ------
    TypeError : a key is unknown, or one is missing.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Exclusion(**each) for each in table.get("exclusion", ())]


@dataclass
class Block:
    """All instances of a block: modules whose `elaborate` is in one file."""

    modules: set[str] = field(default_factory=set)
    counts: dict[str, Count] = field(default_factory=lambda: {kind: Count() for kind in KINDS})
    holes: list[Hole] = field(default_factory=list)


@dataclass
class Design:
    """Coverage of a top.

    Attributes
    ----------
    top : its module.
    sha : start of the SHA-256 of its Verilog, which has the places in the sources as attributes.
    blocks : by file of the Python sources.
    excluded : reason to the number of points by kind.
    """

    top: str
    sha: str
    blocks: dict[str, Block] = field(default_factory=dict)
    excluded: dict[str, Counter[str]] = field(default_factory=dict)

    def total(self, kind: str) -> Count:
        return sum((each.counts[kind] for each in self.blocks.values()), Count())

    def exclude(self, reason: str, kind: str, points: int = 1) -> None:
        self.excluded.setdefault(reason, Counter())[kind] += points


def _condition(module: Module, point: Point) -> tuple[str, str]:
    """Place and words of a branch."""
    row = module.line(point.line).strip()
    raw = module.text[point.line - module.first]
    if point.comment == "case":
        selected = module.selected(point.line)
        return module.place(selected), f"{module.words(selected).strip()} is {row.rstrip(':')}"
    if point.comment.startswith("cond_"):
        taken = "?" if point.comment == "cond_then" else ":"
        text = raw.partition(" = ")[2] or raw
        return module.place(text), f"{taken} of {module.words(row.removeprefix('assign '))}"
    condition = re.search(r"if \((.*)\) begin", row)
    text = condition[1] if condition else row
    words = module.words(text).strip()
    return module.place(text), f"not {words}" if point.comment == "else" else words


class _Counting:
    """Counts of one design."""

    def __init__(self, design: Design, excluded: Sequence[Exclusion]) -> None:
        self._design = design
        self._excluded = [each for each in excluded if design.top in each.tops]
        self._used: list[Exclusion] = []

    def add(self, block: Block, hole: Hole, covered: bool) -> None:
        """Count a point; `hole` is what it is if it is not covered."""
        if not covered:
            if self._reasoned(hole):
                return
            block.holes.append(hole)
        block.counts[hole.kind].add(covered)

    def _reasoned(self, hole: Hole) -> bool:
        """Whether a hole has a reason."""
        fit = [each for each in self._excluded if each.fits(hole)]
        self._used += [each for each in fit if each not in self._used]
        if fit:
            self._design.exclude(fit[0].reason, hole.kind)
        return bool(fit)

    def check(self) -> None:
        """Every reason was used, or StaleReasonError."""
        if stale := [each for each in self._excluded if each not in self._used]:
            raise StaleReasonError([(self._design.top, each) for each in stale])

    def lines_and_branches(
        self, block: Block, module: Module, counts: Mapping[Point, int]
    ) -> set[int]:
        """Count lines and arms; return the lines that ran."""
        run, lines = set[int](), dict[int, Point]()
        for point, count in sorted(counts.items(), key=lambda each: each[0].line):
            if OF_A_LINE.match(module.line(point.line)):
                self._design.exclude(INITIAL, "line", len(point.lines))
                continue
            if point.comment == "case" and "/* empty */" in module.line(point.line + 1):
                self._design.exclude(EMPTY, "branch")
                run.update(point.lines if count else ())
                continue
            lines.update(dict.fromkeys(point.lines, point))
            # Verilator books the line of a condition on its first arm only.
            run.update((*point.lines, point.line) if count else ())
            if point.comment != "block":
                place, words = _condition(module, point)
                self.add(block, Hole("branch", module.name, place, words), count > 0)
        for line, point in sorted(lines.items()):
            place = _condition(module, point)[0]
            hole = Hole("line", module.name, place, module.words(module.line(line)).strip())
            self.add(block, hole, line in run)
        return run

    def toggles(self, block: Block, module: Module, counts: Mapping[Point, int]) -> None:
        missing: dict[str, list[str]] = {}
        for point, count in counts.items():
            match = BIT.fullmatch(point.comment)
            assert match is not None, point
            bit = (match[1], int(match[2] or 0))
            if bit in module.constants:
                self._design.exclude(CONSTANT, "toggle")
            elif bit in module.second_names:
                self._design.exclude(SECOND_NAME, "toggle")
            elif count:
                block.counts["toggle"].add(True)
            else:
                which = f"[{match[2]}]" if match[2] else ""
                missing.setdefault(match[1], []).append(f"{which}{match[3]}")
        for name, edges in missing.items():
            place = module.sources.get(name, "")
            place = place if place.startswith("nearstep_") else module.source
            left = [
                edge
                for edge in edges
                if not self._reasoned(Hole("toggle", module.name, place, f"{name}: {edge}"))
            ]
            if left:
                text = f"{name}: {' '.join(left)}"
                block.holes.append(Hole("toggle", module.name, place, text))
                block.counts["toggle"] += Count(0, len(left))
        for reason, bits in ((UNNAMED, module.unnamed), (TOO_WIDE, module.too_wide)):
            if bits:
                self._design.exclude(reason, "toggle", 2 * bits)

    def machines(self, block: Block, module: Module, run: set[int]) -> None:
        for (register, value), lines in module.states.items():
            hole = Hole("state", module.name, module.source, f"{register} is {value}")
            self.add(block, hole, not run.isdisjoint(lines))
        for each in module.transitions:
            what = f"{each.register} from {each.before} to {each.after}"
            place = module.place(_above(module, each.line)) if each.line not in run else ""
            self.add(block, Hole("transition", module.name, place, what), each.line in run)


def _above(module: Module, number: int) -> str:
    """The condition that encloses a line."""
    row = module.line(number)
    indent = len(row) - len(row.lstrip())
    for above in range(number - 1, module.first, -1):
        row = module.line(above)
        if len(row) - len(row.lstrip()) < indent:
            return row.strip()
    return ""


def design_of(
    verilog: str,
    counts: Mapping[Point, int],
    excluded: Sequence[Exclusion] = (),
    *,
    top: str = "",
    sha: str = "",
) -> Design:
    """Coverage of a file of Verilog.

    Parameters
    ----------
    verilog : its text.
    counts : of its points, of any processes.
    excluded : holes that have a reason.
    top, sha : name and start of the SHA-256, if they are not those of the file.

    Raises
    ------
    StaleReasonError : a reason for this top fits none of its holes.
    """
    modules = modules_of(verilog)
    design = Design(top or next(iter(modules)), sha or next(iter(counts)).sha)
    counting = _Counting(design, excluded)
    for name, points in _by_module(counts).items():
        module = modules[name]
        block = design.blocks.setdefault(module.source.partition(":")[0] or "?", Block())
        block.modules.add(name)
        toggles = {p: count for p, count in points.items() if p.kind == "toggle"}
        others = {p: count for p, count in points.items() if p.kind != "toggle"}
        run = counting.lines_and_branches(block, module, others)
        counting.toggles(block, module, toggles)
        counting.machines(block, module, run)
    counting.check()
    return design


def _by_module(counts: Mapping[Point, int]) -> Mapping[str, dict[Point, int]]:
    found: dict[str, dict[Point, int]] = {}
    for point, count in counts.items():
        found.setdefault(point.module, {})[point] = count
    return found


def designs_of(
    counted: Mapping[Path, Mapping[Point, int]],
    excluded: Sequence[Exclusion] = (),
    shipped: Mapping[str, str] | None = None,
) -> Iterator[Design]:
    """Coverage of each file of Verilog, and of each shipped top that was counted.

    Parameters
    ----------
    counted : counts by file.
    excluded : holes that have a reason.
    shipped : names of tops to their Verilog. Files that begin with it, whatever follows around it,
        are counted together, and their other modules are not.

    Raises
    ------
    StaleReasonError
    """
    texts = {path: path.read_text(encoding="utf-8") for path in counted}
    taken = set[Path]()
    for top, verilog in (shipped or {}).items():
        text = marked(verilog)
        files = [path for path in counted if texts[path].startswith(text)]
        if files:
            taken.update(files)
            known, sha = modules_of(text), sha256(verilog.encode()).hexdigest()[:24]
            counts = Counter[Point]()
            for path in files:
                for point, count in counted[path].items():
                    if point.module in known:
                        counts[replace(point, verilog=files[0])] += count
            yield design_of(text, counts, excluded, top=top, sha=sha)
    for path, single in counted.items():
        if path not in taken:
            top = next(iter(modules_of(texts[path])))
            other = f"{top}, as it is not shipped" if top in (shipped or {}) else top
            yield design_of(texts[path], single, excluded, top=other)


def all_reasons(designs: Iterable[Design]) -> Mapping[str, Counter[str]]:
    """Reasons of exclusions to the number of points by kind."""
    found: dict[str, Counter[str]] = {}
    for design in designs:
        for reason, points in design.excluded.items():
            found.setdefault(reason, Counter()).update(points)
    return found
