"""A plugin for pytest that prints the CPU seconds of each folder and file of tests, child processes included.

    PYTHONPATH=tests/helpers .venv/bin/pytest -p cpu_time ...

A busy machine changes them little, unlike seconds of the clock. They are read from /proc after each test: of
this process, of the children that it has waited for, and of all processes below it that still run, as the
one that ranks are forked from. What a process used that nobody waited for is not counted.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
PROPERTY = "cpu_seconds"
STARTED = pytest.StashKey[float]()
SLOWEST = 25  # files that are printed


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all below it, so far."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    mine = resource.getrusage(resource.RUSAGE_SELF)
    seconds = mine.ru_utime + mine.ru_stime + reaped.ru_utime + reaped.ru_stime
    parents, ticks = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(entry.name)] = int(fields[1])
            # utime, stime, and both of the children that it has waited for (man 5 proc_pid_stat)
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    return seconds + sum(ticks[process] / TICKS for process in below(os.getpid(), parents))


def below(root: int, parents: dict[int, int]) -> Iterator[int]:
    """Yield the processes below one, given the parent of each."""
    for process, parent in parents.items():
        if parent == root:
            yield process
            yield from below(process, parents)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append((PROPERTY, cpu_seconds() - item.stash[STARTED]))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    files: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, seconds in getattr(report, "user_properties", ()):
                if name == PROPERTY:
                    file = report.nodeid.partition("::")[0]
                    files[file] += seconds
                    folders[str(Path(file).parent)] += seconds
    for title, counted in (("folders", folders), ("files", files)):
        terminalreporter.section(f"CPU seconds of {title}")
        for name, seconds in counted.most_common(SLOWEST):
            terminalreporter.write_line(f"{seconds:8.1f} {name}")
