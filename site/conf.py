"""The site of `make site`: pages of `docs`, and a reference that is generated from the sources.

Nothing of a page is executed here; `tests/system/test_docs.py` executes blocks of the pages.
"""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import mermaidx
import typer
from docutils import nodes
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

AUTOMODULE = "## {0}\n\n```{{eval-rst}}\n.. automodule:: {0}\n```\n"
REDIRECT = '<!doctype html><meta http-equiv="refresh" content="0; url={0}"><a href="{0}">{1}</a>\n'
PICTURE = """<div style="background: white; overflow-x: auto">
<div style="min-width: 80rem">{}</div></div>"""
INLINE = re.compile(r"`([^`]+)`|(\*\w[^*\n]*\*)|([\\*|_])")


class Mermaid(SphinxDirective):
    """A picture of Mermaid's text, drawn here: a browser needs no network for it."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        picture = mermaidx.render("\n".join(self.content)).svg()
        return [nodes.raw("", PICTURE.format(picture), format="html")]


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
    app.add_lexer("log", TextLexer)  # transcripts in `docs/linux.md`
    app.connect("source-read", generate)
    app.connect("autodoc-process-docstring", to_rst)
    app.connect("build-finished", finish)
