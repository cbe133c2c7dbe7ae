"""What every shipped graph becomes on four clusters: the steps, what is inserted and why, memory and time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlgraph.cluster import load_cluster
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.plan import Plan, Target
from rlgraph.shipped import shipped_graphs
from rlgraph.text import sentence
from rlgraph.units import range_text, size_text

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


@pytest.mark.parametrize("name", shipped_graphs())
def test_plans_of_a_shipped_graph(name: str, golden: Callable[[str, str], None]) -> None:
    parts = [
        f"== {cluster}, {load_cluster(cluster).total} devices\n{said(name, cluster)}\n"
        for cluster in CLUSTERS
    ]
    golden(f"clusters/{name}.txt", "\n".join(parts))


@pytest.mark.parametrize("name", shipped_graphs())
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_inserted_step_says_why(name: str, cluster: str) -> None:
    text = said(name, cluster)
    assert "because \n" not in text
    assert text.count("because ") == sum(line.startswith("+") for line in text.splitlines())
