"""Failures: a worker that is gone, or an op that raised. Only a run that lost a worker is tried again."""

import errno
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlgraph.errors import RlgraphError, RunError, shortened
from rlgraph.runtime.cluster.interface import WorkerCluster
from rlgraph.runtime.messages.errors import AwayError, ServerLostError
from rlgraph.runtime.messages.tasks import Place, place_text
from rlgraph.variables import hidden

PATIENCE_S = 40.0  # Ray reports the workers of a lost host after some 30 s
RAISED = ("RayError", "UnserializableException")  # in place of errors that Ray can't bring here
DISK = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "the disk takes no more ({}); make room"),
    errno.EROFS: "the disk is read-only ({}); make it writable",
    errno.EIO: "the disk fails ({}); see to it",
}
COLLECTIVES = "torch/distributed/distributed_c10d.py"  # every collective of torch passes through this file


class StepError(RunError):
    """A step failed; the message shows the plan with a mark on it."""


class LostError(RunError):
    """A worker, host, server or network is gone; ``brief`` is the message without the plan."""

    def __init__(self, message: str, brief: str) -> None:
        super().__init__(message)
        self.brief = hidden(brief)


def failure(plan: str, law: str, error: Exception) -> RunError:
    """Return the error of a step, or of an action between two steps.

    ``plan`` is the plan's text with a mark where it failed, ``law`` says what failed.
    """
    brief = f"{law}\n  {reason(error)}"
    message = f"{plan}\n{brief}"
    if is_gone(error) or is_broken(error):
        return LostError(message, brief)
    if isinstance(cause(error), ServerLostError):
        return LostError(message, brief)
    return StepError(message)


def too_late(cluster: WorkerCluster, law: str) -> RunError:
    """Return the error of calls that took too long: a ``LostError`` if some workers can't answer any more."""
    reasons = cluster.unresponsive()
    if not reasons:
        return RunError(law)
    for place, why in reasons.items():
        law += f"\n  {place_text(place)}: {why}"
    return LostError(law, law)


def culprit(
    cluster: WorkerCluster, pending: Mapping[Any, Place], reference: Any, error: Exception
) -> tuple[Place, Exception]:
    """Return the place where a failure began, and its error.

    A worker that is gone breaks the collectives of its peers, whose errors may arrive before Ray reports the
    worker. So the other ``pending`` calls are given ``PATIENCE_S`` seconds to fail for that reason.

    Args:
        cluster: the workers.
        pending: the place of each call that has not been collected, ``reference`` among them.
        reference: the call that failed.
        error: its error.
    """
    if not is_broken(error):
        return pending[reference], error
    unfinished = [call for call in pending if call != reference]
    deadline = time.monotonic() + PATIENCE_S
    while unfinished and time.monotonic() < deadline:
        ready, unfinished = cluster.wait(unfinished, timeout=max(deadline - time.monotonic(), 0))
        for call in ready:
            try:
                cluster.get([call])
            except Exception as call_error:
                if is_gone(call_error):
                    return pending[call], call_error
    return pending[reference], error


def reason(error: Exception) -> str:
    """Return the reason of an error: a user's mistake in its own words, anything else with its traceback.

    Of a text of more than a few kB the beginning and the end are shown.
    """
    origin = cause(error)
    if isinstance(origin, RlgraphError):
        return "\n  ".join([shortened(str(origin)), *getattr(origin, "__notes__", ())])
    if is_gone(error):
        law = f"its worker is gone: {shortened(str(error).strip())}"
        return f"{law}\n  the run directory's logs/ has its last lines"
    text = shortened(_with_traceback(error))
    disk_problem = of_disk(origin)
    if disk_problem:
        return f"{disk_problem}, and continue with --resume\n{text}"
    return text


def of_disk(error: BaseException) -> str:
    """Return a line about a disk that is full or can't be written if the error is of that kind, else ""."""
    for code, law in DISK.items():
        if f"[Errno {code}]" in str(error) or os.strerror(code) in str(error):
            problem = os.strerror(code).lower()
            if isinstance(error, OSError) and error.filename:
                problem += f": {error.filename}"
            return law.format(problem)
    return ""


def of_files(error: OSError, folder: Path) -> str:
    """Return the text of an error with a file of the run directory, and its remedy; "" for other errors."""
    disk_problem = of_disk(error)
    if disk_problem:
        has_started = (folder / "plan.json").exists()
        remedy = "and continue with --resume" if has_started else "or name another --run-dir"
        return f"{folder}: {disk_problem}, {remedy}"
    file = Path(os.fsdecode(error.filename or "/"))
    if not file.absolute().is_relative_to(folder.absolute()):
        return ""
    if isinstance(error, FileNotFoundError) and not folder.exists():
        remedy = "the run directory is gone"
    else:
        remedy = "make it writable, or name another --run-dir"
    return f"{file}: {str(error.strerror).lower()}\n  {remedy}"


def is_gone(error: Exception) -> bool:
    """Return whether a worker or its host is gone, with the columns there; no op raises such an error."""
    kind = type(cause(error))
    return kind.__module__.startswith("ray.") and kind.__name__ not in RAISED


def is_broken(error: Exception) -> bool:
    """Return whether a collective or the network failed, or a column that a peer shared can't be read."""
    origin = cause(error)
    if isinstance(origin, AwayError):
        return True
    if isinstance(origin, RlgraphError):
        return False
    return COLLECTIVES in _with_traceback(error)


def cause(error: Exception) -> BaseException:
    """Return the error that was raised inside a worker, or the error itself if it was raised here."""
    inner = getattr(error, "cause", None)
    return inner if isinstance(inner, BaseException) else error


def _with_traceback(error: Exception) -> str:
    if hasattr(error, "cause"):
        return str(error).strip()  # the text of Ray's errors has the worker's traceback in it
    return "".join(traceback.format_exception(error)).strip()
