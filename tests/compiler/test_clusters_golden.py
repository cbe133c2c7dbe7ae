"""What every shipped graph becomes on four clusters: the steps, what is inserted and why, memory and time."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import unified_diff

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Target
from rlgraph.printing.plan_text import sentence
from rlgraph.units import range_text, size_text
from share import FAMILIES, edits_of

CLUSTERS = ("cpu", "h100-8", "h200-8", "h100-1024")


def large(name: str) -> list[str]:
    """Models of 14B, so that memory matters."""
    found = []
    for model, plan in compile_graph(name).models.items():
        found.append(f"models.{model}.path=Qwen/Qwen2.5-14B")
        found += [f"models.{model}.train.dtype=bfloat16"] if plan.train else []
        found += [f"models.{model}.train.recompute=true"] if plan.train else []
        found += [f"models.{model}.serve.dtype=bfloat16"] if plan.serve else []
    return found


def said(name: str, cluster: str) -> str:
    try:
        plan = compile_graph(name, large(name), target=Target(cluster))
    except GraphError as error:
        return str(error)
    return "\n".join(lines(plan))


def lines(plan: Plan) -> list[str]:
    found = [f"{engine}: {', '.join(parts)} away between iterations" for engine, parts in plan.away.items()]
    for step in plan.steps:
        lead = f", {step.lead} ahead" if step.lead else ""
        found.append(f"{'+' if step.inserted else ' '} {step.id:>2}. {sentence(step)}{lead}")
        if step.inserted:
            found.append(f"        because {step.because}")
    assert plan.peak and plan.predicted
    for pool, peak in plan.peak.items():
        found.append(
            f"peak of {pool}: {size_text(peak.bytes)} of {size_text(peak.capacity)} in `{peak.step}`"
        )
    return [*found, f"an iteration: {range_text(plan.predicted.seconds)}"]


def on_each(name: str) -> str:
    """A graph's plans on all clusters, in which every inserted step says why."""
    parts = []
    for cluster in CLUSTERS:
        text = said(name, cluster)
        assert "because \n" not in text
        assert text.count("because ") == sum(line.startswith("+") for line in text.splitlines())
        parts.append(f"== {cluster}, {load_cluster(cluster).total} devices\n{text}\n")
    return "\n".join(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_of_a_family(family: str, golden: Callable[[str, str], None]) -> None:
    golden(f"clusters/{family}.txt", on_each(family))


@pytest.mark.nightly
@pytest.mark.parametrize("family", [family for family in FAMILIES if edits_of(family)])
def test_plans_of_its_edits(family: str, golden: Callable[[str, str], None]) -> None:
    """The lines of the other shipped graphs' texts that differ from the family's, but for steps' numbers."""
    own, found = unnumbered(on_each(family)), []
    for name in edits_of(family):
        text = on_each(name).replace(f"{name} does not fit", f"{family} does not fit")
        lines = unified_diff(own, unnumbered(text), family, name, n=0, lineterm="")
        found += [line for line in lines if not line.startswith(("---", "@@"))]
    golden(f"clusters/{family}-edits.txt", "\n".join(found) + "\n")


def unnumbered(text: str) -> list[str]:
    """The lines of a plan's text, which are then the same wherever a step stands."""
    return [re.sub(r"^(.) +\d+\. ", r"\1 ", line) for line in text.splitlines()]
