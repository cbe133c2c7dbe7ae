"""Ops of the graphs of score_by_graph.py: responses that a file has, in place of a rollout."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import boolean, int64, op, prompts, samples, text, tokens
from rlgraph.ops.column_types import File
from rlgraph.ops.column_types import json as json_values


class Rows(NamedTuple):
    response: text[prompts]
    completion_ids: json_values[prompts]
    question: json_values[prompts]


class Spoken(NamedTuple):
    responses: text[samples]
    ids: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]


@op(makes="prompts", rows="all", columns="columns")
def rows(*, file: File, columns: dict[str, Any]) -> Rows:
    """All rows of a file."""
    lines = [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]
    values = {name: [row[name] for row in lines] for name in columns}
    ids = [row.get("completion_ids", [1]) for row in lines]
    questions = [[{"role": "user", "content": "How much?"}] for _ in lines]
    said = [row["response"] for row in lines]
    return SimpleNamespace(**values, response=said, completion_ids=ids, question=questions)  # type: ignore[return-value]


@op(makes="samples")
def spoken(response: text[prompts], completion_ids: json_values[prompts]) -> Spoken:
    """The rows' responses, behind a prompt of one token."""
    ids = Ragged.of([[0, *row] for row in completion_ids], torch.int64)
    mask = Ragged.of([[False, *(True for _ in row)] for row in completion_ids], torch.bool)
    return Spoken(list(response), ids, mask)
