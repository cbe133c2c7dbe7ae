"""The role ``show``: a program whose output the parent reads, for the tool python."""

import io
import os
import sys
from typing import Any, BinaryIO

from .main import run_main


def show(job: dict[str, Any], _reader: BinaryIO, writer: BinaryIO) -> None:
    """Run a program; what it prints and its traceback go to the parent in their order."""
    for output in (1, 2):
        os.dup2(writer.fileno(), output)
    if isinstance(sys.stdout, io.TextIOWrapper):  # as it is when Python starts
        # line by line, so that it comes in order with stderr, and is seen if the program is killed
        sys.stdout.reconfigure(line_buffering=True)
    try:
        run_main(job["program"], "program.py")
    except Exception as error:
        frames_of_program = error.__traceback__
        for _ in (show, run_main):
            if frames_of_program is not None:
                frames_of_program = frames_of_program.tb_next
        sys.__excepthook__(type(error), error.with_traceback(frames_of_program), frames_of_program)
