"""Data sources: what is read, in what order, and what is said about data that can't be used."""

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from flattened import flattened
from recorded import means
from rlgraph.nodes.data.prompts import examples, prompts
from rlgraph.nodes.support.data_file import DataError
from rlgraph.nodes.support.dataset import load_prompts
from rlgraph.nodes.support.mixture import pick
from rlgraph.ops import Context
from rlgraph.runtime.demo import make_tokenizer

ROWS = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(7)]
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)

prompts, examples = flattened(prompts), flattened(examples)


@pytest.fixture(scope="module")
def tokenizer():
    made = make_tokenizer()
    made.name_or_path = "characters"
    return made


@pytest.fixture(scope="module")
def chatty():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code - 31 for code in range(32, 127)} | {"<eos>": 0}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", name_or_path="chatty", chat_template=CHAT
    )


def jsonl(directory: Path, rows: list, name: str = "rows.jsonl") -> str:
    file = directory / name
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def parquet(directory: Path, rows: list[dict], name: str = "rows.parquet") -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / name)
    return str(directory / name)


def context(position: int = 0, seed: int = 0) -> Context:
    return Context(node="prompts", seed=seed, iteration=0, position=position)


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_both_kinds_of_file_are_read_alike(tmp_path: Path, tokenizer, write) -> None:
    out = prompts(tokenizer, context(), files=[write(tmp_path, ROWS)], batch="all", template="plain")
    assert out.question == [row["question"] for row in ROWS]
    assert out.answer == [row["answer"] for row in ROWS]
    assert [tokenizer.decode(ids) for ids in out.prompt.tolist()] == out.question
    assert out.prompt.values.dtype == torch.int64


def test_files_follow_each_other_and_blank_lines_count_in_places(tmp_path: Path, tokenizer) -> None:
    files = [jsonl(tmp_path, ["", ROWS[0]]), parquet(tmp_path, ROWS[1:])]
    data = load_prompts(tokenizer, files=files, template="plain")
    assert [data.place(row) for row in range(7)] == [f"{files[0]}:2"] + [
        f"{files[1]}:{n}" for n in range(1, 7)
    ]
    assert data.column("question") == [row["question"] for row in ROWS]


@pytest.mark.parametrize(("batch", "shuffle"), [(3, True), (3, False), (7, True), (20, True), (1, True)])
def test_each_epoch_takes_every_row_once(batch: int, shuffle: bool) -> None:
    taken = [row for i in range(21) for row in pick(7, batch, i * batch, 5, shuffle)]
    for epoch in range(len(taken) // 7):
        assert sorted(taken[7 * epoch : 7 * epoch + 7]) == list(range(7))


def test_epochs_and_seeds_differ_in_order() -> None:
    assert len({tuple(pick(50, 50, epoch * 50, seed, True)) for epoch in range(2) for seed in range(2)}) == 4


def test_a_batch_depends_on_nothing_but_seed_and_position(tmp_path: Path, tokenizer) -> None:
    options = {"files": [jsonl(tmp_path, ROWS)], "batch": 4, "template": "plain"}
    straight = [prompts(tokenizer, context(position), **options).question for position in (0, 4, 8)]
    backward = [prompts(tokenizer, context(position), **options).question for position in (8, 4, 0)]
    assert straight == backward[::-1]
    assert sorted(straight[0] + straight[1][:3]) == sorted(row["question"] for row in ROWS)


def test_a_rewritten_file_is_read_again(tmp_path: Path, tokenizer) -> None:
    file = jsonl(tmp_path, ROWS)
    assert load_prompts(tokenizer, files=[file], template="plain").column("question")[0] == "0+0="
    jsonl(tmp_path, ROWS[3:])
    os.utime(file, ns=(1, 1))
    assert load_prompts(tokenizer, files=[file], template="plain").column("question")[0] == "3+3="


def test_overlong_rows_are_dropped_and_counted(tmp_path: Path, tokenizer) -> None:
    file = jsonl(tmp_path, [*ROWS, {"question": "100+100=", "answer": "200"}])
    ctx = context()
    out = prompts(tokenizer, ctx, files=[file], batch="all", template="plain", max_prompt_tokens=4)
    assert out.question == [row["question"] for row in ROWS]
    assert means(ctx) == {"data/overlong": (1.0, 8)}
    assert load_prompts(tokenizer, files=[file], template="plain").longest() == (f"{file}:8", 8)


def test_answer_after_keeps_what_follows_the_last_marker(tmp_path: Path, tokenizer) -> None:
    file = jsonl(tmp_path, [{"question": "1", "answer": "#### no\n#### 1,234 "}])
    out = prompts(tokenizer, context(), files=[file], batch=1, template="plain", answer_after="####")
    assert out.answer == ["1,234"]


def test_a_source_without_the_marker_has_whole_answers(tmp_path: Path, tokenizer) -> None:
    """grpo's answer_after is GSM8K's, and most other sets have no marker; each source counts alone."""
    files = {
        "marked": [jsonl(tmp_path, [{"question": "1", "answer": "half #### 2"}], "a.jsonl")],
        "plain": [jsonl(tmp_path, [{"question": "1", "answer": "72"}], "b.jsonl")],
    }
    data = load_prompts(tokenizer, files=files, template="plain", answer_after="####")
    assert [*data.column("answer")] == ["2", "72"]


def test_no_answer_column_gives_empty_answers(tmp_path: Path, tokenizer) -> None:
    file = jsonl(tmp_path, [{"question": "1"}])
    assert prompts(tokenizer, context(), files=[file], batch=2, template="plain", answer=None).answer == [
        "",
        "",
    ]


def test_plain_puts_system_before_and_suffix_after(tmp_path: Path, tokenizer) -> None:
    options = {
        "files": [jsonl(tmp_path, ROWS)],
        "batch": "all",
        "template": "plain",
        "system": "(",
        "suffix": ")",
    }
    out = prompts(tokenizer, context(), **options)
    assert tokenizer.decode(out.prompt[0]) == "(0+0=)"
    assert out.question[0] == "0+0="


def test_chat_renders_the_template(tmp_path: Path, chatty) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = parquet(tmp_path, [{"question": [*messages, {"role": "user", "content": "c"}], "answer": "d"}])
    plain = jsonl(tmp_path, [{"question": "a", "answer": "d"}])

    def rendered(file: str, **options: str) -> list[str]:
        out = prompts(chatty, context(), files=[file], batch=1, **options)
        return ["".join(chatty.convert_ids_to_tokens(out.prompt[0].tolist())), *out.question]

    assert rendered(plain) == ["u:a =", "a"]
    assert rendered(plain, system="s", suffix="!") == ["s:s u:a! =", "a"]
    assert rendered(file) == ["u:a a:b u:c =", "user: a\n\nassistant: b\n\nuser: c"]


def test_examples_learn_the_answer_and_the_end_token(tmp_path: Path, tokenizer) -> None:
    file = jsonl(tmp_path, [*ROWS[:2], {"question": "50+50=", "answer": "100"}])
    ctx = context()
    out = examples(tokenizer, ctx, files=[file], batch="all", template="plain", max_tokens=6)
    assert [tokenizer.decode(ids) for ids in out.tokens.tolist()] == ["0+0=0<eos>", "1+1=2<eos>"]
    assert out.loss_mask.tolist() == [[False] * 4 + [True] * 2] * 2
    assert means(ctx) == {"data/overlong": (1.0, 3)}


def wrong(tmp_path: Path, case: str) -> tuple[str, dict]:
    """A file with something wrong in it, and the options to read it with."""
    messages = [{"role": "user", "content": "a"}]
    return {
        "missing": (str(tmp_path / "none.jsonl"), {}),
        "kind": (jsonl(tmp_path, ROWS, "rows.txt"), {}),
        "json": (jsonl(tmp_path, [ROWS[0], "{"]), {}),
        "list": (jsonl(tmp_path, [[1]], "list.jsonl"), {}),
        "column": (jsonl(tmp_path, ROWS, "a.jsonl"), {"question": "prompt"}),
        "parquet column": (parquet(tmp_path, ROWS), {"answer": "label"}),
        "parquet": (jsonl(tmp_path, ROWS, "text.parquet"), {}),
        "marker": (
            jsonl(tmp_path, [{**ROWS[0], "answer": "1 #### 2"}, ROWS[1]], "b.jsonl"),
            {"answer_after": "####"},
        ),
        "null answer": (jsonl(tmp_path, [ROWS[0], {**ROWS[1], "answer": None}], "c.jsonl"), {}),
        "number": (jsonl(tmp_path, [{"question": 3, "answer": "3"}], "d.jsonl"), {}),
        "messages": (jsonl(tmp_path, [{"question": messages, "answer": "3"}], "e.jsonl"), {}),
        "nothing": (jsonl(tmp_path, [], "f.jsonl"), {}),
        "no tokens": (jsonl(tmp_path, [{"question": "", "answer": "3"}], "g.jsonl"), {}),
        "overlong": (jsonl(tmp_path, ROWS, "h.jsonl"), {"max_prompt_tokens": 2}),
        "chat": (jsonl(tmp_path, ROWS, "i.jsonl"), {"template": "chat"}),
    }[case]


SAID = {
    "missing": "none.jsonl: there is no such file",
    "kind": "rows.txt: is not of a kind that is read; convert it, or rename it if it is one of .parquet",
    "json": "rows.jsonl:2: not JSON",
    "list": "list.jsonl:1: list, not an object",
    "column": "a.jsonl:1: has no column 'prompt', only 'question', 'answer'",
    "parquet column": "rows.parquet: has no column 'label', only 'question', 'answer'",
    "parquet": "text.parquet: can't be read as parquet",
    "marker": "b.jsonl:2: no '####' in 'answer', which",
    "null answer": "c.jsonl:2: 'answer' is empty",
    "number": "d.jsonl:1: 'question' is neither text nor a list of messages",
    "messages": "e.jsonl:1: 'question' holds chat messages; set template: chat",
    "nothing": "f.jsonl: no rows",
    "no tokens": "g.jsonl:1: the question has no tokens",
    "overlong": "h.jsonl: all 7 rows have over 2 tokens, the shortest 4; raise max_prompt_tokens",
    "chat": "has no chat template; set template: plain",
}


@pytest.mark.parametrize("case", SAID)
def test_data_that_cannot_be_used_is_named(tmp_path: Path, tokenizer, case: str) -> None:
    file, options = wrong(tmp_path, case)
    with pytest.raises(DataError) as error:
        prompts(tokenizer, context(), **({"files": [file], "batch": 1, "template": "plain"} | options))
    assert SAID[case] in str(error.value)


GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k/test.jsonl"


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K questions are not part of the project")
def test_every_gsm8k_answer_is_a_number(chatty) -> None:
    data = load_prompts(chatty, files=[str(GSM8K)], answer_after="####")
    assert len(data) == 1319
    assert all(answer.replace(",", "").lstrip("-").isdigit() for answer in data.column("answer"))
