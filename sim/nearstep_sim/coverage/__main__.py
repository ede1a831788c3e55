"""`python -m nearstep_sim.coverage DIR`: the counts in a folder as a table, JSON and a page.

The page has shipped tops alone, or those of --top. Cover points are printed as well; with
--functional they alone are, and written to a page of their own.
"""

import argparse
import json
import os
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nearstep_hw import COVERAGE
from nearstep_hw.generate import GENERATORS, verilog
from nearstep_sim.bitstream.command import DESIGNS
from nearstep_sim.boards.library import CELLS, TOP, board_verilog
from nearstep_sim.coverage.points import merged_hits, points
from nearstep_sim.coverage.records import merged
from nearstep_sim.coverage.table import KINDS, Count, Design, all_reasons, designs_of, exclusions
from nearstep_sim.verilate.build import verilog_of
from nearstep_spec.codec import from_text, texts_of
from nearstep_spec.errors import NearstepError

SHIPPED = Path("tests/shipped/shipped.toml")
SHOWN = 12
"""Holes of a kind of a block on the page; the JSON has all."""

HEAD = """\
# Coverage of the RTL

What Verilator counted in the tests below, per block. Written by

```
{command}
```

from counts of

```
NEARSTEP_COVERAGE={folder} .venv/bin/python -m pytest {files}
```

The variable builds every Verilated model, in C++ harnesses and cocotb, with `--coverage-line
--coverage-toggle --coverage-user`, in a part of the cache of its own; each process adds a file of
counts to the folder. Without it nothing changes.

- *line*: statements in `always` blocks of the Verilog. *branch*: arms of `if`, `casez` and `?:`.
  Amaranth's `If`, `Switch`, `FSM` and `Mux` become these, once for each signal that they assign. A
  `casez` without a `default` has no point for what it leaves out.
- *toggle*: both edges of each bit of each signal that has a name.
- *state*, *transition*: arms of `casez` of a state machine's register, and the lines in them that
  give it its next state, from the same counts. A line counts once it was evaluated with its
  condition true, which can be before the inputs of a cycle have settled. Reset is no transition.

Blocks are files of the Python sources; all instances of a block are in its row, and each counts for
itself. Holes are shown with their place in the sources.
"""


FUNCTIONAL = """\
# Functional coverage

Cover points of the RTL: closed sets of events, and those that the tests below have seen. Written by

```
.venv/bin/python -m nearstep_sim.coverage {folder} --functional {page}
```

from counts of

```
NEARSTEP_POINTS={folder} .venv/bin/python -m pytest {files}
```

A bin is sampled from what Verilated hardware showed: commands on the pins of the host beside the
state register of the arbiter, registers that a device answered, frames that a link damaged. Golden
devices and what a test meant to send do not count. A bin that cannot be hit has a reason, and if it
is hit nevertheless, no page is written.
"""


def _shipped(path: Path) -> Mapping[str, str]:
    """Tops that are shipped, and the command that writes each."""
    if not path.is_file():
        return {}
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["top"]
    return {row["name"]: row["command"] for row in rows}


def _known(shipped: Mapping[str, str], counted: Iterable[Path]) -> Mapping[str, str]:
    """The Verilog of shipped tops that can be among the files that were counted, by name."""
    texts = [path.read_text(encoding="utf-8") for path in counted]
    found = {}
    for name, command in shipped.items():
        words = shlex.split(command)
        module = TOP if words[0] == "bitstream" else words[1]
        if any(f"\nmodule {module}(" in text for text in texts):
            found[name] = verilog_of_command(command)
    return {name: text for name, text in found.items() if text}


def verilog_of_command(command: str) -> str:
    """What a command writes, of a board what is simulated, with places in the sources; nothing if
    that is not known.
    """
    os.environ[COVERAGE] = os.environ.get(COVERAGE) or "build/coverage"
    words = shlex.split(command)
    make: Callable[[], str]
    match words:
        case ["rtl", name] if name in GENERATORS:
            make = partial(verilog, name)
        case ["bitstream", board, "--design", design, *options]:
            make = partial(_board, design, board, options)
        case ["bitstream", board, *options]:
            make = partial(_board, "updater", board, options)
        case _:
            return ""
    return verilog_of(f"shipped {command}", make, sources=[CELLS]).read_text(encoding="utf-8")


def _board(design: str, board: str, options: Sequence[str]) -> str:
    kind = DESIGNS[design]
    return board_verilog(from_text(kind, {"board": board, **texts_of(kind, options)}))


def _row(name: str, counts: Sequence[object]) -> str:
    return f"| {name} | {' | '.join(map(str, counts))} |"


def _tops(designs: Sequence[Design], shipped: Sequence[str]) -> Iterator[str]:
    yield "## Shipped tops"
    yield ""
    yield f"| top | {' | '.join(KINDS)} |"
    yield f"|---|{'---:|' * len(KINDS)}"
    measured = {each.top: each for each in designs}
    for name in shipped:
        design = measured.get(name)
        counts = map(design.total, KINDS) if design else ["not yet", *[""] * (len(KINDS) - 1)]
        yield _row(f"`{name}`", list(counts))
    yield ""


def _design(design: Design) -> Iterator[str]:
    yield f"## {design.top}"
    yield ""
    yield f"Verilog with SHA-256 `{design.sha}...`"
    yield ""
    yield f"| block | {' | '.join(KINDS)} |"
    yield f"|---|{'---:|' * len(KINDS)}"
    for name, block in sorted(design.blocks.items()):
        yield _row(f"`{name}`", [block.counts[kind] for kind in KINDS])
    yield _row("all", [design.total(kind) for kind in KINDS])
    yield ""
    for name, block in sorted(design.blocks.items()):
        holes = {kind: [h for h in block.holes if h.kind == kind] for kind in KINDS}
        if not block.holes:
            continue
        yield f"### Holes of {name} in {design.top}"
        yield ""
        for kind in KINDS[1:]:  # lines are those of branches
            for hole in holes[kind][:SHOWN]:
                what = hole.what.replace("`", "'")
                what = what if len(what) < 100 else f"{what[:97]}..."
                yield f"- {kind}, `{hole.place}`: `{what}`"
            if len(holes[kind]) > SHOWN:
                yield f"- {kind}: {len(holes[kind]) - SHOWN} more"
        yield ""


def page(
    designs: Sequence[Design], shipped: Sequence[str], tests: Sequence[str], folder: Path
) -> str:
    """The page, in Markdown."""
    files = sorted({each.partition("[")[0] for each in tests})
    command = f".venv/bin/python -m nearstep_sim.coverage {folder} --page docs/coverage.md"
    lines = [HEAD.format(command=command, folder=folder, files=" ".join(files) or "...")]
    lines += ["Tests that ran:", "", *(f"- `{each}`" for each in tests), ""]
    lines += _tops(designs, shipped)
    lines += ["## Not counted", "", "| reason | points |", "|---|---|"]
    for reason, counted in all_reasons(designs).items():
        said = ", ".join(f"{count} of {kind}" for kind, count in counted.items())
        lines.append(f"| {reason} | {said} |")
    lines.append("")
    for design in designs:
        lines += _design(design)
    return "\n".join(lines).rstrip() + "\n"


def as_json(
    designs: Sequence[Design], tests: Sequence[str], functional: Mapping[str, Mapping[str, Any]]
) -> str:
    """All counts, holes and reasons."""
    tops = [
        {
            "top": each.top,
            "sha256": each.sha,
            "blocks": {
                name: {
                    "modules": sorted(block.modules),
                    **{kind: asdict(count) for kind, count in block.counts.items()},
                    "holes": [asdict(hole) for hole in block.holes],
                }
                for name, block in sorted(each.blocks.items())
            },
            "excluded": each.excluded,
        }
        for each in designs
    ]
    bins = {name: {**each, "count": asdict(each["count"])} for name, each in functional.items()}
    return json.dumps({"tests": list(tests), "tops": tops, "functional": bins}, indent=1) + "\n"


def _functional(hits: Mapping[str, Mapping[str, int]]) -> Mapping[str, Mapping[str, Any]]:
    """Covered and all bins of each cover point, its holes, and bins that cannot be hit."""
    found = {}
    for name, point in points().items():
        possible = [each for each in point.bins if each not in point.impossible]
        holes = [each for each in possible if not hits[name][each]]
        count = Count(len(possible) - len(holes), len(possible))
        found[name] = {
            "what": point.what,
            "count": count,
            "holes": holes,
            "impossible": dict(point.impossible),
            "hits": hits[name],
        }
    return found


def functional_page(
    found: Mapping[str, Mapping[str, Any]], tests: Sequence[str], folder: Path, page: Path
) -> str:
    """The page of cover points, in Markdown."""
    files = " ".join(sorted({each.partition("[")[0] for each in tests})) or "..."
    lines = [FUNCTIONAL.format(folder=folder, page=page, files=files)]
    lines += ["| cover point | covered | sampled |", "|---|---:|---|"]
    lines += [_row(f"`{name}`", [each["count"], each["what"]]) for name, each in found.items()]
    lines += ["", "## Holes", ""]
    for name, each in found.items():
        if each["holes"]:
            lines.append(f"- `{name}`: {'; '.join(each['holes'])}.")
    lines += [
        "",
        "## Bins that cannot be hit",
        "",
        "| cover point | reason | bins |",
        "|---|---|---|",
    ]
    for name, each in found.items():
        for reason in dict.fromkeys(each["impossible"].values()):
            bins = [bin_ for bin_, why in each["impossible"].items() if why == reason]
            lines.append(_row(f"`{name}`", [reason, "; ".join(bins)]))
    lines += ["", "## Tests", "", *(f"- `{each}`" for each in tests)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its status."""
    parser = argparse.ArgumentParser("nearstep_sim.coverage", description=__doc__)
    parser.add_argument("folder", type=Path, help="$NEARSTEP_COVERAGE of the tests")
    parser.add_argument("--json", type=Path, default=Path("build/coverage.json"))
    parser.add_argument("--page", type=Path, help="a page in Markdown")
    parser.add_argument("--functional", type=Path, help="a page of cover points alone")
    parser.add_argument("--top", action="append", help="tops to show (default: all)")
    given = parser.parse_args(arguments)
    counts = [] if given.functional else sorted(given.folder.glob("*.dat"))
    try:
        hits = merged_hits(given.folder)
    except NearstepError as error:
        parser.error(str(error))
    if given.functional and not hits:
        parser.error(f"{given.folder} has no points-*.yml")
    if not counts and not hits:
        parser.error(
            f"{given.folder} has no *.dat: run tests with NEARSTEP_COVERAGE={given.folder}"
        )
    try:
        counted = merged(counts)
        known = _known(_shipped(SHIPPED), counted)
        designs = list(designs_of(counted, exclusions(), known))
    except NearstepError as error:
        parser.error(str(error))
    designs = sorted(designs, key=lambda each: (each.top, each.sha))
    shown = [each for each in designs if each.top in (given.top or known)]
    if given.top:
        designs = shown
    tests = sorted(
        {line for path in given.folder.glob("tests-*.txt") for line in path.read_text().split("\n")}
        - {""}
    )
    for design in designs:
        print(f"{design.top} {design.sha[:8]}")
        for name, block in sorted(design.blocks.items()):
            shares = "  ".join(f"{kind} {block.counts[kind]}" for kind in KINDS)
            print(f"  {name}: {shares}")
        print("  all: " + "  ".join(f"{kind} {design.total(kind)}" for kind in KINDS))
    functional = _functional(hits) if hits else {}
    for name, each in functional.items():
        print(f"{name}: {each['count']}, {len(each['impossible'])} cannot be hit")
        for hole in each["holes"]:
            print(f"  {hole}")
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(as_json(designs, tests, functional), encoding="utf-8")
    if given.functional:
        given.functional.write_text(
            functional_page(functional, tests, given.folder, given.functional), "utf-8"
        )
    if given.page:
        given.page.write_text(page(shown, list(_shipped(SHIPPED)), tests, given.folder), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
