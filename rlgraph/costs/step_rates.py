"""The calibrated rate that prices a step."""

from typing import Literal, assert_never

from rlgraph.ir.actions import Collect, Merge, MoveEngine, Repartition, Repeat, RunOp, Select, Sync
from rlgraph.ir.plan import Step

StepRate = Literal["generate", "score", "update", "sync", "move", "repartition", "host"]

# Kinds of work whose ranges hold what several others measured on GPUs (`alone` in benchmarks/published.yaml);
# ranges of the other kinds are assumed.
PUBLISHED: tuple[StepRate, ...] = ("generate", "update")


def rate_of(step: Step) -> StepRate:
    """Return the rate that prices a step, a field of ``Calibration``."""
    match step.action:
        case RunOp():
            return _rate_of_run(step.action)
        case Sync():
            return "sync"
        case MoveEngine():
            return "move"
        case Merge() | Repartition():
            return "repartition"
        case Repeat() | Select() | Collect():
            return "host"
        case _:
            assert_never(step.action)


def _rate_of_run(run: RunOp) -> StepRate:
    if run.copied:
        return "sync"
    if run.joins:
        return "host"  # the step that it joins takes the time
    if run.updates:
        return "update"
    if run.engine == "train":
        return "score"
    return "generate" if run.engine == "serve" else "host"
