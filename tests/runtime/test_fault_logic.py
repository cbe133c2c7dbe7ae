"""Which worker a failure began at, and how often a run starts again: on a fake cluster with a fake clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import RemoteError
from ray.exceptions import RayActorError, UnserializableException

from rlgraph.errors import RunError
from rlgraph.runtime import run
from rlgraph.runtime.cluster import failures
from rlgraph.runtime.cluster.failures import LostError, StepError, culprit, failure
from rlgraph.runtime.messages.errors import AwayError, ServerLostError
from rlgraph.runtime.messages.tasks import Place
from rlgraph.runtime.rundir.rundir import RunDir

GONE = RayActorError(error_msg="its process has ended")
BROKEN = RemoteError(RuntimeError("peer closed"), f'File "{failures.COLLECTIVES}", in all_reduce')
RAISED = RemoteError(ValueError("an op's own"), 'File "ops.py"')


class ScriptedCluster:
    """Calls end when a script says, as a clock tells that only waiting moves."""

    def __init__(self, script: dict[str, tuple[float, Exception | None]]) -> None:
        self.script, self.now = script, 0.0  # call -> when it ends, and in which error

    def wait(self, references: Sequence[str], timeout: float) -> tuple[list[str], list[str]]:
        first = min((self.script[ref][0] for ref in references if ref in self.script), default=float("inf"))
        self.now = max(self.now, min(first, self.now + timeout))
        ready = [ref for ref in references if ref in self.script and self.script[ref][0] <= self.now]
        return ready[:1], [ref for ref in references if ref not in ready[:1]]

    def get(self, references: Sequence[str]) -> list[None]:
        for ref in references:
            if error := self.script[ref][1]:
                raise error
        return [None for _ in references]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Place, Exception, float]]:
    """``found(error, b=(3, GONE))``: call a on main[0] has failed; of the others, when and how each ends."""

    def find(error: Exception, **script: tuple[float, Exception | None]) -> tuple[Place, Exception, float]:
        cluster = ScriptedCluster({"a": (0, error), **script})
        monkeypatch.setattr(failures.time, "monotonic", lambda: cluster.now)
        pending: dict[Any, Place] = {name: ("main", "abcd".index(name)) for name in "abcd"}
        place, first = culprit(cluster, pending, "a", error)  # type: ignore[arg-type]
        return place, first, cluster.now

    return find


def test_the_worker_that_is_gone_is_found_behind_the_collectives_that_it_broke(found: Any) -> None:
    peers: dict[str, tuple[float, Exception | None]] = {"b": (1, BROKEN), "c": (2, None), "d": (31, GONE)}
    assert found(BROKEN, **peers) == (("main", 3), GONE, 31)
    away = RemoteError(AwayError("what it shared is away"), "")
    assert found(away, **peers) == (("main", 3), GONE, 31)


def test_where_no_worker_is_gone_the_first_failure_counts_once_patience_ends(found: Any) -> None:
    assert found(BROKEN, b=(1, RAISED), c=(failures.PATIENCE_S + 1, GONE)) == (
        ("main", 0),
        BROKEN,
        failures.PATIENCE_S,
    )


def test_nobody_is_waited_for_when_all_have_ended(found: Any) -> None:
    assert found(BROKEN, b=(1, None), c=(2, BROKEN), d=(3, RAISED)) == (("main", 0), BROKEN, 3)


@pytest.mark.parametrize("error", [RAISED, GONE])
def test_what_says_where_it_began_waits_for_nobody(found: Any, error: Exception) -> None:
    assert found(error, b=(1, GONE)) == (("main", 0), error, 0)


def test_only_what_is_gone_or_broken_is_worth_another_try() -> None:
    lost = ServerLostError("the server has ended")
    for error in (GONE, BROKEN, RemoteError(lost, "")):
        assert isinstance(failure("the plan", "step 1 failed", error), LostError)
    for error in (RAISED, RemoteError(RunError("the user's mistake"), failures.COLLECTIVES)):
        assert isinstance(failure("the plan", "step 1 failed", error), StepError)


class Tries:
    """A run that loses a worker in its first tries, or has a mistake in one."""

    def __init__(self, folder: Path, losses: int, restarts: int, error: Exception | None = None) -> None:
        self.plan = SimpleNamespace(schedule=SimpleNamespace(restarts=restarts))
        self.signals = SimpleNamespace(reasons=[])
        self.folder, self.progress = RunDir.fresh(folder, "ones"), self
        self.losses, self.error = losses, error
        self.resumed: list[bool] = []

    def run(self, resume: bool) -> None:
        self.resumed.append(resume)
        if len(self.resumed) <= self.losses:
            raise LostError("the plan\nworker 3 is gone", "worker 3 is gone")
        if self.error:
            raise self.error

    def restarting(self, number: int, of: int, reason: str) -> None:
        assert (number, reason) == (len(self.resumed), "worker 3 is gone")

    def notes(self) -> list[tuple[int, int, str]]:
        lines = (self.folder.path / "restarts.jsonl").read_text().splitlines()
        return [(line["restart"], line["of"], line["reason"]) for line in map(json.loads, lines)]


def test_a_run_starts_again_as_often_as_the_schedule_allows(tmp_path: Path) -> None:
    tries = Tries(tmp_path / "a", losses=2, restarts=2)
    run._train(tries, resume=False)  # type: ignore[arg-type]
    assert tries.resumed == [False, True, True]
    assert tries.notes() == [(1, 2, "worker 3 is gone"), (2, 2, "worker 3 is gone")]

    tries = Tries(tmp_path / "b", losses=3, restarts=2)
    used = r"worker 3 is gone\n  2 restarts were used up .*\n  there is no checkpoint yet"
    with pytest.raises(RunError, match=used):
        run._train(tries, resume=False)  # type: ignore[arg-type]
    assert len(tries.resumed) == 3 and len(tries.notes()) == 2


def test_a_mistake_ends_a_run_whatever_restarts_are_left(tmp_path: Path) -> None:
    tries = Tries(tmp_path / "a", losses=1, restarts=5, error=StepError("an op raised"))
    with pytest.raises(StepError, match="an op raised"):
        run._train(tries, resume=False)  # type: ignore[arg-type]
    assert tries.resumed == [False, True]


def test_an_error_that_ray_cannot_make_again_is_the_op_s() -> None:
    error = failure("plan", "step 1 failed", UnserializableException("Traceback: the abacus broke" * 1000))
    assert isinstance(error, StepError) and "the abacus broke" in str(error)
    assert "characters in all" in str(error) and len(str(error)) < 9000


def divided(responses: list[str]) -> list[float]:
    return [1 / len(response) for response in responses]


def test_the_line_of_a_comprehension_is_shown_once() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        divided([""])
    lines = failures.words(raised.value).splitlines()
    assert [line.rpartition(": ")[2] for line in lines[-2:]] == [
        "return [1 / len(response) for response in responses]",
        "division by zero",
    ]
    assert len({*lines}) == len(lines)
