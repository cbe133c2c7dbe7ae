"""The child of ``nodes/support/sandbox.py``: limits itself, then runs a program, and its test if any.

    stdin   {"program": ..., "seconds": ..., "memory": bytes, "file": bytes}, and "test" and "token"
    stdout  with a test, the token, once both have run to their end; else what the program prints

The token is a secret of this run: a program that exits with status 0 before its test has not passed it. It
runs as a file, without importing the package.
"""

import json
import os
import resource
import sys
import traceback


def limit(seconds: int, memory: int, file: int) -> None:
    """Bound CPU time, address space and the size and number of files; no core is dumped."""
    bounds = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: file,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))


def run() -> None:
    """Run what stdin says; what a program with a test prints goes nowhere."""
    job = json.load(sys.stdin)
    output = os.dup(1)
    if "test" in job:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # in order with stderr; seen if killed
    limit(job["seconds"], job["memory"], job["file"])
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        exec(compile(job["program"], "program.py", "exec"), names)
        if "test" in job:
            exec(compile(job["test"], "test.py", "exec"), names)
            os.write(output, job["token"].encode())
    except Exception as error:
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


if __name__ == "__main__":
    run()
