"""The program of a sandbox (``nodes/support/sandbox.py``): ``python -I -S nodes/sandboxed ROLE``.

It is the standard library alone, run as a folder, without the package. Its standard input and output are a
socket to the parent, whose first line is the job; ``confine.shut`` closes the sandbox before the role begins,
and the parent is told so.
"""

import json
import os
import site
import sys

import confine

role = getattr(__import__(sys.argv[1]), sys.argv[1])
sys.path.pop(0)  # this folder, which is out of sight from here on
reader, writer = open(os.dup(0), "rb"), open(os.dup(1), "wb")  # noqa: SIM115  # they stay open to the end
job = json.loads(reader.readline())
sys.path += job["path"]
site.setquit()  # type: ignore[attr-defined]  # exit() and quit(), which programs use
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0)
if job["sandboxed"]:
    confine.shut(job)
confine.limit(job)
for output in (1, 2):
    os.dup2(null, output)
del null, output
writer.write(b"ready\n")
writer.flush()
role(job, reader, writer)
