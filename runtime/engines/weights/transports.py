"""The transports of weights by the path that a plan names, and whether its paths can be carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlgraph.engines.registry import serving
from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan, ServePlan, Step
from rlgraph.runtime.engines.weights.broadcast import Broadcast
from rlgraph.runtime.engines.weights.disk import Disk
from rlgraph.runtime.engines.weights.memory import Handover
from rlgraph.runtime.engines.weights.transfer import Peers, Transport

# an engine that maps what it is given into its server gets it within the process too
HANDED = ("memory", "ipc")
TRANSPORTS: dict[str, Callable[[Peers, str], Transport]] = {
    "memory": lambda peers, folder: Handover(),
    "ipc": lambda peers, folder: Handover(),
    "broadcast": lambda peers, folder: Broadcast(peers),
    "disk": Disk,
}


def syncs(plan: Plan, one_process: bool) -> Mapping[str, Step]:
    """Return a sync of each model that has one: all of a model go one way.

    Args:
        plan: what will run.
        one_process: whether all pools share this process.

    Raises:
        RunError: a path that can't be carried out.
    """
    found: dict[str, Step] = {}
    for step in (*plan.steps, *plan.eval_steps):
        if step.facts.syncs:
            (model,) = step.models
            serve = plan.models[model].serve
            assert serve
            afar = bool((step.source and not one_process) or serve.addresses)
            if problem := _problem(step, found.get(model), serve, afar):
                law = f"{step.node} of the plan sends the weights of {model} by `{step.path}`, but {problem}"
                raise RunError(f"{law}\n  make the plan anew: rlgraph plan GRAPH -o plan.json")
            found[model] = step
    return found


def _problem(step: Step, before: Step | None, serve: ServePlan, afar: bool) -> str:
    """Why a sync's path can't be carried out; nothing where it can."""
    inside = step.path in HANDED
    if step.path not in TRANSPORTS or step.path not in serving(serve).paths:
        return f"the engine {serve.engine} takes {' or '.join(serving(serve).paths)}"
    if before and before.path != step.path:
        return f"{before.node} sends them by `{before.path}`"
    if inside and afar:
        return "its two engines are not in one process"
    if not inside and not afar:
        return "its two engines are in one process"
    if step.path == "disk" and not serve.sync_folder:
        return f"models.{next(iter(step.models))}.serve.sync_folder names no folder"
    return ""
