"""`python -m nearstep_sim.coverage DIR`: the counts in a folder as a table, JSON and a page."""

import argparse
import hashlib
import json
import os
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from nearstep_hw import COVERAGE
from nearstep_hw.generate import GENERATORS, verilog
from nearstep_sim.coverage.records import merged
from nearstep_sim.coverage.table import KINDS, Design, all_reasons, designs_of, exclusions
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


def _shipped(path: Path) -> Mapping[str, str]:
    """Tops that are shipped, and the command that writes each."""
    if not path.is_file():
        return {}
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["top"]
    return {row["name"]: row["command"] for row in rows}


def _sha_of(command: str) -> str:
    """SHA-256 of the Verilog that `nearstep rtl` writes for a top with places in the sources."""
    os.environ.setdefault(COVERAGE, "build/coverage")
    text = verilog(shlex.split(command)[1])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _row(name: str, counts: Sequence[object]) -> str:
    return f"| {name} | {' | '.join(map(str, counts))} |"


def _tops(designs: Sequence[Design], shipped: Mapping[str, str]) -> Iterator[str]:
    yield "## Shipped tops"
    yield ""
    yield f"| top | {' | '.join(KINDS)} |"
    yield f"|---|{'---:|' * len(KINDS)}"
    measured = {each.top: each for each in designs}
    for name, command in shipped.items():
        design = measured.get(name)
        words = shlex.split(command)
        plain = len(words) == 2 and words[0] == "rtl" and words[1] in GENERATORS
        if design and plain and design.sha == _sha_of(command):
            yield _row(f"`{name}`", [design.total(kind) for kind in KINDS])
        else:
            yield _row(f"`{name}`", ["not yet", *[""] * (len(KINDS) - 1)])
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
    designs: Sequence[Design], shipped: Mapping[str, str], tests: Sequence[str], folder: Path
) -> str:
    """The page, in Markdown."""
    files = sorted({each.partition("::")[0] for each in tests})
    command = f".venv/bin/python -m nearstep_sim.coverage {folder} --page docs/coverage.md"
    lines = [HEAD.format(command=command, folder=folder, files=" ".join(files) or "...")]
    lines += ["Tests that ran:", "", *(f"- `{each}`" for each in tests), ""]
    lines += _tops(designs, shipped)
    lines += ["## Not counted", "", "| reason | points |", "|---|---|"]
    for reason, points in all_reasons(designs).items():
        said = ", ".join(f"{count} of {kind}" for kind, count in points.items())
        lines.append(f"| {reason} | {said} |")
    lines.append("")
    for design in designs:
        lines += _design(design)
    return "\n".join(lines).rstrip() + "\n"


def as_json(designs: Sequence[Design], tests: Sequence[str]) -> str:
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
    return json.dumps({"tests": list(tests), "tops": tops}, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its status."""
    parser = argparse.ArgumentParser("nearstep_sim.coverage", description=__doc__)
    parser.add_argument("folder", type=Path, help="$NEARSTEP_COVERAGE of the tests")
    parser.add_argument("--json", type=Path, default=Path("build/coverage.json"))
    parser.add_argument("--page", type=Path, help="a page in Markdown")
    parser.add_argument("--top", action="append", help="tops to show (default: all)")
    given = parser.parse_args(arguments)
    counts = sorted(given.folder.glob("*.dat"))
    if not counts:
        parser.error(
            f"{given.folder} has no *.dat: run tests with NEARSTEP_COVERAGE={given.folder}"
        )
    try:
        designs = list(designs_of(merged(counts), exclusions()))
    except NearstepError as error:
        parser.error(str(error))
    designs = sorted(designs, key=lambda each: (each.top, each.sha))
    if given.top:
        designs = [each for each in designs if each.top in given.top]
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
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(as_json(designs, tests), encoding="utf-8")
    if given.page:
        given.page.write_text(page(designs, _shipped(SHIPPED), tests, given.folder), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
