"""What a step of a plan does beside reading and writing columns, in words."""

from rlgraph.costs.lora_size import served_alone
from rlgraph.ir.plan import Plan, Step


def notes(plan: Plan, step: Step) -> tuple[tuple[str, str], ...]:
    """Return pairs of a word and a text, which is empty where there is nothing to say."""
    return (
        ("sends", _sent_text(plan, step)),
        ("varies", _courses_text(plan, step)),
        ("state", _state_text(plan, step)),
        ("joins", _joins_text(plan, step)),
        ("holds", _held_text(plan, step)),
        ("caches", _cache_text(plan, step)),
    )


def _sent_text(plan: Plan, step: Step) -> str:
    """Return what a sync sends where that is not all weights."""
    alone = step.facts.syncs and any(served_alone(plan.models[name]) for name in step.models)
    return "its adapter alone, which takes the place of the version before" if alone else ""


def _courses_text(plan: Plan, step: Step) -> str:
    """Return the attributes that change over the iterations, as ``kl_coef: 0.1 to 0.0 over 100 ...``."""
    function = plan.functions[step.phase].get(step.node)
    if function is None:
        return ""
    own = [f"{name}: {course}" for name, course in function.courses.items()]
    for path, hook in function.hooks.items():
        own += [f"{path}.{name}: {course}" for name, course in hook.courses.items()]
    return "; ".join(own)


def _state_text(plan: Plan, step: Step) -> str:
    """Return whose state a step has."""
    function = plan.functions[step.phase].get(step.node)
    state = function.state if function else None
    if state == step.node:
        return "its own, kept for the next iteration and in checkpoints"
    return f"that of {state} before the iteration" if state else ""


def _joins_text(plan: Plan, step: Step) -> str:
    """Return the update whose optimizer steps a loss joins, and whether they read its rows for it alone."""
    if not step.joins:
        return ""
    (lead,) = (other for other in plan.phases[step.phase] if other.node == step.joins)
    own = "in a pass of its own" if step in plan.passes(lead) else "in the pass over the same tokens"
    return f"the optimizer steps of {step.joins}, {own}"


def _held_text(plan: Plan, step: Step) -> str:
    """Return which rows a step holds, and how old those are that it gives."""
    function = plan.functions[step.phase].get(step.node)
    if function is None or not function.holds:
        return ""
    made = plan.domain(step.phase, step.writes[0])
    ages = f"those of {made.ages[0]} to {made.ages[1]} iterations before"
    return f"at most {function.value('capacity'):,} rows, and gives {ages}"


def _cache_text(plan: Plan, step: Step) -> str:
    """Return text such as ``262,144 tokens: 128 samples in flight per engine, 2 waves``, for rollouts."""
    if plan.predicted is None or step.phase != "train" or step.node not in plan.predicted.in_flight:
        return ""  # nobody says how many rows an evaluation has
    at_once, waves = plan.predicted.in_flight[step.node]
    serve = plan.models[next(iter(step.models))].serve
    assert serve
    if serve.addresses:
        return ""  # they have the cache that they were started with
    samples = f"{at_once:,} sample{'s' * (at_once != 1)} in flight per engine"
    return f"{serve.cache_tokens:,} tokens: {samples}, {waves:,} wave{'s' * (waves != 1)}"
