"""The site of `make site`: pages of `docs`, and a reference that is generated from the sources.

Nothing of a page is executed here; `tests/system/test_docs.py` executes blocks of the pages.
"""

import base64
import importlib.metadata
import io
import re
from pathlib import Path
from typing import Any, ClassVar

import mermaidx
import typer
from docutils import nodes
from docutils.parsers.rst.directives import flag, unchanged_required
from matplotlib import rc_context
from matplotlib.figure import Figure
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.cli import get_docs_for_click

from nearstep import cli

project = html_title = "nearstep"
release = importlib.metadata.version("nearstep")
copyright = "The nearstep developers"
extensions = ["myst_parser", "sphinx.ext.autodoc"]

# The source folder is the checkout, so that links between pages are those of the checkout.
root_doc = "site/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/*.md", "site/*.md"]
exclude_patterns = [".*", "bench", "build", "dist", "examples", "host", "hw", "sim", "tests"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
html_theme = "furo"
html_copy_source = False
# Types in signatures are links where one place has the name; all links of pages are checked.
nitpick_ignore_regex = [("py:.*", ".*")]
suppress_warnings = ["ref.python"]

autodoc_default_options = {"members": True, "member-order": "bysource", "no-value": True}
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

TABLES = Path(__file__).parents[1] / "docs" / "benchmarks.md"
AUTOMODULE = "## {0}\n\n```{{eval-rst}}\n.. automodule:: {0}\n```\n"
REDIRECT = '<!doctype html><meta http-equiv="refresh" content="0; url={0}"><a href="{0}">{1}</a>\n'
PICTURE = """<div style="background: white; overflow-x: auto">
<div style="min-width: 80rem">{}</div></div>"""
PLOT = '<img alt="{}" src="data:image/svg+xml;base64,{}" style="width: 34rem; background: white">'
INLINE = re.compile(r"`([^`]+)`|(\*\w[^*\n]*\*)|([\\*|_])")


class Mermaid(SphinxDirective):
    """A picture of Mermaid's text, drawn here: a browser needs no network for it."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        picture = mermaidx.render("\n".join(self.content)).svg()
        return [nodes.raw("", PICTURE.format(picture), format="html")]


def columns(text: str) -> list[str]:
    """Names of columns, from an option."""
    return text.split(" | ")


class Plot(SphinxDirective):
    """Columns `y` of a table of `docs/benchmarks.md`: bars with labels, or lines over column `x`.

    The argument is the heading above the table; `label` has the columns that tell bars, or lines,
    apart. `log` is a scale of lines, `at` a value that is marked.
    """

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar = {
        **dict.fromkeys(("label", "y"), columns),
        **dict.fromkeys(("x", "alt"), unchanged_required),
        "at": float,
        "log": flag,
    }

    def run(self) -> list[nodes.Node]:
        rows, out = self.rows(), io.StringIO()
        with rc_context({"font.size": 8, "svg.hashsalt": "nearstep"}):
            figure = Figure((4, 3), layout="constrained")
            (self.lines if "x" in self.options else self.bars)(figure, rows)
            figure.savefig(out, format="svg", metadata={"Date": None})
        encoded = base64.b64encode(out.getvalue().encode()).decode()
        return [nodes.raw("", PLOT.format(self.options["alt"], encoded), format="html")]

    def rows(self) -> list[dict[str, str]]:
        """Rows of the first table below the heading that has all columns."""
        self.env.note_dependency(TABLES)
        page = TABLES.read_text(encoding="utf-8")
        section = re.split(rf"^#+ {re.escape(self.arguments[0])}$", page, flags=re.MULTILINE)[-1]
        wanted = {*self.options.get("label", ()), *self.options["y"], self.options.get("x", "")}
        for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
            header, _, *rows = ([*map(str.strip, x.split("|")[1:-1])] for x in table.splitlines())
            if wanted - {""} <= {*header}:
                return [dict(zip(header, row, strict=True)) for row in rows]
        raise self.error(f"{TABLES} has no table with {wanted} below {self.arguments[0]!r}")

    def label(self, row: dict[str, str]) -> str:
        cells = [(name, row[name]) for name in self.options.get("label", ())]
        told = [f"{name} {cell}" if cell[:1].isdigit() else cell for name, cell in cells]
        return re.sub("[`*]", "", ", ".join(told))

    def bars(self, figure: Figure, rows: list[dict[str, str]]) -> None:
        axes, names = figure.subplots(), self.options["y"]
        rows = [row for row in rows if any(row[name] for name in names)]
        figure.set_figheight(0.6 + len(rows) * (0.2 + 0.14 * len(names)))
        step = len(names) + 1.4
        for number, name in enumerate(names):
            places = [step * row + number for row in range(len(rows))]
            values = [value(row[name])[0] for row in rows]
            bars = axes.barh(places, values, 0.9, label=name)
            axes.bar_label(bars, [row[name] for row in rows], padding=2, fontsize=7)
        for place, row in enumerate(rows):
            axes.text(0, step * place - 0.65, self.label(row), va="bottom")
        axes.set_yticks([])
        axes.set_ylim(step * len(rows) - 0.9, -1.5)
        axes.margins(x=0.2)
        axes.spines[["right", "top"]].set_visible(False)
        if len(names) == 1:
            axes.set_xlabel(names[0])
        else:
            figure.legend(loc="outside lower center", ncols=len(names))

    def lines(self, figure: Figure, rows: list[dict[str, str]]) -> None:
        axes, x, names = figure.subplots(), self.options["x"], self.options["y"]
        series = {self.label(row): None for row in rows}
        for label in series:
            of = [row for row in rows if self.label(row) == label]
            for name in names:
                told = [name] * (len(names) > 1) + [label] * bool(label)
                points = [(value(row[x])[0], value(row[name])[0]) for row in of]
                axes.plot(*zip(*points, strict=True), marker=".", label=", ".join(told))
        ticks = {value(row[x]) for row in rows}
        axes.set_xscale("log", base=2)
        axes.set_xticks([number for number, _ in ticks], [f"{number:g}" for number, _ in ticks])
        axes.minorticks_off()
        axes.set_xlabel(", ".join([x, *({unit for _, unit in ticks} - {""})]))
        axes.grid(alpha=0.3)
        if len(names) == 1:
            axes.set_ylabel(names[0])
        if len(axes.lines) > 1:
            figure.legend(loc="outside lower center")
            figure.set_figheight(2.6 + 0.17 * len(axes.lines))
        if "log" in self.options:
            axes.set_yscale("log")
        if "at" in self.options:
            axes.axhline(self.options["at"], color="black", linewidth=0.8)


def value(cell: str) -> tuple[float, str]:
    """Number of a cell, and its unit; not a number if it has none."""
    found = re.match(r"([\d.,]+)(.*)", cell)
    return (float(found[1].replace(",", "")), found[2].strip()) if found else (float("nan"), "")


def generate(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace a line `% automodule: NAME ...` by the modules' reference; list all commands."""
    source[0] = re.sub(
        r"^% automodule: (.*)$",
        lambda line: "\n".join(map(AUTOMODULE.format, line[1].split())),
        source[0],
        flags=re.MULTILINE,
    )
    if docname == "site/commands":
        command = typer.main.get_command(cli._app())
        context = typer.Context(command, info_name="nearstep")
        source[0] += get_docs_for_click(obj=command, ctx=context, indent=1, name="nearstep")


def inline(match: re.Match[str]) -> str:
    """Double the quotes of code, with escaped spaces beside other characters; escape the others."""
    code, emphasis, special = match.groups()
    if not code:
        return emphasis or rf"\{special}"
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return "\\ " * bool(before.strip()) + f"``{code}``" + "\\ " * bool(after.strip())


def entry(match: re.Match[str]) -> str:
    """An entry of a section: names, and what is said of them; the names alone; or a sentence."""
    names, text = match.groups()
    if text is None and names.endswith("."):
        return f"- {names}"
    return f"- `{names}`" + (f": {text}" if text else "")


def to_rst(_app: Sphinx, _what: str, _name: str, _of: Any, _options: Any, lines: list[str]) -> None:
    """Turn a docstring of the dialect of `tests/test_docstrings.py` into reStructuredText."""
    blocks: list[str] = []
    code = False
    for block in "\n".join(lines).split("\n\n"):
        if block.startswith("    "):
            if not code and not blocks[-1].endswith("::"):
                blocks.append("::")
            code = True
            blocks.append(block)
            continue
        code = False
        title, underline, entries = (*block.split("\n", 2), "", "")[:3]
        if re.fullmatch("-{3,}", underline):
            entries = re.sub(r",\n +", ", ", entries)  # names on several lines
            entries = re.sub(r"^(\S.*?)(?: : (.*))?$", entry, entries, flags=re.MULTILINE)
            blocks.append(f".. rubric:: {title}")
            block = entries.replace("\n    ", "\n  ")
        blocks.append(INLINE.sub(inline, block))
    lines[:] = "\n\n".join(blocks).splitlines()


def finish(app: Sphinx, exception: Exception | None) -> None:
    """Write the page that a browser is given first."""
    if exception is None:
        first = Path(app.outdir) / "index.html"
        first.write_text(REDIRECT.format(f"{root_doc}.html", project), encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.add_directive("mermaid", Mermaid)
    app.add_directive("plot", Plot)
    app.add_lexer("log", TextLexer)  # transcripts in `docs/linux.md`
    app.connect("source-read", generate)
    app.connect("autodoc-process-docstring", to_rst)
    app.connect("build-finished", finish)
