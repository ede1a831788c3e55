"""What each file of tests costs, beside its budget.

A budget is printed, not enforced: seconds depend on the machine, and a test may not.
"""

import gc
import os
import resource
import signal
import tomllib
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHOWN = 12
COST = "cpu_s"
OF_TERMINALS = (
    "COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "NO_COLOR", "PY_COLORS", "TTY_COMPATIBLE",
)  # fmt: skip
"""Variables with which output that is not on a terminal is that of one."""
COVERAGE = [name for name in ("NEARSTEP_COVERAGE", "NEARSTEP_POINTS") if os.environ.get(name)]
"""Variables with a folder for counts of coverage; tests change their working directory."""
_started: dict[str, float] = {}
_passed: list[str] = []
_spent: Counter[str] = Counter()


def _cpu() -> float:
    """Processor time of this process and of its children that have ended, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def budgets() -> tuple[float, dict[str, float]]:
    """Seconds for a file that is not listed, and those of the listed ones."""
    table = tomllib.loads((HERE / "budgets.toml").read_text(encoding="utf-8"))
    return table["default"], table["files"]


def pytest_configure() -> None:
    """Python's own reaction to SIGINT: a process begun in the background inherits none.

    And no collector of garbage until all is imported: a fifth of that time finds none. Nor what
    typer and rich take from the environment, the one when it is imported.
    """
    for name in OF_TERMINALS:
        os.environ.pop(name, None)
    for name in COVERAGE:
        os.environ[name] = os.path.abspath(os.environ[name])
    if "NEARSTEP_COVERAGE" in COVERAGE:  # a function of Verilator's registers all points of a model
        most = resource.getrlimit(resource.RLIMIT_STACK)[1]
        resource.setrlimit(resource.RLIMIT_STACK, (most, most))
    gc.disable()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Hide what stays from the collector of garbage.

    Those are modules, and thousands of tests: with them a full collection takes half a second, and
    some tests make dozens. The second collection sees few objects: Python makes a full one once new
    objects are a quarter of those that the last one has seen, and interrupted tests leave few
    objects with much memory.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    _started[nodeid] = _cpu()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown" and item.nodeid in _started:
        report.user_properties.append((COST, _cpu() - _started.pop(item.nodeid)))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == COST and isinstance(value, float):
            _spent[report.nodeid.partition("::")[0]] += value
    if COVERAGE and report.when == "call" and report.passed:
        _passed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the page of coverage which tests gave the counts."""
    for name in COVERAGE if _passed and not hasattr(session.config, "workerinput") else ():
        folder = Path(os.environ[name])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"tests-{os.getpid()}.txt").write_text("\n".join(_passed), encoding="utf-8")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _spent or hasattr(terminalreporter.config, "workerinput"):
        return
    other, listed = budgets()
    rows = [(file, cost, listed.get(file, other)) for file, cost in _spent.most_common()]
    over = [row for row in rows if row[1] > row[2]]
    write = terminalreporter.write_line
    terminalreporter.section("processor time by file")
    write(f"{'seconds':>8}  {'budget':>6}  file")
    for file, cost, budget in rows[:SHOWN]:
        write(f"{cost:8.1f}  {budget:6.0f}  {file}{'  over its budget' if cost > budget else ''}")
    write(
        f"{sum(_spent.values()):8.1f}  {'':6}  {len(rows)} files, {len(over)} over "
        f"their budget (tests/budgets.toml): {', '.join(row[0] for row in over) or '-'}"
    )
