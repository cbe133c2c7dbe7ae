"""Golden texts, rewritten by ``pytest --bless``; a limit of time for ``make nightly``."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

# read when torch is loaded: threads that wait for each other would else spin, on cores that are shared here
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Ray's workers give way to everything else unless told otherwise, so that a busy machine would starve them
os.environ.setdefault("RAY_worker_niceness", "0")

# under nohup, and in the background of a shell, what tests start would ignore the signals that it is sent
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

GOLDEN = Path(__file__).parent / "golden"
NO_TIME = "left out: there is no more time"

with suppress(ImportError):  # on a machine with a GPU there may be none
    from hypothesis import HealthCheck, settings

    patient: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("day", max_examples=25, **patient)
    settings.register_profile("nightly", max_examples=200, **patient)
    settings.load_profile("day")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="rewrite golden files; read the diff")
    parser.addoption("--until", type=float, default=float("inf"), help="start no test after this time (Unix)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--bless"):
        config.option.markexpr = ""  # nightly's golden files too


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.getoption("--until"):
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tests that were left out, whose number alone pytest would give; print what tests have counted.

    A test counts by ``record_property("counted", {line: number})``; lines of the same text are added up.
    """
    passed = (
        properties for one in terminalreporter.stats.get("passed", []) for properties in one.user_properties
    )
    if counted := sum((Counter(value) for name, value in passed if name == "counted"), Counter()):
        terminalreporter.section("counted by tests that passed")
        terminalreporter.write_line("\n".join(f"{n:6} {line}" for line, n in sorted(counted.items())))
    skipped = terminalreporter.stats.get("skipped", [])
    names = [report.nodeid for report in skipped if NO_TIME in str(report.longrepr)]
    if names:
        terminalreporter.section(f"{len(names)} tests were left out: there was no more time")
        terminalreporter.write_line("\n".join(names))


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test reads from the environment is hidden in no other's errors."""
    monkeypatch.setattr("rlgraph.variables._hidden", {})


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("plan/ppo-2.txt", text)``: the text must equal the file's."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--bless"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden file {path}; make it with pytest --bless"
        meant = f"it is not as in {path}; where that is meant, run this file with --bless and read the diff"
        assert text == path.read_text(encoding="utf-8"), meant

    return compare
