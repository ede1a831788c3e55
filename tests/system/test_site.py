"""The site that `make site` builds: every page is in it, and every link of it leads somewhere."""

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from nearstep.cli.registers import BLOCKS

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = {
    "How do I train?": "README.html#three-lines-of-pytorch",
    "What does the hardware cost?": "docs/benchmarks.html#area-of-whole-tops",
    "What happens when power fails?": "docs/storage.html#what-is-guaranteed",
    "How close is it to the paper?": "docs/paper-axdimm.html",
}


class Page(HTMLParser):
    """Links, sources and names of places of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id":
                self.places.add(value or "")
            elif name == "src" or (name == "href" and tag == "link"):
                self.loaded.append(value or "")
            elif name == "href":
                self.links.append(value or "")


page_of = cache(Page)


def wrong_links(site: Path) -> Iterator[tuple[str, str]]:
    """Links without a file or a place, and what a page would load from elsewhere."""
    for path in sorted(site.rglob("*.html")):
        page = page_of(path)
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme in ("data", "mailto") or (parts.scheme and link in page.links):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            found = not parts.scheme and not parts.netloc and target.is_file()
            if found and place and target.suffix == ".html":
                found = place in page_of(target).places
            if not found:
                yield str(path.relative_to(site)), link


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    links = ("b.html#here", "#top", "b.html#gone", "c.html", "d/", "https://example.org/")
    text = '<p id="top">' + "".join(f'<a href="{link}"></a>' for link in links)
    (tmp_path / "a.html").write_text(text + '<script src="https://example.org/x.js"></script>')
    (tmp_path / "b.html").write_text('<p id="here">')
    expected = ["b.html#gone", "c.html", "d/", "https://example.org/x.js"]
    assert [*wrong_links(tmp_path)] == [("a.html", link) for link in expected]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by the command of the Makefile into a folder of the test."""
    pytest.importorskip("sphinx", reason="`make site` installs Sphinx")
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text()
    (line,) = re.findall(r"^\t@\$\(BIN\)/(python -m sphinx .*)$", makefile, re.MULTILINE)
    line = line.replace("$(JOBS)", "2").replace("build/site", str(folder / "built"))
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, *line.split()[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(f"built in {time.monotonic() - start:.0f} s")
    return folder / "built"


@pytest.mark.deep
def test_every_page_is_there_and_every_link_leads_somewhere(site: Path) -> None:
    sources = [*ROOT.glob("docs/*.md"), *ROOT.glob("site/*.md"), ROOT / "README.md"]
    for source in sources:
        assert (site / source.relative_to(ROOT)).with_suffix(".html").exists(), source
    pages = [page_of(path) for path in site.rglob("*.html")]
    links = sum(len(page.links) for page in pages)
    print(f"{len(pages)} pages, {links} links")
    assert [*wrong_links(site)] == []
    assert len(pages) > len(sources) >= 38
    assert links > 5000
    assert not re.search(r"https?:", (site / "index.html").read_text())
    drawn = (site / "site" / "plots.html").read_text()
    words = re.findall(r'<img alt="([^"]{40,})" src="data:image/svg', drawn)
    assert len(words) == (ROOT / "site" / "plots.md").read_text().count("```{plot}") >= 6


@pytest.mark.deep
def test_the_four_questions_are_answered_from_the_first_page(site: Path) -> None:
    first = page_of(site / "site" / "index.html")
    text = (site / "site" / "index.html").read_text()
    for question, answer in QUESTIONS.items():
        assert question in text
        assert f"../{answer}" in first.links
    assert "../docs/verification.html" in first.links
    assert "sign-off" in page_of(site / "docs" / "verification.html").places
    assert "site/index.html" in page_of(site / "index.html").links


@pytest.mark.deep
def test_the_reference_has_what_the_pages_import_and_every_command(site: Path) -> None:
    places = {place for path in site.glob("site/api-*.html") for place in page_of(path).places}
    names = set()
    for path in ROOT.glob("docs/*.md"):
        for code in re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.M | re.S):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names |= {f"{node.module}.{each.name}" for each in node.names}
    wanted = {each for each in names if re.match(r"nearstep(_spec)?\.", each)}
    print(f"{len(wanted)} names")
    assert len(wanted) >= 30
    assert {each for each in wanted if not {each, f"module-{each}"} & places} == set()
    commands = page_of(site / "site" / "commands.html").places
    for name in ("", "-devices", "-card-serve", "-storage-check", "-rtl"):
        assert f"nearstep{name}" in commands
    for block in BLOCKS:
        assert (site / "docs" / f"registers-{block}.html").exists()
    assert "adamw" in (site / "searchindex.js").read_text()
