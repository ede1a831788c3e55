"""Writes `docs/benchmarks.md` and its plots from the JSON under `build/bench`."""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import harness
from harness import FOLDER, ROOT, Results, markdown, read, script

DOCS = ROOT / "docs"
FIGURES = Path(__file__).with_name("figures.md")
"""The table that the page begins with, whose numbers a test compares with the sections."""

ELSEWHERE = ("bench_host", "coarse_exact_area", "coarse_timeline", "link", "timing")
"""Sections that are not on this page."""

SECTIONS = [name for name in harness.SECTIONS if name not in ELSEWHERE]
HEAD = """\
# Benchmarks

Made by `make bench`. *Paper* is a printed figure: of the AXDIMM paper, or of the one
that is named. *Measured* was counted in RTL cycles or after synthesis, or timed on the
machine named below each section. *Modelled* follows from measured figures and from what
is said there. Cycles and area are the same everywhere; speeds of simulation are not: one
commit has given rates 2 times apart on machines of the same name. `make bench-check`
compares ratios with those of `bench/ratios.json`, and names what fell.
"""

MARK = "<!-- {} -->"  # begins a section of the page
SEAL = "<!-- {} is as it was written: {} -->"
"""Ends a section of the page: its name, and a digest of its text. A test finds a figure that was
changed by hand."""


def seal(name: str, lines: Sequence[str]) -> str:
    """Make the last line of a section."""
    digest = hashlib.sha256("\n".join(lines).rstrip().encode()).hexdigest()
    return SEAL.format(name, digest[:16])


def made_by(results: Results) -> list[str]:
    """The command and the machine, below each section."""
    machine, versions = results["machine"], results["versions"]
    made_with = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return [
        f"Command: `{results['command']}` at {results['commit']}, {results['date'][:10]}, on "
        f"{machine['cores']} cores of {machine['cpu']}, load average "
        f"{machine['load_average']:.1f} at the start; {made_with}.",
        ""]  # fmt: skip


def kept(page: str) -> dict[str, list[str]]:
    """Sections of the page as it is: those without new results stay."""
    sections: dict[str, list[str]] = {}
    marks = {MARK.format(name): name for name in SECTIONS}
    lines: list[str] = []
    for line in page.splitlines():
        if line in marks:
            lines = sections.setdefault(marks[line], [])
        else:
            lines.append(line)
    return {name: [*"\n".join(text).rstrip().splitlines(), ""] for name, text in sections.items()}


def render(path: Path) -> list[str]:
    """Lines of a section, with its seal."""
    results = read(path)
    section = [*markdown(path.stem, results), *made_by(results)]
    return [*section, seal(path.stem, section), ""]


@script
def main() -> None:
    """Write `docs/benchmarks.md` and its plots from the JSON under `build/bench`."""
    page = DOCS / "benchmarks.md"
    sections = kept(page.read_text(encoding="utf-8") if page.exists() else "")
    lines = [*HEAD.splitlines(), "", *FIGURES.read_text(encoding="utf-8").splitlines(), ""]
    found = False
    for name in SECTIONS:
        path = FOLDER / f"{name}.json"
        if path.exists():
            sections[name] = render(path)
            found = True
        for plot in sorted(FOLDER.glob(f"{name}*.png")):
            shutil.copy(plot, DOCS / plot.name)
        if name in sections:
            lines += [MARK.format(name), *sections[name]]
    if not found:
        raise SystemExit(f"no results in {FOLDER}; run `make bench`")
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"written: {page}")
