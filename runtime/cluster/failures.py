"""Failures: a worker that is gone, or an op that raised. Only a run that lost a worker is tried again."""

import os
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlgraph.errors import RlgraphError, RunError, shortened
from rlgraph.files import of_disk, unusable_file
from rlgraph.runtime.cluster.interface import WorkerCluster
from rlgraph.runtime.messages.errors import AwayError, RaisedError, ServerLostError, resume_command
from rlgraph.runtime.messages.tasks import Place, place_text
from rlgraph.variables import hidden

PATIENCE_S = 40.0  # Ray reports the workers of a lost host after some 30 s
RAISED = ("RayError", "UnserializableException")  # in place of errors that Ray can't bring here
DETAILS = "failure.txt"  # the file of a run directory
FRAMES = 3  # lines of the user's code that a message shows
FRAME = re.compile(
    r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in .*(?:\n(?P<code>(?! *File ").*)(?:\n[ ~^]+$)?)?',
    re.MULTILINE,
)
COLLECTIVES = "torch/distributed/distributed_c10d.py"  # every collective of torch passes through this file


class FailedError(RunError):
    """A run failed on its workers.

    Attributes:
        details: the plan with a mark where it failed, and the whole traceback.
        notice: what is said below the message: where the details are, or the details, shortened.
    """

    def __init__(self, message: str, details: str = "", is_of_disk: bool = False) -> None:
        super().__init__(message)
        self.details = hidden(details)
        self.notice = shortened(self.details)
        self.is_of_disk = is_of_disk

    def __str__(self) -> str:
        return "\n".join(text for text in (super().__str__(), self.notice) if text)

    def keep_details(self, run_dir: Path) -> None:
        """Write the details to a file of the run, which the message names from then on."""
        if not self.details:
            return
        path = run_dir / DETAILS
        lines = []
        if self.is_of_disk:
            lines.append(f"  then continue with: {resume_command(run_dir)}")
        try:
            path.write_text(f"{self.details}\n", encoding="utf-8")
        except OSError:  # of a disk that is full there is enough to say
            pass
        else:
            lines.append(f"  the whole traceback, and the plan with a mark where it failed: {path}")
        self.notice = "\n".join(lines)


class StepError(FailedError):
    """A step failed, or an action between two steps."""


class LostError(FailedError):
    """A worker, host, server or network is gone; ``brief`` is the message without its details."""

    def __init__(self, message: str, brief: str, details: str = "") -> None:
        super().__init__(message, details)
        self.brief = hidden(brief)


def failure(plan: str, law: str, error: Exception) -> FailedError:
    """Return the error of a step, or of an action between two steps.

    Its message has the lines of the user's code and the error's own words first, then ``law``, which says
    what failed. ``plan`` is the plan's text with a mark where it failed.
    """
    details = f"{plan}\n\n{law}\n{_with_traceback(error)}"
    is_lost = is_gone(error) or is_broken(error) or isinstance(cause(error), ServerLostError)
    if is_lost:
        brief = f"{law}\n  {words(error)}"
        return LostError(brief, brief, details)
    return StepError(f"{words(error)}\n  {law}", details, bool(of_disk(cause(error))))


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


def words(error: Exception) -> str:
    """Return the last lines of the user's code that led to an error, and the error without its traceback."""
    origin = cause(error)
    has_own_words = isinstance(origin, RlgraphError) and not isinstance(origin, RaisedError)
    if has_own_words or is_gone(error):
        return reason(error)
    text = str(origin) if isinstance(origin, RaisedError) else _with_traceback(error)
    frames = list(FRAME.finditer(text))
    if isinstance(origin, RaisedError) and frames:
        message = text[frames[-1].end() :].strip()
    else:
        message = "".join(traceback.format_exception_only(origin)).strip()
    disk_problem = of_disk(origin)
    if disk_problem:
        message = f"{disk_problem}\n{message}"
    shown = [frame for frame in frames if _is_of_user(frame["file"])] or frames
    lines: list[str] = []
    for frame in shown[-FRAMES:]:
        line = f"{_seen_from_here(frame['file'])}:{frame['line']}: {(frame['code'] or '').strip()}"
        if lines[-1:] != [line]:  # a comprehension has a frame of its own before Python 3.12
            lines.append(line)
    return "\n".join([*lines, shortened(message)])


def _is_of_user(file: str) -> bool:
    """Return whether a file is neither rlgraph's, nor Python's, nor that of an installed package."""
    path = os.path.realpath(file)
    if file.startswith("<"):
        return False
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for package in sys.modules["rlgraph"].__path__:
        installed += [package, os.path.join(package, "nodes"), os.path.join(package, "runtime")]
    return not any(Path(path).is_relative_to(os.path.realpath(folder)) for folder in installed)


def _seen_from_here(file: str) -> str:
    """Return a file's path, relative to the working folder if it lies in there."""
    folder = os.getcwd()
    return os.path.relpath(file, folder) if Path(file).is_relative_to(folder) else file


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
    return shortened(_with_traceback(error))


def of_files(error: OSError, folder: Path) -> str:
    """Return the text of an error with a file of the run directory, and its remedy; "" for other errors."""
    disk_problem = of_disk(error)
    if disk_problem:
        has_started = (folder / "plan.json").exists()
        remedy = "or name another --run-dir"
        if has_started:
            remedy = f"then continue with: {resume_command(folder)}"
        return f"{folder}: {disk_problem}\n  {remedy}"
    file = Path(os.fsdecode(error.filename or "/"))
    if not file.absolute().is_relative_to(folder.absolute()):
        return ""
    if isinstance(error, NotADirectoryError | FileExistsError):
        return unusable_file(error)
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
