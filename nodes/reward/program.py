"""The child of reward.code: holds itself to limits, then runs a program and its test, one after the other.

    stdin   {"program": ..., "test": ..., "token": ..., "seconds": ..., "memory": bytes, "file": bytes}
    stdout  the token, once both have run to their end

The token is a secret of this run: a program that exits with status 0 before its test has not passed it. It
runs as a file, without importing the package.
"""

import json
import os
import resource
import sys


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
    """Run what stdin says; what it prints goes nowhere."""
    job = json.load(sys.stdin)
    verdict = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    limit(job["seconds"], job["memory"], job["file"])
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(job["program"], "program.py", "exec"), names)
    exec(compile(job["test"], "test.py", "exec"), names)
    os.write(verdict, job["token"].encode())


if __name__ == "__main__":
    run()
