"""What is learnt of a conversation, by the form of its chat template: held to what transformers renders."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import tokenizer_of
from rlgraph.nodes.support.chat_template import TemplateError
from rlgraph.nodes.support.data_file import DataError
from rlgraph.nodes.support.dataset import load_examples

# Templates in the form of the families', written for these tests: (control tokens, eos, template).
CHATML = (
    ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
    "<|im_end|>",
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
QWEN_BASE = (CHATML[0], "<|endoftext|>", CHATML[2])  # the end of a turn is not eos_token
LLAMA3 = (
    ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "<|end_of_text|>",
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
)
GEMMA = (
    ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "<eos>",
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
)
PHI3 = (
    ["<|user|>", "<|assistant|>", "<|end|>"],
    "<|endoftext|>",
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
)
MISTRAL = (
    ["<s>", "[INST]", "[/INST]"],
    "</s>",
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
)
OLMO = (
    ["<|user|>", "<|assistant|>"],
    "<|endoftext|>",
    "<|endoftext|>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role != 'assistant' %}{{ '\n' }}{% elif loop.last %}{{ eos_token }}"
    "{% else %}{{ eos_token + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
)
GLM = (
    ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "<|endoftext|>",
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}\n"
    "<think>{{ m.reasoning_content or '' }}</think>\n{{ m.content }}{% else %}\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
)
HARMONY = (
    ["<|start|>", "<|end|>", "<|message|>", "<|channel|>"],
    "<|return|>",
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% if m.thinking and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant"
    "{% endif %}<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
)
DEEPSEEK = (
    ["<｜begin｜>", "<｜User｜>", "<｜Assistant｜>"],
    "<｜end｜>",
    "<｜begin｜>{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
)
R1 = (
    DEEPSEEK[0],
    DEEPSEEK[1],
    DEEPSEEK[2].replace("<｜Assistant｜>{% endif %}", "<｜Assistant｜><think>\n{% endif %}"),
)
QWEN3 = (
    CHATML[0],
    "<|im_end|>",
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
COMMAND = (
    ["<BOS>", "<|START_TURN|>", "<|USER|>", "<|CHATBOT|>", "<|END_TURN|>"],
    "<|END_TURN|>",
    "<BOS>{% for m in messages %}<|START_TURN|>{{ '<|CHATBOT|>' if m.role == 'assistant' else '<|USER|>' }}"
    "{{ m.content | trim }}<|END_TURN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_TURN|><|CHATBOT|>{% endif %}",
)
GRANITE = (
    ["<|start_of_role|>", "<|end_of_role|>"],
    "<|end_of_text|>",
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
)
HUNYUAN = (
    ["<|startoftext|>", "<|extra_0|>"],
    "<|eos|>",
    "<|startoftext|>{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|extra_0|>"
    "{% else %}{{ m.content }}<|eos|>{% endif %}{% endfor %}",
)
MINIMAX = (
    ["]~b]", "[e~["],
    "[e~[",
    "{% for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n{{ m.content }}[e~[\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n{% endif %}",
)
NEMOTRON = (
    ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"],
    "<SPECIAL_12>",
    "{% for m in messages %}{% if m.role == 'user' %}<SPECIAL_11>User\n{{ m.content }}\n"
    "{% else %}<SPECIAL_11>Assistant\n{{ m.content }}\n<SPECIAL_12>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<SPECIAL_11>Assistant\n{% endif %}",
)
LLAMA4 = (
    ["<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"],
    "<|eot|>",
    "<|begin_of_text|>{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n"
    "{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}",
)
GEMMA4 = (
    ["<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"],
    "<eos>",
    "<bos>{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning and loop.last %}<|channel>thought\n{{ m.reasoning }}\n<channel|>{% endif %}"
    "{{ m.content | trim }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}",
)
PHI4 = (
    ["<|im_start|>", "<|im_sep|>", "<|im_end|>"],
    "<|im_end|>",
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}",
)
OLMO3 = (
    ["<|im_start|>", "<|im_end|>"],
    "<|endoftext|>",
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last %}{{ eos_token }}{% else %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
MISTRAL7 = (  # without spaces, and no begin of a turn
    ["<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
    "</s>",
    "<s>{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}",
)
QWEN35 = (  # it begins a turn by thinking, and leaves out earlier thoughts
    QWEN3[0],
    "<|im_end|>",
    QWEN3[2].replace(
        "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
        "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}",
    ),
)

# family -> what is learnt of turn x and of turn y (the last); None: x is refused, with all
FAMILIES = {
    "chatml": (CHATML, "x<|im_end|>", "y<|im_end|>"),
    "qwen-base": (QWEN_BASE, "x<|im_end|>", "y<|im_end|>"),
    "llama-3": (LLAMA3, "x<|eot_id|>", "y<|eot_id|>"),
    "gemma": (GEMMA, "x<end_of_turn>", "y<end_of_turn>"),
    "phi-3": (PHI3, "x<|end|>", "y<|end|>"),
    "mistral": (MISTRAL, " x</s>", " y</s>"),
    "olmo": (OLMO, "x<|endoftext|>", "y<|endoftext|>"),
    "glm-4.5": (GLM, "<think></think>\nx", "<think></think>\ny<|endoftext|>"),
    "gpt-oss": (HARMONY, "<|channel|>final<|message|>x<|end|>", "<|channel|>final<|message|>y<|return|>"),
    "deepseek-v3": (DEEPSEEK, "x<｜end｜>", "y<｜end｜>"),
    "qwen-3": (QWEN3, None, "<think>\n\n</think>\n\ny<|im_end|>"),
    "command": (COMMAND, "x<|END_TURN|>", "y<|END_TURN|>"),
    "granite": (GRANITE, "x<|end_of_text|>", "y<|end_of_text|>"),
    "hunyuan": (HUNYUAN, "x<|eos|>", "y<|eos|>"),
    "minimax": (MINIMAX, "x[e~[", "y[e~["),
    "nemotron": (NEMOTRON, "x\n<SPECIAL_12>", "y\n<SPECIAL_12>"),
    "llama-4": (LLAMA4, "x<|eot|>", "y<|eot|>"),
    "gemma-4": (GEMMA4, "x<turn|>", "y<turn|>"),
    "phi-4": (PHI4, "x<|im_end|>", "y<|im_end|>"),
    "olmo-3": (OLMO3, "x<|im_end|>", "y<|endoftext|>"),
    "mistral-v7": (MISTRAL7, "x</s>", "y</s>"),
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


TALK = [user("a"), assistant("x"), user("b"), assistant("y")]


def read(
    tmp_path: Path, form: Any, messages: Any, tokenizer: Any = None, **options: Any
) -> tuple[str, list[str]]:
    """Return the text of a row, and the parts of it that are learnt."""
    tokenizer = tokenizer or tokenizer_of(form)
    file = tmp_path / "rows.jsonl"
    row = messages if isinstance(messages, dict) else {"m": messages}
    file.write_text(json.dumps(row) + "\n")
    data = load_examples(tokenizer, files=[str(file)], **{"question": "m", "answer": None, **options})
    ((ids, mask),) = data.examples([0])
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    parts = [(learnt, tokenizer.decode([i for i, _ in run])) for learnt, run in runs]
    return "".join(text for _, text in parts), [text for learnt, text in parts if learnt]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_is_what_the_template_writes_of_it(tmp_path: Path, family: str) -> None:
    form, earlier, last = FAMILIES[family]
    text, learnt = read(tmp_path, form, TALK)
    assert learnt == [last]
    whole = tokenizer_of(form).apply_chat_template(TALK, tokenize=False)
    assert whole.startswith(text) or text == whole + form[1]  # an end only where the template has none
    if earlier is None:
        with pytest.raises(
            TemplateError, match=r"rows\.jsonl:1: .* writes turn 2 of .* otherwise once others"
        ):
            read(tmp_path, form, TALK, assistant_turns="all")
        return
    assert read(tmp_path, form, TALK, assistant_turns="all") == (text, [earlier, last])


def test_a_turn_that_a_rollout_would_have_begun_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"rows\.jsonl:1: .* does not write turn 4 .* as it has it begun"):
        read(tmp_path, R1, TALK)


def test_a_text_answer_is_rendered_too(tmp_path: Path) -> None:
    for family in ("gemma", "gpt-oss", "glm-4.5"):
        form, _, last = FAMILIES[family]
        tokenizer = tokenizer_of(form)
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({"question": "b", "answer": "y"}) + "\n")
        ((ids, mask),) = load_examples(tokenizer, files=[str(file)]).examples([0])
        assert tokenizer.decode([i for i, learnt in zip(ids, mask, strict=True) if learnt]) == last


THOUGHT = [user("2+2?"), assistant("4", reasoning_content="two and two")]


@pytest.mark.parametrize("turns", ["last", "all"])
def test_thoughts_are_learnt_where_the_template_writes_them(tmp_path: Path, turns: str) -> None:
    learnt = read(tmp_path, QWEN3, THOUGHT, assistant_turns=turns)[1]
    assert learnt == ["<think>\ntwo and two\n</think>\n\n4<|im_end|>"]
    learnt = read(tmp_path, GLM, THOUGHT, assistant_turns=turns)[1]
    assert learnt == ["<think>two and two</think>\n4<|endoftext|>"]
    thought = [user("2+2?"), assistant("4", thinking="two and two")]
    assert "two and two<|end|>" in read(tmp_path, HARMONY, thought, assistant_turns=turns)[1][0]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "name", "tool_calls"])
def test_a_key_that_the_template_does_not_write_is_refused(tmp_path: Path, key: str) -> None:
    call = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    value = call if key == "tool_calls" else "words"
    with pytest.raises(
        TemplateError, match=rf"rows\.jsonl:1: .* does not write '{key}' of turn 2; give another"
    ):
        read(tmp_path, CHATML, [user("a"), assistant("x", **{key: value})])


def test_content_that_a_template_takes_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="does not write the content of turn 2 as it is given"):
        read(tmp_path, DEEPSEEK, [user("a"), assistant("<think>t</think>x")])


def test_weights_say_which_turns_are_learnt(tmp_path: Path) -> None:
    talk = [user("a"), assistant("x", weight=0), user("b"), assistant("y", weight=1)]
    assert read(tmp_path, CHATML, talk, assistant_turns="all")[1] == ["y<|im_end|>"]
    talk = [user("a"), assistant("x", train=True), user("b"), assistant("y", train=False)]
    text, learnt = read(tmp_path, CHATML, talk, assistant_turns="all")
    assert learnt == ["x<|im_end|>"] and text.endswith("x<|im_end|>")
    with pytest.raises(DataError, match="says that no turn is learnt"):
        read(tmp_path, CHATML, talk)
    with pytest.raises(DataError, match=r"'m\[1\]' has the weight 0.5"):
        read(tmp_path, CHATML, [user("a"), assistant("x", weight=0.5)])
    with pytest.raises(DataError, match="on a message of 'user'"):
        read(tmp_path, CHATML, [{**user("a"), "weight": 1}, assistant("x")])


MARKED = (
    CHATML[0],
    "<|endoftext|>",
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)


def test_marks_of_a_template_are_used_for_the_last_turn_too(tmp_path: Path) -> None:
    text, learnt = read(tmp_path, MARKED, TALK)
    assert learnt == ["y<|im_end|>"] and text.endswith("y<|im_end|>")
    assert read(tmp_path, MARKED, TALK, assistant_turns="all") == (text, ["x<|im_end|>", "y<|im_end|>"])
    talk = [user("a"), assistant("x", weight=0), user("b"), assistant("y")]
    assert read(tmp_path, MARKED, talk, assistant_turns="all")[1] == ["y<|im_end|>"]


TOOL_CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TAGGED_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "</tool_call>{% endfor %}"
)
GLM_CALLS = (  # without thoughts; what a tool says stands behind <|observation|>
    "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>"
    "{% if m.role != 'assistant' %}\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}(WRITTEN){% endfor %}"
TAKES = {
    "a mapping": "{{ c.function.arguments | tojson }}",
    "a text": "{{ '' + c.function.arguments }}",
    "what there is": "{{ c.function.arguments }}",
    "either": "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}",
}


@pytest.mark.parametrize("given", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize("takes", TAKES)
def test_arguments_are_written_once_whatever_a_template_takes(tmp_path: Path, takes: str, given: Any) -> None:
    calls = CALLS.replace("WRITTEN", TAKES[takes])
    form = (CHATML[0], CHATML[1], CHATML[2].replace("{{ m.content }}", "{{ m.content }}" + calls))
    call = [{"type": "function", "function": {"name": "f", "arguments": given}}]
    learnt = read(tmp_path, form, [user("a"), assistant(None, tool_calls=call)])[1]
    assert learnt == ['f({"a": 1})<|im_end|>']


def test_a_turn_without_an_end_ends_with_the_token_that_the_model_stops_at(tmp_path: Path) -> None:
    # GLM 4.5 stops at <|endoftext|>, <|user|> and <|observation|>, as its generation config has it
    tokenizer = tokenizer_of((GLM[0], GLM[1], GLM_CALLS))
    assert read(tmp_path, None, TALK, tokenizer, assistant_turns="all")[1] == ["x", "y<|endoftext|>"]
    tokenizer.model_stop_ids = tokenizer.convert_tokens_to_ids(
        ["<|endoftext|>", "<|user|>", "<|observation|>"]
    )
    assert read(tmp_path, None, TALK, tokenizer)[1] == ["y<|user|>"]
    text, learnt = read(tmp_path, None, TALK, tokenizer, assistant_turns="all")
    assert learnt == ["x<|user|>", "y<|user|>"]
    assert text == tokenizer.apply_chat_template(TALK, tokenize=False) + "<|user|>"
    talk = [
        user("a"),
        assistant("", tool_calls=[TOOL_CALL]),
        {"role": "tool", "content": "r"},
        assistant("y"),
    ]
    text, learnt = read(tmp_path, None, talk, tokenizer, assistant_turns="all")
    assert learnt == ['f({"a": 1})<|observation|>', "y<|user|>"]
    assert text == tokenizer.apply_chat_template(talk, tokenize=False) + "<|user|>"
    assert read(tmp_path, None, talk[:2], tokenizer)[1] == ['f({"a": 1})<|observation|>']


@pytest.mark.parametrize("family", ["chatml", "llama-3", "gemma", "minimax", "phi-3"])
def test_an_end_token_that_is_not_flagged_special_ends_a_turn(tmp_path: Path, family: str) -> None:
    (controls, _, template), earlier, last = FAMILIES[family]
    form = (controls, "<|endoftext|>", template)
    tokenizer = tokenizer_of(form, unflagged=tuple(controls))
    assert read(tmp_path, form, TALK, tokenizer, assistant_turns="all")[1] == [earlier, last]


def test_a_token_that_ends_calls_of_tools_alone_ends_no_turn(tmp_path: Path) -> None:
    template = CHATML[2].replace("{{ m.content }}<|im_end|>", "{{ m.content }}" + TAGGED_CALLS)
    form = (["<|im_start|>", "<tool_call>", "</tool_call>"], "<|endoftext|>", template)
    tokenizer = tokenizer_of(form, unflagged=("<tool_call>", "</tool_call>"))
    learnt = read(tmp_path, form, [user("a"), assistant("", tool_calls=[TOOL_CALL])], tokenizer)[1]
    assert learnt == ['<tool_call>f({"a": 1})</tool_call><|endoftext|>']


def test_nothing_is_learnt_behind_marks(tmp_path: Path) -> None:
    marked = "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}"
    template = MARKED[2].replace(
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}", marked
    )
    assert template != MARKED[2]
    form = (MARKED[0], MARKED[1], template)
    tokenizer = tokenizer_of(form)
    learnt = read(tmp_path, form, TALK, tokenizer, assistant_turns="all")[1]
    assert learnt == ["x<|im_end|>\n", "y<|im_end|>\n"]
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    whole = tokenizer.apply_chat_template(TALK, **options)
    parts = groupby(zip(whole["input_ids"], whole["assistant_masks"], strict=True), key=lambda pair: pair[1])
    assert [tokenizer.decode([i for i, _ in part]) for is_marked, part in parts if is_marked] == learnt


def test_a_turn_that_is_begun_by_thinking_goes_on_from_there(tmp_path: Path) -> None:
    talk = [user("2+2?"), assistant("4", reasoning_content="two and two")]
    text, learnt = read(tmp_path, QWEN35, talk)
    assert learnt == ["two and two\n</think>\n\n4<|im_end|>"]
    assert text + "\n" == tokenizer_of(QWEN35).apply_chat_template(talk, tokenize=False)
    options = {"enable_thinking": False}
    assert read(tmp_path, QWEN35, TALK, template_options=options)[1] == ["y<|im_end|>"]
    with pytest.raises(TemplateError, match="does not write turn 2 of a conversation as it has it begun"):
        read(tmp_path, QWEN35, TALK, assistant_turns="all")


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
QWEN25_TOOLS = (
    [*CHATML[0], "<tool_call>", "</tool_call>"],
    "<|im_end|>",
    "{% if tools %}<|im_start|>system\n# Tools\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}{% if m.content %}"
    "{{ '\n' + m.content }}{% endif %}{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_calls_and_results_of_tools_are_as_the_template_has_them(tmp_path: Path, tools: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [user("a"), assistant(None, tool_calls=[call]), {"role": "tool", "content": "r"}, assistant("y")]
    tokenizer = tokenizer_of(QWEN25_TOOLS)
    row = {"m": talk, "tools": tools}
    text, learnt = read(tmp_path, None, row, tokenizer, assistant_turns="all", row_tools="tools")
    said = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert learnt == [said, "y<|im_end|>"]
    messages = [user("a"), assistant("", tool_calls=[TOOL_CALL]), *talk[2:]]
    assert text + "\n" == tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    with pytest.raises(TemplateError, match=r"rows\.jsonl:1: .* does not write 'tool_calls' of turn 2"):
        read(tmp_path, CHATML, talk, assistant_turns="all")


def test_a_template_that_joins_texts_is_given_arguments_as_text(tmp_path: Path) -> None:
    template = (
        "<｜begin｜>{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'tool' %}<｜tool｜>{{ m.content }}<｜/tool｜>"
        "{% else %}<｜Assistant｜>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<｜call｜>' + c.function.name + '\n```json\n'"
        " + c.function.arguments + '\n```<｜/call｜>' }}{% endfor %}<｜end｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    )
    calls = ["<｜call｜>", "<｜/call｜>", "<｜tool｜>", "<｜/tool｜>"]
    form = ([*DEEPSEEK[0], *calls], "<｜end｜>", template)
    talk = [
        user("a"),
        assistant(None, tool_calls=[TOOL_CALL]),
        {"role": "tool", "content": "r"},
        assistant("y"),
    ]
    said = '<｜call｜>f\n```json\n{"a": 1}\n```<｜/call｜><｜end｜>'
    assert read(tmp_path, form, talk, assistant_turns="all")[1] == [said, "y<｜end｜>"]


def test_turns_that_follow_each_other_are_learnt_each(tmp_path: Path) -> None:
    talk = [user("a"), assistant("x"), assistant("y")]
    text, learnt = read(tmp_path, CHATML, talk, assistant_turns="all")
    assert learnt == ["x<|im_end|>", "y<|im_end|>"]
    assert text + "\n" == tokenizer_of(CHATML).apply_chat_template(talk, tokenize=False)


def test_a_message_of_the_developer_stands_for_that_of_the_system(tmp_path: Path) -> None:
    talk = [{"role": "developer", "content": "d"}, user("a"), assistant("x")]
    text, learnt = read(tmp_path, CHATML, talk, system="s")
    assert learnt == ["x<|im_end|>"]
    assert text + "\n" == tokenizer_of(CHATML).apply_chat_template(talk, tokenize=False)


def test_marks_hold_with_tools(tmp_path: Path) -> None:
    shown = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    form = (MARKED[0], MARKED[1], shown + MARKED[2])
    text, learnt = read(tmp_path, form, {"m": TALK, "tools": [TOOL]}, row_tools="tools")
    assert learnt == ["y<|im_end|>"] and '"name": "f"' in text


def test_one_row_that_a_template_refuses_is_named_among_others(tmp_path: Path) -> None:
    refuses = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}"
    tokenizer = tokenizer_of((CHATML[0], CHATML[1], refuses + CHATML[2]))
    file = tmp_path / "rows.jsonl"
    bad = [user("a"), {"role": "tool", "content": "r"}, assistant("x")]
    file.write_text("".join(json.dumps({"m": talk}) + "\n" for talk in (TALK, TALK, bad)))
    with pytest.raises(TemplateError, match=r"rows\.jsonl:3: .* can't write user, tool.*no tools"):
        load_examples(tokenizer, files=[str(file)], question="m", answer=None)
