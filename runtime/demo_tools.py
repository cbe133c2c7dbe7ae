"""Makes the files of calculator_tool: a tiny model with a chat template, products, and calculator traces.

    python -m rlgraph.runtime.demo_tools DIR

makes ``DIR/model`` (a Qwen2 of 0.6 M random weights; its tokenizer has one token a byte, and one a piece of a
tool call), ``DIR/traces.parquet`` (turns to imitate: products answered at once, and a few by a call),
``DIR/train.parquet`` and ``DIR/test.parquet`` (questions such as ``12*34=``; none of the test is in the
others).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlgraph.runtime.demo import make_for_command, model_config, questions, write_model, write_parquet

SPECIAL = {"pad_token": "<pad>", "eos_token": "<|end|>"}
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CALL = ["<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}']
WORDS = ["calculator", "expression", "search", "query", "error: "]
TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
CONTEXT = 4096
CALLING = 0.25  # the fraction of traces that call the calculator
DATA = ("traces.parquet", "train.parquet", "test.parquet")
FILES = ("model/model.safetensors", "model/tokenizer_config.json", *DATA)


def make(directory: str | Path = "demo_tool_files", seed: int = 0) -> bool:
    """Make the files that are not there yet, and return whether there were any.

    The weights depend on ``seed``, and which questions are for what.
    """
    directory = Path(directory)
    if all((directory / name).is_file() for name in FILES):
        return False
    make_model(directory / "model", seed)
    train, test = questions(seed, "*")
    write_parquet(directory / "traces.parquet", [*traces(train, seed)])
    write_parquet(directory / "train.parquet", train)
    write_parquet(directory / "test.parquet", test)
    return True


def traces(rows: list[dict[str, str]], seed: int) -> Iterator[dict[str, Any]]:
    """Yield turns to imitate, each behind its history: a call makes two, the call and the answer."""
    drawn = random.Random(seed)
    for row in rows:
        asked = [{"role": "user", "content": row["question"]}]
        if drawn.random() >= CALLING:
            yield {"question": asked, "answer": row["answer"]}
            continue
        call = tool_call("calculator", expression=row["question"].rstrip("="))
        yield {"question": asked, "answer": call}
        turns = [{"role": "assistant", "content": call}, {"role": "tool", "content": row["answer"]}]
        yield {"question": [*asked, *turns], "answer": row["answer"]}


def tool_call(name: str, **arguments: str) -> str:
    """Return a call as the parser hermes reads it.

    Example:
        >>> tool_call("search", query="x")
        '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
    """
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def make_model(directory: Path, seed: int) -> None:
    """Write a Hugging Face model directory: config, random weights, tokenizer with a chat template."""
    tokenizer = make_tokenizer()
    config = model_config(tokenizer)
    config.vocab_size = 288
    config.max_position_embeddings = CONTEXT
    write_model(directory, config, tokenizer, seed)


def make_tokenizer() -> Any:
    """Return a tokenizer of one token per byte, and one per piece of a call (``PreTrainedTokenizerFast``)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *ROLES, *CALL, *WORDS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (*CALL, *WORDS)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
        chat_template=TEMPLATE,
        additional_special_tokens=ROLES,
        **SPECIAL,
    )


def main(arguments: Sequence[str]) -> None:
    """Make the files of calculator_tool, as ``make_for_command`` does."""
    train, test = questions(0, "*")
    contents = f"model (0.6 M parameters), traces.parquet, train.parquet ({len(train)}), "
    contents += f"test.parquet ({len(test)})"
    make_for_command(arguments, "rlgraph.runtime.demo_tools", "demo_tool_files", make, contents)


if __name__ == "__main__":
    main(sys.argv[1:])
