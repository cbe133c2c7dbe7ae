"""The role ``show``: a program whose output the parent reads, for the tool python."""

import os
import sys

from main import run_main


def show(job, _reader, writer):  # type: ignore[no-untyped-def]
    """Run a program; what it prints and its traceback go to the parent in their order."""
    for output in (1, 2):
        os.dup2(writer.fileno(), output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # in order with stderr; seen if killed
    try:
        run_main(job["program"], "program.py")
    except Exception as error:
        own = error.__traceback__.tb_next.tb_next  # without what is here and in run_main
        sys.__excepthook__(type(error), error.with_traceback(own), own)
