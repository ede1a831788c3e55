"""One dialect of docstrings, read from the sources.

A docstring is a summary, which ends with a full stop or a colon and is one sentence if it takes
several lines; paragraphs, of which those of `PARAGRAPHS` come last; the sections of `SECTIONS`,
each underlined to its length and with a blank line before it; and `Ref:`. An entry of a section is
`name, other : text.`, in lower case and its further lines indented, or the names alone where they
say it all. Code stands between single backquotes.
"""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = ("hw", "sim", "host", "examples", "bench", "tests")
PARAGRAPHS = ("Timing", "Numerics", "Resources")
SECTIONS = ("Parameters", "Members", "Attributes", "Returns", "Yields", "Raises")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Owner = ast.Module | ast.ClassDef | Function

STOP = re.compile(r"[.:?]\)?$")
NAME = r"\*{0,2}[\w<>]+(?:\.[\w<>]+)*"
ENTRY = re.compile(rf"(?P<names>{NAME}(?:,\s+{NAME})*)(?: : (?P<text>.+))?", re.DOTALL)
RETURNED = re.compile(r"(?P<names>[\w.,\[\] |]+) : (?P<text>.+)", re.DOTALL)
UNDERLINE = re.compile(r"([-=~^\"'+*#])\1{2,}")
TITLE = re.compile(
    r"(Args|Arguments|Params?|Keyword Arguments|Kwargs|Ports|Returns?|Yields?|Raises?|Throws"
    rf"|Exceptions|Notes?|Examples?|See Also|References|{'|'.join(SECTIONS)}):?"
)
FOREIGN = re.compile(
    r"``|:[a-z]+:`"  # reStructuredText, and roles of Sphinx
    r"|[:@](param|type|arg|raises?|returns?|rtype|yields?)\b[^`\n]*:"  # Sphinx, Epytext
)
PROSE = re.compile(r"(?:^|[.:;]\s)(Raises|Returns|Yields) ", re.MULTILINE)
THIRD_PERSON = re.compile(
    r"(Accepts|Adds|Allocates|Answers|Appends|Applies|Asks|Assumes|Begins|Builds|Calls|Checks|Chooses"
    r"|Clears|Closes|Collects|Compares|Compiles|Computes|Connects|Converts|Copies|Creates|Decides"
    r"|Decodes|Describes|Does|Draws|Encodes|Ends|Expands|Expects|Fetches|Fills|Finds|Follows|Forgets"
    r"|Gets|Gives|Goes|Has|Holds|Imports|Inserts|Keeps|Lets|Loads|Looks|Makes|Measures|Merges|Moves"
    r"|Multiplies|Narrows|Opens|Packs|Parses|Polls|Prints|Puts|Raises|Receives|Removes|Replaces"
    r"|Returns|Rounds|Says|Selects|Sends|Sets|Shifts|Shows|Stores|Submits|Subtracts|Takes|Tells|Tries"
    r"|Unpacks|Uses|Waits|Widens|Writes|Yields)\b"
)
CAPITAL = re.compile(
    r"(An?|The|All|Any|As|At|By|Each|For|From|How|If|In|It|Its|No|Not|Of|On|One|Or|There|These|They"
    r"|This|Those|To|What|When|Where|Whether|Which|Whose|With)\s"
)
BROAD = {"ArgumentError", "NearstepError"} | {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}
"""Errors whose names do not tell what is wrong."""
ERROR_NAME = re.compile(r"_?[A-Z]\w*(Error|Exception|Interrupt|Warning)")


@dataclass
class Seen:
    """What was looked at, by kind, and what is wrong with it, by rule."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    names: list[str]
    text: str


class Docstring:
    """One docstring and what is wrong with it.

    Parameters
    ----------
    owner : what it describes.
    tree : the module that holds that.
    seen : where the findings go.
    where : file and line.
    """

    def __init__(self, owner: Owner, tree: ast.Module, seen: Seen, where: str) -> None:
        self.owner, self.tree, self.seen, self.where = owner, tree, seen, where
        self.text = ast.get_docstring(owner) or ""
        self.lines = self.text.split("\n")

    def check(self) -> None:
        self.seen.counts["docstrings"] += 1
        check_text(self.text, self.seen, self.where)
        summary = self.text.split("\n\n")[0]
        if "\n" in summary and re.search(r"\.\)?\s[A-Z`]", summary):
            self._wrong("sentence", f"must stand alone if it takes several lines: {summary!r}")
        self._check_verbs()
        self._check_paragraphs()
        body = self._check_ref()
        heads = [
            place
            for place, (title, line) in enumerate(pairwise(body))
            if UNDERLINE.fullmatch(line) and title and not title.startswith(" ")
        ]
        self._check_titles(body, heads)
        for start, end in pairwise([*heads, len(body)]):
            if body[start] in SECTIONS:
                self._check_section(body[start], body[start + 2 : end])

    def _wrong(self, rule: str, text: str) -> None:
        self.seen.wrong.append((rule, f"{self.where}: {rule}: {text}"))

    def _check_verbs(self) -> None:
        if not isinstance(self.owner, Function):
            return
        if verb := THIRD_PERSON.match(self.text):
            self._wrong("mood", f"a function is described in the imperative, not as {verb[0]!r}")
        if len(self.lines) > 1:
            for match in PROSE.finditer(self.text):
                self._wrong("prose", f"{match[1]!r} must be a section")

    def _check_paragraphs(self) -> None:
        order: list[str] = []
        for paragraph in self.text.split("\n\n"):
            start = re.match(r"\*(\w+)", paragraph)
            if start and not re.match(r"\*\w+\*(:| \([^)]+\):) ", paragraph):
                self._wrong("paragraph", f"must begin with '*{start[1]}*: '")
            if start and start[1] in PARAGRAPHS:
                order.append(start[1])
            elif order and not re.match(r"\w+\n-{3}|Ref:|- |    ", paragraph):
                self._wrong("paragraph", f"*{order[-1]}* must stand behind {paragraph[:40]!r}")
        if order != sorted(set(order), key=PARAGRAPHS.index):
            self._wrong("paragraph", f"must be in the order {', '.join(PARAGRAPHS)}: {order}")
        if re.search(rf"[^\n]\n\*({'|'.join(PARAGRAPHS)})\b", self.text):
            self._wrong("paragraph", "must have a blank line before it")
        self.seen.counts["paragraphs"] += len(order)

    def _check_ref(self) -> list[str]:
        """Lines before it."""
        starts = [place for place, line in enumerate(self.lines) if re.match(r"Refs?\b", line)]
        if not starts:
            return self.lines
        self.seen.counts["references"] += 1
        start = starts[0]
        if not self.lines[start].startswith("Ref: "):
            self._wrong("ref", f"must begin with 'Ref: ', not {self.lines[start]!r}")
        if len(starts) > 1 or "" in self.lines[start:] or (start and self.lines[start - 1]):
            self._wrong("ref", "must be the last paragraph")
        return self.lines[:start]

    def _check_titles(self, lines: list[str], heads: list[int]) -> None:
        titles = [lines[place] for place in heads]
        for place, title in zip(heads, titles, strict=True):
            if title not in SECTIONS:
                self._wrong("section", f"must be of {', '.join(SECTIONS)}, not {title!r}")
            elif title not in sections_of(self.owner):
                self._wrong("owner", f"{title} belong to another kind of thing")
            if lines[place + 1] != "-" * len(title):
                self._wrong("underline", f"of {title} must be {len(title)} hyphens")
            if place == 0 or lines[place - 1]:
                self._wrong("blank", f"{title} must have a blank line before it")
        for place, line in enumerate(lines):
            if place not in heads and TITLE.fullmatch(line.strip()):
                self._wrong("section", f"{line.strip()!r} is the title of no section")
        known = [title for title in titles if title in SECTIONS]
        if known != sorted(set(known), key=SECTIONS.index):
            self._wrong("order", f"must be {', '.join(SECTIONS)}: {known}")

    def _check_section(self, title: str, lines: list[str]) -> None:
        self.seen.counts[title] += 1
        while lines and not lines[-1]:
            lines = lines[:-1]
        if "" in lines or not lines:
            self._wrong("blank", f"{title} must have entries without blank lines")
        entries = list(self._entries(title, [line for line in lines if line]))
        for entry in entries:
            if entry.text and not STOP.search(entry.text):
                self._wrong("stop", f"the entry {entry.names[0]} must end with a full stop")
            if title == "Raises" and not entry.text and set(entry.names) & BROAD:
                self._wrong("reason", f"when {entry.names[0]} is raised must be said")
            if CAPITAL.match(entry.text):
                self._wrong("capital", f"the entry {entry.names[0]} must begin in lower case")
        self.seen.counts["entries"] += len(entries)
        names = [name for entry in entries for name in entry.names]
        if title == "Raises":
            self._check_errors(names)
        elif title == "Parameters":
            self._check_arguments(names)

    def _entries(self, title: str, lines: list[str]) -> Iterator[Entry]:
        texts: list[str] = []
        for line in lines:
            if line.startswith("    ") and texts:
                texts[-1] += "\n" + line
            else:
                texts.append(line)
        for text in texts:
            returned = title in ("Returns", "Yields")
            match = (RETURNED if returned else ENTRY).fullmatch(text)
            if match is None:
                self._wrong("entry", f"{title} must have 'names : text', not {text!r}")
            else:
                yield Entry(re.split(r",\s+", match["names"]), match["text"] or "")

    def _check_errors(self, names: list[str]) -> None:
        self.seen.counts["errors"] += len(names)
        for name in names:
            if name in BROAD:
                continue
            if not ERROR_NAME.fullmatch(name.rpartition(".")[2]):
                self._wrong("error", f"{name} is no name of an error")

    def _check_arguments(self, names: list[str]) -> None:
        known = arguments(self.owner, self.tree)
        if known is None:
            self.seen.counts["undecided"] += 1
            return
        self.seen.counts["arguments"] += len(names)
        for name in names:
            if name.lstrip("*") not in known:
                self._wrong("argument", f"{name} is none of {', '.join(sorted(known))}")


def check_text(text: str, seen: Seen, where: str) -> None:
    """Check what holds for a docstring and for the string behind an assignment."""
    summary = text.split("\n\n")[0]
    if not STOP.search(summary):
        seen.wrong.append(("summary", f"{where}: summary: ends without a full stop: {summary!r}"))
    for match in FOREIGN.finditer(text):
        seen.wrong.append(("foreign", f"{where}: foreign: markup of another style: {match[0]!r}"))


def sections_of(owner: Owner) -> tuple[str, ...]:
    """Sections that what has the docstring can have: Members are the ports of hardware alone."""
    if isinstance(owner, ast.Module):
        return ()
    if isinstance(owner, Function):
        return ("Parameters", "Returns", "Yields", "Raises")
    bases = [ast.unparse(base) for base in owner.bases]
    plain = not bases or any(re.search(r"(Error|Exception)$", base) for base in bases)
    if plain or any("dataclass" in ast.unparse(each) for each in owner.decorator_list):
        return ("Parameters", "Attributes", "Raises")
    return ("Parameters", "Members", "Attributes", "Raises")


def arguments(owner: Owner, tree: ast.Module) -> set[str] | None:
    """Names that a call takes, or None if that depends on another file."""
    if isinstance(owner, ast.Module):
        return None
    if isinstance(owner, Function):
        return signature(owner)
    for each in owner.body:
        if isinstance(each, Function) and each.name in ("__init__", "__new__"):
            return signature(each)
    names = {
        each.target.id
        for each in owner.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    classes = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
    for base in map(ast.unparse, owner.bases):
        inherited = arguments(classes[base], tree) if base in classes else None
        if inherited is None and base not in ("NamedTuple", "Protocol", "TypedDict"):
            return None
        names |= inherited or set()
    return names


def signature(function: Function) -> set[str] | None:
    given = function.args
    if given.kwarg and given.kwarg.annotation and "Unpack" in ast.unparse(given.kwarg.annotation):
        return None
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return {each.arg for each in every if each}


def findings(source: str, name: str) -> Seen:
    """Check every docstring of a source, and every string behind an assignment."""
    seen, tree = Seen(), ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, Owner) and ast.get_docstring(node) is not None:
            Docstring(node, tree, seen, f"{name}:{node.body[0].lineno}").check()
        if isinstance(node, ast.Module | ast.ClassDef):
            for assignment, after in pairwise(node.body):
                match after:
                    case ast.Expr(ast.Constant(str(text))) if not isinstance(assignment, Owner):
                        seen.counts["assignments"] += 1
                        check_text(text, seen, f"{name}:{after.lineno}")
    return seen


@cache
def everything() -> Seen:
    total = Seen()
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            seen = findings(path.read_text(), str(path.relative_to(ROOT)))
            total.counts += seen.counts
            total.wrong += seen.wrong
    return total


GOOD = '''
class Reader(Component):
    """Reads bursts.

    *Timing*: a beat a cycle.

    *Resources* (Yosys): 12 LUT.

    Parameters
    ----------
    width, depth : of the port, `In(width)`; more
        in the next line.
    name

    Members
    -------
    i_<name> : of each port.

    Raises
    ------
    ValueError, KeyError,
        CacheError : a width is wrong.
    CacheError

    Ref: a paper, section 3.
    """

    def __init__(self, width, *, depth, name): ...
'''
BAD = {
    "summary": '"""No full stop"""',
    "sentence": '"""One sentence. Another one\nin the next line.\n"""',
    "foreign": '"""What :class:`Reader` reads."""',
    "mood": 'def f():\n    """Returns one."""',
    "prose": 'def f():\n    """One.\n\n    Raises `ValueError` at times.\n    """',
    "paragraph": '"""One.\n\n*Numerics*: exact.\n\n*Timing*: none.\n"""',
    "ref": '"""One.\n\nRef: a paper.\n\nMore of it.\n"""',
    "section": '"""One.\n\nArgs:\n    x: a number.\n"""',
    "owner": 'class A:\n    """One.\n\n    Members\n    -------\n    x : a port.\n    """',
    "underline": GOOD.replace("----------", "--------"),
    "blank": GOOD.replace("    name\n\n    Members", "    name\n    Members"),
    "order": GOOD.replace(
        "    Raises",
        "    Attributes\n    ----------\n    x : it.\n\n    Members\n    -------\n"
        "    y : it.\n\n    Raises",
    ),
    "entry": GOOD.replace("i_<name> : of", "i_<name>: of"),
    "stop": GOOD.replace("a width is wrong.", "a width is wrong"),
    "capital": GOOD.replace(" : a width", " : A width"),
    "reason": GOOD.replace(" : a width is wrong.", ""),
    "error": GOOD.replace("    CacheError\n", "    Wrong\n"),
    "argument": GOOD.replace("width, depth :", "width, height :"),
}
"""For each rule a source that breaks it and no other."""


def test_every_docstring_keeps_to_the_dialect() -> None:
    wrong = everything().wrong
    assert not wrong, f"{len(wrong)} docstrings:\n" + "\n".join(text for _, text in wrong)


def test_enough_was_looked_at() -> None:
    counts = everything().counts
    least = {
        "docstrings": 2400,
        "assignments": 150,
        "paragraphs": 120,
        "references": 50,
        "Parameters": 280,
        "Members": 130,
        "Attributes": 120,
        "Returns": 15,
        "Raises": 220,
        "entries": 2200,
        "errors": 400,
        "arguments": 850,
    }
    assert {kind for kind, count in least.items() if counts[kind] < count} == set()
    assert counts["undecided"] < 20


@pytest.mark.parametrize("rule", BAD)
def test_a_broken_rule_is_found_with_its_line(rule: str) -> None:
    wrong = findings(BAD[rule], "source.py").wrong
    assert [found for found, _ in wrong] == [rule]
    assert re.match(r"source\.py:\d+: ", wrong[0][1])


def test_every_rule_is_broken_once() -> None:
    source = Path(__file__).read_text()
    assert set(re.findall(r'(?:_wrong|append)\(\(?"(\w+)"', source)) == set(BAD)


def test_a_docstring_in_the_dialect_is_right() -> None:
    seen = findings(GOOD, "source.py")
    assert seen.wrong == []
    assert seen.counts["arguments"] == 3
    assert seen.counts["errors"] == 4


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a, /, b, *c, d, **e): ...", {"a", "b", "c", "d", "e"}),
        ("def f(**e: Unpack[Options]): ...", None),
        ("class A:\n    x: int\nclass B(A):\n    y: int", {"x", "y"}),
        ("class B(Elsewhere):\n    y: int", None),
        ("class B(NamedTuple):\n    y: int", {"y"}),
    ],
)
def test_arguments_of_a_call_are_known_where_the_file_tells(
    source: str, expected: set[str] | None
) -> None:
    tree = ast.parse(source)
    owner = tree.body[-1]
    assert isinstance(owner, Owner)
    assert arguments(owner, tree) == expected
