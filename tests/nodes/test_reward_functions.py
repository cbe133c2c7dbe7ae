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
from rlgraph.ops.registry import absent_module, load_function

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

def of_output(model_output, ground_truth):
    return 1.0 if model_output == str(ground_truth) else 0.25

def of_prediction(predict_str, ground_truth, completion="unused"):
    return 1.0 if (predict_str, completion) == (str(ground_truth), "unused") else 0.25

def of_program(completion, test_cases, continuous=False):
    return (completion == str(test_cases), {"tests": 1})

def of_source(data_source, extra_info, **row):
    return {"score": data_source == "given" and extra_info["index"], "form": 0.5}

def asks_more(solution_str, tokenizer):
    return 1.0

def of_batch(data_sources, solution_strs, ground_truths, extra_infos):
    assert data_sources == [""] * 3 and extra_infos == [{}] * 3
    pairs = zip(solution_strs, ground_truths, strict=True)
    return [{"score": s == str(t), "length": len(s)} for s, t in pairs]

async def later_of_batch(solution_strs, bonus):
    return [len(text) + bonus for text in solution_strs]

def arrays_of_batch(solution_strs, **more):
    import numpy
    return numpy.arange(3, dtype=numpy.float32)

def short_of_batch(solution_strs):
    return [1.0]

def half_of_batch(solution_strs):
    return [1.0, None, {"acc": 1.0}]

def lacks(solution_str):
    import no_such_module.part

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

def marked(completions, marks=("a",), **kwargs):
    return [float(c[0]["content"] in marks) for c in completions]

def lacks(completions, **kwargs):
    import no_such_module

class counted:
    def __init__(self, start):
        self.count = start

    def __call__(self, completion_ids, **kwargs):
        self.count += 1
        return [self.count + len(ids) for ids in completion_ids]
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


def test_a_scorer_gets_what_verl_s_own_call_otherwise() -> None:
    assert by_verl(context(), "of_output").rewards.tolist() == [1.0, 0.25, 0.25]
    assert by_verl(context(), "of_prediction").rewards.tolist() == [1.0, 0.25, 0.25]
    assert by_verl(context(), "of_program").rewards.tolist() == [1.0, 0.0, 0.0]


def test_arguments_stand_over_columns() -> None:
    ctx = context()
    given = {"data_source": "given", "extra_info": {"index": 2}}
    assert by_verl(ctx, "of_source", arguments=given).rewards.tolist() == [2.0] * 3
    assert means(ctx)["rewards/form"] == (1.5, 3)


def test_a_parameter_that_nothing_gives_is_named() -> None:
    law = "v.py:asks_more has a parameter `tokenizer`, which no column gives; a function may name data_source"
    for on_error in ("fail", "zero"):
        with pytest.raises(RewardError, match=law):
            by_verl(context(), "asks_more", on_error=on_error)
    assert by_verl(context(), "asks_more", arguments={"tokenizer": None}).rewards.tolist() == [1.0] * 3


def test_a_function_of_a_batch_is_called_once() -> None:
    ctx = context()
    assert by_verl(ctx, "of_batch").rewards.tolist() == [1.0, 0.0, 0.0]
    assert means(ctx)["rewards/length"] == (2.0, 3)
    later = by_verl(context(), "later_of_batch", arguments={"bonus": 0.5})
    assert later.rewards.tolist() == [1.5, 1.5, 0.5]
    assert by_verl(context(), "arrays_of_batch").rewards.tolist() == [0.0, 1.0, 2.0]
    nothing = verl(context(), [], [], None, None, function=f"{Path('v.py').resolve()}:of_batch")
    assert nothing.rewards.tolist() == []


def test_what_fails_in_a_function_of_a_batch() -> None:
    with pytest.raises(RewardError, match=r"owes a list of 3 scores, and gave \[1.0\]"):
        by_verl(context(), "short_of_batch")
    assert by_verl(context(), "short_of_batch", on_error="zero").failed.tolist() == [True] * 3
    half = by_verl(context(), "half_of_batch", on_error="zero")
    assert (half.rewards.tolist(), half.failed.tolist()) == ([1.0, 0.0, 0.0], [False, True, True])
    with pytest.raises(
        RewardError, match="2 requests for rewards failed; the first, of sample 1: it gave None"
    ):
        by_verl(context(), "half_of_batch")


def test_a_module_that_is_absent_is_named_with_what_to_do() -> None:
    remedy = r"install what has the module `no_such_module` \(often: pip install no_such_module\)"
    with pytest.raises(RewardError, match=remedy):
        by_verl(context(), "lacks")
    with pytest.raises(RewardError, match=remedy):
        by_trl(context(), "lacks", ["a", "b", "c"])


def test_what_to_do_about_a_module_depends_on_where_it_should_be(tmp_path: Path) -> None:
    def remedy(name: str) -> str:
        return absent_module(ModuleNotFoundError(f"No module named {name!r}", name=name), tmp_path)

    assert remedy("json.no_such") == (
        "the package `json` that is installed has no `json.no_such`: install a release that has it"
    )
    (tmp_path / "of_mine.py").write_text("")
    assert remedy("of_mine") == "`of_mine` lies beside the file: add its folder to PYTHONPATH"
    assert absent_module(ImportError("cannot import name 'x'", name="json")) == ""


def test_a_reward_of_trl_has_arguments_or_is_made_of_some() -> None:
    questions = [[{"role": "user", "content": text}] for text in "abc"]
    marked = by_trl(context(), "marked", questions, arguments={"marks": ["7"]})
    assert marked.rewards.tolist() == [1.0, 0.0, 0.0]
    assert by_trl(context(), "counted", questions, factory={"start": 10}).rewards.tolist() == [13, 12, 11]
    # it is made once, as by a trainer: what it keeps it has in the next iteration
    assert by_trl(context(), "counted", questions, factory={"start": 10}).rewards.tolist() == [14, 13, 12]


def package(folder: Path) -> Path:
    """A package with a scorer that imports from it; its name is not that of another test's."""
    root = folder / f"of_{folder.name.replace('-', '_')}"
    (root / "inner").mkdir(parents=True)
    for place in (root, root / "inner"):
        (place / "__init__.py").write_text("")
    (root / "weights.py").write_text("FULL = 2.0\n")
    text = "from ..weights import FULL\nfrom .own import half\n\n"
    text += "def score(solution_str):\n    return half(FULL) + len(solution_str)\n"
    (root / "inner/scorer.py").write_text(text)
    (root / "inner/own.py").write_text("def half(x):\n    return x / 2\n")
    return root


def test_a_file_of_a_package_may_import_relatively(tmp_path: Path) -> None:
    file = package(tmp_path) / "inner/scorer.py"
    judged = verl(context(), TEXTS, TEXTS, None, None, function=f"{file}:score")
    assert judged.rewards.tolist() == [2.0, 2.0, 1.0]


def test_a_function_of_a_module_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    judged = verl(context(), TEXTS, TEXTS, None, None, function=f"{root.name}.inner.scorer:score")
    assert judged.rewards.tolist() == [2.0, 2.0, 1.0]
    # by its file it is the same module, which its child processes find by its name
    named = load_function(f"{root}/inner/scorer.py:score")
    assert named is load_function(f"{root.name}.inner.scorer:score")
    assert named.__module__ == f"{root.name}.inner.scorer"


def test_what_uses_signals_where_it_was_written_runs_in_the_main_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = package(tmp_path)
    text = "import signal\n\ndef score(solution_str):\n    signal.alarm(0)\n"
    text += "    signal.signal(signal.SIGALRM, signal.SIG_DFL)\n    return 1.0\n"
    (root / "limited.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    Path("named.py").write_text(f"from {root.name}.limited import score\n")
    judged = verl(context(), TEXTS, TEXTS, None, None, function=f"{Path('named.py').resolve()}:score")
    assert judged.rewards.tolist() == [1.0] * 3
