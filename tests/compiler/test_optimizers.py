"""The records of optimizers: each is true of what it names, and no other file compares their names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.optimizers import STEP_COSTS, averages_on_device, may_step_on_host
from rlgraph.costs.plan_size import planned_size
from rlgraph.engines.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerKind
from rlgraph.errors import GraphError
from rlgraph.syntax.model_settings import Optimizer, Train

ROOT = Path(__file__).parents[2]
RECORDS = {  # the record, its cost, and what makes it in the train engine
    "rlgraph/engines/optimizers.py",
    "rlgraph/costs/optimizers.py",
    "runtime/engines/fsdp/optimizer.py",
}
MODEL = "models.policy.path=Qwen/Qwen3-8B"
GIVEN = {"lora": "{rank: 8}", "optimizer_offload": "true", "tensor_parallel": "2"}


def compared(path: Path) -> set[str]:
    """The names of optimizers, but for the default, that a file compares with something or looks up."""
    names = {*OPTIMIZERS} - {DEFAULT_OPTIMIZER}
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare | ast.Subscript | ast.Dict):
            found |= {c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and c.value in names}
    return found


def test_no_other_file_compares_an_optimizers_name() -> None:
    paths = [path for folder in ("rlgraph", "runtime", "nodes") for path in (ROOT / folder).rglob("*.py")]
    product = {
        str(path.relative_to(ROOT)) for path in paths if "importing" not in path.parts and compared(path)
    }
    assert product == RECORDS, "importers compare words of other systems"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_record_names_settings_that_there_are(kind: str) -> None:
    record = OPTIMIZERS[kind]
    assert {*record.settings} <= Optimizer.model_fields.keys()
    assert record.excludes.keys() <= Train.model_fields.keys()
    assert record.may_be_on_host == ("optimizer_offload" not in record.excludes)
    assert record.orthogonalises == (kind in STEP_COSTS)
    assert (
        record.orthogonalises
        or record.averages_per_matrix_weight == OptimizerKind("").averages_per_matrix_weight
    )


@pytest.mark.parametrize(
    ("kind", "key"), [(k, key) for k, record in OPTIMIZERS.items() for key in record.excludes]
)
def test_what_it_excludes_is_refused(kind: str, key: str) -> None:
    settings = [MODEL, f"models.policy.optimizer.kind={kind}", f"models.policy.train.{key}={GIVEN[key]}"]
    with pytest.raises(
        GraphError, match=f"`models.policy.optimizer` is {kind}, whose .*`models.policy.train.{key}`"
    ):
        compile_graph("grpo", settings, 8)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_averages_are_counted_by_the_record(kind: str) -> None:
    plan = compile_graph("grpo", [MODEL, f"models.policy.optimizer.kind={kind}"], 8)
    size, model = planned_size(plan.models["policy"]), plan.models["policy"]
    assert size
    kept = averages_on_device(size, model, 1)
    weights = size.parameters
    assert OPTIMIZERS[kind].averages_per_matrix_weight * weights <= kept <= 2 * weights
    assert may_step_on_host(model) == OPTIMIZERS[kind].may_be_on_host
