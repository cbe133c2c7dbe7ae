"""Files as verl's scripts and TRL's data sets have them; long prompts; what is learnt of a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from flattened import flattened
from recorded import means
from rlgraph.nodes.data.pairs import pairs
from rlgraph.nodes.data.prompts import examples, prompts
from rlgraph.nodes.support.chat_template import TemplateError
from rlgraph.nodes.support.data_file import DataError
from rlgraph.ops import Context

TURN = (
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments }}]{% endfor %}<eos>"
)

prompts, examples, pairs = flattened(prompts), flattened(examples), flattened(pairs)
PLAIN = (
    "{% for t in tools or [] %}{{ t.function.name }},{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}:"
    "{% if m.role == 'assistant' %}TURN{% else %}TURN{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
).replace("TURN", TURN)
MARKED = PLAIN.replace("%}" + TURN, "%}{% generation %}" + TURN + "{% endgeneration %}", 1)
SKY = [{"role": "user", "content": "sky?"}, {"role": "assistant", "content": "blue"}]
MORE = [{"role": "user", "content": "sea?"}, {"role": "assistant", "content": "too"}]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}


def chatty(template: str = PLAIN) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code - 31 for code in range(32, 127)} | {"<eos>": 0}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<eos>",
        name_or_path=f"chatty-{hash(template)}",
        chat_template=template,
    )


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(*rows: dict[str, Any]) -> str:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), tmp_path / "rows.parquet")
        return str(tmp_path / "rows.parquet")

    return write


def context() -> Context:
    return Context(node="data", seed=0, iteration=0, position=0)


def spelled(tokenizer: Any, ids: Any, mask: Any = None) -> str:
    """The text of a row; what is learnt stands in braces."""
    text, before = "", False
    for token, learnt in zip(
        ids.tolist(), mask.tolist() if mask is not None else [False] * len(ids), strict=True
    ):
        text += ("{" if learnt else "}") * (learnt != before) + tokenizer.decode([token])
        before = learnt
    return text + "}" * before


def learnt(tokenizer: Any, file: str, source: Any = examples, **options: Any) -> list[str]:
    out = source(tokenizer, context(), files=[file], batch="all", **options)
    return [spelled(tokenizer, out.tokens[row], out.loss_mask[row]) for row in range(len(out.tokens))]


def test_gsm8k_of_verl(write: Any) -> None:
    """The columns that verl's examples/data_preprocess/gsm8k.py writes."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {n}+1? Let's think"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {
                "split": "train",
                "index": n,
                "answer": f"#### {n + 1}",
                "question": f"What is {n}+1?",
            },
        }
        for n in range(3)
    ]
    tokenizer = chatty()
    out = prompts(
        tokenizer,
        context(),
        files=[write(*rows)],
        batch="all",
        question="prompt",
        answer="reward_model.ground_truth",
        where={"extra_info.split": "train"},
        columns={"data_source": "text", "index": {"from": "extra_info.index", "type": "int64"}},
    )
    assert spelled(tokenizer, out.prompt[1]) == "u:What is 1+1? Let's think<eos>|a:"
    assert (out.answer, out.data_source) == (["1", "2", "3"], ["openai/gsm8k"] * 3)
    assert out.index.tolist() == [0, 1, 2]


def test_conversations_of_trl(write: Any) -> None:
    tokenizer = chatty()
    file = write({"messages": [*SKY, *MORE]})
    assert learnt(tokenizer, file, question="messages", answer=None) == [
        "u:sky?<eos>|a:blue<eos>|u:sea?<eos>|a:{too<eos>}"
    ]
    completion = write({"prompt": SKY[:1], "completion": SKY[1:]})
    assert learnt(tokenizer, completion, question="prompt", answer="completion") == [
        "u:sky?<eos>|a:{blue<eos>}"
    ]
    out = prompts(
        tokenizer, context(), files=[completion], batch="all", question="prompt", answer="completion"
    )
    assert (out.question, out.answer) == (["sky?"], ["blue"])
    only = prompts(tokenizer, context(), files=[completion], batch="all", question="prompt", answer=None)
    assert (spelled(tokenizer, only.prompt[0]), only.answer) == ("u:sky?<eos>|a:", [""])
    text = write({"prompt": "sky is", "completion": " blue"})
    assert learnt(tokenizer, text, question="prompt", answer="completion", template="plain") == [
        "sky is{ blue<eos>}"
    ]


def test_preferences_of_trl(write: Any) -> None:
    tokenizer = chatty()
    green = [{"role": "assistant", "content": "green"}]
    both = ["u:sky?<eos>|a:{blue<eos>}", "u:sky?<eos>|a:{green<eos>}"]
    explicit = write({"prompt": SKY[:1], "chosen": SKY[1:], "rejected": green})
    assert learnt(tokenizer, explicit, pairs, question="prompt") == both
    implicit = write({"chosen": SKY, "rejected": [*SKY[:1], *green]})
    assert learnt(tokenizer, implicit, pairs, question=None) == both
    # what differs may be more than the last turn
    long = write({"chosen": [*SKY, *MORE], "rejected": [*SKY[:1], *green, *MORE]})
    assert learnt(tokenizer, long, pairs, question=None, assistant_turns="all") == [
        "u:sky?<eos>|a:{blue<eos>}|u:sea?<eos>|a:{too<eos>}",
        "u:sky?<eos>|a:{green<eos>}|u:sea?<eos>|a:{too<eos>}",
    ]
    with pytest.raises(DataError, match="is a text, and so there is no question; name its column"):
        learnt(tokenizer, write({"chosen": "a", "rejected": "b"}), pairs, question=None)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_all_turns_of_the_assistant_are_learnt(write: Any, template: str) -> None:
    tokenizer, talk = chatty(template), {"question": "messages", "answer": None}
    file = write({"messages": [*SKY, *MORE]}, {"messages": SKY})
    assert learnt(tokenizer, file, assistant_turns="all", **talk) == [
        "u:sky?<eos>|a:{blue<eos>}|u:sea?<eos>|a:{too<eos>}",
        "u:sky?<eos>|a:{blue<eos>}",
    ]
    # of one turn all is the last
    file = write({"messages": SKY})
    assert learnt(tokenizer, file, assistant_turns="all", **talk) == learnt(tokenizer, file, **talk)
    options = {"assistant_turns": "all", "system": "S", "suffix": "!"}
    assert learnt(tokenizer, file, **options, **talk) == ["s:S<eos>|u:sky?!<eos>|a:{blue<eos>}"]
    # messages of the question are not the answer's
    file = write({"prompt": [*SKY, MORE[0]], "completion": [MORE[1]]})
    assert learnt(tokenizer, file, question="prompt", answer="completion", assistant_turns="all") == [
        "u:sky?<eos>|a:blue<eos>|u:sea?<eos>|a:{too<eos>}"
    ]


@pytest.mark.parametrize("turns", ["last", "all"])
def test_a_turn_that_calls_a_tool_has_no_content(write: Any, turns: str) -> None:
    called = [SKY[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    file = write({"messages": called}, {"messages": [*called, {"role": "tool", "content": "deep"}, MORE[1]]})
    out = learnt(chatty(), file, question="messages", answer=None, assistant_turns=turns)
    assert out[0] == 'u:sky?<eos>|a:{[look{"at": "sea"}]<eos>}'
    call = '[look{"at": "sea"}]<eos>'
    before = "{" + call + "}" if turns == "all" else call
    assert out[1] == f"u:sky?<eos>|a:{before}|t:deep<eos>|a:{{too<eos>}}"
    with pytest.raises(DataError, match=r"'messages\[0\]' has no content that is a text"):
        learnt(
            chatty(),
            write({"messages": [{"role": "user", "content": None}]}),
            question="messages",
            answer=None,
        )


def test_a_template_without_an_end_gets_one_and_one_that_rewrites_turns_is_refused(write: Any) -> None:
    talk = {"question": "messages", "answer": None, "assistant_turns": "all"}
    file = write({"messages": [*SKY, *MORE]})
    bare = PLAIN.replace("<eos>", "")
    assert learnt(chatty(bare), file, **talk) == ["u:sky?|a:{blue|}u:sea?|a:{too|<eos>}"]
    other = PLAIN.replace("a:", "a: ")
    with pytest.raises(
        TemplateError, match=r"parquet:1: the chat template .* turn 2 .*\{% generation %\} marks it"
    ):
        learnt(chatty(other), file, **talk)


def test_a_row_shows_its_own_tools(write: Any) -> None:
    schemas = [{"type": "function", "function": {"name": name}} for name in ("look", "ask")]
    options = {"question": "messages", "answer": None, "template_options": {"tools": schemas}}
    tokenizer = chatty()
    file = write(*({"messages": SKY, "own": own} for own in (["ask"], [], None, ["look", "ask"])))
    shown = [text.partition("u:")[0] for text in learnt(tokenizer, file, row_tools="own", **options)]
    assert shown == ["ask,", "", "", "look,ask,"]
    # as verl names them, with what each is made with
    kwargs = [{"look": {"create_kwargs": {"a": 1}}}, {"ask": {"create_kwargs": {"b": 2}}}]
    file = write(*({"messages": SKY, "extra_info": {"tools_kwargs": own}} for own in kwargs))
    options["row_tools"] = "extra_info.tools_kwargs"
    assert [text.partition("u:")[0] for text in learnt(tokenizer, file, **options)] == ["look,", "ask,"]
    file = write({"messages": SKY, "own": ["lok"]})
    with pytest.raises(DataError, match="parquet:1: 'own' names 'lok', which is none of tools: look, ask"):
        learnt(tokenizer, file, **{**options, "row_tools": "own"})


def test_long_prompts_are_cut_where_it_is_said(write: Any) -> None:
    tokenizer = chatty()
    file = write({"question": "abcdef", "answer": ""}, {"question": "xy", "answer": ""})

    def read(**options: Any) -> tuple[list[str], dict[str, Any]]:
        ctx = context()
        out = prompts(
            tokenizer, ctx, files=[file], batch="all", template="plain", max_prompt_tokens=4, **options
        )
        return [
            spelled(tokenizer, row) for row in map(out.prompt.__getitem__, range(len(out.prompt)))
        ], means(ctx)

    assert read() == (["xy"], {"data/overlong": (1.0, 2)})
    for side, text in (("left", "cdef"), ("right", "abcd"), ("middle", "abef")):
        assert read(truncate=side) == ([text, "xy"], {"data/overlong": (1.0, 2)})
    with pytest.raises(
        DataError, match=r"rows\.parquet:1: 6 tokens, more than max_prompt_tokens 4; raise it"
    ):
        read(truncate="refuse")
    with pytest.raises(
        DataError, match="truncate: left says nothing without a limit; give max_prompt_tokens"
    ):
        prompts(tokenizer, context(), files=[file], batch=1, template="plain", truncate="left")


def test_an_answer_that_is_nested_is_json(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "q", "answer": {"inputs": ["1"], "outputs": ["é"]}}\n')
    out = prompts(chatty(), context(), files=[str(file)], batch="all")
    assert out.answer == ['{"inputs": ["1"], "outputs": ["é"]}']
