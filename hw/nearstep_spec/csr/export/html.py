"""Register maps as pages for a browser, made from their SystemRDL by PeakRDL-html."""

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nearstep_spec.errors import NearstepError

__all__ = ["HtmlError", "check_html", "write_html"]

PACKAGES = {"peakrdl_html": "peakrdl-html", "systemrdl": "systemrdl-compiler"}


class HtmlError(NearstepError, RuntimeError):
    """A package that makes the pages is missing; nothing was written."""

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(
            f"pages of registers need the package {package}, which is not installed: "
            "pip install 'nearstep[rtl]'"
        )


def check_html() -> None:
    """Do nothing if `write_html` can run.

    Raises
    ------
    HtmlError
    """
    for module, package in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise HtmlError(package)


def write_html(texts: Sequence[str], folder: Path, title: str) -> None:
    """Write pages of all `texts`, the last `addrmap` of each, into `folder`.

    A browser needs a server for them, `python3 -m http.server -d FOLDER`: the pages fetch their
    contents, which browsers refuse from `file:`. The same texts give the same bytes.

    Parameters
    ----------
    texts : SystemRDL, each complete in itself.
    folder : made if need be.
    title : of the pages.

    Raises
    ------
    HtmlError
    """
    check_html()
    from peakrdl_html import HTMLExporter
    from systemrdl.compiler import RDLCompiler

    tops = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, text in enumerate(texts):
            path = Path(temporary, f"{number}.rdl")
            path.write_text(text, encoding="utf-8")
            compiler = RDLCompiler()
            compiler.compile_file(str(path))
            tops.append(compiler.elaborate().top)
        # By default links contain the time of the run, and each page a link to its source.
        exporter = HTMLExporter(user_context={"build_ts": 0}, generate_source_links=False)
        exporter.export(tops, str(folder), title=title)
