"""What transformers does with chat templates, where a good guess misses it (tried on 5.23.0)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

pytestmark = pytest.mark.nightly

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "a"}
TALK = [ASKED, {"role": "assistant", "content": "x"}]


def tokenizer_of(template: str) -> Any:
    """A tokenizer of bytes with a chat template."""
    controls = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*controls, *alphabet])}, merges=[]))
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>", chat_template=template
    )


def written(template: str, messages: Any, **options: Any) -> Any:
    return tokenizer_of(template).apply_chat_template(messages, tokenize=False, **options)


def test_the_line_break_behind_a_block_tag_is_dropped_and_that_behind_a_value_is_not() -> None:
    assert written("{% if true %}\nx\n{% endif %}\n{{ 'y' }}\nz", [ASKED]) == "x\ny\nz"


def test_spaces_before_a_block_tag_are_dropped() -> None:
    assert written("a\n  {% if true %}b{% endif %}", [ASKED]) == "a\nb"


def test_a_mapping_is_written_as_python_writes_it_and_tojson_keeps_its_letters_and_order() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"z": "é<", "a": True}}}
    talk = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    value = "messages[1].tool_calls[0].function.arguments"
    assert written(f"{{{{ {value} }}}}", talk) == "{'z': 'é<', 'a': True}"
    assert (
        written(f"{{{{ {value} | tojson }}}}", talk) == '{"z": "é<", "a": true}'
    )  # jinja's own sorts, escapes


def test_render_jinja_template_gives_the_characters_that_are_marked() -> None:
    # it is not documented; apply_chat_template gives marks of tokens alone
    names = [*inspect.signature(render_jinja_template).parameters]
    assert names[:7] == [
        "conversations",
        "tools",
        "documents",
        "chat_template",
        "return_assistant_tokens_mask",
        "continue_final_message",
        "add_generation_prompt",
    ]
    texts, spans = render_jinja_template(
        conversations=[TALK], chat_template=MARKED, return_assistant_tokens_mask=True
    )
    ((start, end),) = spans[0]
    assert texts[0][start:end] == "x<|im_end|>"


def test_marks_are_in_their_places_behind_tools() -> None:
    texts, spans = render_jinja_template(
        conversations=[TALK], tools=[TOOL], chat_template=MARKED, return_assistant_tokens_mask=True
    )
    ((start, end),) = spans[0]
    assert texts[0].startswith('[{"type": "function"')
    assert texts[0][start:end] == "x<|im_end|>"


def test_a_template_without_marks_marks_nothing_and_raises_no_error() -> None:
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    tokens = tokenizer_of(CHATML).apply_chat_template(TALK, **options)
    assert not any(tokens["assistant_masks"])


def test_continue_final_message_cuts_behind_the_last_messages_content() -> None:
    assert written(CHATML, TALK, continue_final_message=True).endswith("<|im_start|>assistant\nx")


def test_continue_final_message_ends_as_the_template_writes_the_content() -> None:
    talk = [ASKED, {"role": "assistant", "content": "<think>\n"}]
    shown = written(CHATML, talk, continue_final_message=True)
    assert shown.endswith("<|im_start|>assistant\n<think>\n")
    trimming = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
    assert written(trimming, talk, continue_final_message=True).endswith("<|im_start|>assistant\n<think>")


def test_continue_final_message_of_an_empty_message_keeps_the_line_break_unless_the_template_trims() -> None:
    talk = [ASKED, {"role": "assistant", "content": ""}]
    assert written(CHATML, talk, continue_final_message=True).endswith("<|im_start|>assistant\n")
    trimming = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
    assert written(trimming, talk, continue_final_message=True).endswith("<|im_start|>assistant")
