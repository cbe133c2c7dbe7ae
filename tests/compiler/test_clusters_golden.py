"""What every shipped graph becomes on four clusters: one plan whole, and of all a line in a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.errors import GraphError
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.ir.plan import Plan, Target
from rlgraph.printing.step_text import sentence
from rlgraph.units import range_text, size_text
from share import FAMILIES

CLUSTERS = ("cpu", "h100-8", "h200-8", "h100-1024")
WHOLE = "grpo"
COLUMNS = (
    "graph",
    "cluster",
    "steps",
    "inserted",
    "away between iterations",
    "peak of a device",
    "an iteration",
)


def large(name: str) -> list[str]:
    """Models of 14B, so that memory matters."""
    found = []
    for model, plan in compile_graph(name).models.items():
        found.append(f"models.{model}.path=Qwen/Qwen2.5-14B")
        found += [f"models.{model}.train.dtype=bfloat16"] if plan.train else []
        found += [f"models.{model}.train.recompute=true"] if plan.train else []
        found += [f"models.{model}.serve.dtype=bfloat16"] if plan.serve else []
    return found


def planned(name: str, cluster: str) -> Plan:
    plan = compile_graph(name, large(name), target=Target(cluster))
    assert all(step.because for step in plan.steps if step.inserted)
    assert plan.peak and plan.predicted
    return plan


def text_of(name: str, cluster: str) -> str:
    """Return every step of a graph's plan, why it was inserted, and what the plan takes."""
    try:
        plan = planned(name, cluster)
    except GraphError as error:
        return str(error)
    lines = [f"{engine}: {', '.join(parts)} away between iterations" for engine, parts in plan.away.items()]
    for step in plan.steps:
        lead = f", {step.lead} ahead" if step.lead else ""
        lines.append(f"{'+' if step.inserted else ' '} {step.id:>2}. {sentence(step)}{lead}")
        if step.inserted:
            lines.append(f"        because {step.because}")
    assert plan.predicted
    lines += [f"peak of {line}" for line in peaks(plan)]
    return "\n".join([*lines, f"an iteration: {range_text(plan.predicted.seconds)}"])


def peaks(plan: Plan) -> list[str]:
    """Return the most that a device of each pool holds, and in which step."""
    return [
        f"{pool}: {size_text(peak.bytes)} of {size_text(peak.capacity)} in `{peak.step}`"
        for pool, peak in (plan.peak or {}).items()
    ]


def row(name: str, cluster: str) -> tuple[str, ...]:
    """Return a plan as a line of the table."""
    try:
        plan = planned(name, cluster)
    except GraphError as error:
        refused = error.problems[0].law.partition(", of which ")[0]
        return (name, cluster, "-", "-", "-", refused.partition(": ")[2] or refused, "-")
    inserted = Counter(step.kind.value for step in plan.steps if step.inserted)
    away = [f"{engine} {'+'.join(parts)}" for engine, parts in plan.away.items()]
    assert plan.predicted
    return (
        name,
        cluster,
        str(len(plan.steps)),
        ", ".join(f"{count} {kind}" for kind, count in sorted(inserted.items())) or "none",
        ", ".join(away) or "nothing",
        "; ".join(peaks(plan)),
        range_text(plan.predicted.seconds),
    )


def table(names: Iterable[str]) -> str:
    """Return a line per graph and cluster, below one with the names of the columns."""
    rows = [COLUMNS, *(row(name, cluster) for name in names for cluster in CLUSTERS)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (" | ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows)
    return "\n".join(lines) + "\n"


def test_one_graph_with_every_step_and_its_reason(golden: Callable[[str, str], None]) -> None:
    parts = [
        f"== {cluster}, {load_cluster(cluster).total} devices\n{text_of(WHOLE, cluster)}\n"
        for cluster in CLUSTERS
    ]
    golden(f"clusters/{WHOLE}.txt", "\n".join(parts))


@pytest.mark.slow
def test_the_families(golden: Callable[[str, str], None]) -> None:
    golden("clusters/families.txt", table(FAMILIES))


@pytest.mark.nightly
def test_the_other_graphs(golden: Callable[[str, str], None]) -> None:
    golden("clusters/others.txt", table(name for name in shipped_graphs() if name not in FAMILIES))
