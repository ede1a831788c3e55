"""A long run of tests that goes on where an earlier one of the same files was stopped.

`--passed FILE` writes the name and the cost of each test that passed; a run that finds such a file
of the same commit, changes, Python and packages leaves these tests out and says so. Skipped and
failed tests run again. A file of anything else is begun anew, and outside of a checkout of git none
is kept.
"""

import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import COST

ROOT = Path(__file__).parents[1]
OPTION = "--passed"


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=True).stdout


def identity() -> str:
    """What is tested: the commit, what differs from it, and the Python and packages that run it."""
    packages = sorted(f"{each.name} {each.version}" for each in importlib.metadata.distributions())
    content = hashlib.sha256("\n".join([sys.version, *packages]).encode())
    content.update(_git("rev-parse", "HEAD") + _git("diff", "HEAD"))
    for name in _git("ls-files", "-z", "--others", "--exclude-standard").split(b"\0")[:-1]:
        content.update(name + (ROOT / name.decode()).read_bytes())
    return content.hexdigest()


class Record:
    """Tests that passed, with their processor time in seconds, in a file of one identity."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.costs: dict[str, float] = {}
        self.called: set[str] = set()
        begins = f"# {identity()}"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if lines[:1] == [begins]:
            rows = [line.split("\t") for line in lines[1:]]
            self.costs = {row[1]: float(row[0]) for row in rows if len(row) == 2}
        self.earlier = frozenset(self.costs)
        path.parent.mkdir(parents=True, exist_ok=True)
        known = [f"{cost:.2f}\t{name}" for name, cost in self.costs.items()]
        path.write_text("\n".join([begins, *known, ""]), encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of xdist, one begun late as well, what the first ones were told."""
        node.workerinput[OPTION] = sorted(self.earlier)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.called.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self.called:
            costs = [value for name, value in report.user_properties if name == COST]
            cost = sum(value for value in costs if isinstance(value, float))
            self.costs[report.nodeid] = cost
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{cost:.2f}\t{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.earlier and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.earlier:
            terminalreporter.write_line(
                f"{len(self.earlier):,} tests passed in earlier runs of these files and were left "
                f"out; {len(self.costs):,} passed in all, in {sum(self.costs.values()):,.0f} s of "
                f"processor time ({self.path})"
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, type=Path, help="file of tests that passed: left out while the files are the same"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption(OPTION)
    if path and (ROOT / ".git").exists() and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(path), "passed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    record = config.pluginmanager.get_plugin("passed")
    told = getattr(config, "workerinput", {}).get(OPTION, ())
    earlier = record.earlier if isinstance(record, Record) else frozenset(told)
    if earlier:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in earlier])
        items[:] = [item for item in items if item.nodeid not in earlier]
