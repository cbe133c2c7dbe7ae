"""A prompt with texts filled in, which are tokenised apart: none can end it, or speak for somebody else."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlgraph.errors import RunError
from rlgraph.nodes.support.chat_template import content_ids, joined, pieces_between
from rlgraph.nodes.support.conversation import ReadingOptions, written
from rlgraph.nodes.support.row_tokens import encode
from rlgraph.ops.declare import PLACE

LITERAL = re.compile(r"\{(\{\w+\})\}")
MARK = "field-number-{}-of-the-prompt"


def filled(
    tokenizer: Any,
    reading: ReadingOptions,
    prompt: str,
    columns: Mapping[str, Sequence[str] | None],
    most: Mapping[str, int] | None = None,
) -> list[list[int]]:
    """Return the token ids of each row's prompt, in which ``{question}`` and so on stand for the columns.

    Control tokens in the texts of columns are read as plain text. ``most`` is how many of a column's last
    tokens are taken; else all are.

    Raises:
        RunError: the prompt names a column that is not there.
        TemplateError: the chat template does not write each place once.
    """
    names = PLACE.findall(prompt)
    for name in names:
        if columns.get(name) is None:
            law = f"the prompt names {{{name}}}, for which the node reads no column"
            raise RunError(f"{law}\n  map one: in: {{{name}: COLUMN}}, or leave it out of `prompt`")
    # texts are tokenised apart, so the template gets marks in their place
    marks = [MARK.format(number) for number in range(len(names))]
    unused_marks = iter(marks)
    marked = LITERAL.sub(r"\1", PLACE.sub(lambda _: next(unused_marks), prompt))
    text = written(tokenizer, reading, marked)
    beginning, *remainder = pieces_between(tokenizer, text, marks)
    fixed_ids = encode(tokenizer, reading, [beginning])
    if remainder:
        fixed_ids += tokenizer(remainder, add_special_tokens=False)["input_ids"]
    source = (reading.template_options or {}).get("chat_template", tokenizer.chat_template)
    around = f"{source}{text}"  # the template has more control tokens than it writes here
    limits = most or {}
    fields: dict[str, list[list[int]]] = {}
    for name in names:
        fields[name] = []
        for value in columns[name] or ():
            ids = content_ids(tokenizer, value, around)
            fields[name].append(ids[-limits[name] :] if name in limits else ids)
    count = len(next(column for column in columns.values() if column is not None))
    prompts = []
    for row in range(count):
        prompts.append(joined(fixed_ids, [fields[name][row] for name in names]))
    return prompts
