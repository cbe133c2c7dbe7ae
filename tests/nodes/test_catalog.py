"""Every op and loss declares itself, and reading the declarations loads nothing heavy."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlgraph.nodes import LOSSES, OPS
from rlgraph.ops.declare import Op
from rlgraph.ops.signature import signature

CATALOG = OPS | LOSSES
ROOT = Path(__file__).parents[2]
PAGES = "".join((ROOT / "docs" / page).read_text() for page in ("metrics.md", "reference.md"))


def declared(name: str) -> Op:
    module, function = CATALOG[name].split(":")
    return signature(name, getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("name", CATALOG)
def test_each_entry_declares_and_documents_itself(name: str) -> None:
    op = declared(name)
    assert op.outputs or op.declared.updates
    assert "Example:" in op.doc
    for attribute in op.attributes.model_fields:
        assert op.docstring().attributes.get(attribute), f"{attribute} is not described"


def recorded_metrics() -> Iterator[tuple[str, str]]:
    """Each literal name that an op records, with its file."""
    for path in sorted((ROOT / "nodes").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ctx.record":
                name = node.args[0]
                if isinstance(name, ast.Constant):
                    yield str(name.value), path.name


@pytest.mark.parametrize(("metric", "file"), sorted({*recorded_metrics()}))
def test_each_metric_is_on_a_page(metric: str, file: str) -> None:
    """A table of docs/metrics.md has it, or its op's docstring says that it records it."""
    in_a_page = re.search(rf"`(NODE/)?{re.escape(metric)}", PAGES)
    assert in_a_page, f"{file} records `{metric}`: add it to docs/metrics.md, or to its op's docstring"


@pytest.mark.parametrize("name", OPS)
def test_each_op_is_decorated(name: str) -> None:
    assert hasattr(declared(name).body, "__op__")


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("rollout", {"max_new_tokens": 0}),
        ("rollout", {"max_new_tokens": 8, "n": 0}),
        ("rollout", {"max_new_tokens": 8, "n": 1.5}),
        ("rollout", {"max_new_tokens": 8, "top_p": 0}),
        ("data.prompts", {"files": [], "batch": 1}),
        ("data.prompts", {"files": ["a"], "batch": "some"}),
        ("data.prompts", {"files": ["a"], "batch": 0}),
        ("reward.kl_penalty", {"kl": "k4"}),
        ("advantage.gae", {"lam": 1.1}),
        ("update.policy", {"loss": {}, "aggregate": "mean"}),
        ("ppo_clip", {"dual_clip": 0.5}),
    ],
)
def test_attributes_out_of_bounds_are_refused(name: str, attributes: dict) -> None:
    with pytest.raises(ValidationError):
        declared(name).attributes(**attributes)


def test_whole_numbers_are_accepted_for_fractions() -> None:
    attributes = declared("rollout").attributes(max_new_tokens=8, temperature=1, top_p=1)
    assert attributes.temperature == 1.0


def test_the_catalog_reads_without_anything_heavy() -> None:
    script = f"""
import importlib, sys
from rlgraph.ops.signature import signature
for name, path in {CATALOG!r}.items():
    module, function = path.split(":")
    signature(name, getattr(importlib.import_module(module), function))
heavy = {{"torch", "transformers", "ray", "pyarrow", "numpy", "math_verify"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_take_the_log_probs_of_now(name: str) -> None:
    assert next(iter(inspect.signature(declared(name).body).parameters)) == "logprobs"
