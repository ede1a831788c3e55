"""One dialect of docstrings, read from the sources.

A docstring is a summary that ends with a full stop or a colon; paragraphs, of which those of
`PARAGRAPHS` come last; the sections of `SECTIONS`, each underlined to its length and with a blank
line before it; and `Ref:`. An entry of a section is `name, other : text.`, its further lines
indented, or the names alone where there is nothing to add. Code stands between single backquotes.
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
TREES = ("hw", "sim", "host", "examples", "bench")
PARAGRAPHS = ("Timing", "Numerics", "Resources")
SECTIONS = ("Parameters", "Members", "Attributes", "Returns", "Yields", "Raises")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Owner = ast.Module | ast.ClassDef | Function

NAME = r"\*{0,2}[\w.<>]+"
TYPE = r"[\w.,\[\] |]+"
ENTRY = re.compile(rf"(?P<names>{NAME}(?:, {NAME})*)(?: : (?P<text>.+))?", re.DOTALL)
RETURNED = re.compile(rf"(?P<names>{TYPE}) : (?P<text>.+)", re.DOTALL)
UNDERLINE = re.compile(r"([-=~^\"'+*#])\1{2,}")
TITLE = re.compile(
    r"(Args|Arguments|Params?|Keyword Arguments|Kwargs|Ports|Returns?|Yields?|Raises?|Throws"
    rf"|Exceptions|Notes?|Examples?|See Also|References|{'|'.join(SECTIONS)}):?"
)
FOREIGN = re.compile(
    r"``|:[a-z]+:`"  # reStructuredText, and roles of Sphinx
    r"|[:@](param|type|arg|raises?|returns?|rtype|yields?)\b[^`\n]*:"  # Sphinx, Epytext
)
PROSE = re.compile(r"(?:^|[.:;]\s)(Raises|Returns|Yields)\s", re.MULTILINE)
THIRD_PERSON = re.compile(
    r"(Accepts|Adds|Allocates|Answers|Appends|Applies|Asks|Assumes|Begins|Builds|Calls|Checks|Chooses"
    r"|Clears|Closes|Collects|Compares|Compiles|Computes|Connects|Converts|Copies|Creates|Decides"
    r"|Decodes|Describes|Does|Draws|Encodes|Ends|Expands|Expects|Fetches|Fills|Finds|Follows|Forgets"
    r"|Gets|Gives|Goes|Has|Holds|Imports|Inserts|Keeps|Lets|Loads|Looks|Makes|Measures|Merges|Moves"
    r"|Multiplies|Narrows|Opens|Packs|Parses|Polls|Prints|Puts|Raises|Receives|Removes|Replaces"
    r"|Returns|Rounds|Says|Selects|Sends|Sets|Shifts|Shows|Stores|Submits|Subtracts|Takes|Tells|Tries"
    r"|Unpacks|Uses|Waits|Widens|Writes(?! in)|Yields)\b"
)
CAPITAL = re.compile(
    r"(An?|The|All|Any|As|At|By|Each|For|From|How|If|In|It|Its|No|Not|Of|On|One|Or|There|These|They"
    r"|This|Those|To|What|When|Where|Whether|Which|Whose|With)\s"
)
ERROR_NAME = re.compile(r"_?[A-Z]\w*(Error|Exception|Interrupt|Warning)")


@dataclass(frozen=True)
class Entry:
    names: tuple[str, ...]
    text: str


@dataclass
class Seen:
    """What was looked at, and what is wrong with it, by rule."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)


class Docstring:
    """Checks of one docstring.

    Parameters
    ----------
    owner : what it belongs to, which has one.
    tree : the module around it.
    seen : gets what was looked at.
    where : for messages.
    """

    def __init__(self, owner: Owner, tree: ast.Module, seen: Seen, where: str) -> None:
        self.owner, self.tree, self.seen, self.where = owner, tree, seen, where
        self.text = ast.get_docstring(owner) or ""
        self.lines = self.text.split("\n")
        """Without those of `Ref:` once that has been looked at."""

    def check(self) -> None:
        self.seen.counts["docstrings"] += 1
        self._check_summary()
        self._check_words()
        self._check_ref()
        self._check_paragraphs()
        heads = [
            place
            for place, (title, line) in enumerate(pairwise(self.lines))
            if UNDERLINE.fullmatch(line) and title.strip() and not title.startswith(" ")
        ]
        self._check_titles(heads)
        for start, end in pairwise([*heads, len(self.lines)]):
            self._check_section(self.lines[start], self.lines[start + 2 : end])

    def _wrong(self, rule: str, text: str) -> None:
        self.seen.wrong.append((rule, f"{self.where}: {rule}: {text}"))

    def _check_summary(self) -> None:
        summary = self.text.split("\n\n")[0]
        if not re.search(r"[.:?]\)?$", summary):
            self._wrong("summary", f"ends without a full stop: {summary!r}")
        verb = THIRD_PERSON.match(summary)
        if isinstance(self.owner, Function) and verb:
            self._wrong("mood", f"a function is described in the imperative, not as {verb[0]!r}")

    def _check_words(self) -> None:
        for match in FOREIGN.finditer(self.text):
            self._wrong("foreign", f"markup of another style: {match[0]!r}")
        if len(self.lines) > 1 and isinstance(self.owner, Function):
            for match in PROSE.finditer(self.text):
                if not re.match(r"-{3}", self.text[match.end() :]):
                    self._wrong("prose", f"a section is wanted for {match[1]!r}")

    def _check_ref(self) -> None:
        starts = [place for place, line in enumerate(self.lines) if re.match(r"Refs?\b", line)]
        if not starts:
            return
        self.seen.counts["references"] += 1
        start = starts[0]
        if not self.lines[start].startswith("Ref: "):
            self._wrong("ref", f"must begin with 'Ref: ', not {self.lines[start]!r}")
        if len(starts) > 1 or "" in self.lines[start:] or (start and self.lines[start - 1]):
            self._wrong("ref", "must be the last paragraph")
        self.lines = self.lines[: max(start - 1, 0)]

    def _check_paragraphs(self) -> None:
        order = []
        for paragraph in self.text.split("\n\n"):
            start = re.match(r"\*(\w+)", paragraph)
            if start and not re.match(r"\*\w+\*(:| \([^)]+\):) ", paragraph):
                self._wrong("paragraph", f"must begin with '*{start[1]}*: '")
            if start and start[1] in PARAGRAPHS:
                order.append(start[1])
            elif order and not re.match(r"\w+\n-{3}|Ref:|- |   ", paragraph):
                self._wrong("paragraph", f"*{order[-1]}* stands before {paragraph[:40]!r}")
        if order != sorted(set(order), key=PARAGRAPHS.index):
            self._wrong("paragraph", f"{', '.join(order)} must be in the order of {PARAGRAPHS}")
        self.seen.counts["paragraphs"] += len(order)
        if re.search(rf"(?<!\n)\n\*({'|'.join(PARAGRAPHS)})\b", self.text):
            self._wrong("paragraph", "must have a blank line before it")

    def _check_titles(self, heads: list[int]) -> None:
        titles = [self.lines[place] for place in heads]
        for place, title in zip(heads, titles, strict=True):
            if title not in SECTIONS:
                self._wrong("section", f"must be of {', '.join(SECTIONS)}, not {title!r}")
            if self.lines[place + 1] != "-" * len(title):
                self._wrong("underline", f"of {title} must be {len(title)} hyphens")
            if place == 0 or self.lines[place - 1]:
                self._wrong("blank", f"{title} must have a blank line before it")
            if title in SECTIONS and title not in sections_of(self.owner):
                self._wrong("owner", f"{title} describes another kind of thing")
        for place, line in enumerate(self.lines):
            if place not in heads and TITLE.fullmatch(line.strip()):
                self._wrong("section", f"{line.strip()!r} is no section of this dialect")
        known = [title for title in titles if title in SECTIONS]
        if known != sorted(set(known), key=SECTIONS.index):
            self._wrong("order", f"{', '.join(known)} must be in the order of {SECTIONS}")

    def _check_section(self, title: str, lines: list[str]) -> None:
        if title not in SECTIONS:
            return
        self.seen.counts[title] += 1
        while lines and not lines[-1]:
            lines = lines[:-1]
        if "" in lines:
            self._wrong("blank", f"{title} has a blank line within it")
        entries = list(self._entries(title, [line for line in lines if line]))
        if not entries:
            self._wrong("entry", f"{title} has none")
        for entry in entries:
            self.seen.counts["entries"] += 1
            if entry.text and not re.search(r"[.:?]\)?$", entry.text):
                self._wrong("stop", f"the entry {entry.names[0]} ends without a full stop")
            if CAPITAL.match(entry.text):
                self._wrong("capital", f"the entry {entry.names[0]} begins with a capital")
            if title == "Raises":
                self._check_errors(entry.names)
        if title == "Parameters":
            self._check_arguments([name for entry in entries for name in entry.names])

    def _entries(self, title: str, lines: list[str]) -> Iterator[Entry]:
        texts: list[str] = []
        for line in lines:
            if line.startswith("    ") and texts:
                texts[-1] += "\n" + line
            else:
                texts.append(line)
        for text in texts:
            flat = re.sub(r",\n +", ", ", text) if " : " not in text.split("\n")[0] else text
            match = (RETURNED if title in ("Returns", "Yields") else ENTRY).fullmatch(flat)
            if match is None:
                self._wrong("entry", f"{title} must have 'names : text', not {text!r}")
                continue
            yield Entry(tuple(match["names"].split(", ")), match["text"] or "")

    def _check_errors(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.seen.counts["errors"] += 1
            builtin = getattr(builtins, name, None)
            known = isinstance(builtin, type) and issubclass(builtin, BaseException)
            if not known and not ERROR_NAME.fullmatch(name.rpartition(".")[2]):
                self._wrong("error", f"{name} is no name of an error")

    def _check_arguments(self, names: list[str]) -> None:
        known = arguments(self.owner, self.tree)
        if known is None:
            self.seen.counts["undecided"] += 1
            return
        for name in names:
            self.seen.counts["arguments"] += 1
            if name.lstrip("*") not in known:
                self._wrong("argument", f"{name} is none of {', '.join(sorted(known))}")


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
    """Names that calls of it take; None if another file or keywords of any name add to them."""
    if isinstance(owner, ast.Module):
        return None
    if isinstance(owner, Function):
        return signature(owner)
    made = next((each for each in owner.body if is_function(each, "__init__", "__new__")), None)
    if isinstance(made, Function):
        return signature(made)
    fields = {
        each.target.id
        for each in owner.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    classes = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
    for base in map(ast.unparse, owner.bases):
        inherited = arguments(classes[base], tree) if base in classes else None
        if inherited is None and base not in ("NamedTuple", "Protocol", "TypedDict"):
            return None
        fields |= inherited or set()
    return fields if fields else None


def is_function(node: ast.AST, *names: str) -> bool:
    return isinstance(node, Function) and node.name in names


def signature(function: Function) -> set[str] | None:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    names = {each.arg for each in [*named, *filter(None, [given.vararg])]}
    if given.kwarg is None:
        return names
    if given.kwarg.annotation is not None and "Unpack" in ast.unparse(given.kwarg.annotation):
        return None
    return names | {given.kwarg.arg}


def looked_at(source: str, name: str) -> Seen:
    """Check every docstring of a source."""
    seen, tree = Seen(), ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, Owner) and ast.get_docstring(node) is not None:
            Docstring(node, tree, seen, f"{name}:{node.body[0].lineno}").check()
    return seen


@cache
def everything() -> Seen:
    total = Seen()
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            seen = looked_at(path.read_text(), str(path.relative_to(ROOT)))
            total.counts += seen.counts
            total.wrong += seen.wrong
    return total


def test_every_docstring_keeps_to_the_dialect() -> None:
    wrong = everything().wrong
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(text for _, text in wrong)
