"""Samples files and environment.json: what the model wrote, what was computed of each token, and by what."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlgraph.runtime.columns.chunk import Chunk, gather
from rlgraph.runtime.messages.tasks import Excerpt
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.rundir.kept_columns import ROWS
from rlgraph.runtime.rundir.progress import sample_text
from rlgraph.runtime.worker.sample_file import MAX_TOKENS, write_samples
from rlgraph.version import VERSION

HERE = Path(__file__).parent
ONES = str(HERE / "ones.yaml")
NUMBERS = ("loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")
FILTERED = f"""graph: filtered
extends: {ONES}
edits:
  - add: {{informative: {{op: filter.mixed, min_std: 0.03}}}}
  - set: {{advantages.rows: informative, ref_logprobs.rows: informative}}
  - set: {{schedule.save_every: 1, prompts.batch: 12, rewards.per: 16}}
"""
pytestmark = pytest.mark.usefixtures("in_demo")


def samples(run_dir: str, file: str = "step-000001.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run_dir, "samples", file).read_text().splitlines()]


@pytest.mark.slow
def test_every_token_comes_with_its_numbers_whichever_devices_they_lie_on(
    run_on_devices: Callable[..., str],
) -> None:
    Path("filtered.yaml").write_text(FILTERED)
    run_graph("filtered.yaml", (), 1, steps=1, inline=True, run_dir=Path("one"))
    run_on_devices("filtered.yaml", "--steps", "1", "--devices", "2", "--run-dir", "two")
    one, two = samples("one"), samples("two")
    assert len(one) == len(two) == ROWS
    for line in one:
        assert "".join(line["pieces"]) == line["tokens"]
        known = [line[name] for name in NUMBERS if line[name] is not None]
        assert {len(values) for values in known} == {len(line["pieces"])}
        wrote = "".join(p for p, mine in zip(line["pieces"], line["loss_mask"], strict=True) if mine)
        assert re.sub(r"<[a-z|]+>", "", wrote) == line["responses"]
        assert type(line["truncated"]) is bool and type(line["group"]) is int
        assert all(
            value == 0
            for value, mine in zip(line["rollout_logprobs"], line["loss_mask"], strict=True)
            if not mine
        )
    dropped = [line["advantages"] is None for line in one]
    assert any(dropped) and not all(dropped), (
        "a row that a filter dropped has none, and the others keep theirs"
    )
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys() and a["tokens"] == b["tokens"]
        for name in NUMBERS:
            assert (a[name] is None) == (b[name] is None)
            assert a[name] == pytest.approx(b[name], abs=2e-3)
    evaluated = samples("one", "step-000001-eval.jsonl")[0]
    assert len(evaluated["rollout_logprobs"]) == len(evaluated["pieces"])
    assert "old_logprobs" not in evaluated, "an evaluation computes none"


BY_SOURCE = """
import torch

from rlgraph.ops import boolean, float32, op, prompts, samples, text


@op(filters=True)
def of_a(source: text[prompts]) -> boolean[prompts]:
    return torch.tensor([name == "a" for name in source])


@op()
def is_a(source: text[samples], responses: text[samples]) -> float32[samples]:
    return torch.tensor([float(name == "a") for name in source])
"""


def test_a_filter_that_reads_prompts_alone_selects_what_a_rollout_answers() -> None:
    Path("by_source.py").write_text(BY_SOURCE)
    train = "${env:RLGRAPH_TEST_FILES}/train.parquet"
    Path("filtered.yaml").write_text(f"""graph: filtered
extends: {ONES}
edits:
  - add: {{only_a: {{op: "by_source.py:of_a"}}}}
  - replace: {{rewards: {{op: "by_source.py:is_a"}}}}
  - set: {{prompts.files: {{a: ["{train}"], b: ["{train}"]}}, prompts.batch: 8, schedule.save_every: 1}}
""")
    run_graph("filtered.yaml", (), 1, steps=1, inline=True, run_dir=Path("all"))
    run_graph("filtered.yaml", ["rollout.rows=only_a"], 1, steps=1, inline=True, run_dir=Path("a"))
    every, of_a = ([line["rewards"] for line in samples(folder)] for folder in ("all", "a"))
    assert 0 < sum(every) < len(every) == 32
    assert of_a == [1.0] * int(sum(every))


class Letters:
    """A tokenizer of letters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_long_rows_come_without_their_tokens_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    lengths = np.array([MAX_TOKENS + 1, 2, 3])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = Chunk(np.full(offsets[-1], ord("a")), offsets)
    values = Chunk(np.full(offsets[-1], np.nan, np.float32), offsets)
    # rows of two parts, the second of which has the file's first line
    columns = [Excerpt(name, np.array([1, 0]), 2) for name in ("tokens", "old_logprobs")]
    path = tmp_path / "samples.jsonl"
    parts = [gather([part], [row]) for part in (ids, values) for row in (0, 2)]
    write_samples(str(path), Letters(), columns, parts)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {"tokens": "aaa", "pieces": ["a", "a", "a"], "old_logprobs": [None] * 3}
    assert second == {"tokens": "a" * (MAX_TOKENS + 1)}


@pytest.mark.parametrize(
    ("tokens", "mask", "prompt", "completion", "printed"),
    [
        ("95+25=#_", "fffffftt", "95+25=", "#_", '"95+25=" -> "#_"'),  # special tokens alone
        ("ask:call=5.done", "fffftttt" + "fff" + "tttt", "ask:", "call=5.done", '"ask:" -> "call=5.done"'),
        ("asks", "ffff", "asks", "", '"asks" -> ""'),
    ],
    ids=["special tokens", "a tool between", "nothing written"],
)
def test_prompt_and_completion_are_cut_where_the_policy_began(
    tmp_path: Path, tokens: str, mask: str, prompt: str, completion: str, printed: str
) -> None:
    offsets = np.array([0, len(tokens)])
    ids = Chunk(np.array([ord(letter) for letter in tokens]), offsets)
    wrote = Chunk(np.array([letter == "t" for letter in mask]), offsets)
    # the text of responses has no special tokens, and only the last turn of a conversation
    columns = [Excerpt(name, np.array([0]), 1) for name in ("tokens", "responses", "loss_mask")]
    (row,) = write_samples(str(tmp_path / "samples.jsonl"), Letters(), columns, [ids, Chunk([""]), wrote])
    assert (row["prompt"], row["completion"]) == (prompt, completion)
    assert sample_text(row) == printed
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert "prompt" not in json.loads(line), "the file has the tokens one by one"


OF_NO_MODEL = """
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import int64, op, prompts, samples, text, tokens

@op(makes="prompts", rows="all")
def numbers() -> int64[prompts]:
    import torch
    return torch.tensor([5, 6])

@op(makes="samples")
def rows(numbers: int64[prompts]) -> int64[samples, tokens]:
    return Ragged.of([[int(n), 7] for n in numbers])

@op()
def responses(tokens: int64[samples, tokens]) -> text[samples]:
    return [str(length) for length in tokens.lengths.tolist()]
"""


def test_tokens_of_a_graph_without_a_model_are_written_as_their_ids() -> None:
    Path("of_no_model.py").write_text(OF_NO_MODEL)
    nodes = {name: {"op": f"of_no_model.py:{name}"} for name in ("numbers", "responses")}
    nodes["tokens"] = {"op": "of_no_model.py:rows"}
    graph = {"graph": "of_no_model", "nodes": nodes, "schedule": {"iterations": 1, "save_every": 1}}
    Path("of_no_model.yaml").write_text(json.dumps(graph))
    run_graph("of_no_model.yaml", (), 1, inline=True, run_dir=Path("a"))
    lines = samples("a")
    assert [line["tokens"] for line in lines] == ["5 7", "6 7"]
    assert [line["pieces"] for line in lines] == [["5", "7"], ["6", "7"]]


def test_a_run_says_what_it_was_made_with_and_no_secret() -> None:
    os.environ["RLGRAPH_TEST_SECRET"] = "hunter2"
    run_graph(ONES, (), 1, steps=0, inline=True, run_dir=Path("a"))
    run_graph(ONES, (), 1, steps=1, inline=True, run_dir=Path("a"), resume=True)
    text = Path("a/environment.json").read_text()
    found = json.loads(text)
    assert found["rlgraph"] == VERSION
    assert {"torch", "transformers", "numpy"} <= found["packages"].keys()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["command"][1:] == sys.argv[1:]
    (device,) = found["devices"]
    assert (device["pool"], device["device"], device["name"]) == ("main", 0, "cpu")
    assert [earlier["devices"] for earlier in found["before"]] == [found["devices"]]
    assert "hunter2" not in text
