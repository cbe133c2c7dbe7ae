"""Reward functions as verl and TRL call them: by which arguments, and what becomes of what they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recorded import means
from rlgraph.nodes.reward.functions import trl, verl
from rlgraph.nodes.reward.per_sample import Judged, RewardError
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context

TOKENS = Ragged.of([[1, 2, 3], [1, 4], [1]], torch.int64)
MASK = Ragged.of([[False, True, True], [False, True], [False]], torch.bool)
TEXTS = ["7", "8", ""]
VERL = """
def plain(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("gsm8k", {"index": 0}), (data_source, extra_info)
    return solution_str == str(ground_truth)

async def told(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    assert (data_source, extra_info) == ("", {})
    return {"score": len(solution_str) + bonus, "acc": bool(solution_str), "note": "x"}

def of_two(solution_str, ground_truth, strict=False):
    return 2.0 * (solution_str == str(ground_truth)) - 1.0 + strict

def of_all(solution_str, **row):
    return len(row)

def broken(data_source, solution_str, ground_truth, extra_info):
    return None if solution_str else 1 / 0
"""
TRL = """
seen = []

def keeps(**given):
    seen.append(given)
    given["log_metric"]("mine", 2.0)
    return [1.0, None, True]

async def later(prompts, completions, **kwargs):
    return [float(len(c)) for c in completions]

def short(prompts, completions, **kwargs):
    return [1.0]

def bad(prompts, completions, **kwargs):
    return [float("nan")] * len(prompts)
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("v.py").write_text(VERL)
    Path("t.py").write_text(TRL)


def context() -> Context:
    return Context(node="rewards", seed=0, iteration=3)


def by_verl(ctx: Context, name: str, **options: Any) -> Judged:
    return verl(ctx, TEXTS, [7, 9, 9], None, None, function=f"{Path('v.py').resolve()}:{name}", **options)


def by_trl(ctx: Context, name: str, questions: list[Any], **options: Any) -> Judged:
    target = f"{Path('t.py').resolve()}:{name}"
    return trl(ctx, questions, TEXTS, TOKENS, MASK, function=target, **options)


def test_verl_is_called_for_each_sample_by_name() -> None:
    target, rows = f"{Path('v.py').resolve()}:plain", 3
    sources, more = ["gsm8k"] * rows, [{"index": 0}] * rows
    judged = verl(context(), TEXTS, [7, 9, 9], sources, more, function=target)
    assert judged.rewards.tolist() == [1.0, 0.0, 0.0]


def test_a_scorer_gets_what_it_names() -> None:
    assert by_verl(context(), "of_two").rewards.tolist() == [1.0, -1.0, -1.0]
    assert by_verl(context(), "of_two", arguments={"strict": True}).rewards.tolist() == [2.0, 0.0, 0.0]
    assert by_verl(context(), "of_all").rewards.tolist() == [3.0] * 3


def test_of_a_dict_the_score_counts_and_other_numbers_are_metrics() -> None:
    ctx = context()
    judged = by_verl(ctx, "told", arguments={"bonus": 0.5})
    assert judged.rewards.tolist() == [1.5, 1.5, 0.5]
    assert means(ctx)["rewards/acc"] == (2.0, 3)
    assert "rewards/note" not in ctx.metrics


def test_what_fails_in_a_function_of_verl_is_told() -> None:
    with pytest.raises(
        RewardError, match="3 requests for rewards failed; the first, of sample 0: it gave None"
    ):
        by_verl(context(), "broken")
    assert by_verl(context(), "broken", on_error="zero").failed.tolist() == [True] * 3


def test_trl_is_called_with_lists_of_columns() -> None:
    ctx = context()
    judged = by_trl(ctx, "keeps", ["a", "b", "c"], columns=["level"], level=torch.tensor([1, 2, 3]))
    assert judged.rewards.tolist() == [1.0, 0.0, 1.0]
    assert judged.failed.tolist() == [False, True, False]
    from rlgraph.ops.registry import load_function

    (given,) = load_function(f"{Path('t.py').resolve()}:keeps").__globals__["seen"]
    assert (given["prompts"], given["completions"]) == (["a", "b", "c"], TEXTS)
    assert given["completion_ids"] == [[2, 3], [4], []]
    assert (given["level"], given["trainer_state"].global_step) == ([1, 2, 3], 2)
    assert means(ctx)["rewards/mine"] == (2.0, 1)


def test_prompts_of_messages_have_completions_of_messages() -> None:
    messages = [[{"role": "user", "content": text}] for text in "abc"]
    assert by_trl(context(), "later", messages).rewards.tolist() == [1.0, 1.0, 1.0]
    assert by_trl(context(), "later", ["a", "b", "c"]).rewards.tolist() == [1.0, 1.0, 0.0]
    assert by_trl(context(), "later", ["a", "b", "c"], conversational=True).rewards.tolist() == [1.0] * 3


def test_a_function_of_trl_owes_a_number_for_each_sample() -> None:
    with pytest.raises(RewardError, match="owes 3 finite numbers of float32, or None, and gave 1"):
        by_trl(context(), "short", ["a", "b", "c"])
    # in TRL 1.16.0 a NaN is what None becomes: a sample without a score
    assert by_trl(context(), "bad", ["a", "b", "c"]).failed.any()


def test_of_no_samples() -> None:
    nothing, target = Ragged.of([], torch.int64), f"{Path('t.py').resolve()}:later"
    assert trl(context(), [], [], nothing, nothing, function=target).rewards.tolist() == []


def test_a_reward_of_verl_may_be_another_number_of_the_dict() -> None:
    Path("keyed.py").write_text(
        "def both(solution_str, **row): return {'form': 0.5, 'acc': 1.0, 'note': 'x'}\n"
    )
    ctx = context()
    judged = verl(ctx, TEXTS, TEXTS, None, None, function="keyed.py:both", key="form")
    assert judged.rewards.tolist() == [0.5] * 3
    assert means(ctx)["rewards/acc"] == (3.0, 3)
