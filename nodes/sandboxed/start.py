"""Starts a role: ``check``, ``run``, ``serve`` or ``show``.

Standard input and output are a socket to the parent, whose first line is the job. The sandbox is closed
before the role begins, and the parent is sent ``ready``.
"""

import importlib
import json
import os
import site
import sys

from . import confine


def start(role: str) -> None:
    """Run a role, the module and the function in it of that name, on the job that the parent sends."""
    # imported now: this folder is out of sight once the sandbox is closed
    run_role = getattr(importlib.import_module(f".{role}", __package__), role)
    reader = open(os.dup(0), "rb")  # noqa: SIM115  # it stays open to the end
    writer = open(os.dup(1), "wb")  # noqa: SIM115  # likewise
    job = json.loads(reader.readline())
    sys.path += job["path"]
    site.setquit()  # exit() and quit(), which programs use
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    if job["sandboxed"]:
        confine.shut(job)
    confine.limit(job)
    for output in (1, 2):
        os.dup2(null, output)
    writer.write(b"ready\n")
    writer.flush()
    run_role(job, reader, writer)
