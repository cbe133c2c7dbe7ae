"""Failures: a worker that is gone, or an op that raised. Only the former is worth another try."""

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
    """Return the error of a step, or of an action between two; ``plan`` is text with a mark where it was."""
    brief = f"{law}\n  {reason(error)}"
    lost = is_gone(error) or is_broken(error) or isinstance(cause(error), ServerLostError)
    return LostError(f"{plan}\n{brief}", brief) if lost else StepError(f"{plan}\n{brief}")


def too_late(cluster: WorkerCluster, law: str) -> RunError:
    """Return the error of calls that took too long: a loss, where there are workers that can't answer."""
    if not (reasons := cluster.unresponsive()):
        return RunError(law)
    law = "\n  ".join([law, *(f"{place_text(place)}: {why}" for place, why in reasons.items())])
    return LostError(law, law)


def culprit(
    cluster: WorkerCluster, pending: Mapping[Any, Place], reference: Any, error: Exception
) -> tuple[Place, Exception]:
    """Return the place where a failure began, and its error.

    A worker that is gone breaks the collectives of its peers, and their errors may come first: ``error`` of
    the call with this reference, which is one of those that are pending.
    """
    rest = [other for other in pending if other != reference] if is_broken(error) else []
    end = time.monotonic() + PATIENCE_S
    while rest and (left := end - time.monotonic()) > 0:
        ready, rest = cluster.wait(rest, timeout=left)
        for other in ready:
            try:
                cluster.get([other])
            except Exception as first:
                if is_gone(first):
                    return pending[other], first
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
    disk = of_disk(origin)
    return f"{disk}, and continue with --resume\n" * bool(disk) + shortened(_said(error))


def of_disk(error: BaseException) -> str:
    """Return a line on a disk that is full or can't be written, if an error says that; else nothing."""
    codes = [code for code in DISK if f"[Errno {code}]" in str(error) or os.strerror(code) in str(error)]
    if not codes:
        return ""
    place = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
    what = os.strerror(codes[0]).lower()
    return DISK[codes[0]].format(what + place)


def of_files(error: OSError, folder: Path) -> str:
    """Return what an error with the files of a run directory says, and what to do; else nothing."""
    if law := of_disk(error):
        begun = (folder / "plan.json").exists()
        return f"{folder}: {law}, {'and continue with --resume' if begun else 'or name another --run-dir'}"
    file = Path(os.fsdecode(error.filename or "/"))
    if not file.absolute().is_relative_to(folder.absolute()):
        return ""
    gone = isinstance(error, FileNotFoundError) and not folder.exists()
    remedy = "the run directory is gone" if gone else "make it writable, or name another --run-dir"
    return f"{file}: {str(error.strerror).lower()}\n  {remedy}"


def is_gone(error: Exception) -> bool:
    """Return whether a worker or its host has ended, with the columns there; no op raises such an error."""
    kind = type(cause(error))
    return kind.__module__.startswith("ray.") and kind.__name__ not in RAISED


def is_broken(error: Exception) -> bool:
    """Return whether a collective or the network failed, or what a peer shared can't be read."""
    if isinstance(cause(error), AwayError):
        return True
    return not isinstance(cause(error), RlgraphError) and COLLECTIVES in _said(error)


def cause(error: Exception) -> BaseException:
    """Return the error that was raised inside a worker; the error itself where it comes from elsewhere."""
    inner = getattr(error, "cause", None)
    return inner if isinstance(inner, BaseException) else error


def _said(error: Exception) -> str:
    """Return the error with its traceback; Ray's errors hold that of the worker in their text."""
    text = str(error) if hasattr(error, "cause") else "".join(traceback.format_exception(error))
    return text.strip()
