"""The tokens of prompts: of a whole history, or of the messages behind an answer that was recorded.

What the policy wrote in this episode is never rendered or tokenised again where a history continues it. A
text of others is tokenised alone, so that no control token in it is read as such (chat_template.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlgraph.nodes.agent.template import MESSAGE, TemplatePieces
from rlgraph.nodes.endpoint.message import Message
from rlgraph.nodes.support.chat_template import joined, pieces_between, rendered
from rlgraph.nodes.support.template_reads import for_template


class HistoryWriter:
    """Renders histories by one tokenizer's chat template.

    ``pieces`` keeps the ids between messages, as they are asked for in every turn.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.pieces = TemplatePieces(tokenizer, options)
        self.reads_ids = "tool_call_id" in self.pieces.template  # few templates write the ids of calls

    def whole(self, history: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a history and of the opening of the policy's next turn.

        Raises:
            TemplateError: the template can't write it.
        """
        options = self.pieces.options
        if tools:
            options = {**options, "tools": [*tools]}
        messages, marks, texts = self._marked(history)
        text = rendered(self.tokenizer, for_template(self.tokenizer, messages, options), options)
        pieces = pieces_between(self.tokenizer, text, marks)
        ids = self.tokenizer(pieces, add_special_tokens=False)["input_ids"]
        return joined(ids, self._contents(texts))

    def behind(self, new_messages: Sequence[Message], last_id: int) -> list[int]:
        """Return the ids of messages behind a turn of the policy, and of the opening of its next turn.

        ``last_id`` is the id that the policy's turn ended with: the template's end token is left out where
        that is the same.

        Raises:
            TemplateError: the template can't be cut so.
        """
        messages, marks, texts = self._marked(new_messages)
        return self.pieces.behind_turn(messages, marks, self._contents(texts), last_id)

    def _marked(self, history: Sequence[Message]) -> tuple[list[dict[str, Any]], list[str], list[str]]:
        """Return messages whose contents are marks, the marks, and the contents.

        The assistant's own stay as they are: templates look into them, for thinking say.
        """
        messages = []
        marks: list[str] = []
        texts = []
        for message in history:
            if message.role == "assistant":
                messages.append(message.for_template(message.text))
                continue
            mark = MESSAGE.format(len(marks))
            marked = message.for_template(mark)
            if not self.reads_ids:
                marked.pop("tool_call_id", None)
            messages.append(marked)
            marks.append(mark)
            texts.append(message.text)
        return messages, marks, texts

    def _contents(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.pieces.content(text) for text in texts]
