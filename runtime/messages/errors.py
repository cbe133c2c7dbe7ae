"""Errors of workers that the driver tells apart: what was lost may be tried again."""

from __future__ import annotations

import pickle
import shlex
import traceback
from pathlib import Path

from rlgraph.errors import RunError, shortened


class AwayError(RunError):
    """A worker, or its memory, can't be reached: it is gone or has stopped."""


class ServerLostError(RunError):
    """A server does not answer any more."""


class RaisedError(RunError):
    """An error as text that only the worker which raised it can hold."""


def portable(error: Exception) -> Exception:
    """Return an error that other processes can read: as it is, or its traceback as text."""
    try:
        str(pickle.loads(pickle.dumps(error)))
    except Exception:  # the author of the error decides what these raise
        return RaisedError(shortened("".join(traceback.format_exception(error)).strip()))
    return error


def resume_command(run_dir: Path) -> str:
    """Return the command that goes on with a run, to be typed as it is.

    Example:
        >>> resume_command(Path("runs/my run"))
        "rlgraph resume 'runs/my run'"
    """
    return f"rlgraph resume {shlex.quote(str(run_dir))}"
