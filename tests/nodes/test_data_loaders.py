"""Every data source names what loads all of its data, so that `check --files` looks at it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from rlgraph.nodes import OPS
from rlgraph.nodes.support.record_file import RecordError
from rlgraph.ops.registry import load

SOURCES = [name for name in OPS if load(OPS[name], name).source]


def test_there_are_sources() -> None:
    assert {"data.prompts", "data.examples", "data.pairs", "data.recorded"} <= {*SOURCES}


@pytest.mark.parametrize("name", SOURCES)
def test_each_source_has_a_loader_that_takes_its_attributes(name: str) -> None:
    op = load(OPS[name], name)
    loader = op.declared.load
    assert loader is not None, f"{name} has no load= in its @op: `check --files` would not look at its data"
    not_loading = {"shuffle", "weights", op.declared.roles.get("rows")}
    attributes = dict.fromkeys(op.attributes.model_fields.keys() - not_loading - op.hooks.keys())
    columns = ["tokenizer"] if "tokenizer" in op.handles.values() else []
    inspect.signature(loader).bind(*columns, **attributes)


def test_a_run_without_records_is_found_by_the_loader(tmp_path: Path) -> None:
    loader = load(OPS["data.recorded"], "data.recorded").declared.load
    assert loader is not None
    with pytest.raises(RecordError, match="has recorded no columns"):
        loader(run=str(tmp_path), columns=None, temperature=1.0)
