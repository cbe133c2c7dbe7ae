"""The role ``run``: a program that reads standard input and prints, once for each input that it is sent."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, BinaryIO

from .harness import RECURSION, harness_names
from .main import run_main


def _file() -> int:
    """Return the number of an empty file without a name."""
    file = os.open(".rlgraph", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.unlink(".rlgraph")
    return file


def run(job: dict[str, Any], reader: BinaryIO, writer: BinaryIO) -> None:
    """Answer each request (``wire.py``), whose argument is the input, with what the program prints.

    The program runs as a process of its own, which goes on from here as if it had been started for it.
    """
    names = harness_names(job["program"])
    sys.setrecursionlimit(RECURSION)
    for line in reader:
        nonce, _, (program_input,), _ = json.loads(line)
        given_file, printed_file = _file(), _file()
        with open(given_file, "w", encoding="utf-8", closefd=False) as file:
            file.write(program_input)
        process = os.fork()
        if not process:
            os.lseek(given_file, 0, os.SEEK_SET)
            os.dup2(given_file, 0)
            os.dup2(printed_file, 1)
            run_main(job["program"], "program.py", names)
            return
        status = os.waitpid(process, 0)[1]
        os.lseek(printed_file, 0, os.SEEK_SET)
        with open(given_file), open(printed_file, encoding="utf-8", errors="replace") as file:
            reply = ["error", ["RuntimeError", [f"status {status}"]]] if status else ["value", file.read()]
        writer.write(json.dumps([nonce, *reply, {}]).encode() + b"\n")
        writer.flush()
