"""``rlgraph doctor``: is this machine fit for training, and what has to be mended?

Probes (probes.py), each in a process of its own with a time limit, print facts, and checks (checks.py) judge
them.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from itertools import product
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

from rlgraph.runtime.doctor.checks import CHECKS
from rlgraph.runtime.doctor.probes import GUIDE, ProbeCall, ProbeFacts
from rlgraph.runtime.engines.findings import Finding, wrong

# a probe -> what is waited for while it runs, and what to do where it gives no facts
ABOUT = {
    "host": ("the host", "is /dev/shm mounted?"),
    "packages": ("installed packages", f"install them anew: {GUIDE}#install"),
    "gpus": ("nvidia-smi", f"is the driver loaded, and of one version with its tools? {GUIDE}#driver"),
    "torch": ("torch and CUDA", f"does nvidia-smi answer? then install torch anew: {GUIDE}#install"),
    "host_optimizer": ("an optimizer's step on the host", "is torch installed, and is there memory?"),
    "sglang": ("SGLang's import", f"install it from requirements/: {GUIDE}#install; no GPU: docs/sglang.md"),
    "ray": ("Ray", "is it running there (ray status), in reach of this host, and with its RAY_AUTH_TOKEN?"),
    "disk": ("the file system of", "is it mounted, and its server up?"),
    "model": ("model", "give a Hugging Face model folder, or a name on its hub where that can be reached"),
}


@dataclass(frozen=True)
class Diagnosis:
    """The findings of all checks, by name of the check, and the facts behind them."""

    lines: tuple[tuple[str, Finding], ...]
    facts: Mapping[str, Any]

    @property
    def fit(self) -> bool:
        """Return whether nothing is wrong."""
        return all(line.level != "wrong" for _, line in self.lines)

    def text(self) -> str:
        """Return each line as level, check and text, with the remedy below; a count at the end."""
        rows = []
        for name, line in self.lines:
            rows.append(f"{line.level:<5}  {name:<13}  {line.text}")
            if line.remedy:
                rows.append(f"{'':22}-> {line.remedy}")
        counts = Counter(line.level for _, line in self.lines)
        rows.append(f"{counts['ok']} ok, {counts['warn']} warn, {counts['wrong']} wrong")
        return "\n".join(rows) + "\n"

    def data(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        lines = []
        for name, line in self.lines:
            lines.append({"check": name, "level": line.level, "text": line.text, "remedy": line.remedy})
        return {"fit": self.fit, "lines": lines, "facts": self.facts}


def judge(facts: Mapping[str, Sequence[ProbeFacts]]) -> Diagnosis:
    """Judge what probes answered. A check is left out where a probe that it needs gave no facts."""
    lines = list[tuple[str, Finding]]()
    gathered: dict[str, list[ProbeFacts]] = {}  # without those of probes that failed
    for probe, answers in facts.items():
        gathered[probe] = []
        for answer in answers:
            if "failed" in answer:
                lines.append((probe, _failure(probe, answer)))
            else:
                gathered[probe].append(answer)
    for name, check in CHECKS.items():
        # a check of models and disks looks at each model with each disk
        choices = [gathered.get(probe, []) for probe in signature(check).parameters]
        for arguments in product(*choices):
            lines += [(name, line) for line in check(*arguments)]
    return Diagnosis(tuple(lines), facts)


def _failure(probe: str, answer: ProbeFacts) -> Finding:
    """Return that a probe gave no facts, and why."""
    subject, remedy = ABOUT[probe]
    if answer["argument"]:
        subject += f" {answer['argument']}"
    return wrong(f"{subject}: {answer['failed']}", remedy)


def examine(models: Sequence[Sequence[str]], run_dir: str, address: str | None, timeout: float) -> Diagnosis:
    """Gather the facts of this machine, of models, and of a Ray cluster; judge them.

    ``models`` are the arguments of ``probes.model``. All probes together may take ``timeout`` seconds.
    """
    about_machine = ("host", "packages", "gpus", "torch", "host_optimizer", "sglang")
    calls: list[ProbeCall] = [(name,) for name in about_machine]
    calls.append(("ray", address) if address else ("ray",))
    calls.append(("disk", run_dir))
    calls += [("model", *words) for words in models]
    return judge(gather(calls, timeout))


def gather(calls: Sequence[ProbeCall], timeout: float) -> dict[str, list[ProbeFacts]]:
    """Run probes at the same time, for at most ``timeout`` seconds in all.

    Return for each probe its facts, one per call, in order. Facts of a probe that gave none are
    ``{"failed": reason, "argument": ...}``, with its first argument.
    """
    deadline = time.monotonic() + timeout
    processes = [_start(*call) for call in calls]
    facts: dict[str, list[ProbeFacts]] = {}
    for (name, *arguments), process in zip(calls, processes, strict=True):
        result = answer(process, max(deadline - time.monotonic(), 0.1), timeout)
        if "failed" in result:
            result["argument"] = arguments[0] if arguments else None
        facts.setdefault(name, []).append(result)
    return facts


def _start(*words: str) -> Popen[str]:
    """Start the process of a probe."""
    command = [sys.executable, "-m", "rlgraph.runtime.doctor.probes", *words]
    return Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)


def answer(process: Popen[str], remaining: float, timeout: float) -> ProbeFacts:
    """Return the facts that a probe prints last, or why it prints none in the ``remaining`` seconds."""
    try:
        printed, errors = process.communicate(timeout=remaining)
    except TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutExpired):  # a process that waits for a disk can't be killed
            process.communicate(timeout=1)
        return {"failed": f"no answer within {timeout:g} s"}
    if process.returncode:
        reason = errors.strip() or f"ended with exit code {process.returncode}"
        return {"failed": reason.splitlines()[-1]}
    facts: ProbeFacts = json.loads(printed.splitlines()[-1])
    return facts
