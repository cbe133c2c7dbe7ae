"""``rlgraph doctor``: is this machine fit for training, and what has to be mended?

Probes gather facts (runtime/doctor/probes.py), and checks judge them (runtime/doctor/checks.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from rlgraph.runtime.doctor.checks import CHECKS
from rlgraph.runtime.doctor.gather import gather
from rlgraph.runtime.doctor.probes import ProbeCall, ProbeFacts
from rlgraph.runtime.doctor.verdicts import GUIDE, Line, wrong

# a probe -> what is waited for while it runs, and what to do where it gives no facts
ABOUT = {
    "host": ("the host", "is /dev/shm mounted?"),
    "packages": ("installed packages", f"install them anew: {GUIDE}#install"),
    "gpus": ("nvidia-smi", f"is the driver loaded, and of one version with its tools? {GUIDE}#driver"),
    "torch": ("torch and CUDA", f"does nvidia-smi answer? then install torch anew: {GUIDE}#install"),
    "sglang": ("SGLang's import", f"install it from requirements/: {GUIDE}#install; no GPU: docs/sglang.md"),
    "ray": ("Ray", "is it running there (ray status), in reach of this host, and with its RAY_AUTH_TOKEN?"),
    "disk": ("the file system of", "is it mounted, and its server up?"),
    "model": ("model", "give a Hugging Face model folder, or a name on its hub where that can be reached"),
}


@dataclass(frozen=True)
class Diagnosis:
    """The findings of all checks, by name of the check, and the facts behind them."""

    lines: tuple[tuple[str, Line], ...]
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
            rows += [f"{'':22}-> {line.remedy}"] if line.remedy else []
        levels = [line.level for _, line in self.lines]
        counts = ", ".join(f"{levels.count(level)} {level}" for level in ("ok", "warn", "wrong"))
        return "\n".join([*rows, counts]) + "\n"

    def data(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        lines = [{"check": name, **asdict(line)} for name, line in self.lines]
        return {"fit": self.fit, "lines": lines, "facts": self.facts}


def judge(facts: Mapping[str, Sequence[ProbeFacts]]) -> Diagnosis:
    """Judge what probes answered. A check is left out where a probe that it needs gave no facts."""
    lines = [
        (probe, _unanswered(answer, *ABOUT[probe]))
        for probe, answers in facts.items()
        for answer in answers
        if "failed" in answer
    ]
    for name, (needs, check) in CHECKS.items():
        for answers in product(*(facts.get(probe, ()) for probe in needs)):
            if not any("failed" in answer for answer in answers):
                lines += [(name, line) for line in check(*answers)]
    return Diagnosis(tuple(lines), facts)


def examine(models: Sequence[str], run_dir: str, address: str | None, timeout: float) -> Diagnosis:
    """Gather the facts of this machine, and judge them.

    Args:
        models: folders or names of models to look at.
        run_dir: where runs are kept.
        address: of a Ray cluster, or nothing.
        timeout: seconds that all probes together may take.
    """
    asked: list[ProbeCall] = [(name, None) for name in ("host", "packages", "gpus", "torch", "sglang")]
    asked += [("ray", address), ("disk", run_dir), *(("model", path) for path in models)]
    return judge(gather(asked, timeout))


def _unanswered(answer: ProbeFacts, what: str, remedy: str) -> Line:
    subject = f"{what} {answer['argument']}" if answer["argument"] else what
    return wrong(f"{subject}: {answer['failed']}", remedy)
