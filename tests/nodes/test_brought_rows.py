"""Rows as users bring them: situations that were written down before the code that reads them was looked at.

Right values are worked out by hand, or are what transformers renders and tokenises.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from byte_tokenizer import CHATML, tokenizer_of
from rlgraph.nodes.data.pairs import load_pairs
from rlgraph.nodes.support.chat_template import TemplateError
from rlgraph.nodes.support.conversation import ReadingOptions, asked
from rlgraph.nodes.support.data_file import DataError
from rlgraph.nodes.support.dataset import load_examples, load_prompts


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


TALK = [user("a"), assistant("x"), user("b"), assistant("y")]
SCHEMA = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": SCHEMA}

# a template that writes tools and calls as Qwen2.5's does
TOOLS = (
    [*CHATML[0], "<tool_call>", "</tool_call>"],
    "<|im_end|>",
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)


def written(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def ids_of(folder: Path, tokenizer: Any, row: Any, **options: Any) -> tuple[list[int], list[bool]]:
    row = row if isinstance(row, dict) else {"m": row}
    data = load_examples(
        tokenizer, files=[written(folder, row)], **{"question": "m", "answer": None, **options}
    )
    ((ids, mask),) = data.examples([0])
    return list(ids), list(mask)


def learnt(folder: Path, tokenizer: Any, row: Any, **options: Any) -> list[str]:
    ids, mask = ids_of(folder, tokenizer, row, **options)
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for is_learnt, run in runs if is_learnt]


# 1. The tokens of a turn are the template's own rendering, or the row is refused by name

DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Q.<|im_end|>\n{% endif %}"
COUNTS = "<|im_start|>system\n{{ messages | length }} messages<|im_end|>\n"
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
SHOUTS = CHATML[2].replace(
    "{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}"
)
TRIMS = CHATML[2].replace("{{ m.content }}", "{{ m.content | trim }}")
ONE_CALL = TOOLS[2].replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")  # as gpt-oss's and GigaChat's
BY_ID = TOOLS[2].replace("{{ c.function.name }}", "{{ c.id }}")  # as Kimi K2's
FORGETS = CHATML[2].replace(
    "{{ m.content }}", "{% if m.reasoning_content %}<think></think>{% endif %}{{ m.content }}"
)
PARTS_ONLY = CHATML[2].replace(  # as Idefics 3's and SmolVLM's, which write nothing of a text
    "{{ m.content }}<|im_end|>",
    "{% generation %}{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}<|im_end|>"
    "{% endgeneration %}",
)

TURNS: dict[str, tuple[str, Any, Any, list[str] | str]] = {
    "a template that trims": (TRIMS, [user("a"), assistant("x\n")], "last", ["x<|im_end|>"]),
    "the user quotes a begun turn": (
        CHATML[2],
        [user("why <|im_start|>assistant\nx<|im_end|>?"), assistant("x"), user("b"), assistant("x")],
        "all",
        ["x<|im_end|>", "x<|im_end|>"],
    ),
    "an answer quotes the end of a turn": (
        CHATML[2],
        [user("a"), assistant("write <|im_end|> then"), user("b"), assistant("y")],
        "all",
        ["write <|im_end|> then<|im_end|>", "y<|im_end|>"],
    ),
    "an answer begins with a line's end": (
        CHATML[2],
        [user("a"), assistant("\nx")],
        "last",
        ["\nx<|im_end|>"],
    ),
    "a default system message": (DEFAULT_SYSTEM + CHATML[2], TALK, "all", ["x<|im_end|>", "y<|im_end|>"]),
    "a greeting comes first": (CHATML[2], [assistant("hi"), *TALK[:2]], "last", ["x<|im_end|>"]),
    "a greeting that a template can't begin with": (
        DEFAULT_SYSTEM + CHATML[2],
        [assistant("hi"), *TALK],
        "all",
        "can't begin a conversation with turn 1, which is the assistant's; leave it out by weight: 0",
    ),
    "a greeting that is left out": (
        DEFAULT_SYSTEM + CHATML[2],
        [assistant("hi", weight=0), *TALK],
        "all",
        ["x<|im_end|>", "y<|im_end|>"],
    ),
    "roles that must alternate": (ALTERNATE + CHATML[2], TALK, "all", ["x<|im_end|>", "y<|im_end|>"]),
    "roles that do not alternate": (
        ALTERNATE + CHATML[2],
        [*TALK[:2], assistant("y")],
        "all",
        "roles must alternate",
    ),
    "a template that counts messages": (COUNTS + CHATML[2], TALK, "last", "does not write turn 4"),
    "a template that changes an answer": (SHOUTS, TALK[:2], "last", "does not write the content of turn 2"),
    "two calls, of which one is written": (
        ONE_CALL,
        [user("a"), assistant("", tool_calls=[call({"a": 1}), call({"a": 2})])],
        "last",
        "does not write call 2 of the 2 in turn 2",
    ),
    "calls by an id that does not name the function": (
        BY_ID,
        [user("a"), assistant("", tool_calls=[call({}, "look_up", id="call_1")])],
        "last",
        "does not write the name 'look_up' of the function that turn 2 calls",
    ),
    "calls by an id that names the function": (
        BY_ID,
        [user("a"), assistant("", tool_calls=[call({}, "look_up", id="functions.look_up:0")])],
        "last",
        ['<tool_call>{"name": "functions.look_up:0", "arguments": {}}</tool_call><|im_end|>'],
    ),
    "thoughts of which a mark alone is written": (
        FORGETS,
        [user("a"), assistant("x", reasoning_content="because")],
        "last",
        "does not write 'reasoning_content' of turn 2 as it is given",
    ),
    "a marked template that takes parts alone": (
        PARTS_ONLY,
        TALK,
        "last",
        "does not write the content of turn 4",
    ),
}


@pytest.mark.parametrize("situation", TURNS)
def test_a_turn_is_what_its_template_writes_or_refused(situation: str, tmp_path: Path) -> None:
    template, talk, turns, right = TURNS[situation]
    tokenizer = tokenizer_of((TOOLS[0], CHATML[1], template))
    if isinstance(right, str):
        with pytest.raises(TemplateError, match=r"rows.jsonl:1: ") as error:
            learnt(tmp_path, tokenizer, talk, assistant_turns=turns)
        assert right in str(error.value)
    else:
        assert learnt(tmp_path, tokenizer, talk, assistant_turns=turns) == right


# Templates in the form of real ones: olmo of allenai/open-instruct, Phi 4 mini, DeepSeek V3, Hunyuan.
OLMO3 = (
    ["<|im_start|>", "<|im_end|>"],
    "<|endoftext|>",
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou have no functions.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% if m.get('functions') %}<functions>{{ m.functions }}</functions>{% endif %}"
    "{% if m.get('function_calls') %}<function_calls>{{ m.function_calls }}</function_calls>{% endif %}"
    "{% if m.role == 'assistant' and loop.last %}{{ eos_token }}{% else %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
PHI4_MINI = (
    ["<|user|>", "<|assistant|>", "<|end|>"],
    "<|endoftext|>",
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}",
)
DEEPSEEK = (
    [
        "<｜U｜>",
        "<｜A｜>",
        "<｜calls｜>",
        "<｜call｜>",
        "<｜sep｜>",
        "<｜/call｜>",
        "<｜/calls｜>",
        "<｜out｜>",
        "<｜/out｜>",
    ],
    "<｜end｜>",
    "{% set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role == 'user' %}<｜U｜>"
    "{{ m.content }}"
    "{% elif m.role == 'tool' %}{% set ns.tool = true %}<｜out｜>{{ m.content }}<｜/out｜>"
    "{% else %}{% if not ns.tool %}<｜A｜>{% endif %}{% set ns.tool = false %}{{ m.content }}"
    "{% if m.tool_calls %}<｜calls｜>{% for c in m.tool_calls %}{{ '<｜call｜>' + c.type + '<｜sep｜>'"
    " + c.function.name + '\n```json\n' + c.function.arguments + '\n```<｜/call｜>' }}{% endfor %}"
    "<｜/calls｜>{% endif %}<｜end｜>"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not ns.tool %}<｜A｜>{% endif %}",
)
HUNYUAN = (
    ["<|startoftext|>", "<|extra_0|>", "<|extra_4|>"],
    "<|eos|>",
    "{% for m in messages %}{% if m.role == 'system' %}<|startoftext|>{{ m.content }}<|extra_4|>"
    "{% elif m.role == 'user' %}{% if loop.first or messages[loop.index0 - 1].role != 'system' %}"
    "<|startoftext|>{% endif %}{{ m.content }}<|extra_0|>"
    "{% else %}{{ m.content }}<|eos|>{% endif %}{% endfor %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n{% endif %}",
)
FAMILIES: dict[str, tuple[Any, list[dict[str, Any]], list[str]]] = {
    "OLMo 3": (OLMO3, TALK, ["x<|im_end|>", "y<|endoftext|>"]),
    "OLMo 3's calls, written out": (
        OLMO3,
        [
            user("a", functions="[]"),
            assistant(None, function_calls="f(a=1)"),
            {"role": "environment", "content": "r"},
            assistant("y"),
        ],
        ["<function_calls>f(a=1)</function_calls><|im_end|>", "y<|endoftext|>"],
    ),
    "Phi 4 mini": (PHI4_MINI, TALK, ["x<|end|>", "y<|end|>"]),
    "DeepSeek V3's calls": (
        DEEPSEEK,
        [
            user("a"),
            assistant(None, tool_calls=[call({"a": 1}), call({"b": "é"}, "g")]),
            {"role": "tool", "content": "r"},
            {"role": "tool", "content": "s"},
            assistant("y"),
        ],
        [
            '<｜calls｜><｜call｜>function<｜sep｜>f\n```json\n{"a": 1}\n```<｜/call｜>'
            '<｜call｜>function<｜sep｜>g\n```json\n{"b": "é"}\n```<｜/call｜><｜/calls｜><｜end｜>',
            "y<｜end｜>",
        ],
    ),
    "Hunyuan": (HUNYUAN, [{"role": "system", "content": "s"}, *TALK], ["x<|eos|>", "y<|eos|>"]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_whose_forms_were_held_against_real_files(family: str, tmp_path: Path) -> None:
    form, talk, right = FAMILIES[family]
    tokenizer = tokenizer_of(form)
    assert learnt(tmp_path, tokenizer, talk, assistant_turns="all") == right
    assert learnt(tmp_path, tokenizer, talk) == right[-1:]


# 1. Tokens are those of the whole text: how tokenizers treat its begin, and what is behind control tokens


def metaspace(scheme: str, template: str) -> Any:
    """A tokenizer that writes ▁ for a space, and one before the first part of a text or each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    controls = ["<unk>", "<pad>", "<s>", "</s>", "[INST]", "[/INST]"]
    letters = [*"▁abuvxy[]"]
    tokens = [*controls, *letters, "▁x", "▁y", "▁a", "▁b"]
    merges = [("▁", letter) for letter in "xyab"]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges=merges, unk_token="<unk>")
    inner = Tokenizer(model)
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    named = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=template, name_or_path="spaced", **named
    )


def phi3_tokenizer() -> Any:
    """One whose control tokens take in the white space behind them, as those of Phi 3 do."""
    from tokenizers import AddedToken

    form = (
        ["<|user|>", "<|assistant|>", "<|end|>"],
        "<|endoftext|>",
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    )
    tokenizer = tokenizer_of(form)
    taking = [AddedToken(token, rstrip=True, normalized=False, special=True) for token in form[0]]
    tokenizer.backend_tokenizer.add_special_tokens(taking)
    return tokenizer


def chatml(change: Callable[[Any], None]) -> Any:
    tokenizer = tokenizer_of(CHATML)
    change(tokenizer.backend_tokenizer)
    return tokenizer


def cuts(inner: Any) -> None:
    inner.enable_truncation(max_length=8)
    inner.enable_padding(length=64, pad_id=0, pad_token="<pad>")


def composes(inner: Any) -> None:
    from tokenizers import normalizers

    inner.normalizer = normalizers.NFC()


SPACED = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
NAMED = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[u]{{ m.content }}[v]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "a space before the first part alone": lambda: metaspace("first", SPACED),
    "a space before each part": lambda: metaspace("always", SPACED),
    "roles in letters, a space before the first part": lambda: metaspace("first", NAMED),
    "roles in letters, a space before each part": lambda: metaspace("always", NAMED),
    "control tokens that take in white space": phi3_tokenizer,
    "a limit and padding in tokenizer.json": lambda: chatml(cuts),
    "letters that are composed": lambda: chatml(composes),
}


@pytest.mark.parametrize("turns", ["last", "all"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_are_those_of_the_whole_text(kind: str, turns: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids, mask = ids_of(tmp_path, tokenizer, TALK, assistant_turns=turns)
    whole = tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"]
    prompt = tokenizer.apply_chat_template(TALK[:3], return_dict=True, add_generation_prompt=True)[
        "input_ids"
    ]
    assert ids == whole[: len(ids)]
    assert ids[: len(prompt)] == prompt and all(mask[len(prompt) :])
    parts = [
        tokenizer.decode([i for i, _ in run]).strip()
        for is_learnt, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
        if is_learnt
    ]
    assert [part[0] for part in parts] == (["x", "y"] if turns == "all" else ["y"])


def test_a_token_across_the_border_of_a_turn_is_no_rollouts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizer_of(CHATML)
    said = json.loads(tokenizer.backend_tokenizer.to_str())
    said["model"]["vocab"]["ĊĊ"] = max(said["model"]["vocab"].values()) + 1
    said["model"]["merges"] = [["Ċ", "Ċ"]]
    inner = Tokenizer.from_str(json.dumps(said))
    named = {"eos_token": CHATML[1], "pad_token": "<pad>"}
    merging = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=CHATML[2], **named)
    talk = [user("a"), assistant("\nx")]
    ids, _ = ids_of(tmp_path, merging, talk)
    prompt = merging.apply_chat_template(talk[:1], return_dict=True, add_generation_prompt=True)["input_ids"]
    assert ids[: len(prompt)] == prompt
    assert learnt(tmp_path, merging, talk) == ["\nx<|im_end|>"]


# 2. What is right for prompts is no example

NO_EXAMPLES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "it ends with what a tool said": (
        [user("a"), assistant("", tool_calls=[call({})]), {"role": "tool", "content": "r"}],
        {},
        "does not end with a turn of the assistant",
    ),
    "a system message alone": ([{"role": "system", "content": "s"}], {}, "does not end with a turn"),
    "no messages": ([], {}, "neither text nor a list of messages"),
    "an answer of a no-break space": ([user("a"), assistant("\u00a0\n")], {}, "the answer is empty"),
    "an answer without parts": ([user("a"), assistant([])], {}, "the answer is empty"),
    "an earlier turn that is empty": (
        [user("a"), assistant(""), user("b"), assistant("y")],
        {"assistant_turns": "all"},
        "turn 2 is empty, so that only its end would be learnt",
    ),
    "a turn that is to be continued": (
        [user("a"), assistant("x")],
        {"template_options": {"continue_final_message": True}},
        "continue_final_message is of prompts",
    ),
    "a blank question": ({"m": " ", "c": "x"}, {"answer": "c"}, "'m' is blank, so nothing is asked"),
    "an answer that asks": ({"m": [user("a")], "c": [user("b")]}, {"answer": "c"}, "a question of its own"),
    "no turn that counts": (
        [user("a"), assistant("x", weight=0)],
        {"assistant_turns": "all"},
        "no turn is learnt",
    ),
}


@pytest.mark.parametrize("situation", NO_EXAMPLES)
def test_nothing_to_imitate_is_refused(situation: str, tmp_path: Path) -> None:
    row, options, law = NO_EXAMPLES[situation]
    with pytest.raises(DataError, match=r"rows.jsonl:1: ") as error:
        learnt(tmp_path, tokenizer_of(TOOLS), row, **options)
    assert law in str(error.value)


def test_an_empty_turn_may_be_left_out(tmp_path: Path) -> None:
    talk = [user("a"), assistant("", weight=0), user("b"), assistant("y")]
    assert learnt(tmp_path, tokenizer_of(CHATML), talk, assistant_turns="all") == ["y<|im_end|>"]


NO_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "different questions": (
        {"chosen": [user("a"), assistant("x")], "rejected": [user("b"), assistant("y")]},
        {"question": None},
        "so they answer different questions",
    ),
    "different system messages": (
        {
            side: [{"role": "system", "content": side}, user("a"), assistant("x")]
            for side in ("chosen", "rejected")
        },
        {"question": None},
        "so they answer different questions",
    ),
    "earlier turns that differ": (
        {"chosen": TALK, "rejected": [user("a"), assistant("z"), *TALK[2:]]},
        {"question": None},
        "differ before their last turn, which alone is compared; set assistant_turns: all",
    ),
    "a call on one side alone": (
        {
            "chosen": [
                user("a"),
                assistant("", tool_calls=[call({})]),
                {"role": "tool", "content": "r"},
                assistant("x"),
            ],
            "rejected": TALK[:2],
        },
        {"question": None},
        "set assistant_turns: all",
    ),
    "a call on one side alone, behind a question": (
        {
            "prompt": [user("a")],
            "chosen": [
                assistant("", tool_calls=[call({})]),
                {"role": "tool", "content": "r"},
                assistant("x"),
            ],
            "rejected": [assistant("x")],
        },
        {"question": "prompt"},
        "set assistant_turns: all",
    ),
    "an empty side": (
        {"prompt": "a", "chosen": "x", "rejected": ""},
        {"question": "prompt"},
        "the answer is empty",
    ),
    "whole texts": (
        {"chosen": "Human: a", "rejected": "Human: b"},
        {"question": None},
        "there is no question",
    ),
}


@pytest.mark.parametrize("situation", NO_PAIRS)
def test_what_is_no_pair_is_refused(situation: str, tmp_path: Path) -> None:
    row, options, law = NO_PAIRS[situation]
    with pytest.raises(DataError, match=r"rows.jsonl:1: ") as error:
        load_pairs(tokenizer_of(TOOLS), files=[written(tmp_path, row)], **options)
    assert law in str(error.value)


def test_sides_that_part_early_are_compared_from_there(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    row = {"chosen": TALK, "rejected": [user("a"), assistant("z"), *TALK[2:]]}
    data = load_pairs(tokenizer, files=[written(tmp_path, row)], question=None, assistant_turns="all")
    sides = [data.examples([0], side)[0] for side in (0, 1)]
    said = [
        tokenizer.decode([i for i, is_learnt in zip(ids, mask, strict=True) if is_learnt])
        for ids, mask in sides
    ]
    assert said == ["x<|im_end|>y<|im_end|>", "z<|im_end|>y<|im_end|>"]


# 3. Forms of files

QUESTION, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}
CALLED = [QUESTION, assistant("", tool_calls=[call({"a": 1})])]
SAME: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "parts of OpenAI's responses": (
        [
            user([{"type": "input_text", "text": "a"}]),
            assistant([{"type": "output_text", "text": "x"}]),
        ],
        [QUESTION, ANSWER],
    ),
    "what OpenAI's client dumps": (
        [
            QUESTION,
            {
                **ANSWER,
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
        ],
        [QUESTION, ANSWER],
    ),
    "ShareGPT with content for value": (
        [{"from": "human", "content": "a"}, {"from": "gpt", "content": "x"}],
        [QUESTION, ANSWER],
    ),
    "several calls in a text of ShareGPT's": (
        [
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": '[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]'},
        ],
        [QUESTION, assistant("", tool_calls=[call({"a": 1}), call({}, "g")])],
    ),
    "Llama 3's parameters": (
        [QUESTION, assistant(None, tool_calls=[{"function": {"name": "f", "parameters": {"a": 1}}}])],
        [QUESTION, assistant("", tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}])],
    ),
    "a call without its wrapper": (
        [QUESTION, assistant(None, tool_calls=[{"name": "f", "arguments": '{"a": 1}'}])],
        CALLED,
    ),
    "arguments in an empty text": (
        [QUESTION, assistant(None, tool_calls=[call("")])],
        [QUESTION, assistant("", tool_calls=[call({})])],
    ),
    "nulls that Arrow fills in": (
        [QUESTION, assistant(None, tool_calls=[call({"a": 1, "b": None})])],
        CALLED,
    ),
    "the role of a function": (
        [*CALLED, {"role": "function", "name": "f", "content": "r"}, ANSWER],
        [*CALLED, {"role": "tool", "name": "f", "content": "r"}, ANSWER],
    ),
}


@pytest.mark.parametrize("form", SAME)
def test_forms_of_one_conversation(form: str) -> None:
    messages, right = SAME[form]
    reading = ReadingOptions(question="m", answer=None)
    row = asked("rows.jsonl:3", {"m": messages}, reading)
    assert [*(row.turns or row.question)] == right


def test_one_message_is_a_conversation_of_one(tmp_path: Path) -> None:
    row = {"m": user("a"), "c": assistant("x")}
    assert learnt(tmp_path, tokenizer_of(CHATML), row, answer="c") == ["x<|im_end|>"]


SCHEMAS: dict[str, Any] = {
    "as it is": [WRAPPED],
    "bare": [SCHEMA],
    "flat, of OpenAI's responses": [{"type": "function", **SCHEMA}],
    "Anthropic's": [{"name": "f", "description": "d", "input_schema": SCHEMA["parameters"]}],
    "of an MCP server": [{"name": "f", "description": "d", "inputSchema": SCHEMA["parameters"]}],
    "in a text": json.dumps([SCHEMA]),
    "each in a text": [json.dumps(SCHEMA)],
}


@pytest.mark.parametrize("form", SCHEMAS)
def test_forms_of_one_schema(form: str) -> None:
    reading = ReadingOptions(question="m", row_tools="t")
    row = asked("rows.jsonl:3", {"m": "q", "answer": "a", "t": SCHEMAS[form]}, reading)
    assert row.options == {"tools": [WRAPPED]}


STRANGE: dict[str, tuple[Any, str]] = {
    "a call by an unknown key": (
        [QUESTION, assistant(None, tool_calls=[{"function": {"name": "f", "args": {"a": 1}}}])],
        "a call is {name, arguments}",
    ),
    "a call with both keys": (
        [
            QUESTION,
            assistant(None, tool_calls=[{"function": {"name": "f", "arguments": {}, "parameters": {}}}]),
        ],
        "a call is {name, arguments}",
    ),
    "Anthropic's part that calls": (
        [QUESTION, assistant([{"type": "tool_use", "name": "f", "input": {}}])],
        "'tool_use'",
    ),
    "Gemini's parts": ([{"role": "user", "parts": [{"text": "a"}]}, ANSWER], "no content that is a text"),
    "lists in place of messages": ([["a", "x"]], "neither text nor a list of messages"),
    "roles and values": ([{"role": "user", "value": "a"}], "no content that is a text"),
    "lists within a mapping": ({"role": ["user"], "content": ["a"]}, "is not a message {role, content}"),
    "a call that is no function's": (
        [QUESTION, assistant(None, tool_calls=[{"type": "custom", "custom": {"name": "f"}}])],
        "without a function {name, arguments}",
    ),
    "a weight in a text": ([QUESTION, assistant("x", weight="0")], "has the weight '0'"),
    "what a tool gave, as a mapping": (
        [*CALLED, {"role": "tool", "content": {"r": 1}}, ANSWER],
        "no content that is a text",
    ),
}


@pytest.mark.parametrize("form", STRANGE)
def test_what_is_half_understood_is_refused(form: str) -> None:
    messages, law = STRANGE[form]
    with pytest.raises(DataError, match=r"rows\.jsonl:3: ") as error:
        asked("rows.jsonl:3", {"m": messages}, ReadingOptions(question="m", answer=None))
    assert law in str(error.value)


@pytest.mark.parametrize("tool", [{"description": "d"}, 5, {"function": {"description": "d"}}])
def test_a_tool_without_a_name_is_refused(tool: Any) -> None:
    reading = ReadingOptions(question="m", row_tools="t")
    with pytest.raises(DataError, match="neither a name nor a schema"):
        asked("rows.jsonl:3", {"m": "q", "answer": "a", "t": [tool]}, reading)


def test_a_preference_of_openais(tmp_path: Path) -> None:
    row = {
        "input": {"messages": [QUESTION], "tools": []},
        "preferred_output": [ANSWER],
        "non_preferred_output": [assistant("z")],
    }
    names = {"question": "input.messages", "chosen": "preferred_output", "rejected": "non_preferred_output"}
    data = load_pairs(tokenizer_of(CHATML), files=[written(tmp_path, row)], **names)
    ids, mask = data.examples([0], 1)[0]
    said = tokenizer_of(CHATML).decode([i for i, is_learnt in zip(ids, mask, strict=True) if is_learnt])
    assert said == "z<|im_end|>"


def test_conversations_that_differ_in_their_tools_are_two_questions() -> None:
    reading = ReadingOptions(question="m", row_tools="t")

    def words(tools: Any) -> str:
        return asked("rows.jsonl:1", {"m": [QUESTION], "answer": "a", "t": tools}, reading).words

    other = {**SCHEMA, "description": "another"}
    assert len({words([SCHEMA]), words([other]), words([SCHEMA, other]), words([])}) == 4
    assert words([SCHEMA]) == words([WRAPPED]) and words([]) == "a"


# 4. Values that become text

ANSWERS: dict[str, tuple[str, str | None]] = {
    "a number with an exponent": ("1e3", None),
    "beyond float64": ("1E400", None),
    "minus zero": ("-0.0", None),
    "many digits": ("0.30000000000000004", "0.30000000000000004"),
    "a large whole number": ("12345678901234567890123", "12345678901234567890123"),
    "not a number": ("NaN", None),
    "a truth value": ("true", None),
    "a list of one": ('["Paris"]', None),
    "digits in a text": ('"007"', "007"),
    "no test of a program": ('{"inputs": [], "outputs": []}', None),
    "tests without an output": ('{"inputs": ["1", "2"], "outputs": ["1"]}', None),
    "tests that are no lists": ('{"inputs": "1", "outputs": "1"}', None),
    "tests of a program": ('{"inputs": ["1"], "outputs": ["2"]}', '{"inputs": ["1"], "outputs": ["2"]}'),
    "null": ("null", None),
}


@pytest.mark.parametrize("situation", ANSWERS)
def test_answers_in_json(situation: str, tmp_path: Path) -> None:
    given, right = ANSWERS[situation]
    file = written(tmp_path, f'{{"question": "q", "answer": {given}}}')
    if right is None:
        with pytest.raises(DataError, match=r"rows.jsonl:1: 'answer' "):
            load_prompts(tokenizer_of(CHATML), files=[file])
    else:
        assert [*load_prompts(tokenizer_of(CHATML), files=[file]).column("answer")] == [right]


@pytest.mark.parametrize(
    ("given", "right"),
    [("a #### 5", "5"), ("a #### 5 b #### 6", "6"), ("no mark", "no mark"), ("a ####  ", None)],
)
def test_answers_behind_a_mark(given: str, right: str | None, tmp_path: Path) -> None:
    file = written(tmp_path, {"question": "q", "answer": given})
    if right is None:
        with pytest.raises(DataError, match=r"rows.jsonl:1: .*'####'"):
            load_prompts(tokenizer_of(CHATML), files=[file], answer_after="####")
    else:
        data = load_prompts(tokenizer_of(CHATML), files=[file], answer_after="####")
        assert [*data.column("answer")] == [right]


COLUMNS: dict[str, tuple[Any, str]] = {
    "a list as text": (["x"], "text"),
    "a truth value as text": (True, "text"),
    "a text as a whole number": ("5", "int64"),
    "5.0 as a whole number": (5.0, "int64"),
    "a truth value as a number": (True, "int64"),
    "1 as a truth value": (1, "boolean"),
    "beyond 64 bits": (2**64 - 1, "int64"),
    "beyond float32": (1e39, "float32"),
}


@pytest.mark.parametrize("situation", COLUMNS)
def test_a_column_takes_no_value_of_another_type(situation: str, tmp_path: Path) -> None:
    value, kind = COLUMNS[situation]
    good = {"question": "q", "answer": "a", "c": {"text": "x", "boolean": True}.get(kind, 1)}
    file = written(tmp_path, good, {**good, "c": value})
    with pytest.raises(DataError, match=r"rows.jsonl:2: 'c' is no "):
        load_prompts(tokenizer_of(CHATML), files=[file], columns={"c": kind})


def test_columns_of_verls_rows(tmp_path: Path) -> None:
    """The nested columns that verl's preprocessing writes to parquet."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "ability": "math",
            "prompt": [{"role": "user", "content": f"q{n}"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris", "City of Light"]}},
            "extra_info": {
                "split": "train",
                "index": n,
                "tools_kwargs": {"f": {"create_kwargs": {"x": str(n)}}},
            },
        }
        for n in range(2)
    ]
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    columns = {
        "data_source": "text",
        "ability": "text",
        "style": {"from": "reward_model.style"},
        "answers": {"from": "reward_model.ground_truth.target", "type": "json"},
        "split": {"from": "extra_info.split"},
        "index": {"from": "extra_info.index", "type": "int64"},
        "extra_info": "json",
        "made_with": {"from": "extra_info.tools_kwargs.f.create_kwargs.x"},
    }
    data = load_prompts(
        tokenizer_of(CHATML), files=[str(path)], question="prompt", answer=None, columns=columns
    )
    values = {name: [row[name] for row in data.more([0, 1])] for name in columns}
    assert values["data_source"] == ["openai/gsm8k"] * 2 and values["ability"] == ["math"] * 2
    assert values["style"] == ["rule"] * 2 and values["split"] == ["train"] * 2
    assert values["answers"] == [["Paris", "City of Light"]] * 2
    assert [*values["index"]] == [0, 1] and values["made_with"] == ["0", "1"]
    assert values["extra_info"] == [row["extra_info"] for row in rows]
    with pytest.raises(
        DataError, match=r"train.parquet:1: 'reward_model.ground_truth' is not text, but a mapping"
    ):
        load_prompts(
            tokenizer_of(CHATML), files=[str(path)], question="prompt", answer="reward_model.ground_truth"
        )


# 5. What is wrong is found when files are read, in the last row as in the first

GOOD = {"question": "q", "answer": "a"}
LATE: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a row without its answer": ((GOOD, GOOD, {"question": "q"}), {}, "rows.jsonl:3: has no column 'answer'"),
    "a row that breaks off": ((GOOD, GOOD, '{"question": "q", '), {}, "rows.jsonl:3: not JSON"),
    "a tool that nobody offers": (
        ({**GOOD, "t": []}, {**GOOD, "t": ["nope"]}),
        {"row_tools": "t"},
        "rows.jsonl:2: 't' names 'nope'",
    ),
    "half a surrogate pair": ((GOOD, '{"question": "\\ud83d", "answer": "a"}'), {}, "rows.jsonl:2: holds "),
    "a blank question": ((GOOD, {**GOOD, "question": " "}), {}, "rows.jsonl:2: 'question' is blank"),
    "a question that is a number": (
        (GOOD, {**GOOD, "question": 5}),
        {},
        "rows.jsonl:2: 'question' is neither",
    ),
    "no row that is meant": (({**GOOD, "split": "train"},), {"where": {"split": "trian"}}, "it is 'train'"),
    "a number where a text was meant": (({**GOOD, "level": 4},), {"where": {"level": "4"}}, "it is 4"),
    "rows that are all too long": (
        ({**GOOD, "question": "q" * 100},),
        {"max_prompt_tokens": 50},
        "all 1 rows have over 50 tokens",
    ),
    "a default of another type": (
        (GOOD,),
        {"columns": {"c": {"from": "z", "type": "int64", "default": "x"}}},
        "is no int64, but 'x'",
    ),
}


@pytest.mark.parametrize("situation", LATE)
def test_what_is_wrong_is_found_when_files_are_read(situation: str, tmp_path: Path) -> None:
    rows, options, law = LATE[situation]
    file = written(tmp_path, *rows)
    with pytest.raises(DataError) as error:
        load_prompts(tokenizer_of(CHATML), files=[file], **options)
    assert law in str(error.value)


ONE = b'{"question": "q", "answer": "a"}\n'
BYTES: dict[str, tuple[str, bytes, str | int]] = {
    "a gzip file of several members": ("r.jsonl.gz", gzip.compress(ONE) * 2, 2),
    "a torn gzip file": ("r.jsonl.gz", gzip.compress(ONE)[:-5], "can't be decompressed"),
    "UTF-16": ("r.jsonl", '{"question": "q", "answer": "a"}\n'.encode("utf-16"), "is not UTF-8"),
    "Latin 1": (
        "r.jsonl",
        '{"question": "caf\xe9", "answer": "a"}\n'.encode("latin-1"),
        "r.jsonl:1: is not UTF-8",
    ),
    "Unicode's own line ends": (
        "r.jsonl",
        '\ufeff{"question": "a\u0085\u2028b", "answer": "a"}\r\n'.encode(),
        1,
    ),
    "a file that is one list": ("r.jsonl", b'[{"question": "q", "answer": "a"}]', "list, not an object"),
    "cells behind a line's end in quotes": ("r.csv", b'question,answer\n"q\n1",1\nq2,2\n', 2),
    "a short line": ("r.csv", b"question,answer\nq\n", "has 1 cells, and the header 2"),
    "a column that is there twice": ("r.csv", b"question,answer,answer\nq,1,2\n", "two columns 'answer'"),
    "another separator": ("r.csv", b"question;answer\nq;1\n", "no column 'question', only 'question;answer'"),
}


@pytest.mark.parametrize("situation", BYTES)
def test_files_of_odd_bytes(situation: str, tmp_path: Path) -> None:
    name, content, right = BYTES[situation]
    (tmp_path / name).write_bytes(content)
    if isinstance(right, int):
        assert len(load_prompts(tokenizer_of(CHATML), files=[str(tmp_path / name)])) == right
    else:
        with pytest.raises(DataError) as error:
            load_prompts(tokenizer_of(CHATML), files=[str(tmp_path / name)])
        assert right in str(error.value)
